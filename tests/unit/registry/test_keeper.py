"""LeaseKeeper on the registry's model: what a role is told, in which order, and what happens to it when calls fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qim.errors import Fenced, StoreError, StoreUnavailable
from qim.obs import metrics
from qim.registry.api import Beat, Grant, LeaseKind, Route
from qim.registry.keeper import LeaseKeeper
from qim.registry.lease import LeaseTimes
from qim.registry.memory import MemoryShardRegistry
from qim.runtime.clock import SystemClock
from tests.unit.shard_workers.pipeline import eventually

KIND = LeaseKind.CONVERSATION_BUCKET
TIMES = LeaseTimes(renew_ms=20, self_fence_ms=60, ttl_ms=75, failover_wait_ms=120)
"""The contract's, divided by about 250."""


class Registry(MemoryShardRegistry):
    """Does not answer while `down`."""

    def __init__(self) -> None:
        super().__init__(SystemClock().monotonic_ms)
        self.down = False

    async def beat(self, *args: object, **named: object) -> Beat:
        if self.down:
            raise StoreUnavailable("down")
        return await super().beat(*args, **named)  # type: ignore[arg-type]


class Holder:
    """A role; `refuse` are what the next openings raise."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.failures: list[BaseException] = []
        self.open: dict[int, Grant] = {}
        self.events: list[str] = []
        self.refuse: list[Exception] = []
        self.draining = asyncio.Event()
        self.draining.set()
        self.keeper = LeaseKeeper(
            KIND,
            4,
            name,
            "core-0",
            registry=registry,
            times=TIMES,
            clock=SystemClock(),
            on_failure=lambda task, error: self.failures.append(error),
        )

    async def open_shard(self, grant: Grant) -> None:
        if self.refuse:
            raise self.refuse.pop()
        self.open[grant.shard_id] = grant
        self.events.append(f"open {grant.shard_id}")

    async def close_shard(self, shard_id: int) -> None:
        self.events.append(f"close {shard_id}")
        await self.draining.wait()
        del self.open[shard_id]

    def drop_shard(self, shard_id: int) -> None:
        self.events.append(f"drop {shard_id}")
        self.open.pop(shard_id, None)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
async def holders(registry: Registry) -> AsyncIterator[list[Holder]]:
    made = [Holder(registry, f"writer-{i}") for i in range(2)]
    yield made
    for holder in made:
        await holder.keeper.close()
        assert holder.failures == []


async def started(holder: Holder) -> Holder:
    holder.keeper.start(holder)
    await eventually(holder.keeper.settled)
    return holder


async def test_a_member_alone_has_everything_and_shares_with_the_next(holders: list[Holder]) -> None:
    first = await started(holders[0])
    assert sorted(first.open) == [0, 1, 2, 3]
    second = await started(holders[1])
    assert (sorted(first.open), sorted(second.open)) == ([0, 2], [1, 3])
    assert [grant.epoch for grant in second.open.values()] == [2, 2]
    await second.keeper.leave()
    assert second.open == {}
    await eventually(lambda: sorted(first.open) == [0, 1, 2, 3])
    assert sorted(first.keeper.held()) == [0, 1, 2, 3]
    assert [first.open[i].epoch for i in range(4)] == [1, 3, 1, 3]


async def test_nothing_is_given_back_before_it_is_drained(holders: list[Holder], registry: Registry) -> None:
    first = await started(holders[0])
    first.draining.clear()
    holders[1].keeper.start(holders[1])
    await eventually(lambda: "close 1" in first.events)
    await asyncio.sleep(0.05)
    assert holders[1].open == {}
    assert await registry.current(KIND, 1) == Route("writer-0", 1)
    first.draining.set()
    await eventually(lambda: sorted(holders[1].open) == [1, 3])


async def test_a_lost_registry_means_letting_go_and_coming_back_under_the_next_epoch(
    holders: list[Holder], registry: Registry
) -> None:
    before = metrics.LEASE_SELF_FENCED_TOTAL.labels(kind=KIND)._value.get()
    holder = await started(holders[0])
    registry.down = True
    await eventually(lambda: not holder.open)
    assert not holder.keeper.settled()
    assert metrics.LEASE_SELF_FENCED_TOTAL.labels(kind=KIND)._value.get() == before + 1
    registry.down = False
    await eventually(holder.keeper.settled)
    assert [holder.open[i].epoch for i in range(4)] == [2] * 4


async def test_an_id_whose_store_is_away_is_opened_when_it_is_back(holders: list[Holder]) -> None:
    holders[0].refuse = [StoreUnavailable("away"), StoreError("odd")]
    holder = await started(holders[0])
    assert sorted(holder.open) == [0, 1, 2, 3]


async def test_an_id_a_store_denies_is_dropped_and_stays_out(holders: list[Holder], registry: Registry) -> None:
    holders[0].refuse = [Fenced("epoch 9 is stored")]
    holders[0].keeper.start(holders[0])
    await eventually(lambda: len(holders[0].open) == 3)
    await asyncio.sleep(0.05)
    assert not holders[0].keeper.settled()
    (denied,) = {0, 1, 2, 3} - set(holders[0].open)
    assert holders[0].events.count(f"drop {denied}") == 1
    await registry.grant(KIND, [denied], "writer-9", "other")
    await eventually(holders[0].keeper.settled)
    assert holders[0].open[denied].epoch == 3


async def test_a_fenced_id_is_taken_back_when_nobody_else_has_it(holders: list[Holder], registry: Registry) -> None:
    holder = await started(holders[0])
    await registry.grant(KIND, [2], "writer-9", "other")
    holder.keeper.fenced(2, 1)
    assert sorted(holder.open) == [0, 1, 3]
    await eventually(lambda: 2 in holder.open)
    assert holder.open[2].epoch == 3


async def test_a_pin_moves_an_id_as_soon_as_the_map_says_so(holders: list[Holder], registry: Registry) -> None:
    first, second = await started(holders[0]), await started(holders[1])
    await registry.pin(KIND, 0, "writer-1")
    first.keeper.poke()
    second.keeper.poke()
    await eventually(lambda: sorted(second.open) == [0, 1, 3])
    assert sorted(first.open) == [2]
