"""Fan-out and mailboxes on real servers: messages, groups, kills of the servers under them, and pulls at volume."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from qim.commit_log.api import LogIdentity
from qim.commit_log.embedded import EmbeddedCommitLog, Partition, RedisCheckpointStore
from qim.core import ids
from qim.obs import metrics
from qim.protocol.qim_pb2 import CURSOR_REBASED, MailboxBatch
from qim.registry.redis import RedisShardRegistry
from qim.stores.redis import keys
from qim.stores.redis.mailbox import RedisMailboxStore
from qim.stores.redis.membership import RedisGroupMembership
from qim.stores.redis.message import MessageInstances, RedisMessageStore
from qim.stores.redis.resp import RespClient
from tests.support.redis_server import PrivateServer, running_server
from tests.unit.shard_workers.pipeline import BUCKETS, SHARDS, Pipeline, eventually

AB = ids.direct_conversation_id("alice", "bob")
MEMBERS = [f"u{n}" for n in range(60)]


def entries_written() -> float:
    """Of all tenants and shards."""
    return sum(
        sample.value
        for family in metrics.FANOUT_ENTRIES_TOTAL.collect()
        for sample in family.samples
        if sample.name == "fanout_entries_total"
    )


class RedisMessages(RedisMessageStore, RedisGroupMembership):
    """Both contracts, as the models have them."""

    def __init__(self, instances: MessageInstances) -> None:
        RedisMessageStore.__init__(self, instances)
        RedisGroupMembership.__init__(self, instances)


class RealPipeline(Pipeline):
    """The pipeline on a core and a mailbox server."""

    def __init__(self, core: PrivateServer, mailbox: PrivateServer) -> None:
        super().__init__()
        self.clients = [RespClient(server.address, name=server.server.name) for server in (core, mailbox)]
        client, mailbox_client = self.clients
        instances = MessageInstances({"m": client}, ["m"] * BUCKETS)
        self.messages = RedisMessages(instances)  # type: ignore[assignment]
        self.registry = RedisShardRegistry(client)  # type: ignore[assignment]
        identity = LogIdentity(cluster_id="c", topic_id="outbox", partition_count=BUCKETS)
        self.checkpoints = RedisCheckpointStore(client, identity)  # type: ignore[assignment]
        self.outbox = EmbeddedCommitLog(  # type: ignore[assignment]
            "outbox", "c", BUCKETS, lambda n: Partition(client, keys.outbox(n), keys.outbox_next(n))
        )
        self.dispatch_log = EmbeddedCommitLog(  # type: ignore[assignment]
            "dispatch", "c", SHARDS, lambda n: Partition(client, keys.dispatch(n), keys.dispatch_next(n))
        )
        self.mailbox = RedisMailboxStore([mailbox_client] * SHARDS)  # type: ignore[assignment]

    async def start(self) -> None:
        for client in self.clients:
            await client.connect()
        await self.start_fanout()
        await self.start_mailbox()
        await self.serving()

    async def serving(self) -> None:
        await eventually(lambda: all(role.ready() for role in self.roles.values()), timeout_s=20)

    async def arrived(self, user: str, texts: list[str]) -> None:
        async def there() -> bool:
            reply = await self.pull(user)
            return not reply.HasField("error") and len(await self.texts(user)) >= len(texts)

        await eventually(there, timeout_s=20)
        assert await self.texts(user) == texts


@pytest.fixture
def servers() -> Iterator[tuple[PrivateServer, PrivateServer]]:
    with running_server("always", name="core") as core, running_server("everysec", name="box") as box:
        yield core, box


@pytest.fixture
async def world(servers: tuple[PrivateServer, PrivateServer]) -> AsyncIterator[RealPipeline]:
    pipeline = RealPipeline(*servers)
    await pipeline.start()
    yield pipeline
    await pipeline.close()
    for client in pipeline.clients:
        await client.close()
    assert not pipeline.failures


async def test_single_chat_and_group_are_delivered_and_pushed(world: RealPipeline) -> None:
    before = entries_written()
    await world.login("bob", 7)
    texts = [f"line {n}" for n in range(30)]
    for n, text in enumerate(texts):
        await world.send(AB, "alice", text, inline=n % 2 == 0)
    await world.arrived("bob", texts)
    await eventually(lambda: len(world.gateway.pushed(7)) == 30)
    assert world.gateway.pushed(7) == await world.entries("bob")
    group = await world.create_group("g", MEMBERS)
    await world.send(group, "u1", "hello", version=1)
    for user in MEMBERS:
        await world.arrived(user, ["", "hello"])
    # both people of the single chat, and every member twice
    assert entries_written() - before == 2 * 30 + 2 * len(MEMBERS)


async def test_a_killed_mailbox_server_is_filled_again(
    world: RealPipeline, servers: tuple[PrivateServer, PrivateServer]
) -> None:
    """kill -9 loses up to the last second of an everysec server; the log has it all."""
    texts = [f"line {n}" for n in range(200)]
    for n, text in enumerate(texts):
        await world.send(AB, "alice", text)
        if n in (60, 140):
            servers[1].restart()
    await world.serving()
    await world.arrived("bob", texts)
    await world.arrived("alice", texts)


async def test_a_killed_core_server_interrupts_nothing_for_good(
    world: RealPipeline, servers: tuple[PrivateServer, PrivateServer]
) -> None:
    for n in range(20):
        await world.send(AB, "alice", f"line {n}")
    servers[0].restart()
    await eventually(lambda: world.clients[0].generation == 2 and world.clients[0].connected, timeout_s=20)
    for n in range(20, 40):
        await world.send(AB, "alice", f"line {n}")
    await world.arrived("bob", [f"line {n}" for n in range(40)])


async def test_mailboxes_killed_and_started_again_keep_every_sequence(world: RealPipeline) -> None:
    first = await world.login("bob", 7)
    sent: list[str] = []
    for life in range(4):
        for n in range(25):
            sent.append(f"line {life}/{n}")
            await world.send(AB, "alice", sent[-1])
        await world.kill("mailbox-0")
        await world.start_mailbox()
        await world.serving()
    await world.arrived("bob", sent)
    entries = await world.entries("bob")
    assert [entry.mailbox_seq for entry in entries] == sorted({entry.mailbox_seq for entry in entries})
    assert (await world.login("bob", 8, first.mailbox_cursor)).error.code == CURSOR_REBASED


async def test_a_backlog_of_thousands_comes_page_by_page(world: RealPipeline) -> None:
    texts = [f"line {n}" for n in range(2500)]
    for text in texts:
        await world.send(AB, "alice", text)
    await world.arrived("bob", texts)
    answer = await world.login("bob", 9)
    assert answer.pending_entry_count == 2500
    reply = await world.pull("bob")
    batch = MailboxBatch.FromString(reply.batch)
    assert (len(batch.entries), batch.has_more) == (500, True)
