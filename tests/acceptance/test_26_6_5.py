"""26.6.5 Sequence regression constantly zero: all criteria, over the whole runs of 26.8.1 to 26.8.5.

Each run is played once for both files. While it lasts every worker's `mailbox_seq_regression_count` is read twice a
second and W of every lane, as the store has it, ten times: what a worker counted before it was killed is kept, and what
it would not have counted is seen. The last test shows that the count can be something else than 0.
"""

from __future__ import annotations

import asyncio
import struct

import pytest
import redis

from qim.app.own_node import OwnNode
from qim.core.seq import LaneVector, log_offset_of, mailbox_seq
from qim.stores.redis import keys
from tests.acceptance.clock_steps import ClockSteps
from tests.acceptance.full_store import FullStore
from tests.acceptance.link_loss import CUT_S, LinkLoss
from tests.acceptance.log_outage import OUTAGE_S, LogOutage
from tests.acceptance.node_kills import INTERVAL_S, KILLS, NodeKills
from tests.acceptance.watching import LOOKS_MIN, REGRESSIONS, SCRAPES_MIN, Watch, watched
from tests.support.node import MERGED, devices_of, running_node

EPOCH_THAT_NEVER_WAS = 0x7000


def check(watch: Watch, *workers: str) -> None:
    """Constantly 0, and really looked at."""
    assert watch.looks >= LOOKS_MIN
    assert all(watch.scrapes[worker] >= SCRAPES_MIN for worker in workers), watch.scrapes
    assert all(f"{REGRESSIONS} 0.0" in watch.texts[worker].splitlines() for worker in workers)
    assert watch.regressions == 0
    assert watch.went_back == []


@pytest.mark.timeout(KILLS * INTERVAL_S + 300)
def test_while_nodes_are_killed(node_kills: NodeKills) -> None:
    check(node_kills.watch, "mailbox-0", "mailbox-1")


@pytest.mark.timeout(CUT_S + 240)
def test_while_a_half_has_no_log(link_loss: LinkLoss) -> None:
    check(link_loss.watch, "mailbox-0", "mailbox-1")


@pytest.mark.timeout(240)
def test_while_the_store_is_full(full_store: FullStore) -> None:
    check(full_store.watch, "mailbox-0", "mailbox-1")


@pytest.mark.timeout(180)
def test_while_the_clock_goes_back(clock_steps: ClockSteps) -> None:
    check(clock_steps.watch, "core-0")


@pytest.mark.timeout(OUTAGE_S + 480)
def test_while_a_partition_is_away(log_outages: dict[str, LogOutage]) -> None:
    check(log_outages["embedded"].watch, "core-0")


@pytest.mark.kafka
@pytest.mark.timeout(OUTAGE_S + 480)
def test_while_a_partition_is_away_on_kafka(log_outages: dict[str, LogOutage]) -> None:
    check(log_outages["kafka"].watch, "core-0")


@pytest.mark.timeout(120)
def test_a_w_that_the_epoch_does_not_reach_is_counted() -> None:
    """As if `shard_epoch` had been granted too low: what is stored lies above all that could follow."""

    async def play(node: OwnNode) -> None:
        address = node.address()
        store = redis.Redis.from_url(address.mailbox_address)
        async with devices_of(node) as devices, watched(address) as watch:
            ann = await devices.add("ann")
            await (await ann.send("dm:ann:bob", "hello"))
            async with asyncio.timeout(30):
                while not any(map(any, watch.look())):
                    await asyncio.sleep(0.05)
            shard = next(number for number, lanes in enumerate(watch.look()) if any(lanes))
            packed = store.hget(keys.shard(shard), keys.WATERMARKS_FIELD)
            assert isinstance(packed, bytes)
            top = log_offset_of(max(LaneVector.unpack(packed).values))
            too_high = mailbox_seq(EPOCH_THAT_NEVER_WAS, top)
            lanes = struct.pack(f">{len(packed) // 8}Q", *[too_high] * (len(packed) // 8))
            store.hset(keys.shard(shard), keys.WATERMARKS_FIELD, lanes)
            node.kill("core-0")
            async with asyncio.timeout(30):
                while watch.regressions == 0:
                    await asyncio.sleep(0.1)
            # and the other observation: the real one comes back, below what was there
            store.hset(keys.shard(shard), keys.WATERMARKS_FIELD, packed)
            watch.look()
            assert watch.went_back
        store.close()

    with running_node(MERGED) as node:
        asyncio.run(play(node))
        node.kill_all()  # a shard whose W was forged has nothing it could drain to
