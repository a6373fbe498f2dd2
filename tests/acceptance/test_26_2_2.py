"""26.2.2 [RELEASE-BLOCKING] Truncation point inside a compound event group: all criteria.

The takeover sub-scenario between two batches, 1,000 times: 950 restarts of the MailboxNode in the process, each with
nothing in memory and a store that has lost all from S on, so that the successor materializes it again from the log; and
50 times kill -9 of its process, with one more event group on its way. No standby exists, so the takeover is a drift
(C-A16): the same member, under the next epoch.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import groupby
from typing import Any, cast

import pytest

from qim.app.audit.evidence import Evidence, evidence_of
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.app.settings import PoolSizes
from qim.commit_log.api import CommitLog
from qim.core import ids
from qim.core.seq import log_offset_of, mailbox_seq
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.registry.api import epoch_owning
from tests.acceptance.devices import Device, direct, triples
from tests.acceptance.dispatching import DispatchLog, committed, dispatch_to, expected_triples
from tests.acceptance.harness import WITHOUT_FANOUT, Node, named_users, running_node
from tests.acceptance.stored import go_back_to, snapshot
from tests.support import node as processes
from tests.support.supervised import is_alive

SHARDS, SHARD = 2, 1
S = 40
"""Log offset of the group the case is about."""
ORDINALS = (0, 1, 2, 3)
EVENT_TYPES = (pb.EVENT_MESSAGE, pb.EVENT_MENTION, pb.EVENT_MEMBERSHIP, pb.EVENT_CONTROL)
PULLED = (3, 20)
"""Entries before the group, pulled already."""
GROUPS = (S, S + 1, S + 30, S + 99)
SINGLES = (S + 2, S + 3, S + 29, S + 31, S + 100)
MAX_ITEMS = 3
RESTARTS, KILLS = 950, 50


def make_group(record: pb.OutboxRecord) -> None:
    """The committed message as one event of each type for everybody in the conversation."""
    del record.events[:]
    for event_type in EVENT_TYPES:
        record.events.add(event_type=event_type, audience_all=True)
    record.events[3].target_conversation_seq = 1


async def nothing() -> None:
    """To do."""


async def prepare(
    node: Node, user: str, before_group: Callable[[], Coroutine[Any, Any, None]] = nothing
) -> tuple[Device, dict[int, bytes]]:
    """A device that has pulled up to S-1, and what lies from S on in its mailbox."""
    sender = await node.online("peer")
    chat = direct("peer", user)
    offsets = sorted(PULLED + GROUPS + SINGLES)
    await sender.say_all(chat, [f"{offset}".encode() for offset in offsets])
    sources = await committed(node, chat)
    placed = {
        offset: await dispatch_to(node, source, SHARD, make_group if offset in GROUPS else None)
        for offset, source in zip(offsets, sources, strict=True)
    }
    log = DispatchLog(node, SHARD, named_users(32, shard=SHARD, shards=SHARDS))
    await log.write_to(S, {offset: placed[offset] for offset in PULLED})
    await node.watermark_reaches(user, node.seq(user, S - 1))
    await before_group()
    device = await node.online(user)
    later = {offset: placed[offset] for offset in GROUPS + SINGLES}
    await log.write_to(S + 101, later)
    await node.watermark_reaches(user, node.seq(user, S + 100))
    return device, later


def groups_of(batch: pb.MailboxBatch) -> dict[int, tuple[int, ...]]:
    """mailbox_seq -> ordinals, in order."""
    return {
        seq: tuple(entry.event_ordinal for entry in entries)
        for seq, entries in groupby(batch.entries, key=lambda entry: entry.mailbox_seq)
    }


async def test_a_group_is_never_cut() -> None:
    async with running_node(roles=WITHOUT_FANOUT, mailbox_shard_count=SHARDS) as node:
        (user,) = named_users(1, shard=SHARD, shards=SHARDS, prefix="e")
        device, later = await prepare(node, user)
        after, up_to, at_s = (node.seq(user, offset) for offset in (S - 1, S + 100, S))

        first = await device.pull_batch(after, up_to, max_items=MAX_ITEMS)
        assert groups_of(first) == {at_s: ORDINALS}  # criterion 1
        assert tuple(entry.event_type for entry in first.entries) == EVENT_TYPES
        assert first.covered_through_seq == at_s  # criterion 1
        assert len(first.entries) != 3  # criterion 2
        assert (len(first.entries), first.covered_through_seq) != (0, after)  # criterion 3

        baseline = await device.pull_batch(after, up_to)
        assert (baseline.has_more, baseline.covered_through_seq) == (False, up_to)
        expected = expected_triples(node, user, {at: later[at] for at in GROUPS}, ORDINALS)
        expected |= expected_triples(node, user, {at: later[at] for at in SINGLES})
        assert Counter(triples([baseline])) == Counter(expected)
        whole = groups_of(baseline)
        for max_items in range(1, 12):
            batches = await device.pull_through(after, up_to, max_items=max_items)
            cut = [batch for batch in batches if any(whole[seq] != found for seq, found in groups_of(batch).items())]
            assert len(cut) == 0  # criterion 2
            reached = [after, *(batch.covered_through_seq for batch in batches)]
            assert reached == sorted(set(reached))  # criterion 3: every batch makes progress
            assert reached[-1] == up_to
            got = Counter(triples(batches))
            assert set(got) == expected  # criterion 4
            assert set(got.values()) == {1}  # criterion 4


# ------------------------------------------------------------------------------------------------------------ takeover

Sequences = dict[int, list[tuple[int, int, bytes]]]
"""mailbox_seq -> (event_ordinal, event_id, digest of the entry) of its entries, in order."""


def sequences_of(batches: list[pb.MailboxBatch]) -> Sequences:
    """What a device got; a seq that comes in two batches would have been cut."""
    found: Sequences = {}
    for batch in batches:
        for seq in groups_of(batch):
            assert seq not in found
        for entry in batch.entries:
            digest = hashlib.blake2b(entry.SerializeToString(deterministic=True)).digest()
            found.setdefault(entry.mailbox_seq, []).append((entry.event_ordinal, entry.event_id, digest))
    return found


async def pull_through(device: Device, after: int, up_to: int) -> list[pb.MailboxBatch]:
    """Batches until `has_more` is false; a shard without an owner is waited for, as the SDK does."""
    batches: list[pb.MailboxBatch] = []
    while not batches or batches[-1].has_more:
        position = batches[-1].covered_through_seq if batches else after
        answer = await device.pull(position, up_to, max_items=MAX_ITEMS)
        if answer.opcode is Opcode.MAILBOX_BATCH:
            batches.append(answer.body)
        else:
            assert answer.body.code in (pb.SHARD_MOVED, pb.REGION_FAILOVER), answer
            await asyncio.sleep(0.02)
    return batches


@pytest.mark.timeout(600)
async def test_a_restart_between_two_batches_changes_no_group() -> None:
    async with running_node(roles=WITHOUT_FANOUT, mailbox_shard_count=SHARDS) as node:
        (user,) = named_users(1, shard=SHARD, shards=SHARDS, prefix="e")
        before: dict[bytes, tuple[bytes, int]] = {}

        async def remember() -> None:
            before.update(snapshot(node.mailbox_address))

        device, later = await prepare(node, user, remember)
        after, up_to, at_s = (node.seq(user, offset) for offset in (S - 1, S + 100, S))
        rows = await node.stored_rows(user)
        baseline = sequences_of(await pull_through(device, after, up_to))
        expected = expected_triples(node, user, {at: later[at] for at in GROUPS}, ORDINALS)
        expected |= expected_triples(node, user, {at: later[at] for at in SINGLES})
        assert {(seq, ordinal, event) for seq, found in baseline.items() for ordinal, event, _ in found} == expected

        mismatches = 0
        for number in range(RESTARTS):
            first = await device.pull_batch(after, up_to, max_items=MAX_ITEMS)
            await node.stop_mailbox()
            go_back_to(node.mailbox_address, before)
            for instance in set(node.outside.mailboxes._instances):
                instance.generation = -1  # what was known of the server is gone with its contents
            await node.start_mailbox()
            device.received.clear()  # every answer is looked for among them
            assert node.shard(SHARD).machine.shard_epoch == number + 2
            again = [await device.pull_batch(after, up_to)]
            rest = await pull_through(device, first.covered_through_seq, up_to)
            mismatches += sequences_of([first, *rest]) != baseline
            mismatches += sequences_of(again) != baseline
            mismatches += sequences_of([first])[at_s] != sequences_of(again)[at_s]  # criterion 5
        assert mismatches == 0  # criterion 6
        assert await node.stored_rows(user) == rows, "what was materialized again is what was there"


NODE = processes.options_with(
    OwnNodeOptions(pools=PoolSizes(1, 1, 1, 1), apart=True, unlimited_tenant=processes.TENANT),
    single_host_mailbox_shard_count="1",
    log_poll_interval_ms="20",  # nobody hints what the test appends
    restart_backoff_reset_ms="100",  # fifty kills are no crash loop
)
CHAT = direct("peer", "user")


class Killed:
    """A node of processes whose dispatch log gets event groups beside what fan-out writes."""

    def __init__(self, node: OwnNode, evidence: Evidence) -> None:
        self.node = node
        self._evidence = evidence
        self._made = 0
        self.groups: dict[int, bytes] = {}
        """Log offset -> dispatch."""

    async def append_group(self) -> int:
        """One more event group: the message of the chat again, in a dispatch of its own; its log offset."""
        log = self._evidence.dispatch
        (message,) = (
            dispatch
            for record in await log.read(0, 0)
            if (dispatch := pb.GroupDispatch.FromString(record.value)).source_bucket < BEYOND
        )
        make_group(message.record)
        message.source_bucket, message.source_offset, message.source_part = BEYOND, self._made, 1
        message.dispatch_id = ids.dispatch_id(self._made.to_bytes(16, "big"), 0)
        self._made += 1
        value = message.SerializeToString()
        (offset,) = await cast(CommitLog, log).append([(0, value)])
        self.groups[offset] = value
        return offset

    async def seq_of(self, offset: int) -> int:
        """`mailbox_seq` of a record, under the epoch that owned it."""
        return mailbox_seq(epoch_owning(await self._evidence.registry.boundaries(0), offset), offset)

    async def covered(self, offset: int) -> None:
        """Until W of every lane is there."""
        async with asyncio.timeout(30):
            while True:
                found = await self._evidence.mailboxes.watermarks(0)
                if found is not None and all(seq and log_offset_of(seq) >= offset for seq in found.values):
                    return
                await asyncio.sleep(0.002)

    async def expected(self) -> set[tuple[int, int, int]]:
        """Triples of the user in all groups, from the definition of `event_id` (§6.7)."""
        found: set[tuple[int, int, int]] = set()
        for offset, value in self.groups.items():
            seq = await self.seq_of(offset)
            prefix = ids.event_id_prefix(processes.TENANT, pb.GroupDispatch.FromString(value).dispatch_id)
            found |= {(seq, ordinal, int.from_bytes(ids.event_id(prefix, "user", ordinal), "big"))
                      for ordinal in ORDINALS}  # fmt: skip
        return found


BEYOND = 1 << 20
"""Source of what the test appends: beyond every real bucket."""


async def kill_between_batches(scene: Killed, device: Device) -> None:
    first_offset = await scene.append_group()
    for _ in range(2):
        last_offset = await scene.append_group()
    await scene.covered(last_offset)
    at_s = await scene.seq_of(first_offset)
    after, known = at_s - 1, await scene.seq_of(last_offset)
    baseline = sequences_of(await pull_through(device, after, known))
    chance, mismatches, pids = random.Random(2622), 0, set()
    for _ in range(KILLS):
        device.received.clear()  # every answer is looked for among them
        first = await device.pull_batch(after, known, max_items=MAX_ITEMS)
        assert groups_of(first) == {at_s: ORDINALS}
        pid = scene.node.pid("mailbox-0")
        offset = await scene.append_group()
        await asyncio.sleep(chance.uniform(0.0, 0.04))  # it is being materialized, or is not yet, or was
        assert scene.node.kill("mailbox-0") == pid
        pids.add(pid)
        rest = await pull_through(device, first.covered_through_seq, known)
        mismatches += sequences_of([first, *rest]) != baseline  # criterion 5
        assert not is_alive(pid)
        await scene.covered(offset)
        known = await scene.seq_of(offset)
        now = sequences_of(await pull_through(device, after, known))
        mismatches += {seq: now[seq] for seq in baseline} != baseline
        assert now.keys() - baseline.keys() == {known}
        baseline = now
    assert len(pids) == KILLS
    assert mismatches == 0  # criterion 6
    got = [(seq, ordinal, event) for seq, found in baseline.items() for ordinal, event, _ in found]
    assert len(got) == len(set(got)) == len(ORDINALS) * (KILLS + 3)
    assert set(got) == await scene.expected()


@pytest.mark.timeout(600)
def test_a_kill_between_two_batches_changes_no_group() -> None:
    async def run(node: OwnNode) -> None:
        address = node.address()
        async with processes.devices_of(node) as devices, evidence_of(address) as evidence:
            peer = await devices.add("peer")
            await (await peer.send(CHAT, "as four events"))
            token = await devices.admin.token(processes.TENANT, "user", "phone", 3600)
            device = await Device.connect(address.port, address.client_tls(), device_id="phone", access_token=token)
            scene = Killed(node, evidence)
            await scene.covered(0)
            await device.go_online()
            await kill_between_batches(scene, device)
            await device.close()

    with processes.running_node(NODE) as node:
        asyncio.run(run(node))
