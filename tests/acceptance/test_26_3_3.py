"""26.3.3 Recovery after a crash in the middle of shard writes: all criteria, on a node of processes.

One shard holds everybody: a group of 100,000, whose expansion is cut at half, and one of 10,000, for 100 crashes at
random chunks. Chunks are of 25 members instead of 100 (ADR-0006), so that there are many to be killed between.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import redis

from qim.app.audit.evidence import Evidence, evidence_of
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.app.settings import PoolSizes
from qim.client.aio import Client
from qim.config.parameters import default_parameters
from qim.core import ids
from qim.core.seq import mailbox_seq
from qim.protocol.qim_pb2 import GroupDispatch
from qim.registry.api import epoch_owning
from qim.stores.mailbox_layout import split_member
from qim.stores.redis import keys
from tests.acceptance.shard_crash import SHARD, Crash, Expansion
from tests.acceptance.stored import connected
from tests.support.node import TENANT, Devices, devices_of, options_with, running_node

CHUNK_MEMBERS = 25
LARGE, SMALL = 100_000, 10_000
CRASHES = 100
HALF = (0.4, 0.6)
"""What counts as about 50 %."""
RTO_MAX_S = 600.0
NODE = options_with(
    OwnNodeOptions(pools=PoolSizes(1, 1, 1, 1), apart=True, unlimited_tenant=TENANT),
    single_host_mailbox_shard_count="1",
    append_chunk_members=str(CHUNK_MEMBERS),
    restart_backoff_reset_ms="100",  # a hundred kills are no crash loop
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    conversation_id: str
    creator: Client
    """Sends its messages."""
    members: Mapping[int, Sequence[str]]
    """By lane, ascending by slot."""
    offsets: list[int]
    """Of its dispatches in the log of the shard."""


class Scene:
    """The node and what it holds."""

    def __init__(self, node: OwnNode, evidence: Evidence, server: redis.Redis, devices: Devices) -> None:
        self._node = node
        self._evidence = evidence
        self._server = server
        self._devices = devices

    async def log_end(self) -> int:
        return (await self._evidence.dispatch.watermarks(SHARD)).high

    async def seq_of(self, offset: int) -> int:
        """`mailbox_seq` of a record, under the epoch that owned it."""
        return mailbox_seq(epoch_owning(await self._evidence.registry.boundaries(SHARD), offset), offset)

    async def dispatch(self, offset: int) -> GroupDispatch:
        (record, *_) = await self._evidence.dispatch.read(SHARD, offset, max_records=1)
        return GroupDispatch.FromString(record.value)

    def expansion(self, members: Mapping[int, Sequence[str]], offset: int) -> Expansion:
        return Expansion(self._server, members, tenant=TENANT, offset=offset, chunk_members=CHUNK_MEMBERS)

    async def make_group(self, group_id: str, count: int) -> Group:
        """Its announcement is in every mailbox."""
        offset = await self.log_end()
        creator = await self._devices.add(f"creator-of-{group_id}")
        await creator.create_group(group_id, [f"{group_id}-{number}" for number in range(count - 1)])
        by_lane: dict[int, list[str]] = {}
        for _, user in sorted((await self._evidence.membership.slot_users(TENANT, group_id, SHARD)).items()):
            by_lane.setdefault(ids.lane_id(TENANT, user, self._evidence.lane_count), []).append(user)
        assert sum(map(len, by_lane.values())) == count
        await asyncio.to_thread(self.expansion(by_lane, offset).covered, 0.0)
        conversation_id = ids.group_conversation_id(group_id)
        return Group(conversation_id=conversation_id, creator=creator, members=by_lane, offsets=[offset])

    async def crash(self, group: Group, fraction: float) -> Crash:
        """The case once: a message to the group, and kill -9 when this part of its chunks is done."""
        offset = await self.log_end()
        expansion = self.expansion(group.members, offset)
        kill = asyncio.create_task(asyncio.to_thread(expansion.kill_at, fraction, self._node.pid("mailbox-0")))
        await (await group.creator.send(group.conversation_id, f"message {offset}"))
        killed_s = await kill
        created_at_ms = (await self.dispatch(offset)).record.created_at
        seq = await self.seq_of(offset)
        at_kill = await asyncio.to_thread(expansion.look, seq, created_at_ms)
        rto_s = await asyncio.to_thread(expansion.covered, killed_s)
        after = await asyncio.to_thread(expansion.look, seq, created_at_ms)
        group.offsets.append(offset)
        return Crash(at_kill=at_kill, after=after, rto_s=rto_s)

    async def check_mailboxes(self, group: Group) -> None:
        """Every member has each of the group's dispatches once, whoever wrote it, and nothing else."""
        expected = [await self.seq_of(offset) for offset in group.offsets]
        for offset in group.offsets:
            assert (await self.dispatch(offset)).record.conversation_id == group.conversation_id
        days = {(await self.dispatch(offset)).record.created_at // 86_400_000 for offset in group.offsets}
        for users in group.members.values():
            pipeline = self._server.pipeline(transaction=False)
            for user in users:
                for day in sorted(days):
                    pipeline.zrange(f"{keys.mailbox_prefix(TENANT, user)}{day}", 0, -1)
            found = await asyncio.to_thread(pipeline.execute)
            for at, user in enumerate(users):
                per_day = found[at * len(days) : (at + 1) * len(days)]
                seqs = [split_member(member).mailbox_seq for members in per_day for member in members]
                assert sorted(seqs) == expected, user  # criteria 1, 2, 5


@asynccontextmanager
async def scene_on(node: OwnNode) -> AsyncIterator[Scene]:
    async with devices_of(node) as devices, evidence_of(node.address()) as evidence:
        with connected(node.address().mailbox_address) as server:
            yield Scene(node, evidence, server, devices)


def check(crash: Crash, members: int) -> None:
    """What must hold of every crash."""
    assert crash.at_kill.differing == 0  # criterion 3, in the moment of the crash
    assert crash.after.entries == members  # criteria 1, 5
    assert crash.after.most == 1  # criteria 2, 5
    assert (crash.after.differing, crash.after.done) == (0, crash.after.total)  # criterion 3
    assert crash.rto_s <= RTO_MAX_S  # criterion 4


def is_inside(crash: Crash, low: float, high: float) -> bool:
    """The kill came when this part of the chunks was written."""
    return low < crash.at_kill.done / crash.at_kill.total < high


async def crash_at_half(scene: Scene) -> None:
    group = await scene.make_group("large", LARGE)
    for _ in range(10):
        crash = await scene.crash(group, 0.5)
        check(crash, LARGE)
        if is_inside(crash, *HALF):
            break
    assert is_inside(crash, *HALF), "no kill was in time"
    print(f"{LARGE:,} members: {crash.at_kill.done} of {crash.at_kill.total} chunks, RTO {crash.rto_s:.2f} s")
    await scene.check_mailboxes(group)


async def crash_often(scene: Scene) -> None:
    group = await scene.make_group("small", SMALL)
    chance = random.Random(2633)
    crashes: list[Crash] = []
    for _ in range(2 * CRASHES):
        crash = await scene.crash(group, chance.uniform(0.0, 0.9))
        check(crash, SMALL)
        if is_inside(crash, 0.0, 1.0):  # others came before the first chunk or after the last
            crashes.append(crash)
        if len(crashes) == CRASHES:
            break
    assert len(crashes) == CRASHES
    times = sorted(crash.rto_s for crash in crashes)
    parts = sorted(crash.at_kill.done / crash.at_kill.total for crash in crashes)
    rto = f"RTO P50 {statistics.median(times):.2f} s, max {times[-1]:.2f} s"
    print(f"{CRASHES} crashes of {len(group.offsets) - 1}: {rto}, at {parts[0]:.0%} to {parts[-1]:.0%} of the chunks")
    await scene.check_mailboxes(group)


@pytest.mark.timeout(900)
def test_a_crash_in_the_middle_of_a_shard_loses_and_repeats_nothing() -> None:
    assert default_parameters().shard_rto_target == RTO_MAX_S * 1000

    async def run(node: OwnNode) -> None:
        async with scene_on(node) as scene:
            await crash_at_half(scene)
            await crash_often(scene)

    with running_node(NODE) as node:
        asyncio.run(run(node))
