"""`qim shards`: the listing, and moves by hand under load."""

from __future__ import annotations

import asyncio

import pytest

from qim.app.own_node import OwnNode
from qim.app.shards import list_shards, move_shard
from qim.core import ids
from qim.errors import StartupError
from qim.registry.api import LeaseKind
from tests.support.node import APART, TENANT, devices_of, options_with, running_node
from tests.support.takeover import PEERS, conversation_with, talk_on


def test_shards_move_by_hand_under_load() -> None:
    async def run(node: OwnNode) -> None:
        address = node.address()
        async with devices_of(node) as devices, talk_on(devices) as talk:
            await talk.say("before")
            traffic = asyncio.create_task(talk.go_on())
            for peer in PEERS[:3]:
                bucket = ids.conversation_bucket(TENANT, conversation_with(peer), address.conversation_bucket_count)
                shard = ids.mailbox_shard_id(TENANT, peer, address.mailbox_shard_count)
                for number in (0, 1, 0):
                    await move_shard(address, LeaseKind.CONVERSATION_BUCKET, bucket, f"writer-{number}")
                    await move_shard(address, LeaseKind.OUTBOX_PARTITION, bucket, f"fanout-{number}")
                    line = await move_shard(address, LeaseKind.MAILBOX_SHARD, shard, f"mailbox-{number}")
                    assert line.startswith(f"mailbox {shard} is at mailbox-{number}, epoch ")
            listed = await list_shards(address, [LeaseKind.MAILBOX_SHARD])
            assert len(listed) == 1 + address.mailbox_shard_count
            with pytest.raises(StartupError, match="no member mailbox-9 .* mailbox-0, mailbox-1"):
                await move_shard(address, LeaseKind.MAILBOX_SHARD, 0, "mailbox-9")
            with pytest.raises(StartupError, match=f"ids are 0..{address.mailbox_shard_count - 1}"):
                await move_shard(address, LeaseKind.MAILBOX_SHARD, address.mailbox_shard_count, "mailbox-0")
            await move_shard(address, LeaseKind.MAILBOX_SHARD, 0, "auto")
            talk.end()
            await traffic
            await talk.check()

    with running_node(options_with(APART, region_failover_retry_after_ms="200")) as node:
        asyncio.run(run(node))
