"""26.6.6 [RELEASE-BLOCKING] `shard_epoch` upper bound and compatibility with signed storage: criteria 1 to 5.

Through the MailboxStore API on a real server, as `log_offset` 2^48-1 cannot be reached in a real log. Not here yet:
6 to 8 (the registry's refusal of 0x8000 under repetition, with its alert) and 9 (`room_seq`).
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from qim.core.seq import SHARD_EPOCH_MAX, mailbox_seq
from qim.obs import metrics
from qim.stores.api import StoredRow
from qim.stores.redis.mailbox import RedisMailboxStore
from qim.stores.redis.resp import RespClient
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
