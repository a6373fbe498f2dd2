"""26.8.4 Clock rollback: all criteria, on the clock of a whole node of processes.

(a) -3 s, below `clock_regression_reject_ms`; (b) -30 s, for conversations that were written to before, for buckets in
which nothing ever was, for CREATE_GROUP, and after a restart of the writer meanwhile.
"""

from __future__ import annotations

import pytest

from qim.config.parameters import default_parameters
from qim.core.seq import message_id_parts
from qim.errors import ErrorCode
from qim.protocol.opcodes import Opcode
from tests.acceptance.clock_steps import CONVERSATIONS, LARGE_MS, LINES, SMALL_MS, ClockSteps


@pytest.mark.timeout(180)
def test_a_clock_that_goes_back_makes_no_id_twice(clock_steps: ClockSteps) -> None:
    run = clock_steps
    assert SMALL_MS < default_parameters().clock_regression_reject_ms < LARGE_MS
    print(
        f"{sum(map(len, run.acks.values()))} sends acknowledged, {len(run.unsafe) + len(run.after_restart)} refused, "
        f"{run.mailbox} entries"
    )
    # (a): absorbed
    assert {phase: len(acks) for phase, acks in run.acks.items()} == {
        "right": LINES * CONVERSATIONS, "3 s back": LINES * CONVERSATIONS, "right again": 2 * LINES * CONVERSATIONS
    }  # fmt: skip
    every = [record.message_id for records in run.buckets for record in records]
    assert len(every) == len(set(every))  # criterion: duplicate message_id == 0
    assert {ack.message_id for acks in run.acks.values() for ack in acks} <= set(every)
    for records in run.buckets:
        clocks = [message_id_parts(record.message_id)[0] for record in records]
        assert clocks == sorted(clocks)  # criterion: hlc_ms regressions == 0
        order = [record.message_id for record in records]
        assert order == sorted(order)
    assert "clock_unsafe_total" not in run.alerts_before

    # (b): refused
    assert len(run.unsafe) == 2 * CONVERSATIONS + 1
    assert len(run.after_restart) == CONVERSATIONS
    for answer in (*run.unsafe, *run.after_restart):
        assert answer.opcode is Opcode.ERROR
        assert answer.body.code == ErrorCode.CLOCK_UNSAFE  # criterion: ERROR{CLOCK_UNSAFE}
        assert answer.body.retry_after_ms > 0
    assert run.watch.alerts["clock_unsafe_total"] == "P1"  # criterion: P1 alert
    assert run.ids_during == run.ids_before  # criterion: silently generated ids == 0

    # and nothing is lost by it: the same sends are taken once the clock is right
    assert [answer.opcode for answer in run.retried] == [Opcode.SEND_ACK] * len(run.retried)
    assert len({answer.body.message_id for answer in run.retried}) == 2 * CONVERSATIONS
    assert run.mailbox == sum(map(len, run.acks.values())) + len(run.retried)
    assert run.audit.passed(), run.audit.text()
    run.watch.check_sequences(tolerated=frozenset(("clock_unsafe_total",)))
