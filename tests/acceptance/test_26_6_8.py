"""26.6.8 `W_floor` check: a recomputed watermark below a published value must refuse service. All criteria.

The node's own takeovers: the MailboxNode ends, its successor gets the shard under the next epoch. Twice, and a reload
in between, because the refusal must not wear off.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from qim.core.seq import LaneVector, log_offset_of
from qim.errors import ErrorCode
from qim.obs import metrics
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.stores.redis import keys
from tests.acceptance.devices import Device, Received, direct, numbers_in, triples
from tests.acceptance.dispatching import DispatchLog, committed, dispatch_to, expected_triples
from tests.acceptance.harness import WITHOUT_FANOUT, Node, named_users, running_node, until
from tests.acceptance.stored import connected

SHARD = 7
LANE = 3
LANES = 64
FLOOR, RECOMPUTED = 10_000, 9_000
PLACED = (100, 8_500, RECOMPUTED, RECOMPUTED + 1, 9_500, FLOOR - 1, FLOOR)
"""Log offsets of the refused lane's user."""
OTHERS_FROM = 9_200
"""The users of the other lanes have one entry each from here on."""
ATTEMPTS = 10
ALERT = "qim_mailbox_lane_refused"
_ROW = struct.Struct(">IQQ")
"""chunk_size, mask of the lanes whose only chunk is done, mask of those with a row of their own."""
_BLOCK_OFFSETS = 1024

(USER,) = named_users(1, shard=SHARD, lane=LANE, prefix="d")
OTHERS = [named_users(1, shard=SHARD, lane=lane, prefix="o")[0] for lane in range(LANES) if lane != LANE]
FILLERS = [named_users(1, shard=SHARD, lane=lane, prefix="f")[0] for lane in range(LANES)]


class Stored(NamedTuple):
    """What a takeover must leave alone of the refused lane."""

    watermark: int
    rows: dict[bytes, bytes]
    entries: list[tuple[int, int, bytes]]


def progress_rows(node: Node, first: int, last: int) -> dict[bytes, bytes]:
    """Rows in which the refused lane is done, of offsets in [first, last]."""
    found: dict[bytes, bytes] = {}
    with connected(node.mailbox_address) as store:
        for block in range(first // _BLOCK_OFFSETS, last // _BLOCK_OFFSETS + 1):
            block_rows = store.hgetall(f"{keys.progress_prefix(SHARD)}{block}").items()
            found |= {
                field: row
                for field, row in block_rows
                if _ROW.unpack(row)[1] >> LANE & 1 and first <= int.from_bytes(field, "big") <= last
            }
    return found


def delete_done_bits(node: Node) -> int:
    """Of the refused lane, for the offsets in (9000, 10000]; how many rows had some."""
    rows = progress_rows(node, RECOMPUTED + 1, FLOOR)
    with connected(node.mailbox_address) as store:
        for field, row in rows.items():
            size, done, several = _ROW.unpack(row)
            name = f"{keys.progress_prefix(SHARD)}{int.from_bytes(field, 'big') // _BLOCK_OFFSETS}"
            store.hset(name, field, _ROW.pack(size, done & ~(1 << LANE), several))
    return len(rows)


async def stored(node: Node) -> Stored:
    with connected(node.mailbox_address) as store:
        packed = store.hget(keys.shard(SHARD), keys.WATERMARKS_FIELD)
    assert isinstance(packed, bytes)
    entries = [(row.mailbox_seq, row.event_ordinal, row.event_id) for row in await node.stored_rows(USER)]
    return Stored(LaneVector.unpack(packed)[LANE], progress_rows(node, 0, FLOOR * 2), entries)


class Case:
    """The node, what lies in its log, and its clients of the refused lane."""

    def __init__(self, node: Node, sender: Device) -> None:
        self.node = node
        self.sender = sender
        self.log = DispatchLog(node, SHARD, FILLERS)
        self.placed: dict[str, dict[int, bytes]] = {}
        self.refused: list[Device] = []

    async def say(self, wanted: Mapping[int, str]) -> dict[int, bytes]:
        """Log offset -> dispatch of a committed message for the user, to be written by the caller; committed in the
        order of the log, as buckets are shared."""
        values: dict[int, bytes] = {}
        for offset, user in sorted(wanted.items()):
            await self.sender.say_all(direct("peer", user), [f"{offset}".encode()])
            source = (await committed(self.node, direct("peer", user)))[-1]
            values[offset] = await dispatch_to(self.node, source, SHARD)
            self.placed.setdefault(user, {})[offset] = values[offset]
        return values

    async def one_more_each(self) -> None:
        """A new message for every lane, the refused one too."""
        at = self.log.next_offset
        values = await self.say(dict(enumerate([USER, *OTHERS], at)))
        await self.log.write_to(at + len(values), values)
        for user in OTHERS:
            await self.node.watermark_reaches(user, self.node.seq(user, self.log.next_offset - 1))

    async def moved(self, answer: Received) -> None:
        assert answer.opcode is Opcode.ERROR, answer  # criterion 2
        assert answer.body.code == ErrorCode.SHARD_MOVED, answer  # criterion 2
        assert answer.body.retry_after_ms > 0

    async def keep_asking(self) -> None:
        """AUTH of a new connection and of one that had a cursor, PULL_MAILBOX of one that was online before."""
        online = self.refused[0]
        after = online.welcome.mailbox_cursor.last_applied_mailbox_seq
        for _ in range(ATTEMPTS):
            fresh = await self.node.device(USER, "fresh")
            known = await self.node.device(USER, "known")
            self.refused += (fresh, known)
            await self.moved(await fresh.authenticate())
            await self.moved(
                await known.authenticate(online.welcome.lane_watermark, online.welcome.mailbox_cursor.token)
            )
            await self.moved(await online.pull(after, online.welcome.sync_to_seq))
            await asyncio.gather(fresh.close(), known.close())
            await asyncio.sleep(0.02)


async def prepared(node: Node) -> Case:
    """W of the lane reached 10000 and was sent in AUTH_OK; the fold was saved below 9000."""
    case = Case(node, await node.online("peer"))
    wanted = dict.fromkeys(PLACED, USER) | dict(enumerate(OTHERS, OTHERS_FROM))
    await case.log.write_to(FLOOR + 1, await case.say(wanted))
    await node.watermark_reaches(USER, node.seq(USER, FLOOR))
    await until(lambda: node.shard(SHARD).machine.saved_offset > 0)
    assert node.shard(SHARD).machine.saved_offset < RECOMPUTED
    online = await node.online(USER)
    assert log_offset_of(online.welcome.lane_watermark) == FLOOR
    case.refused.append(online)
    return case


async def check_others(case: Case) -> None:
    """Criterion 5: a login, everything pulled, and a push, on each of the other lanes."""
    node = case.node
    machine = node.shard(SHARD).machine
    assert [lane for lane in range(LANES) if not machine.serves(lane)] == [LANE]  # criterion 5
    devices = [await node.online(user) for user in OTHERS]
    pushed = [len(device.pushed()) for device in devices]
    await case.one_more_each()
    for user, device, before in zip(OTHERS, devices, pushed, strict=True):
        await device.until(lambda device=device, before=before: len(device.pushed()) > before)  # type: ignore[misc]
        assert device.pushed()[-1].mailbox_seq == node.seq(user, max(case.placed[user]))
        batches = await device.pull_through(0, node.watermark(user))
        assert [log_offset_of(seq) for seq, _, _ in triples(batches)] == sorted(case.placed[user])
        await device.close()


def check_never_sent(case: Case) -> None:
    """Criterion 3: nothing of the refused lane's clients names a W, or any sequence, from (9000's, 10000) after the
    AUTH_OK that named 10000."""
    online, *later = case.refused
    welcome_at = next(i for i, frame in enumerate(online.received) if frame.opcode is Opcode.AUTH_OK)
    frames = online.received[welcome_at:] + [frame for device in later for frame in device.received]
    told = [
        body.lane_watermark
        for frame in frames
        if isinstance(body := frame.body, pb.AuthOk | pb.MailboxBatch) and log_offset_of(body.lane_watermark) < FLOOR
    ]
    assert len(told) == 0  # criterion 3
    after_takeover = [frame.body for device in later for frame in device.received]
    assert {value for body in after_takeover for value in numbers_in(body) if value >> 48} == set()  # criterion 3


async def take_over(case: Case, refused: dict[int, int]) -> None:
    """Criteria 1, 2 and 4 at one takeover, asked all the time."""
    node = case.node
    await node.stop_mailbox()
    asking = asyncio.create_task(case.keep_asking())
    await node.start_mailbox()
    machine = node.shard(SHARD).machine
    assert machine.refused == refused  # criterion 1
    assert [lane for shard in range(16) for lane in node.shard(shard).machine.refused] == [LANE]
    await asking
    alerts = metrics.firing_alerts(metrics.render().decode())
    assert alerts.get(ALERT) == "P1"  # criterion 4


@pytest.mark.timeout(180)
async def test_a_watermark_recomputed_below_what_was_published_serves_nobody() -> None:
    metrics.LANE_REFUSED.clear()
    async with running_node(roles=WITHOUT_FANOUT) as node:
        case = await prepared(node)
        floor, recomputed = node.seq(USER, FLOOR), node.seq(USER, RECOMPUTED)
        assert ALERT not in metrics.firing_alerts(metrics.render().decode())
        expected = expected_triples(node, USER, case.placed[USER])
        assert delete_done_bits(node) > 10
        before = await stored(node)
        assert before.watermark == floor
        assert {(seq, ordinal, int.from_bytes(event_id)) for seq, ordinal, event_id in before.entries} == expected

        await take_over(case, {LANE: recomputed})
        await check_others(case)
        assert await stored(node) == before  # criterion 4: nothing is replayed into it
        node.shard(SHARD).doubt("reload")
        await until(node.mailbox.ready)
        assert node.shard(SHARD).machine.refused == {LANE: recomputed}
        await case.keep_asking()
        await take_over(case, {LANE: recomputed})
        await case.one_more_each()
        await case.keep_asking()
        assert await stored(node) == before  # criterion 4
        check_never_sent(case)
