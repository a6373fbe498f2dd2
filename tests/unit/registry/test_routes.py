"""RouteCache: versions rise, bursts share reads, an outage keeps the last map."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qim.errors import StoreUnavailable
from qim.registry.api import LeaseKind, Route, RouteMap
from qim.registry.memory import MemoryShardRegistry
from qim.registry.routes import RouteCache
from qim.runtime.tasks import TaskSet

BUCKET = LeaseKind.CONVERSATION_BUCKET


class CountingRegistry(MemoryShardRegistry):
    """Counts the reads of the map and can be unavailable."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.down = False

    async def routes(self) -> RouteMap:
        self.reads += 1
        await asyncio.sleep(0)
        if self.down:
            raise StoreUnavailable("down")
        return await super().routes()

    async def routes_version(self) -> int:
        if self.down:
            raise StoreUnavailable("down")
        return await super().routes_version()


@pytest.fixture
def registry() -> CountingRegistry:
    return CountingRegistry()


@pytest.fixture
async def tasks() -> AsyncIterator[TaskSet]:
    failures: list[str] = []
    tasks = TaskSet(lambda name, error: failures.append(name))
    yield tasks
    await tasks.close()
    assert failures == []


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_map_is_there_after_start_and_listeners_hear_of_newer_ones(
    registry: CountingRegistry, tasks: TaskSet
) -> None:
    await registry.grant(BUCKET, [0], "writer-0", "g1")
    cache = RouteCache(registry, tasks, poll_interval_ms=0)
    heard: list[int] = []
    cache.on_change(lambda routes: heard.append(routes.version))
    assert cache.owner(BUCKET, 0) is None
    await cache.start()
    assert cache.owner(BUCKET, 0) == "writer-0"
    await registry.grant(BUCKET, [0], "writer-1", "g2")
    await settled()
    assert cache.route(BUCKET, 0) == Route("writer-1", 2)
    assert heard == [1, 2]
    assert cache.map.version == 2
    reads = registry.reads
    await settled()
    assert registry.reads == reads


async def test_a_burst_of_refreshes_shares_reads_and_sees_what_was_granted_before_it_asked(
    registry: CountingRegistry, tasks: TaskSet
) -> None:
    cache = RouteCache(registry, tasks)
    first = tasks.start("first", cache.refresh())
    await asyncio.sleep(0)
    await registry.grant(BUCKET, [0], "writer-0", "g1")
    await asyncio.gather(first, *(cache.refresh() for _ in range(50)))
    assert registry.reads <= 3
    assert cache.owner(BUCKET, 0) == "writer-0"


async def test_an_outage_keeps_the_last_map_and_the_poll_survives_it(
    registry: CountingRegistry, tasks: TaskSet
) -> None:
    await registry.grant(BUCKET, [0], "writer-0", "g1")
    cache = RouteCache(registry, tasks, poll_interval_ms=0)
    await cache.start()
    registry.down = True
    with pytest.raises(StoreUnavailable):
        await cache.refresh()
    await settled()
    assert cache.owner(BUCKET, 0) == "writer-0"
    await registry.grant(BUCKET, [0], "writer-1", "g2")
    registry.down = False
    await settled()
    assert cache.owner(BUCKET, 0) == "writer-1"


async def test_an_older_map_changes_nothing(registry: CountingRegistry, tasks: TaskSet) -> None:
    await registry.grant(BUCKET, [0], "writer-0", "g1")
    cache = RouteCache(registry, tasks)
    await cache.refresh()
    registry._version = 0
    registry._leases[BUCKET].clear()
    await cache.refresh()
    assert cache.owner(BUCKET, 0) == "writer-0"


async def test_a_silent_owner_brings_the_newer_map_before_the_next_poll(
    registry: CountingRegistry, tasks: TaskSet
) -> None:
    cache = RouteCache(registry, tasks, poll_interval_ms=3_600_000)
    await cache.start()
    await registry.grant(BUCKET, [0], "writer-1", "g1")
    before = registry.reads
    for _ in range(5):
        cache.refresh_soon()
    await settled()
    assert cache.owner(BUCKET, 0) == "writer-1"
    assert registry.reads == before + 1
    registry.down = True
    cache.refresh_soon()
    await settled()
    assert cache.owner(BUCKET, 0) == "writer-1"


async def test_the_owners_of_a_kind_are_told_once_each(registry: CountingRegistry, tasks: TaskSet) -> None:
    routes = RouteCache(registry, tasks)
    await routes.start()
    assert routes.owners(LeaseKind.MAILBOX_SHARD) == []
    await registry.grant(LeaseKind.MAILBOX_SHARD, [1, 3], "mailbox-1", "b")
    await registry.grant(LeaseKind.MAILBOX_SHARD, [0, 2], "mailbox-0", "a")
    await routes.refresh()
    assert routes.owners(LeaseKind.MAILBOX_SHARD) == ["mailbox-0", "mailbox-1"]
    assert routes.owners(BUCKET) == []
