"""RedisMailboxStore: what only a real server shows: lost seconds, expiry, reconnects, equality with the model."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qim.core.seq import LaneVector, mailbox_seq
from qim.errors import StaleInstance
from qim.stores.api import AppendCall, AppendStatus, ChunkAppend, MailboxStore, ProgressRow
from qim.stores.memory_mailbox import MemoryMailboxStore
from qim.stores.redis import keys
from qim.stores.redis.mailbox import RedisMailboxStore
from qim.stores.redis.resp import RespClient
from tests.contract.mailbox_calls import (
    CHUNK,
    DAY_MS,
    EPOCH,
    GRANT,
    LANE,
    LANES,
    SHARD,
    TENANT,
    append,
    chunk,
    identities,
    moved,
    offsets,
    span,
    unix_ms,
    zero,
)
from tests.support.redis_server import PrivateServer, running_server

SHARDS = 16


async def connected_client(address: str) -> RespClient:
    client = RespClient(address, name="mailbox")
    await client.connect()
    return client


@pytest.fixture
async def client(mailbox_redis: str) -> AsyncIterator[RespClient]:
    client = await connected_client(mailbox_redis)
    yield client
    await client.close()


@pytest.fixture
async def store(client: RespClient) -> RedisMailboxStore:
    store = RedisMailboxStore([client] * SHARDS)
    await store.open_shard(SHARD, EPOCH, GRANT, LANES)
    return store


def day_key(user: str, created_at_ms: int) -> str:
    return f"{keys.mailbox_prefix(TENANT, user)}{created_at_ms // DAY_MS}"


# --------------------------------------------------------------------------------------------------- keys and expiry


async def test_a_day_key_expires_eight_days_after_its_day_began(store: RedisMailboxStore, client: RespClient) -> None:
    created_at_ms = unix_ms() - 2 * DAY_MS
    await store.append(append(chunk(1, ["ann"], created_at_ms=created_at_ms)))
    await store.append(append(chunk(2, ["bob", "ann"], created_at_ms=created_at_ms)))
    for user in ("ann", "bob"):
        expires_s = await client.call("EXPIRETIME", day_key(user, created_at_ms))
        assert expires_s == (created_at_ms // DAY_MS + 8) * 86_400


async def test_a_day_key_emptied_by_a_trim_gets_its_expiry_again(store: RedisMailboxStore, client: RespClient) -> None:
    created_at_ms = unix_ms()
    await store.append(append(chunk(1, ["ann"], created_at_ms=created_at_ms)))
    await store.truncate_before(SHARD, EPOCH, TENANT, "ann", mailbox_seq(EPOCH, 1))
    assert await client.call("EXISTS", day_key("ann", created_at_ms)) == 0
    await store.append(append(chunk(2, ["ann"], created_at_ms=created_at_ms)))
    assert await client.call("TTL", day_key("ann", created_at_ms)) > 0


async def test_an_expired_day_leaves_no_key(store: RedisMailboxStore, client: RespClient) -> None:
    created_at_ms = unix_ms() - 9 * DAY_MS
    await store.append(append(chunk(1, ["ann"], created_at_ms=created_at_ms)))
    assert await client.call("EXISTS", day_key("ann", created_at_ms)) == 0


async def test_a_range_reads_only_keys_of_the_shard_and_the_user(store: RedisMailboxStore, client: RespClient) -> None:
    await store.append(append(chunk(1, ["ann", "bob"]), new=moved(zero(), 1)))
    watcher = await asyncio.open_unix_connection(client.address.removeprefix("unix://"))
    watcher[1].write(b"MONITOR\r\n")
    assert await watcher[0].readline() == b"+OK\r\n"
    await store.range_scan(span("ann"))
    await client.call("ECHO", "end")
    touched = set()
    while b'"ECHO"' not in (line := await watcher[0].readline()):
        command = line.decode().split('"')
        if "lua" in command[0] and command[1].upper() != "TIME":
            touched.add(command[3])
    watcher[1].close()
    mailboxes = {name for name in touched if name.startswith(keys.mailbox_prefix(TENANT, "ann"))}
    assert len(mailboxes) == 10
    assert touched - mailboxes == {keys.shard(SHARD), keys.user_trim(SHARD)}


async def test_the_list_of_days_stays_as_short_as_the_retention(store: RedisMailboxStore, client: RespClient) -> None:
    now = unix_ms()
    for offset in range(60):
        await store.append(append(chunk(offset, ["ann"], created_at_ms=now - (60 - offset) * DAY_MS)))
    packed = await client.call("HGET", keys.shard(SHARD), bytes((LANE,)))
    assert len(packed) // 16 <= 10
    assert (await store.range_scan(span("ann"))).effective_trim == mailbox_seq(EPOCH, 52)


async def test_lost_progress_and_other_bytes_on_replay_are_refused(
    store: RedisMailboxStore, client: RespClient
) -> None:
    await store.append(append(chunk(5, ["ann", "bob"], common=b"first")))
    await client.call("DEL", f"{keys.progress_prefix(SHARD)}0")
    again = await store.append(append(chunk(5, ["ann", "bob", "cid"], common=b"other")))
    assert (again.applied, again.nondeterministic) == (1, 2)
    await client.call("DEL", f"{keys.progress_prefix(SHARD)}0")
    same = await store.append(append(chunk(5, ["ann", "bob"], common=b"first")))
    assert (same.applied, same.nondeterministic) == (1, 0)
    assert await offsets(store, "ann") == [5]


async def test_a_fold_far_ahead_drops_old_blocks_a_few_at_a_time(store: RedisMailboxStore, client: RespClient) -> None:
    for block in (0, 63, 64, 100):
        await store.append(append(chunk(block * 1024, ["ann"])))
    w = moved(zero(), 200 * 1024, lanes=range(LANES))
    await store.append(append(new=w, fold=b"f", fold_offset=200 * 1024))
    assert sorted(offset // 1024 for offset, _ in await store.progress(SHARD, 0, 200 * 1024)) == [64, 100]
    await store.append(append(previous=w, new=w, fold=b"f", fold_offset=200 * 1024))
    assert await store.progress(SHARD, 0, 200 * 1024) == {}


async def test_two_calls_in_flight_keep_their_order(store: RedisMailboxStore, client: RespClient) -> None:
    await client.call("SCRIPT", "FLUSH")
    w, calls = zero(), []
    for offset in range(40):
        new = moved(w, offset)
        calls.append(append(chunk(offset, ["ann"]), previous=w, new=new, required=[(offset, LANE, 1)]))
        w = new
    results = await asyncio.gather(*(store.append(call) for call in calls))
    assert {result.status for result in results} == {AppendStatus.OK}
    assert await offsets(store, "ann") == list(range(40))


# ------------------------------------------------------------------------------------------------ crashes of the server


@pytest.fixture
def crashing_server() -> Iterator[PrivateServer]:
    with running_server("everysec", name="crash") as server:
        yield server


async def reconnected(client: RespClient, generation: int) -> None:
    async with asyncio.timeout(10):
        while client.generation == generation or not client.connected:
            await asyncio.sleep(0.01)


async def lose_everything_since(server: PrivateServer, saved: Path, client: RespClient) -> None:
    """Restart the server on an older copy of its files."""
    generation = client.generation
    server.kill()
    shutil.rmtree(server.server.data_dir)
    shutil.copytree(saved, server.server.data_dir)
    server.start()
    await reconnected(client, generation)


async def test_a_killed_server_keeps_entries_bits_and_w_together(crashing_server: PrivateServer) -> None:
    client = await connected_client(crashing_server.address)
    store = RedisMailboxStore([client] * SHARDS)
    await store.open_shard(SHARD, EPOCH, GRANT, LANES)
    w, calls = zero(), []
    for offset in range(300):
        new = moved(w, offset)
        calls.append(append(chunk(offset, ["ann", "bob"]), previous=w, new=new, required=[(offset, LANE, 1)]))
        w = new
    for call in calls[:200]:
        await store.append(call)
    pending = [asyncio.get_running_loop().create_task(store.append(call)) for call in calls[200:]]
    await asyncio.sleep(0)
    generation = client.generation
    crashing_server.kill()
    await asyncio.gather(*pending, return_exceptions=True)
    crashing_server.start()
    await reconnected(client, generation)
    state = await store.load_shard(SHARD, EPOCH)
    reached = state.watermarks[LANE]
    kept = [row.mailbox_seq for row in (await store.range_scan(span("ann"))).rows]
    assert kept == [mailbox_seq(EPOCH, offset) for offset in range(len(kept))]
    assert reached == (kept[-1] if kept else 0)
    assert len(await store.progress(SHARD, 0, 300)) == len(kept)
    await client.close()


async def test_an_instance_that_lost_its_last_second_is_noticed_by_every_call(
    crashing_server: PrivateServer, tmp_path: Path
) -> None:
    client = await connected_client(crashing_server.address)
    store = RedisMailboxStore([client] * SHARDS)
    await store.open_shard(SHARD, EPOCH, GRANT, LANES)
    w1 = moved(zero(), 1)
    await store.append(append(chunk(1, ["ann"]), new=w1))
    await client.call("BGREWRITEAOF")
    while b"aof_rewrite_in_progress:1" in await client.call("INFO", "persistence"):
        await asyncio.sleep(0.02)
    saved = tmp_path / "saved"
    shutil.copytree(crashing_server.server.data_dir, saved)
    w2 = moved(w1, 2)
    lost = append(chunk(2, ["ann"]), previous=w1, new=w2, required=[(2, LANE, 1)])
    await store.append(lost)
    await lose_everything_since(crashing_server, saved, client)
    assert not store.is_loaded(SHARD)
    # a login in between must not read a W that no longer holds
    with pytest.raises(StaleInstance):
        await store.user_status(span("ann"))
    with pytest.raises(StaleInstance):
        await store.range_scan(span("ann"))
    assert (await store.append(append(chunk(3, ["ann"]), previous=w2, new=moved(w2, 3)))).status is AppendStatus.W_MOVED
    assert (await store.load_shard(SHARD, EPOCH)).watermarks == w1
    assert store.is_loaded(SHARD)
    stale = append(chunk(3, ["ann"]), previous=w1, new=moved(w1, 3), required=[(2, LANE, 1), (3, LANE, 1)])
    assert (await store.append(stale)).status is AppendStatus.W_MOVED
    assert (await store.append(lost)).status is AppendStatus.OK
    assert await offsets(store, "ann") == [1, 2]
    assert [row.conversation_id for row in await store.conversations(TENANT, "ann")] == ["dm:ann:bob"]
    await client.close()


async def test_an_instance_that_lost_our_epoch_refuses_us_and_the_zombie(
    crashing_server: PrivateServer, tmp_path: Path
) -> None:
    client = await connected_client(crashing_server.address)
    store, zombie = RedisMailboxStore([client] * SHARDS), RedisMailboxStore([client] * SHARDS)
    await zombie.open_shard(SHARD, EPOCH, GRANT, LANES)
    await client.call("BGREWRITEAOF")
    while b"aof_rewrite_in_progress:1" in await client.call("INFO", "persistence"):
        await asyncio.sleep(0.02)
    saved = tmp_path / "saved"
    shutil.copytree(crashing_server.server.data_dir, saved)
    await store.open_shard(SHARD, EPOCH + 1, "grant-b", LANES)
    await lose_everything_since(crashing_server, saved, client)
    assert (await store.load_shard(SHARD, EPOCH + 1)).stored_epoch == EPOCH
    ours = append(chunk(1, ["ann"], epoch=EPOCH + 1), epoch=EPOCH + 1)
    assert (await store.append(ours)).status is AppendStatus.W_MOVED
    with pytest.raises(StaleInstance):
        await store.range_scan(span("ann", epoch=EPOCH + 1))
    await store.open_shard(SHARD, EPOCH + 1, "grant-b", LANES)
    assert (await store.append(ours)).status is AppendStatus.OK
    assert (await zombie.append(append(chunk(2, ["ann"])))).status is AppendStatus.W_MOVED
    await client.close()


async def test_rows_from_before_lanes_were_joined_count(mailbox_redis: str) -> None:
    client = await connected_client(mailbox_redis)
    store = RedisMailboxStore([client] * SHARDS)
    await store.open_shard(SHARD, EPOCH, GRANT, LANES)
    whole = struct.pack(">IIIB", CHUNK, 1, 1, 1)
    for lane in (LANE, 40):
        await client.call("HSET", f"{keys.progress_prefix(SHARD)}0", struct.pack(">HIB", 0, 1, lane), whole)
    row = ProgressRow(chunk_size=CHUNK, chunk_count=1, done=1)
    assert await store.progress(SHARD, 0, 5) == {(1, LANE): row, (1, 40): row}
    await store.append(append(chunk(1, ["ann"], lane=3)))
    new = moved(zero(), 1, lanes=(3, LANE, 40))
    required = [(1, 3, 1), (1, LANE, 1), (1, 40, 1)]
    refused = await store.append(append(new=new, required=[*required, (1, 41, 1)]))
    assert refused.status is AppendStatus.W_MOVED
    assert (await store.append(append(new=new, required=required))).status is AppendStatus.OK
    await client.close()


# ---------------------------------------------------------------------------------------------- equality with the model

USERS = [f"u{lane}{index}{name}" for lane in range(3) for index in range(2) for name in "ab"]


def _item(offset: int, lane: int, names: str, index: int, count: int, days_ago: int) -> ChunkAppend:
    """A user has one lane, and the chunks of a dispatch have disjoint users."""
    index %= count
    return chunk(
        offset,
        [f"u{lane}{index}{name}" for name in names],
        lane=lane,
        index=index,
        count=count,
        created_at_ms=unix_ms() - days_ago * DAY_MS,
        conversation_id=f"g:{names}",
    )


def _joined(offset: int, names: str, lanes: list[int], days_ago: int) -> ChunkAppend:
    """The only chunks of some lanes."""
    return chunk(
        offset,
        [f"u{lane}0{name}" for lane in lanes for name in names],
        lanes=[(lane, len(names)) for lane in lanes],
        created_at_ms=unix_ms() - days_ago * DAY_MS,
        conversation_id=f"g:{names}",
    )


_items = st.builds(
    _joined,
    st.integers(0, 3),
    st.sampled_from(["a", "ab"]),
    st.lists(st.integers(0, 2), min_size=1, unique=True),
    st.integers(-1, 9),
) | st.builds(
    _item,
    st.integers(0, 3) | st.sampled_from([1023, 1024]),
    st.integers(0, 2),
    st.sampled_from(["a", "b", "ab"]),
    st.integers(0, 1),
    st.sampled_from([1, 1, 2, 9]),
    st.integers(-1, 9),
)


@st.composite
def _calls(draw: st.DrawFn) -> tuple[list[ChunkAppend], bool, int, list[tuple[int, int, int]]]:
    items = draw(st.lists(_items, max_size=4))
    required = [
        (item.log_offset, lane, item.chunk_count) for item in items for lane, _ in item.lanes if draw(st.booleans())
    ]
    return items, draw(st.booleans()), draw(st.integers(0, 2)), required


def _build(drawn: tuple[list[ChunkAppend], bool, int, list[tuple[int, int, int]]], w: LaneVector) -> AppendCall:
    items, moves, lane, required = drawn
    if not moves:
        return append(*items)
    new = w.advanced({lane: w[lane] + 1})
    fold_offset = -1 if not new.minimum() else 0
    return append(*items, previous=w, new=new, required=required, fold=b"f" * lane, fold_offset=fold_offset)


async def _observed(store: MailboxStore) -> list[object]:
    state = await store.load_shard(SHARD, EPOCH)
    seen: list[object] = [state, dict(await store.progress(SHARD, 0, 2000))]
    for user in USERS:
        lane = int(user[1])
        page = await store.range_scan(span(user, lane=lane))
        status = await store.user_status(span(user, lane=lane))
        seen.append((page, status.lane_watermark, status.effective_trim, status.pending_entry_count))
        page = await store.range_scan(span(user, mailbox_seq(EPOCH, 0), mailbox_seq(EPOCH, 1023), max_items=1))
        seen.append((identities(page)[:1], page.effective_trim))
        seen.append(sorted((row.conversation_id, row.kind) for row in await store.conversations(TENANT, user)))
    return seen


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        _calls()
        | st.tuples(st.sampled_from(USERS), st.integers(0, 1100))
        | st.tuples(st.sampled_from(USERS), st.integers(0, 12), st.integers(0, 6), st.integers(1, 12)),
        max_size=8,
    )
)
def test_redis_and_the_model_agree(mailbox_redis: str, steps: list[Any]) -> None:
    async def run() -> None:
        client = await connected_client(mailbox_redis)
        try:
            await client.call("FLUSHALL")
            await compare(RedisMailboxStore([client] * SHARDS), MemoryMailboxStore(SHARDS, unix_ms))
        finally:
            await client.close()

    async def compare(*stores: MailboxStore) -> None:
        for store in stores:
            await store.open_shard(SHARD, EPOCH, GRANT, LANES)
        for step in steps:
            outcomes: list[object] = []
            w = (await stores[1].load_shard(SHARD, EPOCH)).watermarks
            for store in stores:
                if isinstance(step[0], str) and len(step) == 4:
                    user, above, fewer, limit = step
                    capped = await store.enforce_cap(
                        SHARD, EPOCH, TENANT, user, above=above, leave=max(above - fewer, 0), limit=limit
                    )
                    outcomes.append(capped)
                elif isinstance(step[0], str):
                    await store.truncate_before(SHARD, EPOCH, TENANT, step[0], mailbox_seq(EPOCH, step[1]))
                else:
                    outcomes.append(await store.append(_build(step, w)))
            assert outcomes[:1] == outcomes[1:]
            assert await _observed(stores[0]) == await _observed(stores[1])

    asyncio.run(run())
