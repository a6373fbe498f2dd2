"""A bucket that goes to another writer: nothing more is committed, everybody gets an answer; and what should never come
of two owners is counted."""

from __future__ import annotations

import pytest

from qim.errors import ErrorCode
from qim.shard_workers.conversation.machine import Acknowledge, LoadGroup, Prepare, Refuse
from qim.stores.api import CommitStatus
from tests.unit.shard_workers.conversation.test_machine import Bench, committed, context, only, outcome


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_is_in_a_call_gets_the_answer_of_the_store_and_the_rest_is_sent_back(bench: Bench) -> None:
    first, second = bench.send(), bench.send()
    bench.submit(first)
    assert bench.batch() == [first]
    bench.submit(second)
    refused = only(bench.machine.abandon(), Refuse)
    assert refused.submission is second
    assert refused.refusal.code is ErrorCode.REGION_FAILOVER
    assert only(bench.machine.committed([committed(1)]), Acknowledge).submission is first
    assert bench.pump() == []
    assert bench.machine.is_idle()


def test_a_retry_that_would_go_into_another_call_is_sent_back(bench: Bench) -> None:
    send = bench.send()
    bench.submit(send)
    bench.batch()
    assert bench.machine.abandon() == []
    assert bench.machine.committed([outcome(CommitStatus.ID_NOT_GREATER, message_id=bytes(16))]) == []
    assert only(bench.pump(), Refuse).submission is send


def test_a_call_whose_outcome_is_unknown_is_not_repeated(bench: Bench) -> None:
    send = bench.send()
    bench.submit(send)
    bench.batch()
    bench.machine.abandon()
    bench.machine.commit_unknown(bench.now_ms)
    bench.now_ms += 1000
    assert only(bench.pump(), Refuse).submission is send


def test_answers_to_preparations_find_nothing_left_to_do(bench: Bench) -> None:
    change = bench.change("cid")
    only(bench.submit(change), LoadGroup)
    assert bench.load(context()) == []
    assert only(bench.pump(), Prepare).submission is change
    assert only(bench.machine.abandon(), Refuse).submission is change
    assert bench.machine.change_prepared(change, None) == []
    assert bench.machine.is_idle()


def test_a_machine_is_idle_only_when_nothing_waits_and_nothing_is_under_way(bench: Bench) -> None:
    assert bench.machine.is_idle()
    bench.submit(bench.send())
    assert not bench.machine.is_idle()
    bench.batch()
    assert not bench.machine.is_idle()
    bench.machine.committed([committed(1)])
    assert bench.machine.is_idle()


def test_a_sequence_that_does_not_grow_is_counted(bench: Bench) -> None:
    for seq, regressions in ((5, 0), (6, 0), (6, 1), (4, 2), (5, 2)):
        bench.submit(bench.send())
        bench.batch()
        bench.machine.committed([committed(seq)])
        assert bench.machine.regressions == regressions
