"""Every harm a chaos run can do is named, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qim.app.replay.checker import CommittedRecord, DeviceEvidence, Fault, SentMessage, ShownMessage
from qim.core.visibility import FULL
from tests.chaos.judge import HARM_OF, Conversation, Harm, count, expected, judge

DM, OTHER = "dm:ann:bob", "dm:cleo:dan"


def conversation(conversation_id: str, *members: str, lines: int = 3) -> Conversation:
    """`lines` messages of the first member."""
    names = [f"{conversation_id}-{number}" for number in range(1, lines + 1)]
    return Conversation(
        conversation_id=conversation_id,
        sent=[
            SentMessage(
                user=members[0], device="phone", client_message_id=name, text=name, conversation_seq=seq,
                message_id=f"id-{name}",
            )
            for seq, name in enumerate(names, 1)
        ],
        records=[
            CommittedRecord(conversation_seq=seq, message_id=f"id-{name}", sender=members[0], client_message_id=name)
            for seq, name in enumerate(names, 1)
        ],
        intervals=dict.fromkeys(members, FULL),
    )  # fmt: skip


def shown(found: Conversation, *seqs: int) -> list[ShownMessage]:
    return [
        ShownMessage(
            conversation_id=found.conversation_id,
            conversation_seq=record.conversation_seq,
            message_id=record.message_id,
            text=record.client_message_id,
        )
        for seq in seqs
        for record in found.records
        if record.conversation_seq == seq
    ]


HERS, THEIRS = conversation(DM, "ann", "bob"), conversation(OTHER, "cleo", "dan")
BOB = DeviceEvidence(user="bob", device="phone", shown=shown(HERS, 1, 2, 3), cursor_positions=[1, 2, 2, 5])
BOTH = [HERS, THEIRS]


def harms(device: DeviceEvidence, *, conversations: list[Conversation] = BOTH) -> dict[Harm, int]:
    return dict(count(judge(conversations, [device])))


def test_a_device_that_has_everything_once_and_in_order_is_well() -> None:
    assert harms(BOB) == {}


def test_every_fault_of_the_checker_has_a_harm() -> None:
    assert set(HARM_OF) == set(Fault)
    assert set(HARM_OF.values()) == set(Harm)


@pytest.mark.parametrize(
    ("device", "harm"),
    [
        (replace(BOB, shown=shown(HERS, 1, 3)), Harm.LOST),
        (replace(BOB, shown=shown(HERS, 1, 2, 2, 3)), Harm.DUPLICATED),
        (replace(BOB, shown_twice=["id-dm:ann:bob-2"]), Harm.DUPLICATED),
        (replace(BOB, shown=shown(HERS, 2, 1, 3)), Harm.REORDERED),
        (replace(BOB, cursor_positions=[1, 5, 4]), Harm.REGRESSED),
        (replace(BOB, converged=False), Harm.STUCK),
        (replace(BOB, shown=[*shown(HERS, 1, 2, 3), *shown(THEIRS, 1)]), Harm.LEAKED),
        (
            replace(BOB, shown=[*shown(HERS, 1, 2, 3), *shown(conversation("dm:x:y", "x", "y"), 1)]),
            Harm.LEAKED,
        ),
    ],
)
def test_each_harm_is_named_once(device: DeviceEvidence, harm: Harm) -> None:
    assert harms(device) == {harm: 1}


def test_a_message_nobody_answered_is_stuck_and_one_without_a_record_is_lost() -> None:
    unanswered = replace(HERS, sent=[*HERS.sent, replace(HERS.sent[0], client_message_id="new", conversation_seq=0)])
    assert harms(BOB, conversations=[unanswered]) == {Harm.STUCK: 1}
    forgotten = replace(HERS, records=HERS.records[:2])
    found = harms(replace(BOB, shown=shown(HERS, 1, 2)), conversations=[forgotten])
    assert found == {Harm.LOST: 1}


def test_a_senders_lines_that_changed_places_are_reordered() -> None:
    first, second, third = HERS.sent
    swapped = replace(HERS, sent=[second, first, third])
    assert harms(BOB, conversations=[swapped]) == {Harm.REORDERED: 1}


def test_what_a_user_must_have_is_what_his_intervals_cover() -> None:
    assert expected(BOTH, "bob") == {record.message_id for record in HERS.records}
    assert expected(BOTH, "nobody") == set()
