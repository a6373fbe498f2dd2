from __future__ import annotations

import time
from pathlib import Path

import pytest

from qim.runtime.clock import STEP_VARIABLE, SteppedClock, SystemClock, process_clock
from tests.support.faults.clock import HostClock


def test_units_are_milliseconds() -> None:
    clock = SystemClock()
    assert abs(clock.unix_ms() - time.time() * 1000) < 1000
    assert abs(clock.monotonic_ms() - time.monotonic() * 1000) < 1000


def test_monotonic_time_does_not_go_back() -> None:
    clock = SystemClock()
    read = [clock.monotonic_ms() for _ in range(100)]
    assert read == sorted(read)


def test_a_stepped_clock_moves_the_wall_clock_alone(tmp_path: Path) -> None:
    host = HostClock(tmp_path / "step")
    clock = SteppedClock(tmp_path / "step")
    assert abs(clock.unix_ms() - time.time() * 1000) < 1000
    before_ms = clock.monotonic_ms()
    host.step(-30_000)
    assert abs(clock.unix_ms() + 30_000 - time.time() * 1000) < 1000
    assert 0 <= clock.monotonic_ms() - before_ms < 1000
    host.step(1_000)
    assert abs(clock.unix_ms() + 29_000 - time.time() * 1000) < 1000
    host.set_right()
    assert abs(clock.unix_ms() - time.time() * 1000) < 1000


def test_a_process_has_the_kernels_clock_unless_a_test_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STEP_VARIABLE, raising=False)
    assert isinstance(process_clock(), SystemClock)
    HostClock(tmp_path / "step")
    monkeypatch.setenv(STEP_VARIABLE, str(tmp_path / "step"))
    assert isinstance(process_clock(), SteppedClock)
