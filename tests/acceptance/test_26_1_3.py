"""26.1.3 While an earlier task is unfinished the client must not see a higher watermark: all criteria."""

from __future__ import annotations

import asyncio

from qim.core.seq import log_offset_of
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.acceptance.devices import Device, direct, numbers_in, triple
from tests.acceptance.dispatching import DispatchLog, committed, dispatch_to, expected_triples
from tests.acceptance.harness import WITHOUT_FANOUT, Gate, Node, named_users, running_node, until

SHARD = 7
LANE = 3
BLOCKED = 10300
BLOCK_S = 5.0
SLOWEST_LANE = 5
SLOWEST_BLOCKED = 10200
"""Another lane is held earlier, so that min(W) is a value of its own."""
PLACED = (10050, 10299, BLOCKED, 10301, 10302, 10310, 10400, 10499, 10500)
"""Where dispatches of the user lie."""


async def prepare(node: Node, user: str) -> tuple[DispatchLog, dict[int, bytes]]:
    sender = await node.online("peer")
    chat = direct("peer", user)
    await sender.say_all(chat, [f"{offset}".encode() for offset in PLACED])
    values = [await dispatch_to(node, source, SHARD) for source in await committed(node, chat)]
    # The filler leaves both lanes alone: what is blocked on them is what the case puts there.
    others = named_users(64, shard=SHARD, without=(LANE, SLOWEST_LANE))
    log = DispatchLog(node, SHARD, others)
    await log.write_to(10002)
    await node.watermark_reaches(user, node.seq(user, 10001))
    return log, dict(zip(PLACED, values, strict=True))


async def slow_dispatch(node: Node) -> bytes:
    """A message to a user of the lane that holds min(W) back."""
    (slow,) = named_users(1, shard=SHARD, lane=SLOWEST_LANE, prefix="slow")
    sender = await node.online("other")
    await sender.say_all(direct("other", slow), [b"slow"])
    (source,) = await committed(node, direct("other", slow))
    return await dispatch_to(node, source, SHARD)


def frame_values(device: Device) -> set[int]:
    """Every integer in every frame a device received, whole and as a log offset."""
    values = {value for frame in device.received for value in numbers_in(frame.body)}
    return values | {log_offset_of(value) for value in values}


async def check_block(node: Node, user: str, online: Device, late: Device) -> pb.MailboxBatch:
    """The operation, while the lane is held; the batch of the first pull."""
    after, up_to, visible = (node.seq(user, offset) for offset in (10001, 10500, BLOCKED - 1))
    stored = {log_offset_of(row.mailbox_seq) for row in await node.stored_rows(user)}
    assert stored == set(PLACED) - {BLOCKED}, "the entries above the blocked one are in the store"
    welcome = await late.log_in()
    first = await online.pull_batch(after, up_to)
    for watermark in (online.welcome.lane_watermark, welcome.lane_watermark, first.lane_watermark):
        assert watermark <= visible  # criterion 1
    assert (welcome.lane_watermark, first.lane_watermark) == (visible, visible)
    assert first.covered_through_seq <= visible  # criterion 2
    assert [entry for entry in first.entries if entry.mailbox_seq > visible] == []  # criterion 3
    assert first.has_more is True, "what was asked for is not covered"
    again = await online.pull(visible, up_to)
    assert again.opcode is Opcode.ERROR, "nothing of that range may be shown: neither an entry nor a step forward"
    fallback = await online.pull_batch(after, 0)
    assert fallback.covered_through_seq == visible
    pong = await online.ask(Opcode.PING, pb.Ping(ping_id=1))
    assert pong.body.last_pushed_user_seq <= visible
    assert {field.name for field in pb.Pong.DESCRIPTOR.fields if "watermark" in field.name} == set()  # criterion 1
    assert all(entry.mailbox_seq <= visible for entry in online.pushed())
    return first


async def test_nothing_above_an_unfinished_task_is_seen() -> None:
    gate = Gate()
    async with running_node(roles=WITHOUT_FANOUT, chunk_gate=gate) as node:
        (user,) = named_users(1, shard=SHARD, lane=LANE, prefix="d")
        log, placed = await prepare(node, user)
        slow = await slow_dispatch(node)
        online, late = await node.online(user), await node.device(user, "tablet")
        assert online.welcome.lane_watermark == node.seq(user, 10001)

        gate.held = {(SHARD, LANE, BLOCKED), (SHARD, SLOWEST_LANE, SLOWEST_BLOCKED)}
        lifted = asyncio.get_running_loop().time() + BLOCK_S
        await log.write_to(10501, placed | {SLOWEST_BLOCKED: slow})
        machine = node.shard(SHARD).machine
        others = [lane for lane in range(machine.lane_count) if lane not in (LANE, SLOWEST_LANE)]
        await until(lambda: {machine.acked[lane] for lane in others} == {node.seq(user, 10500)})
        await node.watermark_reaches(user, node.seq(user, BLOCKED - 1))
        first = await check_block(node, user, online, late)
        minimum = min(machine.acked)
        assert log_offset_of(minimum) == SLOWEST_BLOCKED - 1
        await asyncio.sleep(lifted - asyncio.get_running_loop().time())
        assert node.watermark(user) == node.seq(user, BLOCKED - 1), "the block was in force for all of its time"

        gate.held.remove((SHARD, LANE, BLOCKED))
        await node.watermark_reaches(user, node.seq(user, 10500))
        second = await online.pull_batch(first.covered_through_seq, node.seq(user, 10500))
        assert [log_offset_of(entry.mailbox_seq) for entry in second.entries] == list(PLACED[2:])  # criterion 4
        assert second.covered_through_seq == node.seq(user, 10500)
        assert second.has_more is False
        got = [triple(entry) for batch in (first, second) for entry in batch.entries]
        assert len(got) == len(set(got))  # criterion 5
        assert set(got) == expected_triples(node, user, placed)  # criterion 5
        assert min(machine.acked) == minimum
        for device in (online, late):
            assert frame_values(device) & {minimum, log_offset_of(minimum)} == set()  # criterion 6
