"""The faults of a chaos run: what each needs of its node and what one injection of it does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from qim.app.own_node import OwnNode
from qim.runtime.crash_point import CRASH_POINTS
from tests.support.faults.broker import BROKERS, ReplicatedCluster, SplitCluster, broker_silent, broker_stopped
from tests.support.faults.clock import HostClock
from tests.support.faults.full_disk import SmallDisk
from tests.support.faults.kill import CrashPoints, is_running, kill_node
from tests.support.faults.link_cut import link_cut
from tests.support.faults.older_aof import OlderAof
from tests.support.faults.pause import paused
from tests.support.faults.registry_loss import registry_lost
from tests.support.kafka_server import KafkaServer

TIMES: Final = 20
FULL_STOP_S: Final = 30.0
BROKER_STOP_S: Final = 60.0
TENTH: Final = 0.1
CLOCK_STEPPED_S: Final = 2.0
"""How long a clock stays wrong before somebody sets it right."""
DISK_FULL_S: Final = 2.0
AOF_LOST_S: Final = 2.0
LINK_CUT_S: Final = 1.5
PARTITION_DOWN_S: Final = 3.0
BROKER_LOST_S: Final = 3.0
RESTART_EVERY: Final = 5
POINT_TIMEOUT_S: Final = 20.0
REPLACED_TIMEOUT_S: Final = 30.0
POOLS: Final = ("writer", "fanout", "mailbox")
LINKS: Final = (
    ("gateway", "writer"), ("writer", "fanout"), ("fanout", "mailbox"), ("gateway", "mailbox"),
)  # fmt: skip
_POLL_S: Final = 0.002


class Surroundings(Enum):
    """What a fault needs beside the private servers."""

    NONE = "none"
    SMALL_DISK = "the mailbox server on a small disk"
    BROKER = "a broker"
    TWO_BROKERS = "two brokers"
    THREE_BROKERS = "three brokers, three replicas"


@dataclass(slots=True, kw_only=True)
class Ground:
    """A started node, and what the surroundings of its fault are."""

    node: OwnNode
    clock: HostClock
    crashes: CrashPoints
    disk: SmallDisk | None
    broker: KafkaServer | None
    brokers: SplitCluster | None
    replicated: ReplicatedCluster | None


class Field(Protocol):
    """Where one fault is injected once."""

    ground: Ground

    async def busy(self) -> None:
        """Return when something is in flight. It was when the act began; one that takes its time before it strikes
        waits again."""
        ...

    def strike(self) -> None:
        """The fault begins now: what is in flight is counted, the time of recovery starts."""
        ...


Act = Callable[[Field, int], Awaitable[None]]
"""(field, number of the injection from 0): one injection, ended when the fault is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    name: str
    """`<injector>-<what>`: `make chaos FAULTS=kill,pause` selects by any beginning."""
    act: Act
    times: int = TIMES
    surroundings: Surroundings = Surroundings.NONE
    default_leases: bool = False
    """True: the contract's lease times instead of a tenth of them."""
    recovery_timeout_s: float = 60.0


def _turn(role: str, number: int) -> str:
    return f"{role}-{number % 2}" if role != "admin" else "admin-0"


async def _running(field: Field, *processes: str) -> None:
    async with asyncio.timeout(REPLACED_TIMEOUT_S):
        while not all(is_running(field.ground.node, process) for process in processes):
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def _held(fault: AbstractContextManager[object]) -> AsyncIterator[None]:
    """A fault whose begin or end takes long, beside the people."""
    await asyncio.to_thread(fault.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(fault.__exit__, None, None, None)


def _kill(*roles: str) -> Act:
    """kill -9 of one process of each role, or server."""

    async def act(field: Field, number: int) -> None:
        victims = [role if role.startswith("redis-") else _turn(role, number) for role in roles]
        await _running(field, *victims)
        pids = [field.ground.node.pid(victim) for victim in victims]
        field.strike()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(REPLACED_TIMEOUT_S):
            while any(field.ground.node.processes()[victim] in (0, *pids) for victim in victims):
                await asyncio.sleep(_POLL_S)

    return act


async def _kill_supervisor(field: Field, _: int) -> None:
    field.strike()
    await asyncio.to_thread(kill_node, field.ground.node)


def _crash(point: str) -> Act:
    async def act(field: Field, _: int) -> None:
        field.ground.crashes.arm(point)
        try:
            async with asyncio.timeout(POINT_TIMEOUT_S):
                while field.ground.crashes.is_armed(point):
                    await asyncio.sleep(_POLL_S)
        finally:
            field.ground.crashes.disarm(point)
        field.strike()

    return act


def _pause(role: str, lasts_s: float) -> Act:
    async def act(field: Field, number: int) -> None:
        pid = field.ground.node.pid(_turn(role, number))
        field.strike()
        with paused(pid):
            await asyncio.sleep(lasts_s)

    return act


async def _older_aof(field: Field, _: int) -> None:
    older = OlderAof(field.ground.node)
    await asyncio.to_thread(older.copy)
    await asyncio.sleep(AOF_LOST_S)
    await field.busy()
    field.strike()
    await asyncio.to_thread(older.restart)


async def _full_disk(field: Field, _: int) -> None:
    assert field.ground.disk is not None
    field.strike()
    field.ground.disk.fill()
    try:
        await asyncio.sleep(DISK_FULL_S)
    finally:
        field.ground.disk.free_up()


def _broker_stop(lasts_s: float) -> Act:
    """Every fifth time it ends and is started again, which costs seconds; else it falls silent."""

    async def act(field: Field, number: int) -> None:
        broker = field.ground.broker
        assert broker is not None
        field.strike()
        async with _held((broker_silent if number % RESTART_EVERY else broker_stopped)(broker)):
            await asyncio.sleep(lasts_s)

    return act


async def _partition_down(field: Field, number: int) -> None:
    """Every fifth time its broker dies and the partition has no leader; else it is led by one who is silent."""
    brokers = field.ground.brokers
    assert brokers is not None
    field.strike()
    async with _held(brokers.partitions_silent() if number % RESTART_EVERY else brokers.partitions_down()):
        await asyncio.sleep(PARTITION_DOWN_S)


def _broker_lost(count: int) -> Act:
    """kill -9 of so many of three: of one the others take its place, of two nothing is written until one is back."""

    async def act(field: Field, number: int) -> None:
        cluster = field.ground.replicated
        assert cluster is not None
        field.strike()
        async with _held(cluster.lost(*((number + one) % BROKERS for one in range(count)))):
            await asyncio.sleep(BROKER_LOST_S)

    return act


def _clock_back(by_ms: int, *, set_right_after_s: float = CLOCK_STEPPED_S) -> Act:
    """`set_right_after_s` 0: nobody does, the clock itself has to get there."""

    async def act(field: Field, _: int) -> None:
        field.strike()
        field.ground.clock.step(-by_ms)
        if set_right_after_s:
            await asyncio.sleep(set_right_after_s)
            field.ground.clock.set_right()

    return act


async def _registry_loss(field: Field, number: int) -> None:
    role = ("writer", "fanout", "mailbox", "gateway")[number % 4]
    victim = _turn(role, number // 4)
    await _running(field, victim)
    field.strike()
    with registry_lost(field.ground.node, victim) as cut:
        assert cut, f"{victim} had no connection to lose"
        await asyncio.sleep(FULL_STOP_S * TENTH)


async def _link_cut(field: Field, number: int) -> None:
    one, other = LINKS[number % len(LINKS)]
    ends = _turn(one, number // len(LINKS)), _turn(other, number // len(LINKS) // 2)
    await _running(field, *ends)
    field.strike()
    with link_cut(field.ground.node, *ends) as cut:
        assert cut, f"there was no link between {ends}"
        await asyncio.sleep(LINK_CUT_S)


FAULTS: Final = (
    *(FaultKind(name=f"kill-{role}", act=_kill(role)) for role in (*POOLS, "gateway", "admin")),
    FaultKind(name="kill-supervisor", act=_kill_supervisor),
    *(FaultKind(name=f"crash-{point.replace('_', '-')}", act=_crash(point)) for point in CRASH_POINTS),
    FaultKind(name="redis-core", act=_kill("redis-core")),
    FaultKind(name="redis-mailbox", act=_kill("redis-mailbox")),
    FaultKind(name="redis-both", act=_kill("redis-core", "redis-mailbox")),
    FaultKind(name="older-aof", act=_older_aof),
    FaultKind(name="full-disk", act=_full_disk, surroundings=Surroundings.SMALL_DISK),
    *(FaultKind(name=f"pause-{role}", act=_pause(role, FULL_STOP_S * TENTH)) for role in POOLS),
    *(
        FaultKind(name=f"pause-{role}-30s", act=_pause(role, FULL_STOP_S), times=1, default_leases=True)
        for role in POOLS
    ),
    FaultKind(name="registry-loss", act=_registry_loss),
    FaultKind(name="link-cut", act=_link_cut),
    FaultKind(name="clock-back-3s", act=_clock_back(3_000)),
    FaultKind(name="clock-back-30s", act=_clock_back(30_000)),
    FaultKind(name="clock-back-30s-for-good", act=_clock_back(30_000, set_right_after_s=0), times=1),
    *(
        FaultKind(name=f"kafka-kill-{role}", act=_kill(role), surroundings=Surroundings.BROKER)
        for role in POOLS
    ),
    FaultKind(name="kafka-kill-supervisor", act=_kill_supervisor, surroundings=Surroundings.BROKER),
    FaultKind(
        name="broker-stop", act=_broker_stop(BROKER_STOP_S * TENTH), surroundings=Surroundings.BROKER
    ),
    FaultKind(
        name="broker-stop-60s", act=_broker_stop(BROKER_STOP_S), times=1, surroundings=Surroundings.BROKER,
        default_leases=True, recovery_timeout_s=120.0,
    ),
    FaultKind(name="partition-down", act=_partition_down, surroundings=Surroundings.TWO_BROKERS),
    *(
        FaultKind(
            name=name, act=_broker_lost(count), surroundings=Surroundings.THREE_BROKERS, default_leases=True
        )
        for count, name in ((1, "broker-lost"), (2, "brokers-lost"))
    ),
)  # fmt: skip


def selected(names: str) -> list[FaultKind]:
    """Faults whose name begins with one of the comma-separated words; all for "". ValueError for a word of none."""
    words = [word for word in names.split(",") if word]
    for word in words:
        if not any(fault.name.startswith(word) for fault in FAULTS):
            raise ValueError(f"no fault begins with {word}; there are {', '.join(fault.name for fault in FAULTS)}")
    return [fault for fault in FAULTS if not words or fault.name.startswith(tuple(words))]
