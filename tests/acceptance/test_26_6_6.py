"""26.6.6 [RELEASE-BLOCKING] `shard_epoch` upper bound and compatibility with signed storage: criteria 1 to 8.

(a) through the MailboxStore API on a real server, as `log_offset` 2^48-1 cannot be reached in a real log. (b) on the
registry alone, for `fencing_epoch`, too, and on a node whose MailboxNode is restarted again and again when a shard is
at its last epoch; P0 is P1 here (C-A7). Not here: 9, `room_seq` of chat rooms, which do not exist yet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import pytest

from qim.core.cursor import verify_cursor
from qim.core.seq import SHARD_EPOCH_MAX, log_offset_of, mailbox_seq
from qim.obs import metrics
from qim.protocol.qim_pb2 import GroupDispatch
from qim.registry.api import Answer, EpochExhausted, LeaseKind
from qim.registry.redis import RedisShardRegistry
from qim.stores.api import StoredRow
from qim.stores.redis import keys
from qim.stores.redis.mailbox import RedisMailboxStore
from qim.stores.redis.resp import RespClient
from tests.acceptance.devices import direct
from tests.acceptance.harness import Node, named_users, running_node
from tests.acceptance.stored import connected
from tests.contract.mailbox_calls import EVERYTHING, LANES, SHARD, append, chunk, span

USER = "nina"
EARLIER = [(epoch, offset * 977) for epoch in (1, 2, 0x3FFF, SHARD_EPOCH_MAX - 1) for offset in range(250)]
EDGES = [0, 1, (1 << 47) - 1, 1 << 47, (1 << 48) - 2, (1 << 48) - 1]
HIGHEST = [(SHARD_EPOCH_MAX, offset) for offset in (*EDGES, *range(2, 1000 - len(EDGES) + 2))]


@pytest.fixture
async def store(mailbox_redis: str) -> AsyncIterator[RedisMailboxStore]:
    client = RespClient(mailbox_redis, name="mailbox")
    await client.connect()
    yield RedisMailboxStore([client] * (SHARD + 1))
    await client.close()


async def write(store: RedisMailboxStore, coordinates: list[tuple[int, int]], epoch: int, seed: int) -> None:
    """Append one entry per coordinate, in random order, as the owner of `epoch`."""
    shuffled = list(coordinates)
    random.Random(seed).shuffle(shuffled)
    for at in range(0, len(shuffled), 100):
        part = shuffled[at : at + 100]
        # Progress belongs to (offset, lane); some offsets stand in several epochs here, so each epoch has its lane.
        items = [chunk(offset, [USER], epoch=of, lane=of % 61) for of, offset in part]
        result = await store.append(append(*items, epoch=epoch))
        assert result.applied == len(part)
        assert result.nondeterministic == 0


async def scan(store: RedisMailboxStore, after: int, up_to: int, epoch: int, page: int) -> list[StoredRow]:
    rows: list[StoredRow] = []
    while True:
        found = await store.range_scan(span(USER, after, up_to, epoch=epoch, max_items=page, max_bytes=1 << 20))
        rows.extend(found.rows)
        if found.exhausted:
            return rows
        after = found.rows[-1].mailbox_seq


async def test_entries_of_the_last_epoch_are_ordered_and_found(store: RedisMailboxStore) -> None:
    regressions = metrics.MAILBOX_SEQ_REGRESSION_COUNT._value.get()
    await store.open_shard(SHARD, SHARD_EPOCH_MAX - 1, "grant-before", LANES)
    await write(store, EARLIER, SHARD_EPOCH_MAX - 1, seed=1)
    await store.open_shard(SHARD, SHARD_EPOCH_MAX, "grant-last", LANES)
    await write(store, HIGHEST, SHARD_EPOCH_MAX, seed=2)
    expected = sorted(mailbox_seq(epoch, offset) for epoch, offset in EARLIER + HIGHEST)
    assert len(set(expected)) == 2000

    full = [row.mailbox_seq for row in await scan(store, 0, EVERYTHING, SHARD_EPOCH_MAX, page=500)]
    assert len(full) == 2000  # criterion 1
    assert len(set(full)) == 2000
    assert [seq for seq in full if seq >> 63] == []  # criterion 2
    assert full == expected  # criterion 3: storage order is the unsigned order

    segmented: list[int] = []
    cuts = [0, *expected[249::250], EVERYTHING]
    for after, up_to in pairwise(cuts):
        segmented += [row.mailbox_seq for row in await scan(store, after, up_to, SHARD_EPOCH_MAX, page=7)]
    assert segmented == expected  # criterion 1, segmented

    old_maximum = max(mailbox_seq(*at) for at in EARLIER)
    across = await scan(store, old_maximum - 1, mailbox_seq(SHARD_EPOCH_MAX, 1), SHARD_EPOCH_MAX, page=500)
    assert [row.mailbox_seq for row in across] == [
        old_maximum,
        mailbox_seq(SHARD_EPOCH_MAX, 0),
        mailbox_seq(SHARD_EPOCH_MAX, 1),
    ]  # criterion 4
    assert metrics.MAILBOX_SEQ_REGRESSION_COUNT._value.get() == regressions  # criterion 5


REPETITIONS = 1000
AT_ONCE = 250
BOUNDED = (LeaseKind.MAILBOX_SHARD, LeaseKind.CONVERSATION_BUCKET)
"""`shard_epoch` and `fencing_epoch`."""


@pytest.fixture
async def registry(message_redis: str) -> AsyncIterator[RedisShardRegistry]:
    client = RespClient(message_redis, name="core")
    await client.connect()
    yield RedisShardRegistry(client)
    await client.close()


async def grant_all(registry: RedisShardRegistry, kind: LeaseKind) -> list[int]:
    """Every epoch id 0 ever gets, from the first to the last: its owner starts again and again."""
    epochs: list[int] = []
    while len(epochs) < SHARD_EPOCH_MAX:
        count = min(AT_ONCE, SHARD_EPOCH_MAX - len(epochs))
        answers = await asyncio.gather(
            *(registry.acquire(kind, [0], "w-0", f"life-{len(epochs) + n}", wait_ms=0) for n in range(count))
        )
        epochs += [answer[0].epoch for answer in answers]
    return epochs


@pytest.mark.parametrize("kind", BOUNDED)
async def test_the_registry_never_grants_an_epoch_above_0x7fff(registry: RedisShardRegistry, kind: LeaseKind) -> None:
    assert sorted(await grant_all(registry, kind)) == list(range(1, SHARD_EPOCH_MAX + 1))
    rejected = 0
    for number in range(REPETITIONS):
        owner, life = f"w-{number % 3}", f"later-{number}"
        if number % 5 == 4:
            with pytest.raises(EpochExhausted):
                await registry.grant(kind, [0], owner, life)
            rejected += 1
        else:
            if number % 2:  # given back by whoever has it, or taken from an owner that is silent
                await registry.leave(kind, f"later-{number - 1}")
            answers = await registry.acquire(kind, [0], owner, life, wait_ms=0)
            rejected += answers == {0: Answer(0, -1)}
        (row,) = await registry.leases(kind)
        assert row.epoch == SHARD_EPOCH_MAX  # criterion 7: it did not wrap
    assert rejected == REPETITIONS  # criterion 6


def set_epoch(node: Node, shard: int, epoch: int) -> None:
    """As if the shard had been granted so often."""
    with connected(node.core_address) as core:
        core.hset(keys.registry_leases(LeaseKind.MAILBOX_SHARD), str(shard), f"{epoch} mailbox-0 earlier")


async def epoch_granted(node: Node, shard: int) -> int:
    route = await node.outside.registry.current(LeaseKind.MAILBOX_SHARD, shard)
    assert route is not None
    return route.epoch


async def check_log(node: Node, shard: int) -> int:
    """No epoch out of range in the dispatch log; how many records it has."""
    log = node.outside.dispatch_log
    high = (await log.watermarks(shard)).high
    records = await log.read(shard, 0, max_records=high)
    assert len(records) == high
    epochs = [GroupDispatch.FromString(record.value).record.fencing_epoch for record in records]
    assert [epoch for epoch in epochs if not 1 <= epoch <= SHARD_EPOCH_MAX] == []  # criterion 8
    return high


def alert() -> str | None:
    """Severity, if it fires."""
    return metrics.firing_alerts(metrics.render().decode()).get("qim_registry_epoch_exhausted_total")


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    """Alerts of this case are not those of others."""
    metrics.LEASE_EPOCH_EXHAUSTED_TOTAL.clear()
    yield
    metrics.LEASE_EPOCH_EXHAUSTED_TOTAL.clear()


@pytest.mark.timeout(300)
async def test_a_shard_without_a_further_epoch_is_read_only() -> None:
    full, other = 0, 1
    async with running_node(mailbox_shard_count=2) as node:
        (user,), (neighbour,) = (named_users(1, shard=shard, shards=2) for shard in (full, other))
        (peer,) = named_users(1, shard=other, shards=2, prefix="peer")
        sender = await node.online(peer)
        chat = direct(peer, user)
        await sender.say_all(chat, [b"under the first epoch"] * 20)
        await node.delivered()
        await node.stop_mailbox()
        set_epoch(node, full, SHARD_EPOCH_MAX - 1)
        await node.start_mailbox()
        assert await epoch_granted(node, full) == SHARD_EPOCH_MAX
        await sender.say_all(chat, [b"under the last epoch"] * 20)
        await node.delivered()
        assert not node.shard(full).machine.read_only
        assert alert() is None
        rows = await node.stored_rows(user)
        assert len(rows) == 40
        watermark = node.watermark(user)

        key = node.context.keys.cursor_key.reveal()
        for number in range(REPETITIONS):
            await node.stop_mailbox()
            await node.start_mailbox()
            refused = metrics.LEASE_EPOCH_EXHAUSTED_TOTAL.labels(kind=LeaseKind.MAILBOX_SHARD)._value.get()
            assert refused == number + 1  # criterion 6
            assert await epoch_granted(node, full) == SHARD_EPOCH_MAX  # criterion 7: it did not wrap
            device = await node.device(user)
            welcome = await device.log_in()
            assert welcome.sync_to_seq == watermark
            assert verify_cursor(welcome.mailbox_cursor.token, key).shard_epoch == SHARD_EPOCH_MAX  # criterion 8
            if number % 100 == 0:
                await sender.say_all(chat, [b"waits in the log"])
                batches = await device.pull_through(0, welcome.sync_to_seq)
                pulled = [entry.mailbox_seq for batch in batches for entry in batch.entries]
                assert pulled == [row.mailbox_seq for row in rows]  # criterion 7: it is read
            await device.close()
        assert alert() == "P1"  # criterion 7

        assert await check_log(node, full) == 40 + REPETITIONS // 100
        assert node.shard(full).machine.read_only
        assert (node.watermark(user), await node.stored_rows(user)) == (watermark, rows)  # criterion 7: nothing written
        assert log_offset_of(watermark) == 39
        await check_neighbour(node, peer, neighbour)
        boundaries = await node.outside.registry.boundaries(full)
        assert [boundary.shard_epoch for boundary in boundaries] == [1, SHARD_EPOCH_MAX]


async def check_neighbour(node: Node, peer: str, user: str) -> None:
    """The other shard goes on as ever, 1,000 takeovers later."""
    sender, reader = await node.online(peer, "laptop"), await node.online(user)
    await sender.say_all(direct(peer, user), [b"hello"])
    await reader.until(reader.pushed)
    assert [entry.payload_or_ciphertext for entry in reader.pushed()] == [b"hello"]
