"""26.6.1 [RELEASE-BLOCKING] ConversationWriter failover never yields two active writers. All criteria, and §19.2.3.

Three writer processes. Two of them are stopped (SIGSTOP) while they own conversations; when their leases have ended the
third one has these, and the two go on, with everything they had in memory and in their sockets. One is the product as
it is and fences itself. The other has had that taken out (planted.py: it neither looks at its clock nor hears the
registry nor gives up what a store refuses), so that for 10 s both are alive and only the two check points stand between
them: clients use the new owner while the case gives the old one sends of the same conversations. Once with a tenth of
the lease times, once with those of the contract and a pause of 30 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from qim.app.audit.command import audit_node
from qim.app.own_node import OwnNode
from qim.backplane.unix import UnixBackplane, socket_path
from qim.core import ids
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import InternalOpcode, Opcode
from qim.registry.api import LeaseKind
from qim.runtime.clock import SystemClock
from qim.shard_workers.fanout.dispatch import Source, direct_targets, dispatches
from tests.acceptance.devices import Device, direct
from tests.acceptance.harness import TENANT, until
from tests.acceptance.processes import APART, UNLIMITED_LAG, Cluster, Joined, cluster_of, joined
from tests.acceptance.stored import all_entries, all_records
from tests.support.node import options_with, running_node
from tests.support.takeover import TENTH

pytestmark = pytest.mark.timeout(240)
LANES = 64
BUCKET = LeaseKind.CONVERSATION_BUCKET
STUBBORN, SOBER = 3, 1
"""Conversations of the planted old writer, and of the one that is as it should be."""
SENDERS = [f"s{number}" for number in range(STUBBORN + SOBER)]
CHATS = [direct(sender, "peer") for sender in SENDERS]
WINDOW_S = 10.0
ACKED_BEFORE = 5
INJECTED_PER_CHAT = 20
"""Dispatches of the old epoch, to each of the two mailbox shards of a chat; a few carry no epoch at all."""
WITHOUT_EPOCH = 5
RETRY_JITTER = 0.3


@dataclass(slots=True)
class Sends:
    """One sender's messages, each repeated until it is acknowledged, and every answer."""

    device: Device
    chat: str
    acks: list[pb.SendAck] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    """When a message was sent first."""
    acked_s: list[float] = field(default_factory=list)
    errors: list[pb.Error] = field(default_factory=list)
    answers: int = 0
    requests: int = 0
    ended: bool = False

    async def go_on(self) -> None:
        while not self.ended:
            await self._send_one(f"{self.chat} {len(self.acks)}")
            await asyncio.sleep(0.05)

    async def _send_one(self, text: str) -> None:
        self.sent_s.append(time.monotonic())
        while True:
            message = pb.SendMessage(
                client_message_id=text, conversation_id=self.chat, message_type=pb.MESSAGE_TYPE_TEXT,
                payload=text.encode(),
            )  # fmt: skip
            self.requests += 1
            answer = await self.device.ask(Opcode.SEND_MESSAGE, message)
            self.answers += 1
            if answer.opcode is Opcode.SEND_ACK:
                self.acks.append(answer.body)
                self.acked_s.append(time.monotonic())
                return
            assert answer.opcode is Opcode.ERROR, answer
            self.errors.append(answer.body)
            await asyncio.sleep(answer.body.retry_after_ms / 1000)


class Case:
    """The node, its two old writers, and what is known of them."""

    def __init__(self, cluster: Cluster, stubborn: Joined, sober: Joined) -> None:
        self.cluster = cluster
        self.old = {chat: stubborn if number < STUBBORN else sober for number, chat in enumerate(CHATS)}
        self.stubborn, self.sober = stubborn, sober
        count = cluster.address.conversation_bucket_count
        self.bucket = {chat: ids.conversation_bucket(TENANT, chat, count) for chat in CHATS}
        assert len(set(self.bucket.values())) == len(CHATS)
        self.old_epoch: dict[str, int] = {}
        self.new_epochs: dict[str, range] = {}
        """Of the new owner: one, unless a busy machine makes it fence itself, too, and be granted the bucket again."""
        self.sends: list[Sends] = []
        self.paused_s = self.resumed_s = 0.0
        self.heads: dict[str, list[tuple[int, int]]] = {chat: [] for chat in CHATS}
        """(latest_conversation_seq, fencing_epoch), one look after the other."""

    async def prepare(self) -> None:
        for chat in CHATS:
            await self.cluster.owned_by(BUCKET, self.bucket[chat], self.old[chat].name)
            route = await self.cluster.registry.current(BUCKET, self.bucket[chat])
            assert route is not None
            self.old_epoch[chat] = route.epoch
        self.sends = [Sends(await self.cluster.online(user), chat) for user, chat in zip(SENDERS, CHATS, strict=True)]

    async def watch_heads(self) -> None:
        while not all(sends.ended for sends in self.sends):
            for chat in CHATS:
                head = await self.cluster.evidence.messages.head(TENANT, chat)
                self.heads[chat].append((head.latest_conversation_seq, head.fencing_epoch))
            await asyncio.sleep(0.02)

    async def pause(self, at_least_s: float) -> None:
        """Stop both old writers until the node's own has all their buckets, or longer."""
        pids = [self.stubborn.worker_pid(), self.sober.worker_pid()]
        self.stubborn.control(deaf=1)
        self.paused_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                for chat in CHATS:  # to stay there: the sober one becomes a member again
                    await self.cluster.registry.pin(BUCKET, self.bucket[chat], "writer-0")
                taken = {chat: await self._taken_over(chat) for chat in CHATS}
            await asyncio.sleep(max(0.0, self.paused_s + at_least_s - time.monotonic()))
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        self.resumed_s = time.monotonic()
        self.new_epochs = {chat: range(epoch, epoch + 1) for chat, epoch in taken.items()}

    async def ended(self) -> None:
        """Nothing is sent any more."""
        for chat, epochs in self.new_epochs.items():
            self.new_epochs[chat] = range(epochs.start, await self._taken_over(chat) + 1)

    async def _taken_over(self, chat: str) -> int:
        while True:
            route = await self.cluster.registry.current(BUCKET, self.bucket[chat])
            if route is not None and route.owner == "writer-0":
                return route.epoch
            await asyncio.sleep(0.05)

    async def old_counts(self) -> Counter[str]:
        """Commit calls and committed messages of the planted old writer, and all refusals of the server for an old
        epoch."""
        series = await self.cluster.series(self.stubborn.name)
        stats = self.cluster.core.info("errorstats")
        refused = stats.get("errorstat_FENCED", {"count": 0})["count"]
        return Counter(
            calls=int(series["qim_writer_commit_batch_messages_count"]),
            committed=int(series["qim_writer_committed_total"]),
            refused=int(refused),
        )

    async def outbox(self, chat: str) -> list[Source]:
        """Everything that was committed in the bucket of a chat."""
        log, bucket = self.cluster.evidence.outbox, self.bucket[chat]
        low, high = await log.watermarks(bucket)
        found: list[Source] = []
        while low + len(found) < high:
            records = await log.read(bucket, low + len(found))
            found += [Source(bucket, record.offset, record.value) for record in records]
        return found


async def write_with_the_old_one(case: Case) -> int:
    """For 10 s, SUBMIT_SEND for every chat straight to the old owners; how many went to the planted one."""
    address = case.cluster.address
    run_dir = Path(address.run_dir)
    names = [case.stubborn.name, case.sober.name]
    failures: list[str] = []
    backplane = UnixBackplane(
        "case", ("case-0",), {name: socket_path(run_dir, name) for name in names}, run_dir=run_dir, clock=SystemClock(),
        on_failure=lambda task, error: failures.append(task),
    )  # fmt: skip
    for name in names:
        backplane.connect(name)
    await backplane.start()
    injected = 0
    try:
        await asyncio.sleep(0.5)
        while time.monotonic() < case.resumed_s + WINDOW_S:
            for number, chat in enumerate(CHATS):
                name = case.old[chat].name
                message = pb.SendMessage(
                    client_message_id=f"old {injected}", conversation_id=chat, message_type=pb.MESSAGE_TYPE_TEXT,
                    payload=b"of the old writer",
                )  # fmt: skip
                submit = pb.SubmitSend(
                    tenant_id=TENANT, user_id=SENDERS[number], device_id="phone", message=message, limits_lifted=True
                )
                injected += name == case.stubborn.name
                answer = await backplane.request(
                    name, InternalOpcode.SUBMIT_SEND, submit.SerializeToString(), timeout_ms=10_000
                )
                reply = pb.SubmitSendReply.FromString(answer)
                assert reply.error.code == pb.REGION_FAILOVER, reply  # criterion 1
            await asyncio.sleep(0.1)
    finally:
        await backplane.close()
    assert failures == []
    return injected


def epoch_faults(dispatched: Iterable[pb.GroupDispatch], leased: dict[bytes, set[int]]) -> list[bytes]:
    """message_ids of dispatches whose fencing_epoch is missing or not that of the writer's lease (criterion 4)."""
    return [
        frame.record.message_id
        for frame in dispatched
        if not frame.record.fencing_epoch or frame.record.fencing_epoch not in leased[frame.record.message_id]
    ]


async def check_commits(case: Case) -> None:
    """Criteria 1 to 3, from what is stored."""
    for chat, sends in zip(CHATS, case.sends, strict=True):
        old, new = case.old_epoch[chat], case.new_epochs[chat]
        epochs = [source.record.fencing_epoch for source in await case.outbox(chat)]
        assert old < new.start
        assert old in epochs
        assert set(epochs) - {old} <= set(new)
        assert epochs == sorted(epochs)  # criterion 1: nothing of the old one after the new one's first
        records = all_records(case.cluster.address, chat)
        seqs = Counter(seq for seq, _ in records)
        message_ids = {pb.MessageRecord.FromString(record).message_id for _, record in records}
        assert set(seqs.values()) == {1}  # criterion 2
        assert len(message_ids) == len(records) == len(sends.acks)  # criterion 2
        assert {(ack.conversation_seq, ack.message_id) for ack in sends.acks} == {
            (seq, pb.MessageRecord.FromString(record).message_id) for seq, record in records
        }  # criterion 2
        assert sorted(seqs) == [ack.conversation_seq for ack in sends.acks] == list(range(1, len(records) + 1))
        looks = case.heads[chat]
        assert sum(later < earlier for earlier, later in pairwise(looks)) == 0  # criterion 3
        assert looks[-1][1] in new


async def check_dispatches(case: Case) -> None:
    """Criteria 4 and 6."""
    leased: dict[bytes, set[int]] = {}
    for chat, sends in zip(CHATS, case.sends, strict=True):
        for ack, sent_s, acked_s in zip(sends.acks, sends.sent_s, sends.acked_s, strict=True):
            before = {case.old_epoch[chat]} if sent_s < case.resumed_s else set()
            after = set(case.new_epochs[chat]) if acked_s > case.paused_s else set()
            leased[ack.message_id] = before | after
    found = [
        pb.GroupDispatch.FromString(record.value)
        for shard in range(case.cluster.address.mailbox_shard_count)
        for record in await case.cluster.dispatches(shard)
    ]
    assert {frame.record.message_id for frame in found} == leased.keys()
    assert epoch_faults(found, leased) == []  # criterion 4
    for frame in found:
        frame.record.ClearField("fencing_epoch")
    assert len(epoch_faults(found, leased)) == len(found)  # criterion 6


def check_clients(case: Case, retry_after_ms: int) -> int:
    """Criterion 7; how many were refused."""
    for sends in case.sends:
        assert sends.requests - sends.answers == 0  # criterion 7: silent failures
        assert {error.code for error in sends.errors} == {pb.REGION_FAILOVER}  # criterion 7
        for error in sends.errors:
            assert abs(error.retry_after_ms / retry_after_ms - 1) <= RETRY_JITTER + 0.01  # criterion 7
        assert any(acked_s < case.paused_s for acked_s in sends.acked_s)
        assert sum(sent_s > case.resumed_s for sent_s in sends.sent_s) > 10, "it went on during the window"
    return sum(len(sends.errors) for sends in case.sends)


def old_dispatches(case: Case, source: Source, chat: str, first: int) -> list[tuple[int, bytes]]:
    """Dispatches the old writer's outbox would have led to, behind everything that is in the log."""
    made: list[tuple[int, bytes]] = []
    targets = direct_targets(TENANT, chat, case.cluster.address.mailbox_shard_count, LANES)
    for number in range(INJECTED_PER_CHAT):
        record = pb.OutboxRecord()
        record.CopyFrom(source.record)
        record.fencing_epoch = case.old_epoch[chat]
        record.message_id = struct.pack(">Q8s", first + number, b"old")
        record.conversation_seq += 1 + number
        if number < WITHOUT_EPOCH:
            record.ClearField("fencing_epoch")
        late = Source(source.bucket, source.offset + 1 + number, record.SerializeToString())
        made += dispatches(late, targets, {}, case.cluster.address.mailbox_shard_count, LANES, {})
    return made


def stored_entries(cluster: Cluster) -> Counter[tuple[str, int, int, bytes]]:
    return Counter(
        (user, row.mailbox_seq, row.event_ordinal, row.event_id) for user, row in all_entries(cluster.address)
    )


async def check_injected(case: Case) -> None:
    """Criterion 5, and that the new writer's next message still arrives."""
    cluster = case.cluster
    made: list[tuple[int, bytes]] = []
    for number, chat in enumerate(CHATS):
        made += old_dispatches(case, (await case.outbox(chat))[-1], chat, number * INJECTED_PER_CHAT)
    before, entries = await dropped(cluster), stored_entries(cluster)
    for value in made:
        await cluster.dispatch_log.append([value])
    for shard in sorted({shard for shard, _ in made}):
        await cluster.covered(shard, 1)
    assert await dropped(cluster) - before == len(made)  # criterion 5
    assert len(cluster.events("stale_dispatch_dropped")) == len(made)  # criterion 5: rejections
    assert stored_entries(cluster) - entries == Counter()  # criterion 5: new entries
    assert len(stored_entries(cluster)) == entries.total()
    peer = await cluster.online("peer")
    for sends in case.sends:
        await sends._send_one(f"{sends.chat} at last")
    wanted = {sends.acks[-1].message_id for sends in case.sends}
    await peer.until(lambda: wanted <= {entry.message_id for entry in peer.pushed()})


async def dropped(cluster: Cluster) -> float:
    return (await cluster.series("mailbox-0"))["stale_epoch_dispatch_dropped_total"]


async def fail_over(case: Case, pause_s: float, retry_after_ms: int) -> None:
    cluster = case.cluster
    working = [asyncio.create_task(sends.go_on()) for sends in case.sends] + [asyncio.create_task(case.watch_heads())]
    await until(lambda: min(len(sends.acks) for sends in case.sends) >= ACKED_BEFORE)
    await case.pause(pause_s)
    took_s = time.monotonic() - case.paused_s
    await asyncio.sleep(1.0)  # what lay in their sockets is judged
    counts = await case.old_counts()
    injected = await write_with_the_old_one(case)
    more = await case.old_counts() - counts
    for sends in case.sends:
        sends.ended = True
    await asyncio.gather(*working)
    await case.ended()
    assert more["calls"] == injected > 10  # criterion 1: each was tried
    assert more["committed"] == 0  # criterion 1
    assert more["refused"] >= injected  # criterion 1: all by check point 1
    assert cluster.events("lease_self_fenced", case.sober.name) != []
    assert cluster.events("lease_self_fenced", case.stubborn.name) == []
    await check_commits(case)
    await check_dispatches(case)
    refused = check_clients(case, retry_after_ms)
    report = await audit_node(cluster.address)
    assert report.passed(), report.text()
    await check_injected(case)
    for process in ("writer-0", case.stubborn.name, case.sober.name):
        assert (await cluster.series(process))["conversation_seq_regression_count"] == 0  # criterion 3, §19.2.3
    print(f"paused for {took_s:.1f} s, {refused} REGION_FAILOVER, {injected} commits of the old writer refused")


@asynccontextmanager
async def old_writers(node: OwnNode, stubborn: Joined, sober: Joined) -> AsyncIterator[Case]:
    async with cluster_of(node) as cluster:
        for writer in (stubborn, sober):
            await cluster.has_joined(writer.name)
        case = Case(cluster, stubborn, sober)
        await case.prepare()
        yield case


async def run(node: OwnNode, stubborn: Joined, pause_s: float, retry_after_ms: int) -> None:
    async with cluster_of(node) as cluster:
        await cluster.has_joined(stubborn.name)
    with joined(node, "writer", place=2) as sober:
        async with old_writers(node, stubborn, sober) as case:
            await fail_over(case, pause_s, retry_after_ms)


@pytest.mark.parametrize(
    ("times", "pause_s", "retry_after_ms"),
    [pytest.param(TENTH, 0.0, 200, id="tenth"), pytest.param({}, 30.0, 2000, id="default")],
)
def test_an_old_writer_commits_nothing_more(times: dict[str, str], pause_s: float, retry_after_ms: int) -> None:
    options = options_with(APART, **times, **UNLIMITED_LAG)
    with running_node(options) as node, joined(node, "writer", plant="stubborn") as stubborn:
        asyncio.run(run(node, stubborn, pause_s, retry_after_ms))
