"""RedisShardRegistry: equal to the model over random histories, and safe against owners that start together."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qim.registry.api import LeaseKind, ShardRegistry
from qim.registry.memory import MemoryShardRegistry
from qim.registry.redis import RedisShardRegistry
from qim.stores.redis.resp import RespClient

_grants = st.tuples(
    st.sampled_from(list(LeaseKind)),
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    st.sampled_from([("writer-0", "g1"), ("writer-1", "g2"), ("writer-0", "g3")]),
)
_OWNERS = st.sampled_from([("writer-0", "g1"), ("writer-1", "g2"), ("writer-0", "g3")])
_IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
_leases = st.one_of(
    st.tuples(st.just("beat"), st.sampled_from(list(LeaseKind)), _IDS, _OWNERS),
    # nothing has ended yet, or everything: the clocks of the two differ
    st.tuples(st.just("acquire"), st.sampled_from(list(LeaseKind)), _IDS, _OWNERS, st.sampled_from([0, 1 << 40])),
    st.tuples(st.just("release"), st.sampled_from(list(LeaseKind)), _IDS, _OWNERS),
    st.tuples(st.just("leave"), st.sampled_from(list(LeaseKind)), _IDS, _OWNERS),
    st.tuples(st.just("pin"), st.sampled_from(list(LeaseKind)), _IDS, _OWNERS),
)
_logins = st.tuples(st.sampled_from(["ann", "bob"]), st.sampled_from(["d1", "d2", "d3", "d4"]), st.integers(1, 5))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_grants | _logins | _leases, max_size=16))
def test_redis_and_the_model_agree(message_redis: str, steps: list[Any]) -> None:
    async def run() -> None:
        client = RespClient(message_redis, name="core")
        await client.connect()
        try:
            await client.call("FLUSHALL")
            await compare([RedisShardRegistry(client), MemoryShardRegistry()])
        finally:
            await client.close()

    async def compare(registries: list[ShardRegistry]) -> None:
        for step in steps:
            answers: list[object] = []
            for registry in registries:
                if len(step) > 3:
                    answers.append(await lease_step(registry, *step))
                elif isinstance(step[0], LeaseKind):
                    kind, shard_ids, (owner, grant_id) = step
                    answers.append(await registry.grant(kind, shard_ids, owner, grant_id))
                else:
                    user_id, device_id, now_ms = step
                    answers.append(await registry.open_session("t1", user_id, device_id, max_devices=2, now_ms=now_ms))
            assert answers[0] == answers[1]
            assert await registries[0].routes() == await registries[1].routes()

    asyncio.run(run())


async def lease_step(
    registry: ShardRegistry, what: str, kind: LeaseKind, ids: list[int], who: tuple[str, str], wait_ms: int = 0
) -> object:
    owner, grant_id = who
    if what == "beat":
        return await registry.beat(kind, owner, "p", grant_id, ids, ttl_ms=1 << 40)
    if what == "acquire":
        answers = await registry.acquire(kind, ids, owner, grant_id, wait_ms=wait_ms)
        return {shard_id: (answer.epoch, answer.wait_ms > 0) for shard_id, answer in answers.items()}
    if what == "release":
        await registry.release(kind, ids, grant_id)
    elif what == "leave":
        await registry.leave(kind, grant_id)
    else:
        await registry.pin(kind, ids[0], owner)
    return None


async def test_owners_that_start_together_get_different_epochs(message_redis: str) -> None:
    clients = [RespClient(message_redis, name=f"core-{i}") for i in range(5)]
    await asyncio.gather(*(client.connect() for client in clients))
    grants = await asyncio.gather(
        *(
            RedisShardRegistry(client).grant(LeaseKind.MAILBOX_SHARD, [0, 1], f"mailbox-{i}", f"g{i}")
            for i, client in enumerate(clients)
        )
    )
    assert sorted(grant[0].epoch for grant in grants) == [1, 2, 3, 4, 5]
    assert all(first.epoch == second.epoch for first, second in grants)
    winner = max((grant[0] for grant in grants), key=lambda grant: grant.epoch)
    current = await RedisShardRegistry(clients[0]).current(LeaseKind.MAILBOX_SHARD, 0)
    assert current is not None
    assert (current.owner, current.epoch) == (winner.owner, 5)
    for client in clients:
        await client.close()
