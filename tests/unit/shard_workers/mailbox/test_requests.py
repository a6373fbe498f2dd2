"""Edges of logins and pulls; the ordinary ones are in test_runner.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qim.core import ids
from qim.core.ids import mailbox_shard_id
from qim.errors import StoreUnavailable
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import (
    CURSOR_INVALID,
    OLDER,
    RATE_LIMITED,
    SHARD_MOVED,
    HistoryPull,
    HistoryPullReply,
    MailboxCursorToken,
    PullHistory,
    SessionListBatch,
    SessionListPull,
    SessionListPullReply,
)
from qim.shard_workers.mailbox.requests import PULLS_AT_ONCE, SHARD_MOVED_RETRY_MS, moved
from qim.shard_workers.mailbox.runner import MailboxRole
from tests.unit.shard_workers.pipeline import SHARDS, TENANT, Pipeline, device, eventually

AB = ids.direct_conversation_id("alice", "bob")


@pytest.fixture
async def world() -> AsyncIterator[Pipeline]:
    pipeline = Pipeline()
    await pipeline.start_fanout()
    await pipeline.start_mailbox()
    await eventually(lambda: pipeline.roles["mailbox-0"].ready())
    yield pipeline
    await pipeline.close()


def role_of(world: Pipeline) -> MailboxRole:
    role = world.roles["mailbox-0"]
    assert isinstance(role, MailboxRole)
    return role


def test_a_retry_is_spread() -> None:
    delays = {moved().retry_after_ms for _ in range(100)}
    assert len(delays) > 20
    assert SHARD_MOVED_RETRY_MS * 0.69 <= min(delays) <= max(delays) <= SHARD_MOVED_RETRY_MS * 1.31


async def test_a_refused_login_leaves_no_device_behind(world: Pipeline) -> None:
    answer = await world.login("bob", 7, MailboxCursorToken(token=b"forged" * 9, last_applied_mailbox_seq=5))
    assert answer.error.code == CURSOR_INVALID
    assert len(role_of(world)._index) == 0


async def test_the_device_is_in_the_index_before_w_is_read(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message between the two would be invisible until the next one (DESIGN-data §7)."""
    status = world.mailbox.user_status
    seen: list[int] = []

    async def watched(request: object) -> object:
        seen.append(len(role_of(world)._index.devices_of(TENANT, "bob")))
        return await status(request)  # type: ignore[arg-type]

    monkeypatch.setattr(world.mailbox, "user_status", watched)
    await world.login("bob", 7)
    assert seen == [1]


async def test_an_unreadable_mailbox_is_asked_again_later(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    async def down(*_: object) -> None:
        raise StoreUnavailable("down")

    monkeypatch.setattr(world.mailbox, "user_status", down)
    monkeypatch.setattr(world.mailbox, "range_scan", down)
    assert (await world.login("bob", 7)).error.code == SHARD_MOVED
    assert (await world.pull("bob")).error.code == SHARD_MOVED
    assert len(role_of(world)._index) == 0


async def test_a_session_that_reopens_is_not_judged_and_stays(world: Pipeline) -> None:
    cursor = MailboxCursorToken(token=b"of another epoch", last_applied_mailbox_seq=1)
    answer = await world.login("bob", 7, cursor, reopen=True)
    assert not answer.HasField("error")
    assert answer.shard_epoch == 1
    assert len(role_of(world)._index) == 1


async def test_a_read_during_a_reload_is_not_trusted(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = world.mailbox.range_scan
    runner = role_of(world)._shards[mailbox_shard_id(TENANT, "bob", SHARDS)]

    async def reloading(request: object) -> object:
        runner.doubt("test")
        return await scan(request)  # type: ignore[arg-type]

    monkeypatch.setattr(world.mailbox, "range_scan", reloading)
    assert (await world.pull("bob")).error.code == SHARD_MOVED


async def test_a_shard_of_somebody_else_is_moved(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = world.owner_of("bob")
    for shard in role_of(world).shard_ids():
        role_of(world).drop_shard(shard)
    monkeypatch.setattr(world, "owner_of", lambda user: asked)
    assert (await world.login("bob", 7)).error.code == SHARD_MOVED
    assert (await world.pull("bob")).error.code == SHARD_MOVED


async def test_history_answers_errors_with_their_retry(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.send(AB, "alice", "one")
    request = HistoryPull(device=device("alice", 1), pull=PullHistory(conversation_id=AB, direction=OLDER))

    async def pull() -> HistoryPullReply:
        body = request.SerializeToString()
        return HistoryPullReply.FromString(await world.request("alice", InternalOpcode.HISTORY_PULL, body))

    for _ in range(5):
        assert not (await pull()).HasField("error")
    limited = (await pull()).error
    assert limited.code == RATE_LIMITED
    assert 0 < limited.retry_after_ms <= 200

    async def down(*_: object) -> None:
        raise StoreUnavailable("down")

    await asyncio.sleep(0.21)
    monkeypatch.setattr(world.messages, "head", down)
    assert (await pull()).error.code == SHARD_MOVED


async def test_an_own_pull_told_w_is_a_legal_upper_bound(world: Pipeline) -> None:
    """W read from the store at login may be ahead of the answers that are still on the way here."""
    await world.send(AB, "alice", "one")

    async def there() -> bool:
        return bool(await world.texts("bob"))

    await eventually(there)
    told = (await world.login("bob", 7)).lane_watermark
    runner = role_of(world)._shards[mailbox_shard_id(TENANT, "bob", SHARDS)]
    runner.machine.acked = [0] * runner.machine.lane_count
    reply = await world.pull("bob", up_to=told)
    assert reply.covered_through_seq == told


async def test_pulls_are_made_a_few_at_a_time(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login storm must leave time for appends and for the answers of the store."""
    scan = world.mailbox.range_scan
    gate = asyncio.Event()
    started: list[object] = []

    async def slow(request: object) -> object:
        started.append(request)
        await gate.wait()
        return await scan(request)  # type: ignore[arg-type]

    monkeypatch.setattr(world.mailbox, "range_scan", slow)
    async with asyncio.TaskGroup() as storm:
        pulls = [storm.create_task(world.pull("bob")) for _ in range(3 * PULLS_AT_ONCE)]
        await eventually(lambda: len(started) == PULLS_AT_ONCE)
        await asyncio.sleep(0)
        assert len(started) == PULLS_AT_ONCE
        gate.set()
    assert [pull.result().HasField("error") for pull in pulls] == [False] * len(pulls)


async def test_the_session_list_comes_from_a_lane_that_is_caught_up(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.send(AB, "alice", "hello")

    async def asked() -> SessionListPullReply:
        pull = SessionListPull(device=device("bob", 1))
        answer = await role_of(world)._requests.pull_session_list("gateway-0", pull.SerializeToString())
        return SessionListPullReply.FromString(answer)

    async def there() -> bool:
        return len(SessionListBatch.FromString((await asked()).batch).sessions) == 1

    await eventually(there)
    (session,) = SessionListBatch.FromString((await asked()).batch).sessions
    assert (session.conversation_id, session.latest_conversation_seq) == (AB, 1)

    async def broken(tenant_id: str, user_id: str) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(world.mailbox, "conversations", broken)
    assert (await asked()).error.code == SHARD_MOVED
    role_of(world)._shards[mailbox_shard_id(TENANT, "bob", SHARDS)].doubt("test")
    assert (await asked()).error.code == SHARD_MOVED
