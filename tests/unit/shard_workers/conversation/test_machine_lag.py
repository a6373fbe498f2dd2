"""The commit queue of a bucket as delivery lag."""

from __future__ import annotations

from qim.errors import Detail
from qim.shard_workers.conversation.machine import CommitBatch, Refuse
from tests.unit.shard_workers.conversation.test_machine import LIMITS, Bench, committed, only


def test_the_age_of_the_call_under_way_counts_as_lag() -> None:
    bench = Bench()
    bench.submit(bench.send())
    bench.now_ms += 30
    only(bench.pump(), CommitBatch)
    bench.now_ms += LIMITS.delivery_lag_ms - 30
    assert bench.submit(bench.send()) == []
    bench.now_ms += 1
    refused = only(bench.submit(bench.send()), Refuse)
    assert refused.refusal.detail == Detail.DELIVERY_LAG
    bench.machine.committed([committed(1)])
    assert bench.submit(bench.send(sender="bob")) == []


def test_a_store_that_does_not_answer_is_no_queue() -> None:
    """What waits for it gets REGION_FAILOVER when its time is over, and so does what comes now (26.8.2)."""
    bench = Bench()
    bench.submit(bench.send())
    only(bench.pump(), CommitBatch)
    bench.machine.commit_unknown(bench.now_ms)
    bench.now_ms += LIMITS.delivery_lag_ms + 1
    assert bench.submit(bench.send(sender="bob")) == []
    assert len(bench.batch()) == 2
    assert bench.submit(bench.send()) == []
    bench.machine.committed([committed(1), committed(2)])
    bench.now_ms += LIMITS.delivery_lag_ms + 1
    refused = only(bench.submit(bench.send()), Refuse)
    assert refused.refusal.detail == Detail.DELIVERY_LAG, "it answers again: now it is one"
