"""A kill falls only while a SEND is un-ACKed and a dispatch is above W; recovery is when both have arrived."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from qim.app.replay.chaos import Backlog, BacklogProbe, Chaos
from qim.core.seq import mailbox_seq
from qim.runtime.clock import SystemClock
from qim.stores.redis import keys

IDLE = Backlog(high=(5,), materialized=(4,))
BUSY = Backlog(high=(7,), materialized=(4,))
DONE = Backlog(high=(9,), materialized=(8,))


class ScriptedProbe:
    """Answers in order, the last one for ever."""

    def __init__(self, *answers: Backlog) -> None:
        self.answers = list(answers)

    def read(self) -> Backlog:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class ScriptedTraffic:
    def __init__(self, *waiting: frozenset[str]) -> None:
        self.waiting = list(waiting)

    def unacknowledged(self) -> frozenset[str]:
        return self.waiting.pop(0) if len(self.waiting) > 1 else self.waiting[0]


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def chaos(probe: ScriptedProbe, traffic: ScriptedTraffic, victim: subprocess.Popen[bytes]) -> Chaos:
    return Chaos(cast(BacklogProbe, probe), traffic, SystemClock(), lambda _: victim.pid, started_ms=0)


async def test_the_kill_waits_until_something_is_in_flight(victim: subprocess.Popen[bytes]) -> None:
    one = frozenset({"m1"})
    probe = ScriptedProbe(IDLE, IDLE, BUSY, BUSY, DONE)
    traffic = ScriptedTraffic(one, one, one, one, one, one, one, frozenset({"m2"}))
    kill = await chaos(probe, traffic, victim).kill("writer", "writer-0", timeout_s=30)
    assert victim.wait(5) == -signal.SIGKILL
    assert kill.met_something
    assert (kill.unacknowledged_sends, kill.dispatches_above_w) == (1, 2)
    assert kill.recovery_ms >= 0


async def test_without_such_a_moment_the_report_says_so(victim: subprocess.Popen[bytes]) -> None:
    traffic = ScriptedTraffic(frozenset())
    kill = await chaos(ScriptedProbe(IDLE), traffic, victim).kill("writer", "writer-0", timeout_s=0)
    assert victim.wait(5) == -signal.SIGKILL
    assert not kill.met_something


class Reads:
    """A redis-py client that knows two keys."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    def mget(self, names: list[str]) -> list[bytes | None]:
        return [self.values.get(name) for name in names]

    def pipeline(self, *, transaction: bool) -> Reads:
        assert not transaction
        self.asked: list[str] = []
        return self

    def hget(self, name: str, field: str) -> None:
        assert field == keys.WATERMARKS_FIELD
        self.asked.append(name)

    def execute(self) -> list[bytes | None]:
        return self.mget(self.asked)

    def close(self) -> None:
        pass


def test_the_lowest_lane_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = BacklogProbe("unix:///nowhere", "unix:///nowhere", 3)
    lanes = struct.pack(">3Q", mailbox_seq(1, 9), mailbox_seq(2, 4), mailbox_seq(2, 9))
    empty = struct.pack(">3Q", 0, mailbox_seq(2, 4), 0)
    monkeypatch.setattr(probe, "_core", Reads({keys.dispatch_next(0): b"10", keys.dispatch_next(1): b"3"}))
    monkeypatch.setattr(probe, "_mailbox", Reads({keys.shard(0): lanes, keys.shard(1): empty}))
    backlog = probe.read()
    assert backlog == Backlog(high=(10, 3, 0), materialized=(4, -1, -1))
    assert backlog.above_w == 5 + 3
    probe.close()
