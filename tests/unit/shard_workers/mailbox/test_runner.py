"""Fan-out and mailboxes together, on models: what is committed arrives, whatever restarts or gets lost in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

from qim.core import ids
from qim.core.seq import log_offset_of, mailbox_seq
from qim.errors import Fenced, StoreUnavailable
from qim.presence.layout import PresenceEntry
from qim.protocol.internal import user_key
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import (
    CURSOR_REBASED,
    EVENT_MEMBERSHIP,
    OLDER,
    PERMISSION_DENIED,
    SHARD_MOVED,
    CloseSession,
    DispatchEvent,
    HistoryBatch,
    HistoryPull,
    HistoryPullReply,
    LagReport,
    MailboxBatch,
    PresenceStale,
    PullHistory,
)
from qim.registry.api import LeaseKind
from qim.shard_workers.mailbox.expand import Dispatch
from qim.shard_workers.mailbox.fold import AdmissionFold
from qim.stores.api import ProgressRow
from tests.unit.shard_workers.pipeline import LANES, SHARDS, TENANT, Pipeline, device, eventually

AB = ids.direct_conversation_id("alice", "bob")
MEMBERS = [f"u{n}" for n in range(40)]


@pytest.fixture
async def world() -> AsyncIterator[Pipeline]:
    pipeline = Pipeline()
    await pipeline.start_fanout()
    await pipeline.start_mailbox()
    await serving(pipeline)
    yield pipeline
    await pipeline.close()


async def serving(world: Pipeline) -> None:
    await eventually(lambda: all(role.ready() for role in world.roles.values()))


async def arrived(world: Pipeline, user: str, texts: list[str]) -> None:
    """The user's mailbox holds exactly these, in this order."""

    async def there() -> bool:
        return len(await world.texts(user)) >= len(texts)

    await eventually(there)
    assert await world.texts(user) == texts


async def test_single_chat_reaches_both_mailboxes_and_the_online_device(world: Pipeline) -> None:
    await world.login("bob", 7)
    texts = [f"line {n}" for n in range(20)]
    for n, text in enumerate(texts):
        await world.send(AB, "alice", text, inline=n % 3 > 0)
    await arrived(world, "bob", texts)
    await arrived(world, "alice", texts)
    await eventually(lambda: len(world.gateway.pushed(7)) == len(texts))
    pushed = world.gateway.pushed(7)
    assert pushed == await world.entries("bob"), "a push and a pull carry the same entry"
    assert [entry.client_message_id for entry in pushed] == [""] * 20
    assert [entry.client_message_id for entry in await world.entries("alice")] == texts


async def test_group_messages_reach_every_member_of_every_shard(world: Pipeline) -> None:
    for n, user in enumerate(MEMBERS):
        await world.login(user, 100 + n)
    group = await world.create_group("g", MEMBERS)
    await world.send(group, "u3", "inline", version=1)
    await world.send(group, "u4", "joined", version=1, inline=False)
    for n, user in enumerate(MEMBERS):
        await arrived(world, user, ["", "inline", "joined"])
        await eventually(lambda at=100 + n: len(world.gateway.pushed(at)) == 3)
    announcement = (await world.entries("u9"))[0]
    assert announcement.body_included
    assert (announcement.conversation_seq, announcement.event_type) == (0, EVENT_MEMBERSHIP)


async def test_named_users_alone_get_an_event_for_named_users(world: Pipeline) -> None:
    group = await world.create_group("g", MEMBERS)
    event = DispatchEvent(event_type=EVENT_MEMBERSHIP, user_ids=["u1", "u2", "stranger"], joined_at=[5, 6, 7], flags=6)
    await world.send(group, "u1", "welcome", version=1, events=[event])
    await arrived(world, "u1", ["", "welcome"])
    await arrived(world, "u2", ["", "welcome"])
    assert (await world.entries("u2"))[1].visibility_floor_conversation_seq == 6
    assert await world.texts("u3") == [""]


async def test_lost_hints_are_read_from_the_log(world: Pipeline) -> None:
    world.writer.lose = lambda opcode: True
    world.hub.members["fanout-0"].lose = lambda opcode: opcode == InternalOpcode.DISPATCH_HINT
    texts = [f"line {n}" for n in range(5)]
    for text in texts:
        await world.send(AB, "alice", text)
    await arrived(world, "bob", texts)


async def test_a_fanout_that_dies_before_its_checkpoint_dispatches_again_and_nothing_doubles(world: Pipeline) -> None:
    for n in range(30):
        await world.send(AB, "alice", f"line {n}")
    await arrived(world, "bob", [f"line {n}" for n in range(30)])
    bucket = ids.conversation_bucket(TENANT, AB, 4)
    world.checkpoints._positions[bucket].next_offset = 3
    await world.kill("fanout-0")
    await world.start_fanout()
    await world.send(AB, "alice", "after")
    await arrived(world, "bob", [*(f"line {n}" for n in range(30)), "after"])
    assert not world.failures


async def test_a_replaced_fanout_stops_itself(world: Pipeline) -> None:
    await world.start_fanout(name="fanout-9")
    await world.send(AB, "alice", "hello")
    await arrived(world, "bob", ["hello"])
    await eventually(lambda: bool(world.failures))
    assert all(isinstance(error, Fenced) for _, error in world.failures)
    assert not world.roles["fanout-0"].ready()
    assert world.roles["fanout-9"].ready()


async def test_takeover_rebases_cursors_and_keeps_sequences(world: Pipeline) -> None:
    await world.send(AB, "alice", "one")
    await arrived(world, "bob", ["one"])
    first = await world.login("bob", 7)
    assert (first.has_offline, first.pending_entry_count) == (True, 1)
    cursor = first.mailbox_cursor
    cursor.last_applied_mailbox_seq = first.lane_watermark
    before = await world.entries("bob")
    await world.kill("mailbox-0")
    await world.send(AB, "alice", "two")
    await world.start_mailbox()
    await serving(world)
    await arrived(world, "bob", ["one", "two"])
    answer = await world.login("bob", 8, cursor)
    assert answer.error.code == CURSOR_REBASED
    assert answer.error.replay_from_seq == first.lane_watermark
    assert (await world.login("bob", 8, answer.error.new_cursor)).has_offline
    await arrived(world, "bob", ["one", "two"])
    entries = await world.entries("bob")
    assert entries[0] == before[0]
    assert entries[1].mailbox_seq > entries[0].mailbox_seq


async def test_three_starts_without_a_record_let_everybody_in() -> None:
    world = Pipeline()
    for _ in range(3):
        await world.start_mailbox()
        await serving(world)
        reply = await world.login("bob")
        assert not reply.HasField("error")
        assert reply.lane_watermark == 0
        await world.kill("mailbox-0")
    boundaries = await world.registry.boundaries(0)
    assert [(b.shard_epoch, b.start_offset, b.prev_epoch_end_mailbox_seq) for b in boundaries] == [
        (1, 0, 0), (2, 0, 0), (3, 0, 0),
    ]  # fmt: skip


async def test_records_from_before_the_first_mailbox_start_are_delivered() -> None:
    world = Pipeline()
    await world.start_fanout()
    await world.send(AB, "alice", "early")
    shard = ids.mailbox_shard_id(TENANT, "bob", SHARDS)

    async def dispatched() -> bool:
        return (await world.dispatch_log.watermarks(shard)).high > 0

    await eventually(dispatched)
    await world.start_mailbox()
    await serving(world)
    assert await world.texts("bob") == ["early"]
    await world.close()


async def test_a_shard_that_opens_tells_online_devices_to_look(world: Pipeline) -> None:
    await world.kill("mailbox-0")
    entry = PresenceEntry(TENANT, "bob", "bob-d", connection_id=7, session_epoch=1, user_hash=0)
    world.present.append(("gateway-0", entry))
    await world.start_mailbox()
    await eventually(lambda: 7 in world.gateway.dirty_connections(), timeout_s=8)
    (frame,) = [frame for frame in world.gateway.dirty if frame.devices]
    assert frame.shard_epoch == 2
    await world.send(AB, "alice", "hello")
    await eventually(lambda: len(world.gateway.pushed(7)) == 1)


async def test_a_connection_that_was_in_no_presence_table_is_told_to_look_when_it_opens_again(world: Pipeline) -> None:
    """Its gateway's lease had ended by a step of the clock when the shard opened."""
    await world.login("bob", 7)
    await world.login("bob", 7, reopen=True)
    await world.kill("mailbox-0")
    await world.start_mailbox()
    await serving(world)
    await world.login("bob", 7, reopen=True)
    await eventually(lambda: 7 in world.gateway.dirty_connections(), timeout_s=8)
    assert len(world.gateway.dirty) == 1, "the first reopening found it in the index"


async def test_an_instance_that_lost_its_last_second_is_filled_again(world: Pipeline) -> None:
    await world.send(AB, "alice", "kept")
    await arrived(world, "bob", ["kept"])
    saved = world.mailbox.saved()
    await world.login("bob", 7)
    for n in range(10):
        await world.send(AB, "alice", f"lost {n}")
    await arrived(world, "bob", ["kept", *(f"lost {n}" for n in range(10))])
    told = (await world.login("bob", 7)).lane_watermark
    world.mailbox.restart(saved)
    answer = await world.login("bob", 8)
    assert answer.error.code == SHARD_MOVED
    assert answer.error.retry_after_ms > 0
    await serving(world)
    assert (await world.login("bob", 8)).lane_watermark == told
    assert await world.texts("bob") == ["kept", *(f"lost {n}" for n in range(10))]


async def test_an_instance_that_lost_its_last_second_is_filled_again_without_anybody_asking(world: Pipeline) -> None:
    """Nobody logs in and nothing is sent: retention must not find the entries missing a week later."""
    saved = world.mailbox.saved()
    await world.send(AB, "alice", "lost")
    await arrived(world, "bob", ["lost"])
    world.mailbox.restart(saved)
    shard = ids.mailbox_shard_id(TENANT, "bob", SHARDS)
    await eventually(lambda: world.mailbox.is_loaded(shard))
    await serving(world)
    await arrived(world, "bob", ["lost"])


async def test_a_fold_saved_by_a_late_call_during_a_reload_refuses_no_lane(world: Pipeline) -> None:
    """It drops the progress of records the reload still looks for: they must not count as unfinished."""
    await world.send(AB, "alice", "one")
    await arrived(world, "bob", ["one"])
    shard = ids.mailbox_shard_id(TENANT, "bob", SHARDS)
    read_progress = world.mailbox.progress

    async def progress(number: int, first: int, last: int) -> Mapping[tuple[int, int], ProgressRow]:
        if number == shard:
            world.mailbox.progress = read_progress  # type: ignore[method-assign]
            held = world.mailbox._held.shards[shard]
            fold = AdmissionFold()
            for offset, value in await world.dispatch_log.read(shard, 0):
                dispatch = Dispatch(offset, value)
                fold.admit(offset, dispatch.bucket, dispatch.source, dispatch.fencing_epoch)
                held.fold, held.fold_offset = fold.encode(), offset
            held.progress.clear()
        return await read_progress(number, first, last)

    world.mailbox.progress = progress  # type: ignore[method-assign, assignment]
    world.mailbox.restart()
    await eventually(lambda: world.mailbox.is_loaded(shard))
    await serving(world)
    assert not (await world.login("bob", 3)).HasField("error")
    assert await world.texts("bob") == ["one"]


async def test_a_lane_behind_a_held_chunk_shows_nothing_beyond_it() -> None:
    """26.1.3: the entries behind the held dispatch are stored, and stay out of sight."""
    held: set[int] = {3}
    world = Pipeline(
        chunk_gate=lambda shard, lane, offset: lane == ids.lane_id(TENANT, "bob", LANES) and offset in held
    )
    await world.start_fanout()
    await world.start_mailbox()
    await serving(world)
    for n in range(8):
        await world.send(AB, "alice", f"line {n}")
    await arrived(world, "alice", [f"line {n}" for n in range(8)])
    await arrived(world, "bob", ["line 0", "line 1", "line 2"])
    assert log_offset_of((await world.login("bob")).lane_watermark) == 2
    first = await world.pull("bob")
    batch = MailboxBatch.FromString(first.batch)
    assert (log_offset_of(first.covered_through_seq), batch.has_more) == (2, False)
    held.clear()
    await arrived(world, "bob", [f"line {n}" for n in range(8)])
    assert len(await world.entries("bob", first.covered_through_seq)) == 5
    await world.close()


async def test_an_unreadable_snapshot_stops_its_group_and_nothing_else(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = await world.create_group("g", MEMBERS)
    await arrived(world, "u1", [""])
    await world.kill("mailbox-0")
    broken = True
    snapshot = world.messages.shard_snapshot

    async def failing(*args: object) -> object:
        if broken:
            raise StoreUnavailable("down")
        return await snapshot(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(world.messages, "shard_snapshot", failing)
    await world.start_mailbox()
    await serving(world)
    await world.send(group, "u1", "to all", version=1)
    outsiders = [f"x{n}" for n in range(300)]
    pair = next(
        (x, y)
        for x, y in zip(outsiders[::2], outsiders[1::2], strict=True)
        if ids.lane_id(TENANT, x, LANES) not in {ids.lane_id(TENANT, user, LANES) for user in MEMBERS}
        and ids.lane_id(TENANT, y, LANES) not in {ids.lane_id(TENANT, user, LANES) for user in MEMBERS}
    )
    await world.send(ids.direct_conversation_id(*pair), pair[0], "still works")
    await arrived(world, pair[1], ["still works"])
    assert await world.texts("u1") == [""]
    broken = False
    await arrived(world, "u1", ["", "to all"])


async def test_a_replaced_mailbox_stops_itself_and_its_successor_serves(world: Pipeline) -> None:
    old = world.roles.pop("mailbox-0")
    await world.start_mailbox(name="mailbox-9")
    await serving(world)
    await world.send(AB, "alice", "hello")
    await arrived(world, "bob", ["hello"])
    await eventually(lambda: bool(world.failures))
    assert all(isinstance(error, Fenced) for _, error in world.failures)
    assert not old.ready()
    await old.stop()


async def test_a_cut_link_ends_in_dirty_not_in_silence(world: Pipeline) -> None:
    await world.login("bob", 7)
    world.hub.cut("gateway-0")
    await world.send(AB, "alice", "unseen")
    await arrived(world, "bob", ["unseen"])
    assert not world.gateway.pushed(7)
    world.hub.mend("gateway-0")
    await eventually(lambda: 7 in world.gateway.dirty_connections(), timeout_s=8)


async def test_closed_and_stale_connections_get_no_more_pushes(world: Pipeline) -> None:
    await world.login("bob", 7)
    await world.login("bob", 8, device_id="tablet")
    gateway = world.hub.members["gateway-0"]
    close = CloseSession(device=device("bob", 7))
    gateway.notify("mailbox-0", InternalOpcode.CLOSE_SESSION, close.SerializeToString())
    await world.send(AB, "alice", "one")
    await eventually(lambda: len(world.gateway.pushed(8)) == 1)

    def stale(user: str) -> None:
        """As a gateway reports a connection it does not have: it cannot name who had it."""
        named = device("", 8, "")
        report = PresenceStale(device=named, user_key=user_key(TENANT, user))
        gateway.notify("mailbox-0", InternalOpcode.PRESENCE_STALE, report.SerializeToString())

    stale("eve")
    await world.send(AB, "alice", "another's report ends nothing of bob's")
    await eventually(lambda: len(world.gateway.pushed(8)) == 2)
    stale("bob")
    await world.send(AB, "alice", "two")
    await arrived(world, "bob", ["one", "another's report ends nothing of bob's", "two"])
    assert len(world.gateway.pushed(8)) == 2
    assert not world.gateway.pushed(7)


async def test_history_is_for_members_only(world: Pipeline) -> None:
    for n in range(5):
        await world.send(AB, "alice", f"line {n}")

    async def pull(user: str, limit: int) -> HistoryPullReply:
        request = HistoryPull(
            device=device(user, 1), pull=PullHistory(conversation_id=AB, direction=OLDER, limit=limit)
        )
        return HistoryPullReply.FromString(
            await world.request(user, InternalOpcode.HISTORY_PULL, request.SerializeToString())
        )

    batch = HistoryBatch.FromString((await pull("alice", 3)).batch)
    assert [message.payload_or_ciphertext.decode() for message in batch.messages] == ["line 2", "line 3", "line 4"]
    assert batch.has_more
    assert (await pull("mallory", 3)).error.code == PERMISSION_DENIED


async def test_lag_is_reported_to_the_writers(world: Pipeline) -> None:
    await world.registry.grant(LeaseKind.CONVERSATION_BUCKET, range(4), "writer-0", "w")
    await eventually(lambda: len(world.lag_reports) >= 4)
    reports = [LagReport.FromString(body) for body in world.lag_reports]
    (mailbox, *_) = [report for report in reports if report.reporter == "mailbox-0"]
    assert list(mailbox.shards) == list(range(SHARDS))
    assert list(mailbox.shard_lane_lag_ms) == [0] * SHARDS * LANES
    (fanout, *_) = [report for report in reports if report.reporter == "fanout-0"]
    assert list(fanout.partition_lag_ms) == [0, 0, 0, 0]


async def test_roles_share_shards_and_partitions_by_number() -> None:
    world = Pipeline()
    for index in range(2):
        await world.start_fanout(index, 2)
        await world.start_mailbox(index, 2)
    await serving(world)
    group = await world.create_group("g", MEMBERS)
    await world.send(group, "u0", "hello", version=1)
    for user in MEMBERS:
        await arrived(world, user, ["", "hello"])
    for role in list(world.roles.values()):
        await role.drain()
    await world.close()


async def test_sequences_start_at_epoch_one(world: Pipeline) -> None:
    await world.send(AB, "alice", "first")
    await arrived(world, "bob", ["first"])
    assert (await world.entries("bob"))[0].mailbox_seq == mailbox_seq(1, 0)
