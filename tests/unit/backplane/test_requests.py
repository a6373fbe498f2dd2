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


def new_future() -> asyncio.Future[bytes]:
    return asyncio.get_running_loop().create_future()


async def test_an_answer_reaches_its_own_request() -> None:
    in_flight = InFlight("core-0")
    first, second = new_future(), new_future()
    first_id, second_id = in_flight.open(first), in_flight.open(second)
    assert first_id != second_id
    assert in_flight.answer(second_id, b"two")
    assert await second == b"two"
    assert not first.done()
    assert not in_flight.answer(second_id, b"again")
    assert len(in_flight) == 1


async def test_a_full_window_refuses() -> None:
    in_flight = InFlight("core-0", in_flight_max=1)
    in_flight.open(new_future())
    with pytest.raises(PeerUnavailable, match="in flight"):
        in_flight.open(new_future())


async def test_a_lost_link_fails_all() -> None:
    in_flight = InFlight("core-0")
    futures = [new_future() for _ in range(3)]
    for future in futures:
        in_flight.open(future)
    in_flight.fail_all("link lost")
    for future in futures:
        with pytest.raises(PeerUnavailable, match="link lost"):
            await future
    assert len(in_flight) == 0


async def test_a_request_whose_caller_left_is_forgotten() -> None:
    in_flight = InFlight("core-0")
    future = new_future()
    request_id = in_flight.open(future)
    future.cancel()
    assert not in_flight.answer(request_id, b"late")
    assert len(in_flight) == 0


async def test_deadlines_are_met_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qim.backplane.requests.SWEEP_INTERVAL_MS", 1)
    clock = StepClock()
    sweeper = DeadlineSweeper(clock)
    in_flight = InFlight("core-0")
    slow, quick, answered = new_future(), new_future(), new_future()
    sweeper.watch(in_flight, in_flight.open(slow), 2000)
    sweeper.watch(in_flight, in_flight.open(quick), 100)
    answered_id = in_flight.open(answered)
    sweeper.watch(in_flight, answered_id, 100)
    in_flight.answer(answered_id, b"in time")
    clock.now_ms = 150
    with pytest.raises(PeerUnavailable, match="in time"):
        await quick
    assert await answered == b"in time"
    assert not slow.done()
    clock.now_ms = 2100
    with pytest.raises(PeerUnavailable):
        await slow
    sweeper.close()
