"""26.6.7 [RELEASE-BLOCKING] Takeover start position is derived from the watermark, independent of offset-commit timing.

All criteria. N1 is a MailboxNode process that reads D and lets one chunk of one lane into the store, then none; the
committed position of its consumer group is set beyond D, and it is killed. The node's own MailboxNode, as it is, is N2,
after the lease of N1 has ended: once with the times of the contract on a Kafka, once with a tenth of them on the
embedded log, which has no committed positions at all. In the controls (criterion 5) N2 has an implementation planted
that trusts the committed position; the same judgement must find it guilty.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from confluent_kafka import Consumer, TopicPartition

from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.commit_log.kafka_address import KafkaAddress
from qim.core import ids
from qim.core.seq import log_offset_of
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.registry.api import LeaseKind
from tests.acceptance.devices import Device
from tests.acceptance.harness import TENANT, named_users
from tests.acceptance.processes import APART, Cluster, Joined, cluster_of, joined, written_offsets
from tests.acceptance.stored import all_entries
from tests.contract.kafka_fixtures import new_prefix
from tests.support.kafka_server import KafkaServer
from tests.support.node import options_with, running_node
from tests.support.redis_monitor import Monitor, monitored
from tests.support.takeover import TENTH

pytestmark = pytest.mark.timeout(180)
SHARD = 7
LANE = 21
LANE_STALL_ALERT_MS = 30_000
"""`lane_stall_alert` (B.5.1)."""
CONSUMER_GROUP = "qim"
IN_LANE = named_users(150, shard=SHARD, lane=LANE, prefix="d")
"""Two chunks of one lane: N1 writes the first."""
IN_SHARD = named_users(40, shard=SHARD, prefix="m", without=(LANE,))
ELSEWHERE = named_users(10, shard=3, prefix="e")
SENDER = ELSEWHERE[0]
CONTROL_S = 4.0
"""How long a control is watched after the takeover; it has no reason ever to move."""

Key = tuple[str, int, int]
"""(user, ordinal, event_id)."""


@dataclass(slots=True)
class Evidence:
    """What happened to D, at log offset `e`."""

    e: int
    message_id: bytes
    min_w_offset: int = -1
    """log_offset of min(W) when N1 died."""
    before: dict[Key, bytes] = field(default_factory=dict)
    after: dict[Key, bytes] = field(default_factory=dict)
    written_offsets: set[int] = field(default_factory=set)
    """Log offsets whose chunks N2 wrote."""
    w_offset: int = -1
    """log_offset of W of the lane at the end."""
    stall_ms: float = 0.0
    metric_peak_ms: float = 0.0


def judge(found: Evidence, expected: set[Key]) -> set[int]:
    """Numbers of the criteria that are not met."""
    broken: set[int] = set()
    start = min(found.written_offsets, default=-1)
    if start != found.min_w_offset + 1 or start > found.e:
        broken.add(1)
    if expected - found.after.keys():
        broken.add(2)
    if any(found.after.get(key) != entry for key, entry in found.before.items()) or found.after.keys() - expected:
        broken.add(3)
    if found.w_offset < found.e or max(found.stall_ms, found.metric_peak_ms) >= LANE_STALL_ALERT_MS:
        broken.add(4)
    return broken


def entries_of(cluster: Cluster, message_id: bytes) -> dict[Key, bytes]:
    """Everything of D in the mailboxes of the shard, with its bytes."""
    found: dict[Key, bytes] = {}
    for user, row in all_entries(cluster.address):
        in_shard = ids.mailbox_shard_id(TENANT, user, cluster.address.mailbox_shard_count) == SHARD
        if in_shard and pb.Entry.FromString(row.entry).message_id == message_id:
            key = (user, row.event_ordinal, int.from_bytes(row.event_id, "big"))
            assert key not in found, "one entry per user and event"
            found[key] = row.mailbox_seq.to_bytes(8, "big") + row.entry
    return found


def expected_keys(dispatch_id: bytes) -> set[Key]:
    prefix = ids.event_id_prefix(TENANT, dispatch_id)
    return {(user, 0, int.from_bytes(ids.event_id(prefix, user, 0), "big")) for user in IN_LANE + IN_SHARD}


# --------------------------------------------------------------------------------------------------------- the window


async def say_to_group(sender: Device, group: str, text: bytes) -> bytes:
    while (answer := await sender.answer(sender.say(group, text))).opcode is not Opcode.SEND_ACK:
        assert answer.body.code == pb.RATE_LIMITED, answer  # delivery lag of a busy machine
        await asyncio.sleep(answer.body.retry_after_ms / 1000)
    message_id: bytes = answer.body.message_id
    return message_id


async def prepare(cluster: Cluster) -> tuple[Device, str]:
    """The group, with some messages that are everywhere."""
    sender = await cluster.online(SENDER)
    members = [*IN_LANE, *IN_SHARD, *ELSEWHERE[1:]]
    answer = await sender.ask(Opcode.CREATE_GROUP, pb.CreateGroup(group_id="team", member_ids=members))
    assert answer.opcode is Opcode.MEMBER_LIST_BATCH, answer
    group = ids.group_conversation_id("team")
    for number in range(5):
        await say_to_group(sender, group, f"before {number}".encode())
    await cluster.covered(SHARD, 6)
    return sender, group


async def open_window(cluster: Cluster, n1: Joined, sender: Device, group: str) -> Evidence:
    """D is read by N1, and half written: everywhere but for the second chunk of the lane."""
    n1.control(shard=SHARD, lane=LANE, chunks=1)
    e = await cluster.covered(SHARD, 6)
    found = Evidence(e, await say_to_group(sender, group, b"D"))
    others = [lane for lane in range(64) if lane != LANE]
    async with asyncio.timeout(30):
        while True:
            w = cluster.watermarks(SHARD)
            found.before = entries_of(cluster, found.message_id)
            if all(log_offset_of(w[lane]) == e for lane in others) and len(found.before) == len(IN_SHARD) + 100:
                break
            await asyncio.sleep(0.02)
    assert log_offset_of(w[LANE]) == e - 1
    found.min_w_offset = log_offset_of(min(w))
    assert found.min_w_offset == e - 1
    return found


def commit_position(url: str, position: int) -> None:
    """What N1's consumer group has done, says the broker."""
    address = KafkaAddress.parse(url)
    consumer = Consumer({"bootstrap.servers": address.servers, "group.id": CONSUMER_GROUP})
    at = TopicPartition(address.topic("dispatch"), SHARD, position)
    consumer.commit(offsets=[at], asynchronous=False)
    (stored,) = consumer.committed([at], timeout=10)
    assert stored.offset == position
    consumer.close()


def forget_chunk(cluster: Cluster, e: int) -> None:
    """Of the chunk N1 wrote only the entries are left, so that N2 has to write them again (criterion 3)."""
    name = f"prog:s{SHARD:04d}:{e // 1024}"
    assert cluster.mailboxes.hdel(name, e.to_bytes(6, "big") + bytes((LANE,))) == 1


async def watch(cluster: Cluster, found: Evidence, n2: str, until_s: float, *, stop: bool) -> None:
    """Peak of the stall, by N2's metric and by W itself, until W has passed E (`stop`) or the time is over."""
    name = f'lane_watermark_stall_ms{{lane="{LANE}",shard="{SHARD}"}}'
    started_s = time.monotonic()
    while time.monotonic() < until_s:
        found.w_offset = log_offset_of(cluster.watermarks(SHARD)[LANE])
        found.metric_peak_ms = max(found.metric_peak_ms, (await cluster.series(n2)).get(name, 0.0))
        if found.w_offset < found.e:
            found.stall_ms = (time.monotonic() - started_s) * 1000
        elif stop:
            return
        await asyncio.sleep(0.05)


async def finish(cluster: Cluster, found: Evidence) -> set[Key]:
    """What is stored in the end; the keys D must have."""
    found.after = entries_of(cluster, found.message_id)
    (dispatch,) = (
        frame
        for record in await cluster.dispatches(SHARD)
        if (frame := pb.GroupDispatch.FromString(record.value)).record.message_id == found.message_id
    )
    return expected_keys(dispatch.dispatch_id)


@asynccontextmanager
async def window(cluster: Cluster, n1: Joined) -> AsyncIterator[tuple[Evidence, Monitor, Device, str]]:
    """The window is open; the commands of the mailbox server are seen."""
    await cluster.owned_by(LeaseKind.MAILBOX_SHARD, SHARD, n1.name)
    sender, group = await prepare(cluster)
    found = await open_window(cluster, n1, sender, group)
    async with monitored(cluster.address.mailbox_address) as monitor:
        yield found, monitor, sender, group


# ---------------------------------------------------------------------------------------------------------- the cases


async def takeover(node: OwnNode, n1: Joined, ttl_s: float) -> None:
    async with cluster_of(node) as cluster, window(cluster, n1) as (found, monitor, _, _):
        if cluster.address.commit_log:
            commit_position(cluster.address.commit_log, found.e + 1)
        epoch = (await cluster.boundaries(SHARD))[-1].shard_epoch
        n1.kill()
        forget_chunk(cluster, found.e)
        await monitor.settle()
        monitor.commands.clear()
        await watch(cluster, found, "mailbox-0", time.monotonic() + LANE_STALL_ALERT_MS / 1000, stop=True)
        found.written_offsets = written_offsets(SHARD, await monitor.settle())
        expected = await finish(cluster, found)
        assert len(expected) == len(IN_LANE) + len(IN_SHARD)
        assert judge(found, expected) == set()
        assert found.stall_ms > ttl_s * 500, "N1 had the lease until it ended"
        assert (await cluster.boundaries(SHARD))[-1].shard_epoch == epoch + 1
        (restored,) = (
            line for line in cluster.events("shard_restored", "mailbox-0")
            if line["mailbox_shard"] == SHARD and line["shard_epoch"] == epoch + 1
        )  # fmt: skip
        assert restored["first_offset"] <= found.e < restored["last_offset"]  # criterion 1
        for name in ("mailbox_seq_regression_count", "event_id_nondeterminism_total"):
            assert (await cluster.series("mailbox-0"))[name] == 0
        print(f"W passed E {found.stall_ms:.0f} ms after N1 had died; stall by metric {found.metric_peak_ms:.0f} ms")


async def control(node: OwnNode, n1: Joined, plant: str) -> tuple[Evidence, set[int]]:
    """The planted N2 takes the shard; later messages arrive, so W has every reason to move."""
    async with cluster_of(node) as cluster:
        await cluster.has_joined(n1.name)
        with joined(node, "mailbox", place=2, plant=plant) as n2:
            await cluster.has_joined(n2.name)
            async with window(cluster, n1) as (found, monitor, sender, group):
                n2.control(shard=SHARD, committed=found.e + 1)
                n1.kill()
                await monitor.settle()
                monitor.commands.clear()
                await cluster.owned_by(LeaseKind.MAILBOX_SHARD, SHARD, n2.name)
                for number in range(3):
                    await say_to_group(sender, group, f"after {number}".encode())
                await watch(cluster, found, n2.name, time.monotonic() + CONTROL_S, stop=False)
                found.written_offsets = written_offsets(SHARD, await monitor.settle())
                return found, judge(found, await finish(cluster, found))


def run_takeover(options: OwnNodeOptions, ttl_s: float) -> None:
    with running_node(options) as node, joined(node, "mailbox", plant="held") as n1:
        asyncio.run(takeover(node, n1, ttl_s))


def test_the_successor_starts_at_the_watermark() -> None:
    run_takeover(options_with(APART, **TENTH), 1.5)


@pytest.mark.kafka
def test_the_successor_starts_at_the_watermark_whatever_was_committed(kafka_server: KafkaServer) -> None:
    run_takeover(replace(APART, commit_log=kafka_server.url(new_prefix())), 15.0)


@pytest.mark.parametrize(
    ("plant", "guilty", "w_behind_e"),
    [
        pytest.param("committed", {1, 2, 4}, -1, id="W stuck at E-1"),
        pytest.param("committed_fold", {1, 2}, 3, id="W past what is missing"),
    ],
)
def test_a_successor_that_starts_at_the_committed_position_is_found_out(
    plant: str, guilty: set[int], w_behind_e: int
) -> None:
    with running_node(options_with(APART, **TENTH)) as node, joined(node, "mailbox", plant="held") as n1:
        found, broken = asyncio.run(control(node, n1, plant))
    assert broken == guilty  # criterion 5
    assert found.w_offset - found.e == w_behind_e  # criterion 5
