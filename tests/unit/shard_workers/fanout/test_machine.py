from __future__ import annotations

from math import inf

from qim.shard_workers.fanout.machine import (
    BATCH_RECORDS_MAX,
    CHECKPOINT_INTERVAL_MS,
    CHECKPOINT_RECORDS,
    PartitionMachine,
)


def _machine(next_offset: int = 0) -> PartitionMachine:
    machine = PartitionMachine(next_offset, poll_interval_ms=1000, now_ms=0)
    machine.feed.offer_read([], complete=True, now_ms=0)
    return machine


def test_a_batch_comes_again_until_it_is_dispatched() -> None:
    machine = _machine(5)
    machine.feed.offer_hint(5, [b"a", b"b"], 0)
    batch = machine.next_batch()
    assert [record.offset for record in batch] == [5, 6]
    machine.feed.offer_hint(7, [b"c"], 0)
    assert machine.next_batch() == batch
    assert machine.durable == 5
    oldest = machine.oldest()
    assert oldest is not None
    assert oldest.value == b"a"
    machine.dispatched()
    assert machine.durable == 7
    assert [record.offset for record in machine.next_batch()] == [7]


def test_nothing_to_do_is_an_empty_batch() -> None:
    machine = _machine()
    assert machine.next_batch() == []
    assert machine.oldest() is None


def test_a_batch_is_bounded() -> None:
    machine = _machine()
    machine.feed.offer_hint(0, [b"x"] * (BATCH_RECORDS_MAX + 1), 0)
    assert len(machine.next_batch()) == BATCH_RECORDS_MAX


def test_the_checkpoint_follows_what_is_durable_and_never_leads() -> None:
    machine = _machine()
    assert machine.checkpoint_in_ms(0) == inf
    machine.feed.offer_hint(0, [b"x"], 0)
    machine.next_batch()
    assert machine.checkpoint_in_ms(10_000) == inf
    machine.dispatched()
    assert machine.checkpoint_in_ms(0) == CHECKPOINT_INTERVAL_MS
    assert machine.checkpoint_in_ms(CHECKPOINT_INTERVAL_MS) == 0
    machine.checkpoint_saved(1, CHECKPOINT_INTERVAL_MS)
    assert machine.saved == 1
    assert machine.checkpoint_in_ms(0) == inf


def test_many_records_bring_the_checkpoint_forward() -> None:
    machine = _machine()
    machine.feed.offer_hint(0, [b"x"] * CHECKPOINT_RECORDS, 0)
    machine.next_batch()
    machine.dispatched()
    assert machine.checkpoint_in_ms(0) == 0
