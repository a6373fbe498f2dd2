"""The heartbeat time wheel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qim.gateway.wheel import SLOTS, HeartbeatWheel


def test_a_connection_is_looked_at_at_its_tick() -> None:
    wheel = HeartbeatWheel(now_ms=0, tick_ms=1000)
    wheel.hang(1, 2500)
    wheel.hang(2, 3000)
    wheel.hang(3, 3001)
    assert wheel.turn(2999) == ([], 1)
    assert wheel.turn(3000) == ([1, 2], 0)
    assert wheel.turn(3999) == ([], 0)
    assert wheel.turn(4000) == ([3], 0)
    assert wheel.turn(5000) == ([], 0)


def test_what_is_due_already_comes_with_the_next_tick() -> None:
    wheel = HeartbeatWheel(now_ms=10_000, tick_ms=1000)
    wheel.hang(1, 0)
    assert wheel.turn(11_000) == ([1], 0)


def test_far_deadlines_are_looked_at_on_the_way() -> None:
    wheel = HeartbeatWheel(now_ms=0, tick_ms=1)
    wheel.hang(1, 10 * SLOTS)
    assert wheel.turn(SLOTS - 2) == ([], SLOTS - 3)
    assert wheel.turn(SLOTS - 1) == ([1], 0)


def test_a_late_loop_misses_ticks_but_no_connection() -> None:
    wheel = HeartbeatWheel(now_ms=0, tick_ms=1)
    for number in range(SLOTS):
        wheel.hang(number, number)
    reached, missed = wheel.turn(3 * SLOTS)
    assert sorted(reached) == list(range(SLOTS))
    assert missed == 3 * SLOTS - 1


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 300)), min_size=1, max_size=40),
    st.integers(1, 50),
)
def test_nobody_is_late_by_more_than_a_tick(hung: list[tuple[int, int]], tick_ms: int) -> None:
    wheel = HeartbeatWheel(now_ms=0, tick_ms=tick_ms)
    due = {number: after for number, (after, _) in enumerate(hung)}
    for number, after in due.items():
        wheel.hang(number, after)
    seen: dict[int, int] = {}
    for now_ms in range(0, 2000 + 2 * tick_ms, tick_ms):
        for number in wheel.turn(now_ms)[0]:
            if now_ms >= due[number]:
                seen[number] = now_ms
            else:
                wheel.hang(number, due[number])
    assert seen.keys() == due.keys()
    assert all(due[number] <= at < max(due[number], 1) + tick_ms for number, at in seen.items())
