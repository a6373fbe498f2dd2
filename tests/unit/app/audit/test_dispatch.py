"""The audit finds every kind of orphan, planted one at a time into what fan-out and mailboxes really made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from qim.app.audit.dispatch import DispatchAudit
from qim.app.audit.evidence import Evidence, User
from qim.app.audit.report import AuditReport, Orphan
from qim.core import ids
from qim.core.seq import LaneVector
from qim.errors import StoreError
from qim.protocol.qim_pb2 import GroupDispatch, MessageRecord
from qim.stores.api import StoredRow
from qim.stores.mailbox_layout import DAY_MS, split_member
from tests.unit.shard_workers.pipeline import BUCKETS, SHARDS, TENANT, Pipeline, eventually

AB = ids.direct_conversation_id("alice", "bob")
BOB_SHARD = ids.mailbox_shard_id(TENANT, "bob", SHARDS)
BUCKET = ids.conversation_bucket(TENANT, AB, BUCKETS)
MESSAGES = 6


class Mailboxes:
    """The model's contents, as the audit reads an instance."""

    def __init__(self, world: Pipeline) -> None:
        self.held = world.mailbox._held
        self.clock = world.clock
        self.days_ahead = 0

    async def watermarks(self, shard: int) -> LaneVector | None:
        return self.held.shards[shard].watermarks

    async def users(self) -> Mapping[int, Sequence[User]]:
        found: dict[int, list[User]] = {}
        for user in self.held.mailboxes:
            found.setdefault(ids.mailbox_shard_id(*user, SHARDS), []).append(user)
        return found

    async def rows(self, user: User) -> list[StoredRow]:
        return [split_member(m) for members in self.held.mailboxes.get(user, {}).values() for m in members.values()]

    async def trim(self, shard: int, user: User) -> int:
        return self.held.shards[shard].user_trim.get(user, 0)

    async def today(self) -> int:
        return self.clock.unix_ms() // DAY_MS + self.days_ahead

    def entries(self, user: str) -> dict[bytes, bytes]:
        """Prefix -> member of a user's only day."""
        (members,) = self.held.mailboxes[TENANT, user].values()
        return members


class Scene:
    def __init__(self, world: Pipeline) -> None:
        self.world = world
        self.mailboxes = Mailboxes(world)

    async def audit(self, drain_timeout_s: float = 5.0) -> AuditReport:
        world = self.world
        evidence = Evidence(
            outbox=world.outbox, dispatch=world.dispatch_log, positions=world.checkpoints, messages=world.messages,
            membership=world.messages, mailboxes=self.mailboxes, registry=world.registry, bucket_count=BUCKETS,
            shard_count=SHARDS, lane_count=world.lane_count,
        )  # fmt: skip
        return await DispatchAudit(evidence, world.clock, drain_timeout_s=drain_timeout_s).run()

    async def found(self) -> dict[Orphan, int]:
        return dict((await self.audit()).found)

    def dispatches(self, shard: int = BOB_SHARD) -> list[bytes]:
        kept: list[bytes] = self.world.dispatch_log._records_of(shard)
        return kept

    def change(self, offset: int, **fields: Any) -> None:
        """Another dispatch at an offset."""
        frame = GroupDispatch.FromString(self.dispatches()[offset])
        for name, value in fields.items():
            setattr(frame.record if hasattr(frame.record, name) else frame, name, value)
        self.dispatches()[offset] = frame.SerializeToString()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """Messages of a single chat and of a group, delivered."""
    world = Pipeline()
    await world.start_fanout()
    mailbox = await world.start_mailbox()
    await world.create_group("team", ["alice", "bob", "carol", "dan"])
    for n in range(MESSAGES):
        await world.send(AB, "alice", f"{n}")
        await world.send("g:team", "alice", f"group {n}", version=1)
    made = Scene(world)

    async def delivered() -> bool:
        report = await made.audit(0.0)
        return mailbox.ready() and not report.found[Orphan.NOT_DRAINED]

    await eventually(delivered)
    yield made
    await world.close()


async def test_what_works_has_no_orphans(scene: Scene) -> None:
    report = await scene.audit()
    assert report.passed(), report.text()
    assert report.examined["commits"] >= 2 * MESSAGES
    assert report.examined["dispatches"] > 2 * MESSAGES
    assert report.examined["entries"] >= 2 * MESSAGES + 4 * MESSAGES


async def test_a_pipeline_that_stands_still_is_not_drained(scene: Scene) -> None:
    await scene.world.kill("fanout-0")
    await scene.world.send(AB, "alice", "stuck")
    report = await scene.audit(0.2)
    assert report.found[Orphan.NOT_DRAINED] == 1
    assert report.found[Orphan.COMMIT_WITHOUT_DISPATCH] >= 1


async def test_a_commit_whose_dispatch_is_gone(scene: Scene) -> None:
    log = scene.dispatches()
    before = GroupDispatch.FromString(log[-1])
    filler = GroupDispatch.FromString(log[-2])
    log[-1] = filler.SerializeToString()  # the same as the one before it: a duplicate
    found = await scene.found()
    assert found[Orphan.COMMIT_WITHOUT_DISPATCH] == 1
    assert found[Orphan.ENTRY_UNEXPECTED] >= 1, "its entries are there"
    assert before.source_offset != filler.source_offset


async def test_a_dispatch_nothing_calls_for(scene: Scene) -> None:
    await scene.world.kill("mailbox-0")
    frame = GroupDispatch.FromString(scene.dispatches()[0])
    frame.source_offset = 10_000
    await scene.world.dispatch_log.append([(BOB_SHARD, frame.SerializeToString())])
    report = await scene.audit(0.1)
    assert report.found[Orphan.DISPATCH_WITHOUT_COMMIT] == 1
    frame.source_bucket = BUCKETS + 3
    scene.dispatches()[-1] = frame.SerializeToString()
    assert (await scene.audit(0.1)).found[Orphan.DISPATCH_WITHOUT_COMMIT] == 1


@pytest.mark.parametrize("fields", [{"sender_id": "eve"}, {"conversation_seq": 9_999}, {"dispatch_id": bytes(16)}])
async def test_a_dispatch_of_other_coordinates(scene: Scene, fields: dict[str, Any]) -> None:
    scene.change(0, **fields)
    assert (await scene.found())[Orphan.COORDINATES_DIFFER] == 1


async def test_a_dispatch_in_the_wrong_partition(scene: Scene) -> None:
    scene.change(0, target_mailbox_shard=(BOB_SHARD + 1) % SHARDS)
    found = await scene.found()
    assert found[Orphan.WRONG_PARTITION] == 1
    assert found[Orphan.COMMIT_WITHOUT_DISPATCH] == 1


async def test_a_commit_whose_record_is_gone_or_another(scene: Scene) -> None:
    records = scene.world.messages._records
    del records[TENANT, AB, 2]
    other = MessageRecord.FromString(records[TENANT, AB, 3])
    other.sender_id = "eve"
    records[TENANT, AB, 3] = other.SerializeToString()
    assert await scene.found() == {Orphan.COMMIT_WITHOUT_RECORD: 1, Orphan.COORDINATES_DIFFER: 1}


async def test_forgotten_history_is_no_orphan(scene: Scene) -> None:
    await scene.world.messages.forget_history(BUCKET, scene.world.messages._buckets[BUCKET].epoch, TENANT, AB, 4)
    assert await scene.found() == {}


async def test_entries_too_few_and_too_many(scene: Scene) -> None:
    entries = scene.mailboxes.entries("bob")
    prefix, member = next(iter(entries.items()))
    del entries[prefix]
    foreign = prefix[:9] + bytes(8)
    entries[foreign] = foreign + member[17:]
    assert await scene.found() == {Orphan.ENTRY_MISSING: 1, Orphan.ENTRY_UNEXPECTED: 1}


async def test_entries_of_somebody_no_dispatch_names(scene: Scene) -> None:
    prefix, member = next(iter(scene.mailboxes.entries("bob").items()))
    day = scene.world.clock.unix_ms() // DAY_MS
    scene.mailboxes.held.mailboxes[TENANT, "mallory"] = {day: {prefix: member}}
    assert await scene.found() == {Orphan.ENTRY_UNEXPECTED: 1}


async def test_what_the_cap_or_the_days_removed_is_not_missing(scene: Scene) -> None:
    rows = sorted(await scene.mailboxes.rows((TENANT, "bob")))
    epoch = scene.mailboxes.held.shards[BOB_SHARD].epoch
    await scene.world.mailbox.truncate_before(BOB_SHARD, epoch, TENANT, "bob", rows[3].mailbox_seq)
    assert await scene.found() == {}
    scene.mailboxes.entries("alice").clear()
    scene.mailboxes.days_ahead = 9
    assert await scene.found() == {}


async def test_trimmed_logs_demand_nothing_of_what_is_gone(scene: Scene) -> None:
    world = scene.world
    await world.outbox.trim(BUCKET, 3)
    assert await scene.found() == {}
    await world.dispatch_log.trim(BOB_SHARD, 5)
    assert await scene.found() == {}


async def test_a_hole_in_the_outbox(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    read = scene.world.outbox.read

    async def broken(partition: int, offset: int, **bounds: Any) -> Any:
        if partition == BUCKET:
            raise StoreError("log outbox/0: no record at offset 2")
        return await read(partition, offset, **bounds)

    monkeypatch.setattr(scene.world.outbox, "read", broken)
    found = await scene.found()
    assert found[Orphan.OUTBOX_NOT_DENSE] == 1


async def test_a_range_that_fanout_produced_twice_is_no_orphan(scene: Scene) -> None:
    world = scene.world
    await world.dispatch_log.append([(BOB_SHARD, value) for value in scene.dispatches()[-4:]])
    await eventually(lambda: all(role.ready() for role in world.roles.values()))
    report = await scene.audit()
    assert report.passed(), report.text()
    assert report.examined["duplicates and stale dispatches"] == 4
