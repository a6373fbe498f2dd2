"""What a writer forgets, on the models; the scripts are compared with them in tests/contract."""

from __future__ import annotations

import struct

import pytest

from qim.commit_log.api import LogIdentity
from qim.commit_log.memory import MemoryCheckpointStore, MemoryCommitLog
from qim.errors import StoreError
from qim.protocol.qim_pb2 import COMPLIANCE_HOLD, EPHEMERAL_24H, MessageRecord, OutboxRecord, RetentionClass
from qim.shard_workers.conversation.retention import (
    DAY_MS,
    OutboxRetention,
    WriterRetention,
    WriterRetentionSettings,
    outbox_created_at_ms,
)
from qim.shard_workers.log_retention import LogRetention
from qim.shard_workers.mailbox.retention import dispatch_created_at_ms
from qim.stores.memory_message import MemoryMessageStore
from tests.contract.commit_requests import BUCKET, GRANT, TENANT, GroupPlan, message_id, request

EPOCH = 5
DM = "dm:ann:bob"
NOW_MS = 100 * DAY_MS


class Clock:
    now_ms = NOW_MS

    def unix_ms(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> float:
        return float(self.now_ms)


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryMessageStore()
        identity = LogIdentity(cluster_id="c", topic_id="t", partition_count=4)
        self.checkpoints = MemoryCheckpointStore(identity)
        self.outbox = MemoryCommitLog(identity, records_of=self.store.outbox)
        self.dispatch = MemoryCommitLog(identity)
        self.epochs = {BUCKET: EPOCH}
        self.bytes_max = 1 << 30
        self.number = 0

    async def open(self) -> WriterRetention:
        await self.store.open_bucket(BUCKET, EPOCH, GRANT)
        logs = OutboxRetention(
            self.log("outbox", self.outbox), self.checkpoints, self.log("dispatch", self.dispatch), range(4)
        )
        settings = WriterRetentionSettings()
        return WriterRetention(lambda: self.epochs, self.store, self.store, logs, self.clock, settings)

    def log(self, topic: str, found: MemoryCommitLog) -> LogRetention:
        created_at_ms = outbox_created_at_ms if topic == "outbox" else dispatch_created_at_ms
        return LogRetention(
            topic, found, partition_count=4, created_at_ms=created_at_ms, retention_ms=DAY_MS,
            bytes_max=self.bytes_max, clock=self.clock,
        )  # fmt: skip

    async def commit(
        self,
        days_old: float,
        count: int = 1,
        conversation_id: str = DM,
        kept: RetentionClass = 0,  # type: ignore[assignment]
    ) -> None:
        created_at_ms = int(NOW_MS - days_old * DAY_MS)
        record = MessageRecord(created_at=created_at_ms, retention_class=kept).SerializeToString()
        outbox = OutboxRecord(created_at=created_at_ms).SerializeToString()
        for _ in range(count):
            self.number += 1
            await self.store.commit(
                BUCKET, EPOCH, [request(self.number, conversation_id, record=record, outbox=outbox)]
            )

    async def earliest(self, conversation_id: str = DM) -> int:
        return (await self.store.head(TENANT, conversation_id)).earliest_available_conversation_seq


async def test_records_past_their_retention_go_and_the_bound_follows() -> None:
    scene = Scene()
    retention = await scene.open()
    await scene.commit(31, 70)
    await scene.commit(29, 5)
    await scene.commit(40, 3, "dm:ann:cid")
    await scene.commit(1, 3, "dm:ann:dan")
    assert await retention.walk_step(), "one step walks the model"
    assert await scene.earliest() == 71
    assert await scene.store.records(TENANT, DM, 0, [70, 71]) == [None, scene.store._records[TENANT, DM, 71]]
    assert await scene.earliest("dm:ann:cid") == 4, "a conversation that is forgotten whole keeps its head"
    assert await scene.earliest("dm:ann:dan") == 1


async def test_a_long_history_goes_a_part_per_walk() -> None:
    scene = Scene()
    retention = await scene.open()
    await scene.commit(31, 1_200)
    bounds = []
    for _ in range(3):
        await retention.walk_step()
        bounds.append(await scene.earliest())
    assert bounds == [501, 1_001, 1_201]


async def test_a_record_that_never_expires_holds_what_is_behind_it() -> None:
    scene = Scene()
    retention = await scene.open()
    await scene.commit(2, 1, kept=EPHEMERAL_24H)
    await scene.commit(31)
    await scene.commit(99, 1, kept=COMPLIANCE_HOLD)
    await scene.commit(31)
    await retention.walk_step()
    assert await scene.earliest() == 3


async def test_a_replaced_owner_forgets_nothing() -> None:
    scene = Scene()
    retention = await scene.open()
    await scene.commit(31)
    await scene.store.open_bucket(BUCKET, EPOCH + 1, "grant-2")
    assert await retention.walk_step(), "another bucket's turn comes"
    assert await scene.earliest() == 1
    scene.epochs = {}
    await retention.walk_step()


async def test_superseded_versions_of_a_group_go_after_eight_days() -> None:
    scene = Scene()
    retention = await scene.open()
    plan = GroupPlan()
    meta, snapshots = plan.create(["ann", "bob", "cid"])
    group = (BUCKET, EPOCH, TENANT, plan.group_id)
    await scene.store.stage_members(*group, plan.slots, plan.shards())
    await scene.store.publish_group(*group, meta, snapshots, plan.index, message_id(1), b"")
    scene.number = 1
    for user in ("bob", "cid"):
        scene.number += 1
        frozen = plan.version
        rewrite = plan.change([], [user])
        await scene.store.commit(
            BUCKET, EPOCH,
            [request(scene.number, "g:team", membership_version=frozen, membership=rewrite, record=b"",
                     created_at_ms=NOW_MS)],
        )  # fmt: skip
    await retention.walk_step()
    scene.clock.now_ms += 8 * DAY_MS
    await retention.walk_step()
    with pytest.raises(StoreError):
        await scene.store.version_index(TENANT, "team", 2)
    assert await scene.store.version_index(TENANT, "team", 3) == plan.index


async def test_the_outbox_goes_below_the_stored_fanout_position() -> None:
    scene = Scene()
    retention = await scene.open()
    await scene.commit(2, 10)
    assert await retention.trim_outbox() == 0
    await scene.checkpoints.open_partition(BUCKET, 1, "f")
    await scene.checkpoints.save(BUCKET, 1, 6)
    assert await retention.trim_outbox() == 6
    assert (await scene.outbox.watermarks(BUCKET)).low == 6
    assert not retention.full


async def test_a_log_that_nobody_reads_stops_the_writer_at_its_bound() -> None:
    scene = Scene()
    scene.bytes_max = 4_000
    retention = await scene.open()
    await scene.commit(0, 10)
    await retention.trim_outbox()
    assert not retention.full
    await scene.dispatch.append([(0, struct.pack(">4000x"))])
    await retention.trim_outbox()
    assert not retention.full
    await scene.dispatch.append([(1, b".")])
    await retention.trim_outbox()
    assert retention.full
