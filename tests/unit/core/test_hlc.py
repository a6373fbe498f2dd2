from __future__ import annotations

import pytest

from qim.core.hlc import HybridClock
from qim.core.seq import MESSAGE_EPOCH_UNIX_MS, SEQ_IN_MS_MAX, compose_message_id, message_id_parts
from qim.errors import ClockUnsafe, ErrorCode

T0 = MESSAGE_EPOCH_UNIX_MS + 1_000_000


def _clock() -> HybridClock:
    return HybridClock(writer_id=7, regression_reject_ms=5000)


def test_ids_carry_time_and_writer() -> None:
    assert message_id_parts(_clock().allocate(T0)) == (1_000_000, 0, 7, 0)


def test_ids_grow_within_a_millisecond() -> None:
    clock = _clock()
    made = [clock.allocate(T0) for _ in range(3)]
    assert made == sorted(made)
    assert [message_id_parts(one)[3] for one in made] == [0, 1, 2]


def test_a_small_step_back_is_absorbed() -> None:
    clock = _clock()
    first = clock.allocate(T0)
    assert clock.allocate(T0 - 5000) > first


def test_a_large_step_back_is_refused() -> None:
    clock = _clock()
    clock.allocate(T0)
    with pytest.raises(ClockUnsafe) as refused:
        clock.allocate(T0 - 5001)
    assert refused.value.code is ErrorCode.CLOCK_UNSAFE


def test_a_successor_never_reissues_what_is_stored() -> None:
    stored = compose_message_id(1_000_004, 0, 7, 9)
    clock = _clock()
    clock.observe(stored)
    assert clock.allocate(T0) > stored
    clock.observe(compose_message_id(5, 0, 7, 0))
    assert clock.allocate(T0) > stored


def test_a_full_millisecond_borrows_from_the_next() -> None:
    clock = _clock()
    clock.observe(compose_message_id(1_000_000, 0, 7, SEQ_IN_MS_MAX))
    assert message_id_parts(clock.allocate(T0)) == (1_000_001, 0, 7, 0)
