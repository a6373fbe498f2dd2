from __future__ import annotations

import pytest

from qim.core.hlc import HybridClock, LatestWall
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


def test_a_bucket_without_ids_notices_a_large_step_by_the_others() -> None:
    latest = LatestWall()
    busy, idle = (HybridClock(writer_id=n, regression_reject_ms=5000, latest=latest) for n in range(2))
    busy.allocate(T0)
    with pytest.raises(ClockUnsafe):
        idle.allocate(T0 - 5001)
    assert message_id_parts(idle.allocate(T0 - 5000)) == (995_000, 0, 1, 0)


def test_what_a_store_holds_binds_its_bucket_alone() -> None:
    """A writer whose clock was ahead leaves ids of the future: they must not stop every bucket of its successors."""
    latest = LatestWall()
    ahead, other = (HybridClock(writer_id=n, regression_reject_ms=5000, latest=latest) for n in range(2))
    ahead.observe(compose_message_id(1_000_000 + 3_600_000, 0, 0, 0))
    with pytest.raises(ClockUnsafe):
        ahead.allocate(T0)
    assert message_id_parts(other.allocate(T0))[0] == 1_000_000
