"""EmbeddedCommitLog: what only a real server shows: restarts, lost tails, the outbox of the commit script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qim.commit_log.api import AppendRun
from qim.commit_log.embedded import EmbeddedCommitLog, Partition
from qim.errors import StoreError
from qim.stores.redis import keys
from qim.stores.redis.message import MessageInstances, RedisMessageStore
from qim.stores.redis.resp import RespClient, RespError
from tests.contract.commit_requests import BUCKET, GRANT, request
from tests.support.redis_server import running_server


def dispatch_log(client: RespClient, *, cluster_id: str = "c", partitions: int = 2) -> EmbeddedCommitLog:
    return EmbeddedCommitLog(
        "dispatch", cluster_id, partitions, lambda p: Partition(client, keys.dispatch(p), keys.dispatch_next(p))
    )


@pytest.fixture
async def client(message_redis: str) -> AsyncIterator[RespClient]:
    client = RespClient(message_redis, name="core")
    await client.connect()
    yield client
    await client.close()


async def test_a_topic_made_anew_or_of_another_cluster_is_noticed(client: RespClient) -> None:
    first = await dispatch_log(client).identity()
    assert await dispatch_log(client).identity() == first
    with pytest.raises(StoreError, match="identity"):
        await dispatch_log(client, cluster_id="d").identity()
    with pytest.raises(StoreError, match="identity"):
        await dispatch_log(client, partitions=3).identity()
    await client.call("FLUSHALL")
    assert (await dispatch_log(client).identity()).topic_id != first.topic_id


async def test_a_hole_is_never_read_over(client: RespClient) -> None:
    log = dispatch_log(client)
    await log.append([(0, b"%d" % i) for i in range(6)])
    await client.call("XDEL", keys.dispatch(0), "3-0")
    assert [record.offset for record in await log.read(0, 0, max_records=2)] == [0, 1]
    with pytest.raises(StoreError, match="offset 2"):
        await log.read(0, 0)


async def test_a_log_that_lost_its_tail_is_noticed(client: RespClient) -> None:
    log = dispatch_log(client)
    await log.append([(0, b"%d" % i) for i in range(6)])
    await client.call("XDEL", keys.dispatch(0), "6-0")
    with pytest.raises(StoreError, match="offset 5"):
        await log.read(0, 5)


async def test_a_stream_ahead_of_its_counter_takes_nothing(client: RespClient) -> None:
    log = dispatch_log(client)
    await log.append([(1, b"a")])
    await client.call("SET", keys.dispatch_next(1), "0")
    with pytest.raises(RespError):
        await log.append([(0, b"before"), (1, b"b"), (0, b"after")])
    # what came before the failure is counted, so that partition goes on
    assert await log.append([(0, b"next")]) == [1]
    assert [record.value for record in await log.read(0, 0)] == [b"before", b"next"]


async def test_a_run_that_fails_leaves_the_others_their_offsets(client: RespClient) -> None:
    log = dispatch_log(client)
    await log.append([(1, b"a")])
    await client.call("SET", keys.dispatch_next(1), "0")
    broken, fine = await log.append_each(
        [AppendRun(None, [(0, b"before"), (1, b"b"), (0, b"after")]), AppendRun(None, [(0, b"c"), (0, b"d")])]
    )
    assert isinstance(broken, RespError)
    assert fine == [1, 2]
    assert [record.value for record in await log.read(0, 0)] == [b"before", b"c", b"d"]


async def test_partitions_on_several_instances_keep_the_order_of_the_call(client: RespClient) -> None:
    with running_server("always", name="other") as second:
        other = RespClient(second.address, name="core-2")
        await other.connect()
        clients = (client, other)
        log = EmbeddedCommitLog(
            "dispatch", "c", 4, lambda p: Partition(clients[p % 2], keys.dispatch(p), keys.dispatch_next(p))
        )
        assert await log.append([(0, b"a"), (1, b"b"), (2, b"c"), (1, b"d"), (0, b"e")]) == [0, 0, 0, 1, 1]
        assert [record.value for record in await log.read(1, 0)] == [b"b", b"d"]
        await other.call("SET", keys.dispatch_next(1), "0")
        broken, fine = await log.append_each(
            [AppendRun(None, [(0, b"f"), (1, b"g")]), AppendRun(None, [(3, b"h"), (2, b"i")])]
        )
        assert isinstance(broken, RespError)
        assert fine == [0, 1]
        await other.close()


async def test_the_outbox_is_the_stream_the_commit_script_writes(client: RespClient) -> None:
    store = RedisMessageStore(MessageInstances({"m0": client}, ["m0"] * 64))
    await store.open_bucket(BUCKET, 1, GRANT)
    outcomes = await store.commit(BUCKET, 1, [request(1), request(2)])
    log = EmbeddedCommitLog("outbox", "c", 64, lambda p: Partition(client, keys.outbox(p), keys.outbox_next(p)))
    records = await log.read(BUCKET, 0)
    assert [record.offset for record in records] == [outcome.outbox_offset for outcome in outcomes] == [0, 1]
    assert records[0].value.endswith(request(1).outbox)


async def test_what_was_acknowledged_survives_kill_9() -> None:
    with running_server("always", name="crash") as server:
        client = RespClient(server.address, name="core")
        await client.connect()
        log = dispatch_log(client)
        acknowledged = 0

        async def produce() -> None:
            nonlocal acknowledged
            while True:
                offsets = await log.append([(0, b"x"), (0, b"y")])
                acknowledged = offsets[-1] + 1

        producer = asyncio.get_running_loop().create_task(produce())
        while acknowledged < 200:
            await asyncio.sleep(0.001)
        generation = client.generation
        server.kill()
        await asyncio.gather(producer, return_exceptions=True)
        server.start()
        async with asyncio.timeout(10):
            while client.generation == generation or not client.connected:
                await asyncio.sleep(0.01)
        low, high = await log.watermarks(0)
        assert (low, high >= acknowledged, high % 2) == (0, True, 0)
        kept = await log.read(0, 0, max_records=high)
        assert [record.offset for record in kept] == list(range(high))
        assert await log.append([(0, b"z")]) == [high]
        await client.close()
