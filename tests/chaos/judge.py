"""What a chaos run did to its people, in six words; every word must stay at 0.

The replay's checker judges one conversation; here every conversation is judged by it, and what a device shows of a
conversation it has no part in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from qim.app.replay.checker import CommittedRecord, DeviceEvidence, Evidence, Fault, Finding, SentMessage, check
from qim.core.visibility import Interval, is_visible


class Harm(Enum):
    LOST = "lost"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"
    REGRESSED = "regressed"
    STUCK = "stuck"
    LEAKED = "leaked"


HARM_OF: Final[Mapping[Fault, Harm]] = {
    Fault.LOST: Harm.LOST,
    Fault.ACK_WITHOUT_RECORD: Harm.LOST,
    Fault.ALTERED: Harm.LOST,
    Fault.DUPLICATED: Harm.DUPLICATED,
    Fault.DOUBLE_CLIENT_MESSAGE_ID: Harm.DUPLICATED,
    Fault.RECORD_NOBODY_SENT: Harm.DUPLICATED,
    Fault.MISORDERED_COMMIT: Harm.REORDERED,
    Fault.MISORDERED_DEVICE: Harm.REORDERED,
    Fault.CURSOR_REGRESSION: Harm.REGRESSED,
    Fault.NEVER_CONVERGED: Harm.STUCK,
    Fault.NEVER_ACKNOWLEDGED: Harm.STUCK,
    Fault.LEAKED: Harm.LEAKED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What is known of one conversation."""

    conversation_id: str
    sent: Sequence[SentMessage]
    records: Sequence[CommittedRecord]
    intervals: Mapping[str, tuple[Interval, ...]]
    """User -> when they belonged to it; nobody else may see anything of it."""


def judge(conversations: Sequence[Conversation], devices: Sequence[DeviceEvidence]) -> list[Finding]:
    """Everything that is wrong with a run; `devices` hold all they show, of whatever conversation."""
    known = {conversation.conversation_id for conversation in conversations}
    findings: list[Finding] = []
    for conversation in conversations:
        own = {message.client_message_id for message in conversation.sent}
        findings += check(
            Evidence(
                conversation_id=conversation.conversation_id,
                sent=conversation.sent,
                records=conversation.records,
                intervals=dict(conversation.intervals),
                devices=[_part(device, conversation, own) for device in devices],
            )
        )
    for device in devices:
        where = f"{device.user}/{device.device}"
        if not device.converged:
            findings.append(Finding(Fault.NEVER_CONVERGED, where, f"holds {len(device.shown)} messages"))
        findings += [
            Finding(Fault.LEAKED, where, f"{shown.conversation_id} seq {shown.conversation_seq} is nobody's")
            for shown in device.shown
            if shown.conversation_id not in known
        ]
        findings += [
            Finding(Fault.CURSOR_REGRESSION, where, f"from {before} to {after}")
            for before, after in zip(device.cursor_positions, device.cursor_positions[1:], strict=False)
            if after < before
        ]
    return findings


def _part(device: DeviceEvidence, conversation: Conversation, own: Iterable[str]) -> DeviceEvidence:
    """What concerns one conversation; what concerns the device as a whole is judged once."""
    ids = set(own)
    message_ids = {record.message_id for record in conversation.records}
    return replace(
        device,
        shown=[shown for shown in device.shown if shown.conversation_id == conversation.conversation_id],
        pending=[client_message_id for client_message_id in device.pending if client_message_id in ids],
        shown_twice=[message_id for message_id in device.shown_twice if message_id in message_ids],
        cursor_positions=(),
        converged=True,
    )


def count(findings: Iterable[Finding]) -> Counter[Harm]:
    """Findings by harm."""
    return Counter(HARM_OF[finding.fault] for finding in findings)


def expected(conversations: Iterable[Conversation], user: str) -> set[str]:
    """message_ids (hex) that every device of a user must show."""
    return {
        record.message_id
        for conversation in conversations
        for record in conversation.records
        if is_visible(conversation.intervals.get(user, ()), record.conversation_seq)
    }
