"""Judge a finished run: pure functions from evidence to named findings. No finding means the promise was kept.

"Committed" is the senders' own log of SEND_ACKs joined with a scan of the store. A device must hold every committed
message whose `conversation_seq` lies in any of its user's membership intervals, once, in the committed order, and
nothing outside of them (§7.5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from qim.core.visibility import Interval, is_visible


class Fault(Enum):
    LOST = "lost"
    DUPLICATED = "duplicated"
    MISORDERED_COMMIT = "misordered (commit)"
    """Committed order differs from one sender's send order."""
    MISORDERED_DEVICE = "misordered (device)"
    """A device shows another order than the committed one."""
    LEAKED = "leaked"
    ALTERED = "altered"
    """A device shows another text than was sent."""
    CURSOR_REGRESSION = "cursor regression"
    NEVER_CONVERGED = "never converged"
    NEVER_ACKNOWLEDGED = "never acknowledged"
    ACK_WITHOUT_RECORD = "ack without record"
    RECORD_NOBODY_SENT = "record nobody sent"
    DOUBLE_CLIENT_MESSAGE_ID = "two records of one client_message_id"


class Finding(NamedTuple):
    fault: Fault
    where: str
    """The device or sender, e.g. "u0007/phone"."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """One line of a sender's own log, in send order. `conversation_seq` 0: no SEND_ACK came."""

    user: str
    device: str
    client_message_id: str
    text: str
    conversation_seq: int = 0
    message_id: str = ""
    """Hex, of the SEND_ACK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRecord:
    """One record of the store scan. `control`: made by the server (membership), sent by nobody."""

    conversation_seq: int
    message_id: str
    sender: str
    client_message_id: str
    control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """One row of a device's store, in the order the device shows them."""

    conversation_id: str
    conversation_seq: int
    message_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvidence:
    user: str
    device: str
    shown: Sequence[ShownMessage]
    cursor_positions: Sequence[int]
    """Every value the stored cursor ever had, in order."""
    pending: Sequence[str] = ()
    """client_message_ids the device still holds as unsent."""
    shown_twice: Sequence[str] = ()
    """message_ids the device announced to its screen more than once."""
    converged: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    conversation_id: str
    sent: Sequence[SentMessage]
    records: Sequence[CommittedRecord]
    intervals: dict[str, tuple[Interval, ...]]
    """User -> membership intervals of the run, from the store."""
    devices: Sequence[DeviceEvidence]
    control_reaches_all: bool = True
    """Membership messages go to every member (groups up to 500), else to their subjects only (DESIGN-data §8)."""


def check(evidence: Evidence) -> list[Finding]:
    """Everything that is wrong, most telling first for one cause; empty when all is well."""
    findings = list(_check_commits(evidence))
    sent_text = {message.client_message_id: message.text for message in evidence.sent}
    committed = {record.message_id: record for record in evidence.records}
    for device in evidence.devices:
        findings.extend(_check_device(evidence, committed, sent_text, device))
    return findings


def _check_commits(evidence: Evidence) -> Iterator[Finding]:
    by_seq = {record.conversation_seq: record for record in evidence.records}
    sent_ids = {(message.user, message.client_message_id) for message in evidence.sent}
    latest: dict[tuple[str, str], int] = {}
    for message in evidence.sent:
        where = f"{message.user}/{message.device}"
        if message.conversation_seq == 0:
            yield Finding(Fault.NEVER_ACKNOWLEDGED, where, message.client_message_id)
            continue
        record = by_seq.get(message.conversation_seq)
        if record is None or (record.message_id, record.client_message_id) != (
            message.message_id,
            message.client_message_id,
        ):
            yield Finding(
                Fault.ACK_WITHOUT_RECORD, where, f"{message.client_message_id} at seq {message.conversation_seq}"
            )
        sender = (message.user, message.device)
        if message.conversation_seq <= latest.get(sender, 0):
            yield Finding(
                Fault.MISORDERED_COMMIT,
                where,
                f"seq {message.conversation_seq} was sent after what became seq {latest[sender]}",
            )
        latest[sender] = max(message.conversation_seq, latest.get(sender, 0))
    own = [record for record in evidence.records if not record.control]
    for record in own:
        if (record.sender, record.client_message_id) not in sent_ids:
            yield Finding(Fault.RECORD_NOBODY_SENT, record.sender, f"seq {record.conversation_seq}")
    for (sender_id, client_message_id), count in Counter((r.sender, r.client_message_id) for r in own).items():
        if count > 1:
            yield Finding(Fault.DOUBLE_CLIENT_MESSAGE_ID, sender_id, f"{client_message_id} has {count} records")


def _check_device(
    evidence: Evidence,
    committed: dict[str, CommittedRecord],
    sent_text: dict[str, str],
    device: DeviceEvidence,
) -> Iterator[Finding]:
    where = f"{device.user}/{device.device}"
    intervals = evidence.intervals.get(device.user, ())
    if not device.converged:
        yield Finding(Fault.NEVER_CONVERGED, where, f"holds {len(device.shown)} messages")
    held = Counter(message.message_id for message in device.shown)
    for record in evidence.records:
        if record.control and not evidence.control_reaches_all:
            continue
        if is_visible(intervals, record.conversation_seq) and record.message_id not in held:
            yield Finding(Fault.LOST, where, f"seq {record.conversation_seq} of {record.sender}")
    for message_id, count in held.items():
        if count > 1:
            yield Finding(Fault.DUPLICATED, where, f"{message_id} is stored {count} times")
    for message_id in device.shown_twice:
        yield Finding(Fault.DUPLICATED, where, f"{message_id} was announced twice")
    yield from _check_shown(evidence, committed, sent_text, device, where, intervals)
    for before, after in zip(device.cursor_positions, device.cursor_positions[1:], strict=False):
        if after < before:
            yield Finding(Fault.CURSOR_REGRESSION, where, f"from {before} to {after}")


def _check_shown(
    evidence: Evidence,
    committed: dict[str, CommittedRecord],
    sent_text: dict[str, str],
    device: DeviceEvidence,
    where: str,
    intervals: tuple[Interval, ...],
) -> Iterator[Finding]:
    latest = 0
    held_ids: set[str] = set()
    for message in device.shown:
        record = committed.get(message.message_id)
        if message.conversation_id != evidence.conversation_id or record is None:
            whose = f"{message.conversation_id} seq {message.conversation_seq}"
            yield Finding(Fault.LEAKED, where, f"{whose} is not theirs")
            continue
        if not is_visible(intervals, record.conversation_seq):
            yield Finding(Fault.LEAKED, where, f"seq {record.conversation_seq} is outside of every membership interval")
        if record.conversation_seq < latest:
            yield Finding(Fault.MISORDERED_DEVICE, where, f"seq {record.conversation_seq} is shown after seq {latest}")
        latest = max(latest, record.conversation_seq)
        held_ids.add(record.client_message_id)
        if not record.control and message.text != sent_text.get(record.client_message_id, message.text):
            yield Finding(Fault.ALTERED, where, f"seq {record.conversation_seq}")
    for client_message_id in device.pending:
        if client_message_id in held_ids:
            yield Finding(Fault.DUPLICATED, where, f"{client_message_id} is shown as sent and as unsent")
        else:
            yield Finding(Fault.NEVER_ACKNOWLEDGED, where, client_message_id)
