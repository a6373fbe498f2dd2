"""Play one day against a node: everybody does what the script says, then every device is read and judged."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from qim.app.connect import AdminClient, NodeAddress
from qim.app.latency import summarize
from qim.app.own_node import pid_of
from qim.app.replay.chaos import BacklogProbe, Chaos
from qim.app.replay.checker import check
from qim.app.replay.crowd import Crowd, Device
from qim.app.replay.evidence import DeviceState, RunDir, RunFacts
from qim.app.replay.plan import Act, DayPlan, Step
from qim.app.replay.report import DayReport, Kill, SlowDelivery
from qim.app.replay.scan import StoredGroup, scan_group
from qim.core.ids import group_conversation_id
from qim.core.visibility import is_visible
from qim.runtime.clock import Clock

CONVERGE_TIMEOUT_S: Final = 90.0
"""A device that was told nothing finds a gap by its next PONG at the latest (§15.1); pings are 60 s apart at first."""
BROADCAST_MEMBERS_MAX: Final = 500
"""`membership_event_broadcast_max_members` (B.5.1)."""
SLOWEST_KEPT: Final = 50
_KILL_WAIT_S: Final = 20.0
_CHAOS_PACE_S: Final = 0.005
_LOGINS_AT_ONCE: Final = 16
_PROGRESS_EVERY_S: Final = 1.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRun:
    """How a day is played. `victims`: (role, process) to kill, in order; empty = no chaos."""

    plan: DayPlan
    node: NodeAddress
    tenant_id: str
    run_name: str
    """Makes users and group of this run differ from those of every other run on the node."""
    seed: int
    speed: float
    victims: Sequence[tuple[str, str]]
    evidence: RunDir
    notes: Sequence[str]


async def play_day(run: DayRun, clock: Clock) -> DayReport:
    """Play, wait until all devices hold what they must, save the evidence and judge it."""
    started_ms = clock.monotonic_ms()
    group_id = f"day-{run.plan.name}-{run.run_name}"
    node = run.node
    probe = BacklogProbe(node.core_address, node.mailbox_address, node.mailbox_shard_count, commit_log=node.commit_log)
    try:
        async with AdminClient(run.node) as admin, asyncio.TaskGroup() as tasks:
            crowd = Crowd(
                node=run.node,
                admin=admin,
                tenant_id=run.tenant_id,
                group_id=group_id,
                run_dir=run.evidence,
                clock=clock,
                user_id_of=lambda name: f"{name}-{run.run_name}",
                tasks=tasks,
            )
            player = _Player(run, crowd, probe, clock, started_ms)
            progress = tasks.create_task(player.show_progress())
            kills = await player.play(group_id)
            stored = scan_group(run.node, run.tenant_id, group_id)
            converged = await player.converge(stored)
            progress.cancel()
            await crowd.close()
    finally:
        probe.close()
    _save(run, crowd, stored, converged)
    deliveries = sum(len(device.shown) for device in crowd.devices.values())
    online = _online_deliveries(crowd, started_ms)
    return DayReport(
        day=run.plan.name,
        people=len(run.plan.people),
        devices=len(crowd.devices),
        messages=len(crowd.ledger.sent),
        deliveries=deliveries,
        elapsed_s=(clock.monotonic_ms() - started_ms) / 1000,
        ack=summarize(crowd.ledger.ack_latencies_ms()),
        delivery=summarize([slow.latency_ms for slow in online]),
        slowest=nlargest(SLOWEST_KEPT, online),
        findings=check(run.evidence.load()),
        kills=kills,
        kills_wanted=len(run.victims),
        notes=run.notes,
    )


def _online_deliveries(crowd: Crowd, started_ms: float) -> list[SlowDelivery]:
    return [
        SlowDelivery(
            found.latency_ms,
            f"{device.user}/{device.name}",
            found.client_message_id,
            (found.sent_at_ms - started_ms) / 1000,
        )
        for device in crowd.devices.values()
        for seen in device.seen
        if (found := crowd.ledger.delivery_of(device.user, seen)) is not None
    ]


def _save(run: DayRun, crowd: Crowd, stored: StoredGroup, converged: set[tuple[str, str]]) -> None:
    run.evidence.save(
        RunFacts(
            conversation_id=group_conversation_id(f"day-{run.plan.name}-{run.run_name}"),
            plan=run.plan.name,
            seed=run.seed,
            control_reaches_all=len(run.plan.people) <= BROADCAST_MEMBERS_MAX,
            devices=tuple(
                DeviceState(
                    user=device.user,
                    device=device.name,
                    converged=(device.user, device.name) in converged,
                    shown_twice=tuple(device.shown_twice),
                )
                for device in crowd.devices.values()
            ),
        ),
        crowd.ledger.sent,
        stored.records,
        stored.intervals,
    )


class _Player:
    """One run in progress."""

    def __init__(self, run: DayRun, crowd: Crowd, probe: BacklogProbe, clock: Clock, started_ms: float) -> None:
        self._run = run
        self._crowd = crowd
        self._probe = probe
        self._clock = clock
        self._started_ms = started_ms
        self._phase = "logging in"

    async def play(self, group_id: str) -> list[Kill]:
        """Everybody logs in, the group is made, the day goes by; the kills that happened meanwhile."""
        plan = self._run.plan
        cut = {step.user for step in plan.steps if step.act is Act.CUT}
        limit = asyncio.Semaphore(_LOGINS_AT_ONCE)

        async def arrive(index: int) -> None:
            async with limit:
                person = plan.people[index]
                await self._crowd.add_person(person, cut=person.user in cut)
                for device in person.online_devices:
                    self._crowd.login(self._crowd.user_id_of(person.user), device)

        await asyncio.gather(*(arrive(index) for index in range(len(plan.people))))
        await self._crowd.wait_ready()
        await self._create_group(group_id)
        self._phase = "playing"
        kills = await self._play_steps(plan.steps)
        self._phase = "waiting for the last ACKs"
        await self._crowd.finish()
        return kills

    async def _create_group(self, group_id: str) -> None:
        members = [self._crowd.user_id_of(person.user) for person in self._run.plan.people if person.initial_member]
        creator = next(
            self._crowd.user_id_of(person.user)
            for person in self._run.plan.people
            if person.initial_member and person.online_devices
        )
        device = next(device for (user, _), device in self._crowd.devices.items() if user == creator)
        await device.client.create_group(group_id, members)

    async def _play_steps(self, steps: Sequence[Step]) -> list[Kill]:
        """The steps are spread over the kills: each kill has its share of them, sent slowly enough that the moment when
        something is in flight is not missed, and more as long as its victim waits for such a moment."""
        kills: list[Kill] = []
        pace = self._pace(steps)
        chaos = Chaos(
            self._probe,
            self._crowd.ledger,
            self._clock,
            lambda name: pid_of(self._run.node.run_dir, name),
            started_ms=self._started_ms,
        )
        waiting = deque(steps)
        victims = self._run.victims
        for index, (role, process) in enumerate(victims):
            self._phase = f"killing {process}"
            killing = asyncio.get_running_loop().create_task(chaos.kill(role, process, timeout_s=_KILL_WAIT_S))
            share_left = len(waiting) // (len(victims) - index + 1)
            while waiting and (share_left > 0 or chaos.looking):
                await self._crowd.do(waiting.popleft())
                await asyncio.sleep(_CHAOS_PACE_S)
                share_left -= 1
            kills.append(await killing)
        self._phase = "playing"
        for step in waiting:
            await pace(step)
            await self._crowd.do(step)
        return kills

    def _pace(self, steps: Sequence[Step]) -> Callable[[Step], asyncio.Future[None]]:
        """Waits until a step is due: at once, or at its time of day divided by the speed."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        first_ms = steps[0].t_ms

        def wait(step: Step) -> asyncio.Future[None]:
            due_s = began_s + (step.t_ms - first_ms) / 1000 / self._run.speed if self._run.speed else 0.0
            return asyncio.ensure_future(asyncio.sleep(max(due_s - loop.time(), 0.0)))

        return wait

    async def converge(self, stored: StoredGroup) -> set[tuple[str, str]]:
        """Devices that are online and hold as many messages as they must within CONVERGE_TIMEOUT_S."""
        self._phase = "converging"
        expected = {
            user: {
                bytes.fromhex(record.message_id)
                for record in stored.records
                if is_visible(intervals, record.conversation_seq)
            }
            for user, intervals in stored.intervals.items()
        }
        own = {line.message_id: line.user for line in self._crowd.ledger.sent}
        waiting = dict(self._crowd.devices)
        converged: set[tuple[str, str]] = set()
        deadline_ms = self._clock.monotonic_ms() + CONVERGE_TIMEOUT_S * 1000
        while waiting and self._clock.monotonic_ms() < deadline_ms:
            for key, device in list(waiting.items()):
                if self._holds(device, expected.get(device.user, set()), own):
                    converged.add(key)
                    del waiting[key]
            await asyncio.sleep(_POLL_S)
        return converged

    def _holds(self, device: Device, expected: set[bytes], own: dict[str, str]) -> bool:
        """What a device has sent itself it shows by its SEND_ACK, without being told again."""
        missing = expected - device.shown
        return device.client.live and all(own.get(message_id.hex()) == device.user for message_id in missing)

    async def show_progress(self) -> None:
        """A line every second on a terminal's standard error."""
        if not sys.stderr.isatty():
            return
        total = self._run.plan.count(Act.SEND)
        while True:
            sent = len(self._crowd.ledger.sent)
            waiting = len(self._crowd.ledger.unacknowledged())
            line = f"{self._run.plan.name}: {self._phase}, {sent}/{total} sent, {waiting} un-ACKed"
            print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(_PROGRESS_EVERY_S)
