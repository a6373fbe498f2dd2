"""Requests in flight: matching, window, deadlines."""

from __future__ import annotations

import asyncio

import pytest

from qim.backplane.api import PeerUnavailable
from qim.backplane.requests import DeadlineSweeper, InFlight


class StepClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms


class Asked:
    """Keeps how a request ended."""

    def __init__(self) -> None:
        self.outcomes: list[bytes | PeerUnavailable] = []

    def __call__(self, outcome: bytes | PeerUnavailable) -> None:
        self.outcomes.append(outcome)

    def reasons(self) -> list[str]:
        return [str(outcome) for outcome in self.outcomes]


def test_an_answer_reaches_its_own_request() -> None:
    in_flight = InFlight("core-0")
    first, second = Asked(), Asked()
    first_id, second_id = in_flight.open(first), in_flight.open(second)
    assert first_id != second_id
    assert in_flight.answer(second_id, b"two")
    assert second.outcomes == [b"two"]
    assert first.outcomes == []
    assert not in_flight.answer(second_id, b"again")
    assert len(in_flight) == 1


def test_a_full_window_refuses() -> None:
    in_flight = InFlight("core-0", in_flight_max=1)
    in_flight.open(Asked())
    with pytest.raises(PeerUnavailable, match="in flight"):
        in_flight.open(Asked())


def test_a_lost_link_fails_all() -> None:
    in_flight = InFlight("core-0")
    asked = [Asked() for _ in range(3)]
    for one in asked:
        in_flight.open(one)
    in_flight.fail_all("link lost")
    assert [one.reasons() for one in asked] == [["core-0: link lost"]] * 3
    assert len(in_flight) == 0


def test_a_handler_that_raises_does_not_reach_the_link() -> None:
    def broken(outcome: bytes | PeerUnavailable) -> None:
        raise RuntimeError("defect")

    in_flight = InFlight("core-0")
    next_one = Asked()
    broken_id, next_id = in_flight.open(broken), in_flight.open(next_one)
    assert in_flight.answer(broken_id, b"x")
    assert in_flight.answer(next_id, b"y")
    assert next_one.outcomes == [b"y"]


async def test_deadlines_are_met_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qim.backplane.requests.SWEEP_INTERVAL_MS", 1)
    clock = StepClock()
    sweeper = DeadlineSweeper(clock)
    in_flight = InFlight("core-0")
    slow, quick, answered = Asked(), Asked(), Asked()
    sweeper.watch(in_flight, in_flight.open(slow), 2000)
    sweeper.watch(in_flight, in_flight.open(quick), 100)
    answered_id = in_flight.open(answered)
    sweeper.watch(in_flight, answered_id, 100)
    in_flight.answer(answered_id, b"in time")
    await asyncio.sleep(0.01)
    clock.now_ms = 99.5
    await asyncio.sleep(0.01)
    assert quick.outcomes == []
    clock.now_ms = 150
    while not quick.outcomes:
        await asyncio.sleep(0.001)
    assert quick.reasons() == ["core-0: no answer in time"]
    assert answered.outcomes == [b"in time"]
    assert slow.outcomes == []
    clock.now_ms = 2100
    while not slow.outcomes:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert (len(slow.outcomes), len(quick.outcomes)) == (1, 1)
    sweeper.close()
