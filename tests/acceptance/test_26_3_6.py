"""26.3.6 Lane watermark isolation: all criteria.

A 100,000-member group is expanded on two shards of one node; lane 0 is stretched to 120 s on one of them and to 30 s,
four times, on the other. Users of lane 1 of both shards get single-chat messages at the same instants, so that the two
P99 are measured under the same load (criterion 2). The control group (`lane_count` 1) is another cluster that runs
meanwhile.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qim
from qim.core.seq import LaneVector
from qim.shard_workers.mailbox import runner
from qim.shard_workers.mailbox.lanes import Work
from qim.shard_workers.mailbox.machine import ShardMachine
from tests.acceptance.devices import Device, direct
from tests.acceptance.harness import Node, named_users, running_node
from tests.acceptance.lane_isolation import (
    LANE_WATERMARK_ADVANCE_P99_MS,
    Probe,
    Throttle,
    check_isolated,
    p99,
    release,
    say_to_group,
    send_during,
)

SHARDS = 2
LONG, SHORT = 0, 1
"""Shards of the 120 s and of the 30 s dispatches."""
SHORT_S, LONG_S = 30.0, 120.0
CONTROL_S = 31.0
"""P99 of messages sent evenly over it is above 30 s if all of them wait for its end."""
GROUP_MEMBERS = 100_000
SETUP_S = 150.0
"""For the announcements of two such groups at once, on whatever the machine has left: no bound of the case."""
VARIANT_MEMBERS, VARIANT_S = 4_000, 4.0


async def crowd(node: Node, members: int) -> tuple[Device, str]:
    """The creator of a group of that size, online, when everybody has got its announcement."""
    creator = named_users(1, prefix="creator", without=(0, 1))[0]
    group = await node.create_group("crowd", creator, [f"m{number}" for number in range(members - 1)])
    await node.delivered(SETUP_S)
    return await node.online(creator), group


async def probe(node: Node, sender: str, shard: int, lane: int) -> Probe:
    parameters = node.parameters
    (user,) = named_users(
        1, shard=shard, lane=lane, prefix="z", shards=parameters.mailbox_shard_count, lanes=parameters.lane_count
    )
    return Probe(await node.online(user), direct(sender, user))


async def measure(node: Node, throttle: Throttle, *, members: int, short_s: float, rounds: int) -> tuple[Probe, Probe]:
    """The operation: (probe past the short holds, probe past the long one)."""
    creator, group = await crowd(node, members)
    (sender,) = named_users(1, prefix="sender", without=(0, 1))
    device = await node.online(sender)
    short, long = await probe(node, sender, SHORT, 1), await probe(node, sender, LONG, 1)
    throttle.arm(LONG, short_s * rounds)
    for _ in range(rounds):
        throttle.arm(SHORT, short_s)
        await say_to_group(creator, group)
        hold = await throttle.in_force(SHORT)
        await throttle.in_force(LONG)
        await send_during(device, (short, long), hold.ends_s())
        await release(throttle, SHORT, (short,))
    await send_during(device, (), (await throttle.in_force(LONG)).ends_s())
    await release(throttle, LONG, (long,))
    return short, long


async def measure_control() -> Probe:
    """One lane: everything of the shard waits for the group."""
    throttle = Throttle()
    async with running_node(chunk_gate=throttle, mailbox_shard_count=1, lane_count=1) as node:
        throttle.node = node
        creator, group = await crowd(node, GROUP_MEMBERS)
        sender = await node.online("sender")
        control = await probe(node, "sender", 0, 0)
        throttle.arm(0, CONTROL_S)
        await say_to_group(creator, group)
        hold = await throttle.in_force(0)
        await send_during(sender, (control,), hold.ends_s())
        await release(throttle, 0, (control,))
        return control


async def measure_isolation() -> tuple[Probe, Probe]:
    throttle = Throttle()
    async with running_node(chunk_gate=throttle, mailbox_shard_count=SHARDS) as node:
        throttle.node = node
        rounds = int(LONG_S / SHORT_S)
        return await measure(node, throttle, members=GROUP_MEMBERS, short_s=SHORT_S, rounds=rounds)


@pytest.mark.timeout(600)
async def test_a_large_group_holds_up_nobody_on_another_lane() -> None:
    async with asyncio.TaskGroup() as both:  # one that fails ends the other, with its node
        isolation, alone = both.create_task(measure_isolation()), both.create_task(measure_control())
    (short, long), control = isolation.result(), alone.result()
    figures = {"short": short, "long": long, "control": control}
    for name, found in figures.items():
        print(f"{name}: P99 {p99(found.latencies_ms()):.1f} ms of {len(found.sent_ms)} messages")
    check_isolated(short, long)  # criteria 1, 2, 4
    assert p99(control.latencies_ms()) > SHORT_S * 1000  # criterion 3
    assert control.waits() == len(control.sent_ms)


class AllLanesTogether(ShardMachine):
    """The implementation the case exists to catch: W moves by whole records, on every lane at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finished: list[tuple[Work, int]] = []

    def _advance(self) -> tuple[LaneVector, list[tuple[Work, int]]]:
        _, finished = super()._advance()
        self.finished += finished
        heads = [head.offset for lane in self.lanes.active() if (head := self.lanes.head(lane)) is not None]
        end = min(heads, default=self.next_offset) - 1
        covered = [passed for passed in self.finished if passed[0].offset <= end]
        self.finished = [passed for passed in self.finished if passed[0].offset > end]
        return LaneVector(tuple(max(self.seq_of(end), sent) for sent in self._sent.values)), covered


async def test_an_implementation_that_moves_all_lanes_together_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ShardMachine", AllLanesTogether)
    throttle = Throttle()
    async with running_node(chunk_gate=throttle, mailbox_shard_count=SHARDS) as node:
        throttle.node = node
        short, long = await measure(node, throttle, members=VARIANT_MEMBERS, short_s=VARIANT_S, rounds=1)
    assert p99(short.latencies_ms()) > LANE_WATERMARK_ADVANCE_P99_MS
    assert short.waits() == len(short.sent_ms)
    with pytest.raises(AssertionError, match="criterion 1"):
        check_isolated(short, long)  # criterion 6


def minima_of_w() -> Iterator[str]:
    """Functions that take a minimum over lanes."""
    for path in Path(qim.__path__[0]).rglob("*.py"):
        for outer in ast.walk(ast.parse(path.read_text())):
            if not isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in ast.walk(outer):
                if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in ("min", "minimum"):
                    text = ast.unparse(call)
                    if ".minimum()" in text or any(name in text for name in ("acked", "published", "self.values")):
                        yield f"{path.stem}.{outer.name}"


def test_the_minimum_over_lanes_is_for_checkpoints_alone() -> None:
    assert set(minima_of_w()) == {
        "seq.minimum",
        "seq.__repr__",
        "machine.next_call",  # writes the checkpoint (fold and C) once min(W) has reached it
        "mailbox_layout.check_append",  # the store refuses a checkpoint above min(W)
        "runner._observe_lanes",  # lane_watermark_skew_seq (§24.1.4), a metric by definition max(W) - min(W)
    }  # criterion 5
