"""26.2.2 [RELEASE-BLOCKING] Truncation point inside a compound event group: criteria 1 to 4.

Not here yet: 5 and 6, the takeover sub-scenario (kill -9 of the MailboxNode between two batches, 1000 repetitions).
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from qim.protocol import qim_pb2 as pb
from tests.acceptance.devices import Device, direct, triples
from tests.acceptance.dispatching import DispatchLog, committed, dispatch_to, expected_triples
from tests.acceptance.harness import WITHOUT_FANOUT, Node, named_users, running_node

SHARD = 11
S = 40
"""Log offset of the group the case is about."""
ORDINALS = (0, 1, 2, 3)
EVENT_TYPES = (pb.EVENT_MESSAGE, pb.EVENT_MENTION, pb.EVENT_MEMBERSHIP, pb.EVENT_CONTROL)
PULLED = (3, 20)
"""Entries before the group, pulled already."""
GROUPS = (S, S + 1, S + 30, S + 99)
SINGLES = (S + 2, S + 3, S + 29, S + 31, S + 100)
MAX_ITEMS = 3


def make_group(record: pb.OutboxRecord) -> None:
    """The committed message as one event of each type for everybody in the conversation."""
    del record.events[:]
    for event_type in EVENT_TYPES:
        record.events.add(event_type=event_type, audience_all=True)
    record.events[3].target_conversation_seq = 1


async def prepare(node: Node, user: str) -> tuple[Device, dict[int, bytes]]:
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
    log = DispatchLog(node, SHARD, named_users(32, shard=SHARD))
    await log.write_to(S, {offset: placed[offset] for offset in PULLED})
    await node.watermark_reaches(user, node.seq(user, S - 1))
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
    async with running_node(roles=WITHOUT_FANOUT) as node:
        (user,) = named_users(1, shard=SHARD, prefix="e")
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
