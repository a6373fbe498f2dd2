"""26.6.2 Watermark constraints of Mailbox takeover. All criteria.

Two MailboxNode processes beside the node's own: the primary is killed with a backlog it has only begun and with lanes
at different watermarks; the successor gets the shard when the lease has ended and a throttle lets so many chunks a
second into its store (drift takeover, C-A16). Devices ask all the time. Once with a tenth of the lease times, once with
those of the contract.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from qim.app.audit.command import audit_node
from qim.app.own_node import OwnNode
from qim.core.seq import log_offset_of
from qim.errors import ErrorCode
from qim.protocol.opcodes import Opcode
from qim.registry.api import LeaseKind
from tests.acceptance.devices import Device, Received, Triple, direct, triples
from tests.acceptance.harness import named_users
from tests.acceptance.processes import APART, UNLIMITED_LAG, Cluster, Joined, cluster_of, joined, written_offsets
from tests.acceptance.stored import all_entries
from tests.support.node import options_with, running_node
from tests.support.redis_monitor import Monitor, monitored
from tests.support.takeover import TENTH

pytestmark = pytest.mark.timeout(180)
SHARD = 7
LANES = 64
SLOW_LANE = 21
"""Held from early on, so that min(W) is one lane's and far below the others'."""
USERS = [named_users(1, shard=SHARD, lane=lane, prefix="u")[0] for lane in range(LANES)]
(SENDER,) = named_users(1, shard=3, prefix="sender")
WATCHED = [*range(0, LANES, 6), SLOW_LANE]
ROUNDS = 4
BEGUN_CHUNKS = 40
CHUNKS_PER_S = 40
AUTHS_PER_CONNECTION = 10


@dataclass(slots=True)
class Watch:
    """What the clients of the shard were told, and what is stored meanwhile."""

    cluster: Cluster
    line: int
    """The takeover line: the last log offset a lane must have covered before it is served."""
    early: list[tuple[int, int]] = field(default_factory=list)
    """(lane, log offset of W) of successes before the lane had caught up."""
    refusals: dict[int, int] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    regressions: int = 0
    done: bool = False

    def judge(self, lane: int, answer: Received) -> bool:
        """True for a success; the stored W is read after the answer, so it is not below what the server relied on."""
        if answer.opcode is Opcode.ERROR:
            assert answer.body.code in (ErrorCode.SHARD_MOVED, ErrorCode.REGION_FAILOVER), answer
            assert answer.body.retry_after_ms > 0
            self.refusals[lane] = self.refusals.get(lane, 0) + 1
            return False
        stored = log_offset_of(self.cluster.watermarks(SHARD)[lane])
        claimed = log_offset_of(answer.body.lane_watermark)
        if min(stored, claimed) < self.line:
            self.early.append((lane, min(stored, claimed)))
        self.told.setdefault(lane, []).append(answer.body.lane_watermark)
        return True

    async def log_in(self, lane: int) -> None:
        """AUTH of a new device until it is accepted; a connection without a session is closed after a while."""
        while True:
            device = await self.cluster.device(USERS[lane], "late")
            for _ in range(AUTHS_PER_CONNECTION):
                if self.judge(lane, await device.authenticate()):
                    return
                await asyncio.sleep(0.1)
            await device.close()

    async def pull(self, lane: int, device: Device) -> None:
        """PULL_MAILBOX of a device that was online before."""
        while not self.judge(lane, await device.pull(0, device.welcome.sync_to_seq)):
            await asyncio.sleep(0.1)

    async def sample(self) -> None:
        """W as it is stored, again and again."""
        before = self.cluster.watermarks(SHARD)
        while not self.done:
            await asyncio.sleep(0.01)
            now = self.cluster.watermarks(SHARD)
            self.regressions += sum(new < old for new, old in zip(now, before, strict=True))
            before = now


def entries_of_shard(cluster: Cluster) -> dict[tuple[str, int], list[tuple[int, bytes, bytes]]]:
    """(user, mailbox_seq) -> (ordinal, event_id, bytes), in storage order."""
    found: dict[tuple[str, int], list[tuple[int, bytes, bytes]]] = {}
    for user, row in all_entries(cluster.address):
        if user in USERS:
            found.setdefault((user, row.mailbox_seq), []).append((row.event_ordinal, row.event_id, row.entry))
    return found


async def say_to_all(sender: Device, text: str, lanes: range | list[int] = range(LANES)) -> None:
    for lane in lanes:
        await sender.say_all(direct(SENDER, USERS[lane]), [f"{text} {lane}".encode()])


async def build_backlog(cluster: Cluster, primary: Joined, sender: Device) -> int:
    """Lanes at different W, a part of the backlog begun; min(W) as a log offset."""
    at = await cluster.covered(SHARD, LANES)
    primary.control(shard=SHARD, lane=SLOW_LANE, chunks=0)
    await say_to_all(sender, "held", [SLOW_LANE])
    await say_to_all(sender, "more", [lane for lane in range(LANES) if lane != SLOW_LANE])
    await lanes_reach(cluster, at + LANES - 1)
    primary.control(shard=SHARD, stopped=SLOW_LANE, chunks=BEGUN_CHUNKS)
    for number in range(ROUNDS):
        await say_to_all(sender, f"backlog {number}")
    async with asyncio.timeout(30):
        while (await cluster.dispatch_log.watermarks(SHARD)).high < at + LANES * (ROUNDS + 1):
            await asyncio.sleep(0.02)
        while len(entries_of_shard(cluster)) < LANES * 2 - 1 + BEGUN_CHUNKS:
            await asyncio.sleep(0.05)
    w = [log_offset_of(seq) for seq in cluster.watermarks(SHARD)]
    assert w[SLOW_LANE] == min(w) == at - 1
    assert max(w) > at + LANES, "a single lane's watermark would lead elsewhere"
    return at - 1


async def lanes_reach(cluster: Cluster, offset: int) -> None:
    """All but the slow one."""
    async with asyncio.timeout(30):
        while min(log_offset_of(w) for lane, w in enumerate(cluster.watermarks(SHARD)) if lane != SLOW_LANE) < offset:
            await asyncio.sleep(0.02)


async def take_over(
    cluster: Cluster, primary: Joined, successor: Joined, online: dict[int, Device], monitor: Monitor
) -> Watch:
    """Kill the primary, ask until every lane serves; criteria 1, 2 and 4."""
    minimum = min(log_offset_of(w) for w in cluster.watermarks(SHARD))
    line = (await cluster.dispatch_log.watermarks(SHARD)).high - 1
    successor.control(shard=SHARD, chunks_per_s=CHUNKS_PER_S)
    started_s = time.monotonic()
    primary.kill()
    watch = Watch(cluster, line)
    await monitor.settle()
    monitor.commands.clear()
    sampling = asyncio.create_task(watch.sample())
    asking = [watch.log_in(lane) for lane in WATCHED] + [watch.pull(lane, online[lane]) for lane in WATCHED]
    moving = asyncio.create_task(cluster.owned_by(LeaseKind.MAILBOX_SHARD, SHARD, successor.name))
    await asyncio.gather(*asking)
    await moving
    assert await cluster.covered(SHARD, line + 1) == line + 1
    watch.done = True
    await sampling
    boundary = (await cluster.boundaries(SHARD))[-1]
    assert boundary.start_offset == line + 1
    assert min(written_offsets(SHARD, await monitor.settle())) == minimum + 1  # criterion 4
    restored = [
        line for line in cluster.events("shard_restored", successor.name)
        if line["mailbox_shard"] == SHARD and line["shard_epoch"] == boundary.shard_epoch
    ]  # fmt: skip
    assert len(restored) == 1, "one takeover, one decision"
    assert restored[0]["first_offset"] <= minimum + 1  # criterion 4
    print(f"killed, taken over and caught up in {time.monotonic() - started_s:.1f} s, "
          f"{sum(watch.refusals.values())} requests refused meanwhile")  # fmt: skip
    return watch


async def run(node: OwnNode, primary: Joined) -> None:
    async with cluster_of(node) as cluster:
        await cluster.has_joined(primary.name)
        with joined(node, "mailbox", place=2, plant="slow") as successor:
            await cluster.has_joined(successor.name)
            await cluster.owned_by(LeaseKind.MAILBOX_SHARD, SHARD, primary.name)
            sender = await cluster.online(SENDER)
            await say_to_all(sender, "first")
            await cluster.covered(SHARD, LANES)
            online = {lane: await cluster.online(USERS[lane]) for lane in WATCHED}
            pulled = {lane: await pulled_by(device) for lane, device in online.items()}
            await build_backlog(cluster, primary, sender)
            before = entries_of_shard(cluster)
            async with monitored(cluster.address.mailbox_address) as monitor:
                watch = await take_over(cluster, primary, successor, online, monitor)

            assert watch.early == []  # criterion 1
            assert all(watch.refusals.get(lane, 0) > 0 for lane in WATCHED), "each was asked before, too"
            assert watch.regressions == 0  # criterion 2
            assert all(old <= new for told in watch.told.values() for old, new in pairwise(told))  # criterion 2
            for process in ("mailbox-0", successor.name):
                assert (await cluster.series(process))["mailbox_seq_regression_count"] == 0  # criterion 2
                assert (await cluster.series(process))["event_id_nondeterminism_total"] == 0
            after = entries_of_shard(cluster)
            assert {at: after.get(at) for at in before} == before  # criterion 3
            assert len(after) == LANES * (ROUNDS + 2)
            for lane, device in online.items():
                again = await pulled_by(device)
                assert again[: len(pulled[lane])] == pulled[lane]  # criterion 3
            report = await audit_node(cluster.address)
            assert report.passed(), report.text()


async def pulled_by(device: Device) -> list[Triple]:
    """What a device gets of the range it logged in for."""
    return triples(await device.pull_through(0, device.welcome.sync_to_seq))


@pytest.mark.parametrize("times", [pytest.param(TENTH, id="tenth"), pytest.param({}, id="default")])
def test_nothing_is_served_before_it_has_caught_up(times: dict[str, str]) -> None:
    options = options_with(APART, **times, **UNLIMITED_LAG)
    with running_node(options) as node, joined(node, "mailbox", plant="held") as primary:
        asyncio.run(run(node, primary))
