"""26.2.5 Device cursors do not swallow each other: all criteria."""

from __future__ import annotations

import redis

from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.stores.api import RangeRequest
from qim.stores.redis import keys
from tests.acceptance.devices import Device, direct, triple, triples
from tests.acceptance.harness import TENANT, Node, running_node

USER = "bob"
ENTRIES = 100
PAGE_ITEMS = 7


async def trim_watermark(node: Node) -> int:
    """`mailbox_trim_watermark` of the user as the store holds it."""
    shard = node.shard_of(USER)
    status = await node.outside.mailboxes.user_status(
        RangeRequest(
            tenant_id=TENANT, user_id=USER, shard=shard, shard_epoch=node.shard(shard).machine.shard_epoch,
            lane=node.lane_of(USER), after_seq=0, up_to_seq=0, max_items=0, max_bytes=0,
        )
    )  # fmt: skip
    return status.effective_trim


async def acknowledge(device: Device, end: int, acked_seq: int) -> None:
    """An empty pull at the end of the mailbox that says how far the device is."""
    batch = await device.pull_batch(end, end, acked_seq=acked_seq)
    assert len(batch.entries) == 0


async def sync_beside(device: Device, noisy: Device, seqs: list[int]) -> list[pb.MailboxBatch]:
    """Sync page by page from 0 while another device acknowledges now this, now that."""
    end = device.welcome.sync_to_seq
    batches: list[pb.MailboxBatch] = []
    after = 0
    while not batches or batches[-1].has_more:
        await acknowledge(noisy, end, (0, end, seqs[len(batches)])[len(batches) % 3])
        batches.append(await device.pull_batch(after, end, max_items=PAGE_ITEMS, acked_seq=after))
        after = batches[-1].covered_through_seq
    await acknowledge(device, end, end)
    await device.complete()
    return batches


async def test_every_device_gets_everything() -> None:
    async with running_node() as node:
        sender = await node.online("ann")
        first = await node.online(USER, "a")
        trims = [await trim_watermark(node), first.welcome.trim_watermark]
        await sender.say_all(direct("ann", USER), [f"line {number}".encode() for number in range(ENTRIES)])
        await node.delivered()
        await first.until(lambda: len(first.pushed()) == ENTRIES)
        end = node.watermark(USER)
        expected = triples(await first.pull_through(0, end))
        assert len(expected) == len(set(expected)) == ENTRIES
        assert sorted(map(triple, first.pushed())) == expected
        await acknowledge(first, end, end)
        await first.ask(Opcode.PING, pb.Ping(ping_id=1, last_applied_mailbox_seq=end))

        others = [await node.device(USER, name) for name in ("b", "c")]
        welcomes = [await device.log_in() for device in others]
        seqs = [seq for seq, _, _ in expected]
        assert seqs == sorted(seqs)
        covered = [*seqs[PAGE_ITEMS - 1 : -1 : PAGE_ITEMS], end]
        influenced = 0
        for device, welcome in zip(others, welcomes, strict=True):
            assert (welcome.has_offline, welcome.sync_to_seq) == (True, end)
            batches = await sync_beside(device, first, seqs)
            assert triples(batches) == expected  # criterion 1
            assert len(batches) == len(covered)
            influenced += sum(
                batch.covered_through_seq != wanted for batch, wanted in zip(batches, covered, strict=True)
            )
        assert influenced == 0  # criterion 2
        trims += [await trim_watermark(node), *(welcome.trim_watermark for welcome in welcomes)]
        assert set(trims) == {0}  # criterion 3: it never moved
        with redis.Redis(unix_socket_path=node.mailbox_address.removeprefix("unix://")) as store:
            assert store.hget(keys.user_trim(node.shard_of(USER)), USER) is None  # criterion 3
