"""KafkaCommitLog on a real broker: the contract, then what only a broker shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from qim.commit_log.api import Fence, LogIdentity, LogRecord
from qim.commit_log.embedded import RedisCheckpointStore
from qim.commit_log.kafka import RECORD_BYTES_MAX, KafkaCommitLog, KafkaConnection
from qim.commit_log.kafka_address import KafkaAddress
from qim.errors import StoreError
from qim.protocol.qim_pb2 import EVENT_MESSAGE, DispatchEvent, OutboxRecord
from qim.shard_workers.fanout.dispatch import Chain, Source, dispatches
from qim.shard_workers.mailbox.expand import Dispatch
from qim.shard_workers.mailbox.fold import AdmissionFold, Verdict
from qim.stores.api import SnapshotRef
from qim.stores.redis.resp import RespClient
from tests.contract.kafka_fixtures import TrimmableKafkaLog, change_topic, delete_topic, make_topics, new_prefix
from tests.contract.log_contract import PARTITIONS, CommitLogContract
from tests.support.kafka_server import KafkaServer, running_kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]


@pytest.fixture
async def connection(kafka_server: KafkaServer) -> AsyncIterator[KafkaConnection]:
    address = KafkaAddress.parse(kafka_server.url(new_prefix()))
    make_topics(kafka_server, address, {"dispatch": PARTITIONS})
    connection = KafkaConnection(address)
    yield connection
    await connection.close()


class TestKafka(CommitLogContract):
    @pytest.fixture(autouse=True)
    async def _make(
        self, kafka_server: KafkaServer, connection: KafkaConnection, message_redis: str
    ) -> AsyncIterator[None]:
        self.log = TrimmableKafkaLog(kafka_server, connection, "dispatch", PARTITIONS)
        identity = await self.log.identity()
        self.cluster_id = identity.cluster_id
        client = RespClient(message_redis, name="core")
        await client.connect()
        self.checkpoints = RedisCheckpointStore(client, identity)
        self.foreign_checkpoints = RedisCheckpointStore(
            client, LogIdentity(cluster_id=identity.cluster_id, topic_id="other", partition_count=PARTITIONS)
        )
        yield
        await client.close()


async def test_a_fence_is_left_to_the_fold_and_the_checkpoint(connection: KafkaConnection) -> None:
    log = KafkaCommitLog(connection, "dispatch", PARTITIONS)
    assert await log.append([(0, b"a"), (0, b"b")], Fence(7, 2)) == [0, 1]
    assert await log.append([(0, b"b")], Fence(7, 1)) == [2]


async def test_calls_under_way_together_keep_their_order_in_every_partition(connection: KafkaConnection) -> None:
    log = KafkaCommitLog(connection, "dispatch", PARTITIONS)
    calls = [[(n % PARTITIONS, b"%d %d" % (call, n)) for n in range(40)] for call in range(25)]
    offsets = await asyncio.gather(*(log.append(call) for call in calls))
    for partition in range(PARTITIONS):
        wanted = [
            LogRecord(offset, value)
            for call, found in zip(calls, offsets, strict=True)
            for (where, value), offset in zip(call, found, strict=True)
            if where == partition
        ]
        assert await log.read(partition, 0) == wanted


async def test_reads_of_several_partitions_take_turns(connection: KafkaConnection) -> None:
    log = KafkaCommitLog(connection, "dispatch", PARTITIONS)
    await log.append([(n % 2, b"%d" % n) for n in range(3000)])
    at = [0, 0]
    while min(at) < 1500:
        for partition in (0, 1):
            records = await log.read(partition, at[partition], max_records=400)
            assert [record.offset for record in records] == list(range(at[partition], at[partition] + len(records)))
            assert all(record.value == b"%d" % (2 * record.offset + partition) for record in records)
            at[partition] += len(records)
    assert at == [1500, 1500]


async def test_a_record_the_broker_might_refuse_is_refused_here(connection: KafkaConnection) -> None:
    log = KafkaCommitLog(connection, "dispatch", PARTITIONS)
    with pytest.raises(StoreError, match="exceeds"):
        await log.append([(0, b"small"), (0, bytes(RECORD_BYTES_MAX + 1))])
    assert await log.append([(0, bytes(RECORD_BYTES_MAX))]) == [0]
    assert len((await log.read(0, 0))[0].value) == RECORD_BYTES_MAX


async def test_a_record_refused_for_good_leaves_no_hole(kafka_server: KafkaServer, connection: KafkaConnection) -> None:
    """Somebody lowers the limit of the topic: the broker refuses a large record and takes the small one behind it. The
    call fails and is repeated; the fold of every reader takes each message once, in order."""
    log = KafkaCommitLog(connection, "dispatch", PARTITIONS)
    topic = connection.address.topic("dispatch")
    chain: Chain = {}
    shards = {0: SnapshotRef(1, 1, 1)}

    def call(first: int, sizes: Sequence[int]) -> list[tuple[int, bytes]]:
        chain.clear()
        made: list[tuple[int, bytes]] = []
        for offset, size in enumerate(sizes, first):
            event = DispatchEvent(event_type=EVENT_MESSAGE, audience_all=True)
            record = OutboxRecord(
                conversation_id="g:g", message_id=offset.to_bytes(16), events=[event], inline_ciphertext=bytes(size)
            )
            made += dispatches(Source(3, offset, record.SerializeToString()), shards, {}, 1, 64, chain)
        return made

    await log.append(call(0, [10]))
    change_topic(kafka_server, topic, {"max.message.bytes": "10000"})
    lossy = call(1, [RECORD_BYTES_MAX - 300, 1000, 1000])
    with pytest.raises(StoreError, match="refused a record"):
        await log.append(lossy)
    landed = [Dispatch(offset, value).source[0] for offset, value in await log.read(0, 0)]
    assert landed == [0, 2, 3], "this is what it is about: the broker took what came behind"
    change_topic(kafka_server, topic, {"max.message.bytes": "1048588"})
    await log.append(lossy)
    await log.append(call(4, [10]))
    fold = AdmissionFold()
    verdicts: dict[int, list[Verdict]] = {}
    for offset, value in await log.read(0, 0):
        found = Dispatch(offset, value)
        verdict = fold.admit(offset, found.bucket, found.source, found.fencing_epoch, found.follows)
        verdicts.setdefault(found.source[0], []).append(verdict)
    orphaned, admitted = Verdict.ORPHANED, Verdict.ADMITTED
    assert verdicts == {
        0: [admitted], 1: [admitted], 2: [orphaned, admitted], 3: [orphaned, admitted], 4: [admitted],
    }  # fmt: skip


async def test_small_records_never_make_a_batch_above_the_least_limit(
    kafka_server: KafkaServer, connection: KafkaConnection
) -> None:
    """The limit of a topic is one of batches: many fitting records together must not exceed it."""
    change_topic(
        kafka_server, connection.address.topic("dispatch"), {"max.message.bytes": str(RECORD_BYTES_MAX + 1024)}
    )
    log = KafkaCommitLog(connection, "dispatch", PARTITIONS)
    assert await log.append([(0, bytes(90_000))] * 60) == list(range(60))


async def test_a_topic_made_anew_is_noticed(kafka_server: KafkaServer, connection: KafkaConnection) -> None:
    log = KafkaCommitLog(connection, "dispatch", PARTITIONS)
    known = await connection.identities(["dispatch"])
    await log.append([(0, b"a"), (0, b"b"), (0, b"c")])
    delete_topic(kafka_server, connection.address.topic("dispatch"))
    with pytest.raises(StoreError):
        await log.identity()
    make_topics(kafka_server, connection.address, {"dispatch": PARTITIONS})
    with pytest.raises(StoreError, match="made anew"):
        await connection.watch(known)
    assert (await log.identity()).topic_id != known["dispatch"].topic_id
    with pytest.raises(StoreError, match="had 3 records"):
        await log.watermarks(0)
    with pytest.raises(StoreError, match="had 3 records"):
        await log.append([(0, b"d")])


async def test_what_was_acknowledged_survives_kill_9_and_appends_wait_for_the_broker() -> None:
    with running_kafka() as server:
        address = KafkaAddress.parse(server.url("k"))
        make_topics(server, address, {"dispatch": 2})
        connection = KafkaConnection(address)
        log = KafkaCommitLog(connection, "dispatch", 2)
        acknowledged: list[tuple[int, bytes]] = []

        async def produce() -> None:
            n = 0
            while True:
                values = [b"%d" % (n + i) for i in range(5)]
                offsets = await log.append([(0, value) for value in values])
                acknowledged.extend(zip(offsets, values, strict=True))
                n += 5

        producer = asyncio.get_running_loop().create_task(produce())
        while len(acknowledged) < 200:
            assert not producer.done()
            await asyncio.sleep(0.01)
        server.kill()
        server.launch()
        await asyncio.to_thread(server.wait_until_ready)
        goal = len(acknowledged) + 200
        deadline_s = time.monotonic() + 60
        while len(acknowledged) < goal:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
        kept: dict[int, bytes] = {}
        while records := await log.read(0, len(kept)):
            kept.update(records)
        assert all(kept[offset] == value for offset, value in acknowledged)
        # In order and without a hole: repeated records are all a crash may leave.
        greatest = -1
        for value in map(int, kept.values()):
            assert value <= greatest + 1
            greatest = max(greatest, value)
        await connection.close()
