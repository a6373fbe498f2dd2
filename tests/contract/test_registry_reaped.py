"""Leases of members whose death is proven, on a real server."""

from __future__ import annotations

import pytest

from qim.errors import StoreUnavailable
from qim.registry.api import LeaseKind, Route
from qim.registry.memory import MemoryShardRegistry
from qim.registry.reaped import lease_owners, release_reaped
from qim.registry.redis import RedisShardRegistry
from qim.stores.redis.resp import RespClient

TTL_MS = 60_000


async def test_a_reaped_member_has_nothing_at_once_and_nobody_else_loses_anything(message_redis: str) -> None:
    client = RespClient(message_redis, name="core")
    await client.connect()
    registry = RedisShardRegistry(client)
    kinds = {"writer": LeaseKind.CONVERSATION_BUCKET, "mailbox": LeaseKind.MAILBOX_SHARD}
    for pool, kind in kinds.items():
        for member in (0, 1):
            name = f"{pool}-{member}"
            await registry.beat(kind, name, f"core-{member}", f"g{name}", [], ttl_ms=TTL_MS)
            await registry.acquire(kind, [member, member + 2], name, f"g{name}", wait_ms=TTL_MS)
    assert lease_owners(message_redis) == {"writer-0", "writer-1", "mailbox-0", "mailbox-1"}
    version = await registry.routes_version()
    assert release_reaped(message_redis, ("writer-0", "mailbox-0", "admin-0")) == 4
    assert lease_owners(message_redis) == {"writer-1", "mailbox-1"}
    assert await registry.routes_version() > version
    for pool, kind in kinds.items():
        one = f"{pool}-1"
        answers = await registry.acquire(kind, [0, 1, 2], one, f"g{one}", wait_ms=TTL_MS)
        assert [answer.epoch for answer in answers.values()] == [2, 1, 2]
        assert (await registry.beat(kind, one, "core-1", f"g{one}", [0, 1, 2, 3], ttl_ms=TTL_MS)).owners == (one,)
    assert release_reaped(message_redis, ("writer-0",)) == 0
    await client.close()


async def test_a_member_that_comes_back_soon_is_expected(message_redis: str) -> None:
    client = RespClient(message_redis, name="core")
    await client.connect()
    registry, kind = RedisShardRegistry(client), LeaseKind.OUTBOX_PARTITION
    await registry.beat(kind, "fanout-0", "core-0", "g0", [], ttl_ms=TTL_MS)
    await registry.acquire(kind, [0], "fanout-0", "g0", wait_ms=TTL_MS)
    release_reaped(message_redis, ("fanout-0",), "core-0")
    other = await registry.beat(kind, "fanout-1", "core-1", "g1", [], ttl_ms=TTL_MS)
    assert other.owners == ("fanout-0", "fanout-1")
    assert await registry.current(kind, 0) is None
    answers = await registry.acquire(kind, [0], "fanout-0", "g0b", wait_ms=TTL_MS)
    assert answers[0].epoch == 2
    assert await registry.current(kind, 0) == Route("fanout-0", 2)
    await client.close()


async def test_the_model_does_the_same(message_redis: str) -> None:
    client = RespClient(message_redis, name="core")
    await client.connect()
    real, model = RedisShardRegistry(client), MemoryShardRegistry()
    kind = LeaseKind.OUTBOX_PARTITION
    seen = []
    for registry in (real, model):
        for member in (0, 1):
            name = f"fanout-{member}"
            await registry.beat(kind, name, f"core-{member}", f"g{member}", [], ttl_ms=TTL_MS)
            await registry.acquire(kind, [member], name, f"g{member}", wait_ms=TTL_MS)
        if registry is real:
            release_reaped(message_redis, ("fanout-0", "admin-0"), "core-0")
        else:
            model.release_reaped(("fanout-0", "admin-0"), "core-0")
        seen.append((
            await registry.beat(kind, "fanout-1", "core-1", "g1", [0, 1], ttl_ms=TTL_MS),
            [(row.shard_id, row.owner, row.epoch) for row in await registry.leases(kind)],
            (await registry.routes()).processes,
            await registry.acquire(kind, [0], "fanout-0", "g2", wait_ms=TTL_MS),
            await registry.routes_version(),
        ))  # fmt: skip
    assert seen[0] == seen[1]
    await client.close()


def test_a_registry_that_does_not_answer_is_no_reason_to_wait() -> None:
    with pytest.raises(StoreUnavailable):
        release_reaped("unix:///nonexistent/redis.sock", ("writer-0",))
