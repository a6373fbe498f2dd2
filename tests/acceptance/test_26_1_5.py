"""26.1.5 [RELEASE-BLOCKING] Read-time join is grouped by conversation; point lookups are forbidden: all criteria.

Reads are counted at the message server itself. The body LRU is cleared before each measured pull, as the case says; the
keys of the conversations (DEKs) come from the key cache, which a first pull has filled.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from qim.protocol import qim_pb2 as pb
from qim.shard_workers.mailbox import bodies
from tests.acceptance.devices import Device, direct
from tests.acceptance.dispatching import DispatchLog, committed, dispatch_to
from tests.acceptance.harness import WITHOUT_FANOUT, Node, named_users, running_node
from tests.support.redis_monitor import Command, monitored

SHARDS = 64
BODY_BYTES = 2500
"""Above `inline_body_max_bytes` (2 KiB)."""
BACKLOG = 500
GROUP_MEMBERS = 5000
CHATS, PER_CHAT = 20, 5
RECORDS_PREFIX = "rec:"


class Measured:
    """One pull: its batch, the reads of the message server, what was encoded."""

    def __init__(self, batch: pb.MailboxBatch, commands: list[Command], encoded: Counter[bytes]) -> None:
        self.batch = batch
        self.encoded = encoded
        self.reads = [command for command in commands if not command.by_script and "{b" in command.arguments[0]]
        self.range_reads = [read for read in self.reads if read.arguments[0].startswith(RECORDS_PREFIX)]

    def joined(self) -> Counter[tuple[str, str]]:
        """(records key, conversation_seq) -> how often it was read."""
        return Counter((read.arguments[0], seq) for read in self.range_reads for seq in read.arguments[1:])


def big(sender: str, number: int) -> bytes:
    return f"{sender} {number} ".encode().ljust(BODY_BYTES, b".")


class Case:
    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self._encoded: Counter[bytes] = Counter()
        encode = bodies.body_fragment

        def counted(
            message_type: int, custom_type: str, schema_version: int, payload: bytes, media: pb.MediaMetadata | None
        ) -> bytes:
            self._encoded[payload] += 1
            return encode(message_type, custom_type, schema_version, payload, media)

        monkeypatch.setattr(bodies, "body_fragment", counted)

    async def pull(self, device: Device) -> Measured:
        """Everything in one PULL_MAILBOX, with no body in memory."""
        self.node.mailbox._bodies.clear()
        self._encoded.clear()
        async with monitored(self.node.core_address) as monitor:
            batch = await device.pull_batch(0, device.welcome.sync_to_seq, max_items=BACKLOG)
            commands = await monitor.settle()
        assert batch.has_more is False
        assert all(entry.body_included for entry in batch.entries)
        return Measured(batch, list(commands), Counter(self._encoded))

    async def deliver(self, user: str, conversations: list[str]) -> Device:
        """Put what is committed in these conversations into the user's mailbox; a device that has logged in since."""
        node = self.node
        shard = node.shard_of(user)
        sources = [source for name in conversations for source in await committed(node, name)]
        sources = [source for source in sources if source.record.conversation_seq]
        sources.sort(key=lambda source: source.offset)
        log = DispatchLog(node, shard, [user])
        values = [await dispatch_to(node, source, shard) for source in sources]
        await log.write_to(len(values), dict(enumerate(values)))
        await node.watermark_reaches(user, node.seq(user, len(values) - 1))
        device = await node.device(user)
        await device.log_in()
        return device


def check_joined_once(measured: Measured, payloads: list[bytes]) -> None:
    assert [read for read in measured.range_reads if len(read.arguments) == 2] == []  # criterion 3
    assert set(measured.joined().values()) == {1}  # criterion 4
    assert len(measured.joined()) == len(payloads)
    assert measured.encoded == Counter(payloads)  # criterion 4
    assert Counter(entry.payload_or_ciphertext for entry in measured.batch.entries) == Counter(payloads)


async def check_one_group(case: Case) -> None:
    """Distribution (a)."""
    node = case.node
    members = named_users(GROUP_MEMBERS, shards=SHARDS)
    user = members[-1]
    group = await node.create_group("choir", "ann", members)
    payloads = [big("ann", number) for number in range(BACKLOG)]
    await (await node.online("ann")).say_all(group, payloads)
    device = await case.deliver(user, [group])
    cold = await case.pull(device)
    assert len(cold.range_reads) <= 2
    warm = await case.pull(device)
    assert len(warm.reads) <= 2  # criterion 1
    check_joined_once(warm, payloads)


async def check_many_chats(case: Case) -> None:
    """Distribution (b): sent in rounds, so that the conversations lie mixed in the mailbox."""
    node = case.node
    user = "dora"
    peers = [f"peer{number}" for number in range(CHATS)]
    devices = [await node.online(peer) for peer in peers]
    chats = [direct(peer, user) for peer in peers]
    for number in range(PER_CHAT):
        asked = [device.say(chat, big(peer, number)) for device, chat, peer in zip(devices, chats, peers, strict=True)]
        await asyncio.gather(*(device.answer(answer) for device, answer in zip(devices, asked, strict=True)))
    device = await case.deliver(user, chats)
    cold = await case.pull(device)
    assert len(cold.range_reads) <= CHATS + 1
    warm = await case.pull(device)
    assert len(warm.reads) <= CHATS + 1  # criterion 2
    check_joined_once(warm, [big(peer, number) for peer in peers for number in range(PER_CHAT)])


async def check_inline_entries_stay_out(case: Case) -> None:
    """Short and long messages of one chat in turns: only the long ones are read from the message server."""
    node = case.node
    user, chat = "dave", direct("gus", "dave")
    short = [f"short {number}".encode() for number in range(10)]
    long = [big("gus", number) for number in range(10)]
    await (await node.online("gus")).say_all(chat, [line for pair in zip(short, long, strict=True) for line in pair])
    device = await case.deliver(user, [chat])
    await case.pull(device)
    warm = await case.pull(device)
    assert warm.encoded == Counter(short + long)
    inline = {str(entry.conversation_seq) for entry in warm.batch.entries if entry.payload_or_ciphertext in short}
    assert len(inline) == len(short)
    assert sum(seq in inline for _, seq in warm.joined()) == 0  # criterion 5
    assert len(warm.joined()) == len(long)


async def test_bodies_are_joined_by_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_node(roles=WITHOUT_FANOUT, mailbox_shard_count=SHARDS) as node:
        case = Case(node, monkeypatch)
        await check_one_group(case)
        await check_many_chats(case)
        await check_inline_entries_stay_out(case)
