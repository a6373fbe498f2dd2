"""Instruments of 26.3.6: a throttle for one lane, single-chat traffic past it, and the criteria as one check."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.shard_workers.mailbox.lanes import SubTask
from tests.acceptance.devices import Device, Sent
from tests.acceptance.harness import Node, until

LANE_WATERMARK_ADVANCE_P99_MS = 2000
"""`lane_watermark_advance_p99` (B.5.1)."""
P99_CHANGE_MAX = 0.2
SEND_INTERVAL_S = 0.05
DRAIN_S = 1.0
"""For the last messages of a hold to become visible while it is still in force."""
_LARGE_SUBTASK_MEMBERS = 10
"""Above every single chat: what the throttle takes for the group's."""


@dataclass(slots=True)
class Hold:
    task: SubTask
    started_s: float
    seconds: float
    released: bool = False

    def ends_s(self) -> float:
        return self.started_s + self.seconds


class Throttle:
    """The fault hook on lane 0: stretches the next large sub-task of an armed shard evenly over its time, and keeps its
    last chunk until `release`."""

    def __init__(self, lane: int = 0) -> None:
        self.node: Node
        self._lane = lane
        self._armed: dict[int, float] = {}
        self._holds: dict[tuple[int, int], Hold] = {}

    def __call__(self, shard: int, lane: int, offset: int) -> bool:
        if lane != self._lane:
            return False
        hold = self._holds.get((shard, offset))
        if hold is None:
            task = self._task(shard, offset)
            if shard not in self._armed or len(task.members) < _LARGE_SUBTASK_MEMBERS:
                return False
            hold = self._holds[shard, offset] = Hold(task, time.monotonic(), self._armed.pop(shard))
        if hold.released:
            return False
        allowed = int((time.monotonic() - hold.started_s) / hold.seconds * hold.task.chunk_count)
        return hold.task.done.bit_count() >= min(allowed, hold.task.chunk_count - 1)

    def arm(self, shard: int, seconds: float) -> None:
        self._armed[shard] = seconds

    async def in_force(self, shard: int) -> Hold:
        """The hold of a shard, once its sub-task has come."""
        await until(lambda: any(at == shard and not hold.released for (at, _), hold in self._holds.items()))
        (found,) = (hold for (at, _), hold in self._holds.items() if at == shard and not hold.released)
        return found

    async def release(self, shard: int) -> float:
        """Let the sub-task finish; when that was, in monotonic ms."""
        hold = await self.in_force(shard)
        machine = self.node.shard(shard).machine
        before = machine.seq_of(hold.task.offset - 1)
        assert machine.acked[self._lane] <= before, "W of the held lane stood still"
        released_ms = time.monotonic() * 1000
        hold.released = True
        await until(lambda: machine.acked[self._lane] > before)
        return released_ms

    def _task(self, shard: int, offset: int) -> SubTask:
        lanes = self.node.shard(shard).machine.lanes
        works = (*lanes._fifos[self._lane], *lanes._recent)
        task = next(work for work in works if work.offset == offset).task_of(self._lane)
        assert task is not None
        return task


@dataclass(slots=True)
class Probe:
    """A user with single-chat traffic only, and when each message to them was sent and seen."""

    device: Device
    chat: str
    sent_ms: dict[bytes, float] = field(default_factory=dict)
    released_ms: list[tuple[int, float]] = field(default_factory=list)
    """(messages sent before, end of the hold)."""

    def seen_ms(self) -> dict[bytes, float]:
        return {
            entry.payload_or_ciphertext: frame.at_ms
            for frame in self.device.received
            if frame.opcode is Opcode.PUSH_EVENTS
            for entry in frame.body.events
        }

    def all_seen(self) -> bool:
        """Everything sent is visible."""
        return len(self.device.received) >= len(self.sent_ms) and len(self.seen_ms()) == len(self.sent_ms)

    def latencies_ms(self) -> list[float]:
        """From SEND_MESSAGE to the push, which W of the lane must have covered."""
        seen = self.seen_ms()
        return [seen[payload] - at for payload, at in self.sent_ms.items()]

    def waits(self) -> int:
        """Messages that became visible only after the held lane had moved."""
        seen, sent = self.seen_ms().items(), self.sent_ms
        held_until = {
            payload: next(at for count, at in self.released_ms if number < count) for number, payload in enumerate(sent)
        }
        return sum(at >= held_until[payload] for payload, at in seen)


def p99(values: Sequence[float]) -> float:
    """Nearest rank."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


async def send_during(sender: Device, probes: Sequence[Probe], until_s: float) -> None:
    """One message to every probe each 50 ms, in alternating order, all acknowledged; then until all are seen, or a
    moment. One that a busy node refuses for now is sent again, as a client does: its latency is from the first time."""
    taken = []
    turn = 0
    while (left_s := until_s - time.monotonic()) > 0:
        for probe in probes if turn % 2 else reversed(probes):
            payload = f"{probe.chat} {len(probe.sent_ms)}".encode()
            sender.say(probe.chat, payload)
            probe.sent_ms[payload] = sender.sent[-1].at_ms
            taken.append(asyncio.create_task(_acknowledged(sender, sender.sent[-1])))
        turn += 1
        await asyncio.sleep(min(SEND_INTERVAL_S, left_s))
    await asyncio.gather(*taken)
    try:
        for probe in probes:
            await probe.device.until(probe.all_seen, DRAIN_S)
    except TimeoutError:
        pass


async def release(throttle: Throttle, shard: int, probes: Sequence[Probe]) -> None:
    """End the hold of a shard and wait until everything sent to these probes is visible."""
    at_ms = await throttle.release(shard)
    for probe in probes:
        probe.released_ms.append((len(probe.sent_ms), at_ms))
        await probe.device.until(probe.all_seen)


async def say_to_group(sender: Device, group: str) -> None:
    """One message to the group; a refusal for now is waited out."""
    sender.say(group, b"to all")
    await _acknowledged(sender, sender.sent[-1])


async def _acknowledged(sender: Device, sent: Sent) -> None:
    """Until the message is taken; sent again it is the same one, which may have been committed."""
    request_id = sent.request_id
    while (answer := await sender.answer(request_id)).opcode is not Opcode.SEND_ACK:
        assert answer.body.code in (pb.RATE_LIMITED, pb.REGION_FAILOVER), answer
        await asyncio.sleep(answer.body.retry_after_ms / 1000)
        request_id = sender.send(Opcode.SEND_MESSAGE, sent.body)


def check_isolated(short: Probe, long: Probe) -> None:
    """Criteria 1, 2 and 4: latencies past a short hold and past a long one, measured at the same time."""
    for probe in (short, long):
        assert len(probe.latencies_ms()) == len(probe.sent_ms) > 0
        found_ms = p99(probe.latencies_ms())
        assert found_ms <= LANE_WATERMARK_ADVANCE_P99_MS, f"criterion 1: P99 {found_ms:.0f} ms"
    change = p99(long.latencies_ms()) / p99(short.latencies_ms()) - 1
    assert change <= P99_CHANGE_MAX, f"criterion 2: P99 grew by {change:.0%} with the duration"
    waits = short.waits() + long.waits()
    assert waits == 0, f"criterion 4: {waits} messages waited for the held lane"
