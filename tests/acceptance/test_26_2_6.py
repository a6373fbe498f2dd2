"""26.2.6 [RELEASE-BLOCKING] A device beyond the retention window must get CURSOR_EXPIRED.

All criteria. `mailbox_retention_days` + 1 = 8 days go by in the store (aging.py). The device has seen some messages of
a group and of three single chats; while it is away the group and one chat go on before the window (these entries are
gone) and inside it, one chat only before it, one not at all, and somebody unknown to it writes before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from qim.client.perform import REBUILD
from qim.client.store import LocalStore
from qim.core.ids import direct_members
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.acceptance.aging import days_pass
from tests.acceptance.devices import Device, RecordedClient, direct
from tests.acceptance.harness import TENANT, Node, running_node

USER = "dora"
BUSY, QUIET, SILENT, STRANGER = (direct(USER, other) for other in ("busy", "quiet", "silent", "stranger"))
DAYS = 8
LOGINS = 3
SEQ_BUCKET_WIDTH = 4096


class Away(NamedTuple):
    """The device before its return."""

    path: Path
    token: bytes
    last_applied: int
    group: str


@asynccontextmanager
async def device_away(tmp_path: Path) -> AsyncIterator[tuple[Node, Away]]:
    """A node on which the days went by, and the device's store."""
    async with running_node() as node:
        group = await node.create_group("team", "busy", [USER, "quiet"])
        path = tmp_path / "device.db"
        client = node.client(USER, store=LocalStore(path))
        await client.wait_ready(10_000)
        await talk(node, "seen", {group: 5, BUSY: 5, QUIET: 5, SILENT: 5})
        await client.resync(10_000)
        cursor = client.state.sync.cursor
        assert cursor.last_applied_mailbox_seq == node.watermark(USER)
        await client.close()
        await talk(node, "missed", {group: 60, BUSY: 70, QUIET: 8, STRANGER: 4})
        days_pass(node, DAYS)
        await talk(node, "recent", {group: 6, BUSY: 7})
        yield node, Away(path, cursor.token, cursor.last_applied_mailbox_seq, group)


async def talk(node: Node, when: str, lines: dict[str, int]) -> None:
    """Messages of the others; a device each, for its name makes the message ids."""
    for conversation_id, count in lines.items():
        if conversation_id.startswith("g:"):
            sender = "busy"
        else:
            (sender,) = set(direct_members(conversation_id)) - {USER}
        device = await node.online(sender, f"{when}-{conversation_id.partition(':')[0]}")
        texts = [f"{when} {number} in {conversation_id}".encode() for number in range(count)]
        await device.say_all(conversation_id, texts)
    await node.delivered()


async def stored_ids(node: Node, conversation_id: str) -> dict[int, bytes]:
    """conversation_seq -> message_id of everything MessageStore holds of a conversation."""
    head = await node.outside.messages.head(TENANT, conversation_id)
    seqs = list(range(head.earliest_available_conversation_seq, head.latest_conversation_seq + 1))
    records = await node.outside.messages.records(TENANT, conversation_id, seqs[0] // SEQ_BUCKET_WIDTH, seqs)
    return {
        seq: pb.MessageRecord.FromString(packed).message_id
        for seq, packed in zip(seqs, records, strict=True)
        if packed is not None
    }


async def check_bare_logins(node: Node, away: Away) -> None:
    """However often it tries."""
    for _ in range(LOGINS):
        device: Device = await node.device(USER)
        answer = await device.authenticate(away.last_applied, away.token)
        assert answer.opcode is Opcode.ERROR
        error = answer.body
        assert (error.code, error.rebuild_required) == (ErrorCode.CURSOR_EXPIRED, True)  # criterion 1
        assert error.trim_watermark > away.last_applied  # criterion 1
        assert device.bodies(Opcode.AUTH_OK) == []  # criterion 2
        assert device.bodies(Opcode.MAILBOX_BATCH) == []  # criterion 3
        await device.close()


def check_login_of_the_client(client: RecordedClient, away: Away) -> pb.AuthOk:
    """First refused, then a cold start; no batch in between. The AUTH_OK of the rebuild session."""
    refused, renewed = client.requests(Opcode.AUTH)
    assert refused.body.mailbox_cursor.last_applied_mailbox_seq == away.last_applied
    assert renewed.body.mailbox_cursor == pb.MailboxCursorToken()
    error, welcome = (
        next(frame for frame in client.received if frame.request_id == sent.request_id) for sent in (refused, renewed)
    )
    assert (error.opcode, error.body.code) == (Opcode.ERROR, ErrorCode.CURSOR_EXPIRED)  # criterion 1
    assert error.body.rebuild_required  # criterion 1
    assert (welcome.opcode, welcome.body.has_offline) == (Opcode.AUTH_OK, True)  # criterion 2
    batches = [frame for frame in client.received if frame.opcode is Opcode.MAILBOX_BATCH]
    assert all(frame.at_ms >= welcome.at_ms for frame in batches)  # criterion 3
    body: pb.AuthOk = welcome.body
    return body


async def check_conversations(node: Node, client: RecordedClient, away: Away) -> None:
    """Every conversation is whole; what was never here has its latest page, which is all of it."""
    for conversation_id in (away.group, BUSY, QUIET, SILENT, STRANGER):
        stored = await stored_ids(node, conversation_id)
        rows = [row for row in client.store.messages(conversation_id) if row.conversation_seq]
        page = await client.pull_history(conversation_id, anchor_conversation_seq=0)
        assert len(page.messages) >= 1  # criterion 4, latest page
        assert {m.conversation_seq: m.message_id for m in page.messages}.items() <= stored.items()
        assert {row.conversation_seq: row.message_id for row in rows} == stored  # criterion 4, equal one by one
        assert len(rows) == len({row.message_id for row in rows})  # criterion 4, duplicates
        assert all(row.body_included for row in rows)
    (listed,) = client.bodies(Opcode.SESSION_LIST_BATCH)
    inexact = {session.conversation_id for session in listed.sessions if not session.unread_exact}
    assert {QUIET, SILENT, STRANGER} <= inexact  # criterion 4, outside the window
    for conversation_id in (QUIET, SILENT, STRANGER):
        unread = client.store.unread(conversation_id)
        assert unread is not None
        assert not unread[1]


async def check_next_login(node: Node, away: Away, sync_to_seq: int) -> None:
    """The new cursor is not pinned to the edge of the window."""
    again = node.client(USER, store=LocalStore(away.path))
    await again.wait_ready(10_000)
    (auth,) = again.requests(Opcode.AUTH)
    assert auth.body.mailbox_cursor.last_applied_mailbox_seq == sync_to_seq
    assert again.bodies(Opcode.ERROR) == []  # criterion 4, regression guard
    assert again.bodies(Opcode.SESSION_LIST_BATCH) == [], "one rebuild is enough"


@pytest.mark.timeout(120)
async def test_a_device_beyond_the_window_rebuilds(tmp_path: Path) -> None:
    async with device_away(tmp_path) as (node, away):
        await check_bare_logins(node, away)
        client = node.client(USER, store=LocalStore(away.path))
        await client.wait_ready(10_000)
        await client._wait(lambda: not client.store.meta(REBUILD), 30_000)
        welcome = check_login_of_the_client(client, away)
        await check_conversations(node, client, away)
        position = client.state.sync.cursor.last_applied_mailbox_seq
        assert position == welcome.sync_to_seq  # criterion 4, new cursor
        await client.close()
        await check_next_login(node, away, position)
