"""26.3.7 Consistency of the inline decision and its budget boundary: all criteria.

No tenant policy names a retention class yet, so criterion 4 sets the class where the writer will read it from: on the
record, before the decision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qim.client
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.shard_workers.conversation.records import RecordEncoder
from tests.acceptance.devices import direct
from tests.acceptance.dispatching import append_dispatches
from tests.acceptance.harness import Node, named_users, running_node, until

BODY = b"x" * 600
"""With `inline_body_budget_bytes` 8 KiB: 13 members inline, 14 do not."""
MEMBERS = named_users(14, prefix="member")
FLIPPED_BUCKET = 1 << 20
"""Source of the dispatches made by hand: beyond every real bucket."""


class Chats:
    """The three conversations of the case, sent to by their first member."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.members = {direct(*MEMBERS[:2]): MEMBERS[:2]}

    async def make_groups(self) -> None:
        for size in (13, 14):
            name = await self.node.create_group(f"group{size}", MEMBERS[0], MEMBERS[1:size])
            self.members[name] = MEMBERS[:size]
        self.sender = await self.node.online(MEMBERS[0])

    def of(self, size: int) -> str:
        (found,) = (name for name, members in self.members.items() if len(members) == size)
        return found

    async def send(self, size: int, body: bytes) -> bytes:
        """The message_id of a delivered message."""
        (ack,) = await self.sender.say_all(self.of(size), [body])
        await self.node.delivered()
        return ack.message_id

    async def stored(self, size: int, message_id: bytes) -> dict[str, pb.Entry]:
        """user -> entry at rest, of every member."""
        found = {}
        for user in self.members[self.of(size)]:
            entries = [pb.Entry.FromString(row.entry) for row in await self.node.stored_rows(user)]
            (found[user],) = (entry for entry in entries if entry.message_id == message_id)
        return found

    async def dispatches(self, message_id: bytes) -> dict[int, bytes]:
        """mailbox shard -> its GroupDispatch of a message."""
        found = {}
        for shard in range(self.node.parameters.mailbox_shard_count):
            for record in await self.node.outside.dispatch_log.read(shard, 0):
                if pb.GroupDispatch.FromString(record.value).record.message_id == message_id:
                    found[shard] = record.value
        return found


def is_inline(entry: pb.Entry) -> bool:
    assert bool(entry.inline_ciphertext) == bool(entry.dek_id)
    return bool(entry.inline_ciphertext)


async def check_budget(chats: Chats) -> None:
    node = chats.node
    for size in (13, 14):
        assert len({node.shard_of(user) for user in chats.members[chats.of(size)]}) >= 4
    for size in (2, 13, 14):
        message_id = await chats.send(size, BODY)
        entries = await chats.stored(size, message_id)
        assert len(entries) == size
        results = {is_inline(entry) for entry in entries.values()}
        decided = {pb.GroupDispatch.FromString(value).record.inline_body
                   for value in (await chats.dispatches(message_id)).values()}  # fmt: skip
        assert results == {size <= 13}  # criteria 1, 2
        assert len(results) - 1 == 0  # criterion 3: no two shards differ
        assert results == decided  # criterion 3


async def sealed(node: Node, record: pb.OutboxRecord) -> bytes:
    """The inline body of a record as the writer encrypts it."""
    head = await node.outside.messages.head(record.tenant_id, record.conversation_id)
    keys = node.context.keys
    dek = keys.unwrap(head.dek_id, head.wrapped_dek)
    plain = pb.InlineBody(payload=BODY).SerializeToString()
    return keys.encrypt(dek, plain, record.tenant_id, record.conversation_id, record.message_id)


async def check_mailbox_does_not_decide(chats: Chats) -> None:
    """Dispatches whose flag contradicts the rule are carried out as they say."""
    node = chats.node
    for size in (2, 14):
        message_id = await chats.send(size, BODY)
        for shard, value in (await chats.dispatches(message_id)).items():
            dispatch = pb.GroupDispatch.FromString(value)
            dispatch.source_bucket = FLIPPED_BUCKET + size
            record = dispatch.record
            record.message_id = message_id[::-1]
            record.inline_body = not record.inline_body
            record.inline_ciphertext = await sealed(node, record) if record.inline_body else b""
            offset = await append_dispatches(node, shard, [dispatch.SerializeToString()])
            users = [user for user in chats.members[chats.of(size)] if node.shard_of(user) == shard]
            for user in users:
                at = node.seq(user, offset)
                await node.watermark_reaches(user, at)
                (row,) = await node.stored_rows(user, at - 1, at)
                assert bool(pb.Entry.FromString(row.entry).inline_ciphertext) == record.inline_body  # criterion 3


async def check_retention_classes(chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    commit: Any = RecordEncoder._commit
    for retention_class in (pb.EPHEMERAL_24H, pb.COMPLIANCE_HOLD):

        def with_class(
            encoder: RecordEncoder, submission: Any, record: pb.MessageRecord, *rest: Any, of: Any = retention_class
        ) -> Any:
            record.retention_class = of
            return commit(encoder, submission, record, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(RecordEncoder, "_commit", with_class)
            for size in (2, 13, 14):
                for body in (BODY, b"y"):
                    entries = await chats.stored(size, await chats.send(size, body))
                    assert sum(map(is_inline, entries.values())) == 0  # criterion 4


async def check_large_bodies(chats: Chats) -> None:
    limit = chats.node.parameters.inline_body_max_bytes
    for size in (2, 13, 14):
        entries = await chats.stored(size, await chats.send(size, b"z" * (limit + 1)))
        assert sum(map(is_inline, entries.values())) == 0  # criterion 5
    entries = await chats.stored(2, await chats.send(2, b"z" * limit))
    assert all(map(is_inline, entries.values()))


async def check_client_sees_no_difference(chats: Chats) -> None:
    """Both kinds of entries of one receiver, by push and by pull; then what the SDK makes of them."""
    node = chats.node
    user = MEMBERS[1]
    live, client = await node.online(user), node.client(user, "desktop")
    await client.wait_ready(10_000)
    sent = [await chats.send(13, BODY), await chats.send(14, BODY)]
    await live.until(lambda: {entry.message_id for entry in live.pushed()} >= set(sent))
    later = await node.online(user, "tablet")
    pulled = [entry for batch in later.bodies(Opcode.MAILBOX_BATCH) for entry in batch.entries]
    entries = [entry for entry in (*live.pushed(), *pulled) if entry.message_id in sent]
    assert len(entries) == 4
    assert all(entry.body_included and entry.payload_or_ciphertext == BODY for entry in entries)
    field_sets = {frozenset(field.name for field, _ in entry.ListFields()) for entry in entries}
    assert len(field_sets) == 1  # criterion 6
    await until(lambda: client.state.counters.entries_applied >= len(pulled))
    for size, message_id in zip((13, 14), sent, strict=True):
        (row,) = (row for row in client.store.messages(chats.of(size)) if row.message_id == message_id)
        assert row.payload == BODY
    sources = {path.name: path.read_text() for path in Path(qim.client.__path__[0]).glob("*.py")}
    readers = [name for name, text in sources.items() if "entry.payload_or_ciphertext" in text]
    assert len(readers) == 1  # criterion 6: one place reads the body of an entry
    told_apart = [name for name, text in sources.items() if "inline_ciphertext" in text or "dek_id" in text]
    assert told_apart == []  # criterion 6: nothing to branch on


async def test_inline_or_joined_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_node() as node:
        chats = Chats(node)
        await chats.make_groups()
        await check_budget(chats)
        await check_mailbox_does_not_decide(chats)
        await check_retention_classes(chats, monkeypatch)
        await check_large_bodies(chats)
        await check_client_sees_no_difference(chats)
