"""Logs are trimmed below what is surely read, on real servers, and a restart finds all it needs in the rest."""

from __future__ import annotations

import asyncio

import pytest

from qim.core import ids
from qim.errors import Detail, ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.shard_workers.mailbox.machine import FOLD_SAVE_RECORDS
from tests.acceptance.devices import direct
from tests.acceptance.harness import TENANT, Node, named_users, running_node

USERS = named_users(2, shard=3, prefix="u")
CONVERSATION = direct(*sorted(USERS))
MESSAGES = FOLD_SAVE_RECORDS + 50
HELD_MS = 86_400_000
LAG_MS = 600_000


def allow_bytes(node: Node, bytes_max: int) -> None:
    """The memory bound of both logs."""
    writer = node.roles["writer-0"]
    for log in (writer.retention._logs.outbox, node.mailbox.retention._dispatch_log):  # type: ignore[attr-defined]
        assert log is not None
        log._bytes_max = bytes_max


@pytest.mark.timeout(120)
async def test_logs_go_below_the_fold_and_the_fanout_position() -> None:
    async with running_node(
        retention_interval_ms=HELD_MS, admission_retention_margin_ms=100, delivery_lag_ms=LAG_MS,
        delivery_lag_group_ms=LAG_MS,
    ) as node:  # fmt: skip
        sender = await node.online(USERS[0])
        await sender.say_all(CONVERSATION, [b"hello"] * MESSAGES, ahead=48)
        await node.delivered()
        shard, bucket = 3, ids.conversation_bucket(TENANT, CONVERSATION, node.parameters.conversation_bucket_count)
        saved = node.shard(shard).machine.saved_offset
        assert saved == FOLD_SAVE_RECORDS - 1
        writer = node.roles["writer-0"]

        assert await node.mailbox.retention.trim_logs() == 0, "nothing is a day old"
        allow_bytes(node, 1)
        await asyncio.sleep(0.1)  # the margin: the instance may lose what is younger
        assert await node.mailbox.retention.trim_logs() == saved + 1
        assert (await node.outside.dispatch_log.watermarks(shard)).low == saved + 1
        while await node.outside.checkpoints.position(bucket) < MESSAGES:
            await asyncio.sleep(0.05)  # a save between the two looks below would move it
        position = await node.outside.checkpoints.position(bucket)
        assert 0 < position <= MESSAGES
        assert await writer.retention.trim_outbox() == position  # type: ignore[attr-defined]

        refused = await sender.answer(sender.say(CONVERSATION))
        assert (refused.body.code, refused.body.detail) == (ErrorCode.RATE_LIMITED, Detail.STORE_FULL)
        assert not writer.ready()
        allow_bytes(node, 1 << 30)
        await writer.retention.trim_outbox()  # type: ignore[attr-defined]
        assert writer.ready()

        node.shard(shard).doubt("the log is read again from the fold")
        await sender.say_all(CONVERSATION, [b"after"])
        await node.delivered()
        assert len(await node.stored_rows(USERS[1])) == MESSAGES + 1
        reader = await node.device(USERS[1])
        assert (await reader.log_in()).has_offline


@pytest.mark.timeout(60)
async def test_old_history_goes_and_pages_end_where_it_begins() -> None:
    async with running_node(retention_interval_ms=HELD_MS) as node:
        sender = await node.online(USERS[0])
        await sender.say_all(CONVERSATION, [f"line {n}".encode() for n in range(20)])
        await node.delivered()
        retention = node.roles["writer-0"].retention  # type: ignore[attr-defined]

        def is_old(record: pb.MessageRecord) -> bool:
            old: bool = record.client_message_id in {f"phone-{n}" for n in range(1, 8)}
            return old

        retention._is_expired = is_old
        while not await retention.walk_step():
            pass
        reader = node.client(USERS[1])
        await reader.wait_ready(10_000)
        page = await reader.pull_history(CONVERSATION, anchor_conversation_seq=0)
        assert [m.conversation_seq for m in page.messages] == list(range(8, 21))
        assert page.earliest_available_conversation_seq == 8
        assert not page.has_more
