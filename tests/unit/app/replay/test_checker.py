"""Every fault that can be planted in a finished run is found and named; a clean run has no finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from qim.app.replay.checker import (
    CommittedRecord,
    DeviceEvidence,
    Evidence,
    Fault,
    SentMessage,
    ShownMessage,
    check,
)
from qim.core.visibility import Interval

GROUP = "g:day"
SENDERS = ("a", "b", "a", "b", "a", "b")


def clean() -> Evidence:
    """Six messages of a and b; c joined before the third and left at the fifth, then came back at the sixth."""
    sent = [
        SentMessage(
            user=u,
            device="phone",
            client_message_id=f"m{n}",
            text=f"t{n}",
            conversation_seq=n,
            message_id=f"{n:02x}",
        )
        for n, u in enumerate(SENDERS, 1)
    ]
    records = [
        CommittedRecord(conversation_seq=n, message_id=f"{n:02x}", sender=u, client_message_id=f"m{n}")
        for n, u in enumerate(SENDERS, 1)
    ]
    return Evidence(
        conversation_id=GROUP,
        sent=sent,
        records=records,
        intervals={"a": (Interval(0),), "b": (Interval(0),), "c": (Interval(2, 5), Interval(5))},
        devices=[device("a", [1, 2, 3, 4, 5, 6]), device("b", [1, 2, 3, 4, 5, 6]), device("c", [3, 4, 6])],
    )


def device(user: str, seqs: Sequence[int]) -> DeviceEvidence:
    return DeviceEvidence(user=user, device="phone", shown=[shown(n) for n in seqs], cursor_positions=[0, 5, 5, 9])


def shown(n: int, *, shows_seq: int = 0) -> ShownMessage:
    return ShownMessage(conversation_id=GROUP, conversation_seq=shows_seq or n, message_id=f"{n:02x}", text=f"t{n}")


def with_device(change: Callable[[DeviceEvidence], DeviceEvidence], index: int = 0) -> Evidence:
    evidence = clean()
    devices = list(evidence.devices)
    devices[index] = change(devices[index])
    return replace(evidence, devices=devices)


def test_a_clean_run_has_no_finding() -> None:
    assert check(clean()) == []


PLANTED = {
    "one message missing on a device": (
        with_device(lambda d: replace(d, shown=[*d.shown[:2], *d.shown[3:]])), Fault.LOST,
    ),
    "one message twice": (with_device(lambda d: replace(d, shown=[*d.shown, d.shown[-1]])), Fault.DUPLICATED),
    "announced twice": (with_device(lambda d: replace(d, shown_twice=["03"])), Fault.DUPLICATED),
    "sent and unsent at once": (with_device(lambda d: replace(d, pending=["m1"])), Fault.DUPLICATED),
    "two messages swapped on a device": (
        with_device(lambda d: replace(d, shown=[d.shown[1], d.shown[0], *d.shown[2:]])), Fault.MISORDERED_DEVICE,
    ),
    "a message of before the joining": (
        with_device(lambda d: replace(d, shown=[shown(1), *d.shown]), index=2), Fault.LEAKED,
    ),
    "a message of the time away": (
        with_device(lambda d: replace(d, shown=[shown(3), shown(4), shown(5), shown(6)]), index=2), Fault.LEAKED,
    ),
    "a message of another conversation": (
        with_device(lambda d: replace(d, shown=[*d.shown, replace(shown(6), conversation_id="g:x", message_id="ff")])),
        Fault.LEAKED,
    ),
    "a changed text": (
        with_device(lambda d: replace(d, shown=[replace(d.shown[0], text="?"), *d.shown[1:]])), Fault.ALTERED,
    ),
    "a cursor that went back": (
        with_device(lambda d: replace(d, cursor_positions=[0, 7, 6, 9])), Fault.CURSOR_REGRESSION,
    ),
    "a device that never converged": (with_device(lambda d: replace(d, converged=False)), Fault.NEVER_CONVERGED),
    "a message left unsent": (with_device(lambda d: replace(d, pending=["m9"])), Fault.NEVER_ACKNOWLEDGED),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_on_a_device_is_named(name: str) -> None:
    evidence, fault = PLANTED[name]
    assert [finding.fault for finding in check(evidence)] == [fault]


def test_an_ack_without_a_record_is_named() -> None:
    evidence = clean()
    lost = [replace(d, shown=d.shown[:-1]) for d in evidence.devices]
    findings = check(replace(evidence, records=evidence.records[:-1], devices=lost))
    assert [finding.fault for finding in findings] == [Fault.ACK_WITHOUT_RECORD]


def test_an_ack_that_names_another_message_is_named() -> None:
    evidence = clean()
    sent = [replace(evidence.sent[0], message_id="ee"), *evidence.sent[1:]]
    assert [f.fault for f in check(replace(evidence, sent=sent))] == [Fault.ACK_WITHOUT_RECORD]


def test_a_record_nobody_sent_is_named_unless_the_server_made_it() -> None:
    evidence = clean()
    extra = CommittedRecord(conversation_seq=7, message_id="07", sender="z", client_message_id="zz", control=True)
    subjects_only = replace(evidence, records=[*evidence.records, extra], control_reaches_all=False)
    assert check(subjects_only) == []
    assert {f.fault for f in check(replace(subjects_only, control_reaches_all=True))} == {Fault.LOST}
    forged = replace(extra, control=False)
    devices = [replace(d, shown=[*d.shown, shown(7)]) for d in evidence.devices]
    findings = check(replace(evidence, records=[*evidence.records, forged], devices=devices))
    assert [finding.fault for finding in findings] == [Fault.RECORD_NOBODY_SENT]


def test_two_records_of_one_client_message_id_are_named() -> None:
    evidence = clean()
    twin = replace(evidence.records[0], conversation_seq=7, message_id="07")
    devices = [replace(d, shown=[*d.shown, replace(shown(7), text="t1")]) for d in evidence.devices]
    findings = check(replace(evidence, records=[*evidence.records, twin], devices=devices))
    assert [finding.fault for finding in findings] == [Fault.DOUBLE_CLIENT_MESSAGE_ID]


def test_a_senders_lines_committed_in_another_order_are_named() -> None:
    evidence = clean()
    sent = [evidence.sent[2], *evidence.sent[:2], *evidence.sent[3:]]
    assert [f.fault for f in check(replace(evidence, sent=sent))] == [Fault.MISORDERED_COMMIT]


def test_a_send_without_answer_is_named() -> None:
    evidence = clean()
    sent = [replace(evidence.sent[0], conversation_seq=0, message_id=""), *evidence.sent[1:]]
    assert [f.fault for f in check(replace(evidence, sent=sent))] == [Fault.NEVER_ACKNOWLEDGED]
