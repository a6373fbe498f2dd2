"""The writer on a real server, killed with -9 under it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from qim.core.ids import conversation_bucket
from qim.errors import ErrorCode
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import OutboxRecord, SendAck
from qim.stores.redis import keys
from qim.stores.redis.membership import RedisGroupMembership
from qim.stores.redis.message import MessageInstances, RedisMessageStore
from qim.stores.redis.resp import RespClient
from tests.support.redis_server import PrivateServer, running_server
from tests.unit.shard_workers.conversation.test_runner import BUCKETS, DM, GROUP, Bench

LINES = 200
SEND_RETRY_MS_MAX = 500
"""The client's wait between tries is cut to this: the server is back within a second."""


class RealBench(Bench):
    def __init__(self, server: PrivateServer) -> None:
        self.client = RespClient(server.address, name="m0", timeout_ms=2000)
        instances = MessageInstances({"m0": self.client}, ["m0"] * BUCKETS)
        super().__init__(RedisMessageStore(instances), RedisGroupMembership(instances))

    async def outbox(self, conversation: str) -> list[tuple[int, OutboxRecord]]:
        """(offset, record) of a bucket's whole outbox."""
        name = keys.outbox(conversation_bucket("t", conversation, BUCKETS))
        rows = await self.client.call("XRANGE", name, "-", "+")
        return [(int(row[0].split(b"-")[0]) - 1, OutboxRecord.FromString(row[1][1])) for row in rows]

    async def send_until_acked(self, text: str, *, to: str, own_id: str, after: str = "") -> SendAck:
        """What a client does: the same id again after every retryable answer."""
        while True:
            reply = await self.send(text, to=to, own_id=own_id, after_client_message_id=after)
            if reply.HasField("ack"):
                return reply.ack
            assert int(reply.error.code) in (ErrorCode.RATE_LIMITED, ErrorCode.REGION_FAILOVER), reply.error
            await asyncio.sleep(min(reply.error.retry_after_ms, SEND_RETRY_MS_MAX) / 1000)


@pytest.fixture
def server() -> Iterator[PrivateServer]:
    with running_server("always", name="m") as made:
        yield made


@pytest.fixture
async def bench(server: PrivateServer) -> AsyncIterator[RealBench]:
    made = RealBench(server)
    await made.client.connect()
    await made.start()
    yield made
    await made.close()
    await made.client.close()
    assert made.failures == []


async def test_a_killed_server_loses_and_doubles_nothing_and_keeps_each_line_in_order(
    bench: RealBench, server: PrivateServer
) -> None:
    conversations = [f"dm:ann:user{index}" for index in range(6)]

    async def talk(conversation: str) -> list[SendAck]:
        acks, after = [], ""
        for index in range(LINES):
            own_id = f"{conversation}/{index}"
            acks.append(await bench.send_until_acked(f"{index}", to=conversation, own_id=own_id, after=after))
            after = own_id
        return acks

    talks = [asyncio.create_task(talk(conversation)) for conversation in conversations]
    for _ in range(3):
        await asyncio.sleep(0.03)
        await asyncio.to_thread(server.restart)
    for conversation, acks in zip(conversations, await asyncio.gather(*talks), strict=True):
        assert [ack.conversation_seq for ack in acks] == list(range(1, LINES + 1))
        rows = await bench.outbox(conversation)
        assert [offset for offset, _ in rows] == list(range(len(rows)))
        mine = [record for _, record in rows if record.conversation_id == conversation]
        assert [record.conversation_seq for record in mine] == list(range(1, LINES + 1))
        assert [record.message_id for record in mine] == [ack.message_id for ack in acks]


async def test_a_group_lives_through_all_its_changes(bench: RealBench) -> None:
    members = [f"user{index:04}" for index in range(2500)]
    created = await bench.create(*members)
    assert (created.members.total_hint, created.members.has_more) == (2501, True)
    assert await bench.create(*members) == created
    assert (await bench.acked("hello", to=GROUP)).conversation_seq == 1
    added = await bench.change(InternalOpcode.SUBMIT_GROUP_ADD, *(f"late{index}" for index in range(500)))
    assert (added.conversation_seq, added.members.total_hint) == (2, 3001)
    left = await bench.leave("user0007")
    assert (left.conversation_seq, left.members.total_hint) == (3, 3000)
    assert int((await bench.refused("x", to=GROUP, by="user0007")).code) == ErrorCode.PERMISSION_DENIED
    assert (await bench.acked("hi", to=GROUP, by="late9")).conversation_seq == 4
    index = await bench.membership.version_index("t", "choir", 3)
    assert sum(ref.member_count for ref in index.values()) == 3000
    intervals = await bench.membership.intervals_of_many("t", "choir", ["user0007", "late9"])
    assert [(rows[0].joined_at, rows[0].left_at == 3) for rows in intervals] == [(0, True), (1, False)]
    rows = await bench.outbox(GROUP)
    assert [record.membership_version for _, record in rows] == [1, 1, 2, 3, 3]
    assert [len(record.events) for _, record in rows] == [1, 1, 1, 0, 1]


async def test_a_successor_finds_the_keys_and_clocks_of_its_predecessor(bench: RealBench) -> None:
    first = await bench.acked("hello", own_id="m1")
    await bench.writer.stop()
    bench.plane._requests.clear()
    bench.plane._notices.pop(InternalOpcode.LAG_REPORT)
    bench.writer = bench.new_writer()
    await bench.writer.start()
    acks = await asyncio.gather(*(bench.acked(f"line {index}") for index in range(10)))
    assert sorted(ack.conversation_seq for ack in acks) == list(range(2, 12))
    assert min(ack.message_id for ack in acks) > first.message_id
    assert len({record.dek_id for _, record in await bench.outbox(DM)}) == 1
    assert (await bench.acked("hello", own_id="m1")).message_id == first.message_id
