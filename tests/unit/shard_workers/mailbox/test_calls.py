from __future__ import annotations

import asyncio
from typing import cast

from qim.errors import Fenced, StoreUnavailable
from qim.runtime.clock import SystemClock
from qim.shard_workers.mailbox.calls import CallScheduler
from qim.shard_workers.mailbox.lanes import HURRIED_IN_ROW_MAX
from qim.shard_workers.mailbox.machine import PlannedCall
from qim.shard_workers.mailbox.shard import ShardRunner
from qim.stores.api import AppendCall, AppendResult, AppendStatus, ChunkAppend
from qim.stores.memory_mailbox import MemoryMailboxStore

ENTRIES_MAX = 100


class SlowStore(MemoryMailboxStore):
    """Answers when told."""

    def __init__(self) -> None:
        super().__init__(4, lambda: 0)
        self.waiting: list[tuple[int, asyncio.Future[AppendResult]]] = []

    async def append(self, call: AppendCall) -> AppendResult:
        future: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        self.waiting.append((call.shard, future))
        return await future

    def answer(self) -> int:
        shard, future = self.waiting.pop(0)
        future.set_result(AppendResult(status=AppendStatus.OK))
        return shard


class LinkStore(SlowStore):
    """Calls of one loop turn leave in one write, as from `RespClient`."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[list[int]] = []
        self._out: list[int] = []

    async def append(self, call: AppendCall) -> AppendResult:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(call.shard)
        return await super().append(call)

    def _flush(self) -> None:
        self.writes.append(self._out)
        self._out = []


class FakeShard:
    """A shard with some calls of some entries to make."""

    def __init__(self, shard: int, calls: int, entries: int = ENTRIES_MAX, *, hurried: bool = False) -> None:
        self.shard = shard
        self.hurried = hurried
        self.left = calls
        self.item = ChunkAppend(
            log_offset=0, lanes=[(0, entries)], chunk_index=0, chunk_count=1, chunk_size=1, mailbox_seq=1,
            tenant_id="t", conversation_id="g:g", created_at_ms=0, common=b"",
            recipients=[("u", 0, b"", b"")] * entries,
        )  # fmt: skip
        self.machine = self
        self.events: list[str] = []

    def hurries(self) -> bool:
        return self.hurried

    def has_work(self) -> bool:
        return self.left > 0

    def next_call(self) -> PlannedCall | None:
        if not self.left:
            return None
        self.left -= 1
        append = AppendCall(shard=self.shard, shard_epoch=1, tenant_items=[self.item], watermarks=None)
        return PlannedCall(append, [], 1, 0)

    def call_fenced(self, error: Fenced) -> None:
        self.events.append("fenced")

    def call_answered(self, call: PlannedCall, result: AppendResult) -> None:
        self.events.append(result.status.value)

    def call_failed(self, call: PlannedCall, error: Exception) -> None:
        self.events.append("failed")


async def rest() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def start(store: MemoryMailboxStore, slots: int = 2) -> tuple[CallScheduler, list[asyncio.Task[None]]]:
    scheduler = CallScheduler(store, SystemClock(), entries_max=ENTRIES_MAX)
    return scheduler, [asyncio.create_task(scheduler.run_slot()) for _ in range(slots)]


async def stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_two_calls_are_in_flight_and_shards_take_turns() -> None:
    store = SlowStore()
    scheduler, tasks = start(store)
    shards = [FakeShard(n, 3) for n in range(3)]
    for shard in shards:
        scheduler.want(cast(ShardRunner, shard))
        scheduler.want(cast(ShardRunner, shard))
    order = []
    await rest()
    while store.waiting:
        assert len(store.waiting) <= 2
        order.append(store.answer())
        await rest()
    assert order == [0, 1, 2] * 3
    assert [shard.events for shard in shards] == [["ok"] * 3] * 3
    await stop(tasks)


async def test_small_calls_of_several_shards_share_a_slot() -> None:
    store = SlowStore()
    scheduler, tasks = start(store, slots=1)
    shards = [FakeShard(n, 1, entries=6) for n in range(4)]
    for shard in shards:
        scheduler.want(cast(ShardRunner, shard))
    await rest()
    assert [shard for shard, _ in store.waiting] == [0, 1, 2, 3]
    for _ in shards:
        store.answer()
    await rest()
    assert [shard.events for shard in shards] == [["ok"]] * 4
    await stop(tasks)


async def test_calls_leave_in_the_order_they_were_planned() -> None:
    """A slot with one call does not overtake the calls that the other slot planned before: W would have moved."""
    store = SlowStore()
    scheduler, tasks = start(store)
    for shard in (FakeShard(0, 2, entries=6), FakeShard(1, 1)):
        scheduler.want(cast(ShardRunner, shard))
    await rest()
    assert [shard for shard, _ in store.waiting] == [0, 1, 0]
    await stop(tasks)


async def test_shards_in_which_somebody_waits_go_first_but_for_a_turn_now_and_then() -> None:
    store = SlowStore()
    scheduler, tasks = start(store, slots=1)
    others, urgent = [FakeShard(n, 2) for n in range(3)], FakeShard(7, HURRIED_IN_ROW_MAX + 2)
    for shard in (*others, urgent):
        scheduler.want(cast(ShardRunner, shard))
    urgent.hurried = True
    scheduler.want(cast(ShardRunner, urgent))
    await rest()
    order = []
    while store.waiting:
        order.append(store.answer())
        await rest()
    assert order == [7] * HURRIED_IN_ROW_MAX + [0, 7, 7, 1, 2, 0, 1, 2]
    await stop(tasks)


async def test_full_batches_leave_in_writes_of_their_own() -> None:
    """What leaves together is answered together: both slots would plan at once and then wait at once."""
    store = LinkStore()
    scheduler, tasks = start(store)
    for n in range(3):
        scheduler.want(cast(ShardRunner, FakeShard(n, 2)))
    await rest()
    for _ in range(3):
        store.answer()
        store.answer()
        await rest()
    assert store.writes == [[0], [1], [2], [0], [1], [2]]
    await stop(tasks)


async def test_while_a_small_batch_is_under_way_what_arrives_waits_for_the_next_one() -> None:
    store = SlowStore()
    scheduler, tasks = start(store)
    shards = [FakeShard(n, 1, entries=6) for n in range(3)]
    scheduler.want(cast(ShardRunner, shards[0]))
    await rest()
    for shard in shards[1:]:
        scheduler.want(cast(ShardRunner, shard))
    await rest()
    assert [shard for shard, _ in store.waiting] == [0]
    store.answer()
    await rest()
    assert [shard for shard, _ in store.waiting] == [1, 2]
    await stop(tasks)


async def test_an_idle_slot_wakes_for_new_work() -> None:
    store = SlowStore()
    scheduler, tasks = start(store)
    await rest()
    shard = FakeShard(1, 1)
    scheduler.want(cast(ShardRunner, shard))
    await rest()
    assert store.answer() == 1
    await stop(tasks)


async def test_a_failed_call_is_told_and_the_slot_lives_on() -> None:
    store = SlowStore()
    scheduler, tasks = start(store, slots=1)
    shard = FakeShard(1, 2)
    scheduler.want(cast(ShardRunner, shard))
    await rest()
    store.waiting.pop()[1].set_exception(StoreUnavailable("down"))
    await rest()
    store.answer()
    await rest()
    assert shard.events == ["failed", "ok"]
    await stop(tasks)


async def test_a_fenced_call_ends_its_shard_alone() -> None:
    store = SlowStore()
    scheduler, tasks = start(store, slots=1)
    fenced, other = FakeShard(1, 1), FakeShard(2, 1)
    scheduler.want(cast(ShardRunner, fenced))
    await rest()
    store.waiting.pop()[1].set_exception(Fenced("replaced"))
    await rest()
    assert fenced.events == ["fenced"]
    scheduler.want(cast(ShardRunner, other))
    await rest()
    store.answer()
    await rest()
    assert other.events == ["ok"]
    tasks[0].cancel()


async def test_the_turn_of_a_shard_that_went_is_not_in_the_way_of_its_next_life() -> None:
    store = SlowStore()
    scheduler, tasks = start(store, slots=1)
    first, second = FakeShard(1, 1), FakeShard(1, 1)
    scheduler.want(cast(ShardRunner, first))
    scheduler.forget(cast(ShardRunner, first))
    scheduler.want(cast(ShardRunner, second))
    await rest()
    store.answer()
    await rest()
    assert (first.events, second.events) == ([], ["ok"])
    tasks[0].cancel()
