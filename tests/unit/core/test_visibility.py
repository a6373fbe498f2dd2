from __future__ import annotations

from typing import Any

import pytest

from qim.core import visibility
from qim.core.visibility import Interval
from tests.support.golden import golden


@pytest.mark.parametrize("vector", golden("seq")["intervals"])
def test_interval_bytes(vector: dict[str, Any]) -> None:
    intervals = tuple(Interval(*pair) for pair in vector["intervals"])
    assert visibility.pack_intervals(intervals).hex() == vector["packed"]
    assert visibility.unpack_intervals(visibility.pack_intervals(intervals)) == intervals


def test_both_ends_are_open() -> None:
    intervals = (Interval(3, 6),)
    assert [seq for seq in range(10) if visibility.is_visible(intervals, seq)] == [4, 5]


def test_people_come_back() -> None:
    intervals = (Interval(0, 3), Interval(7))
    assert [seq for seq in range(11) if visibility.is_visible(intervals, seq)] == [1, 2, 8, 9, 10]
    assert visibility.is_active(intervals)
    assert not visibility.is_active(intervals[:1])
    assert not visibility.is_active(())


def test_upper_bound_is_the_head_or_the_leave() -> None:
    assert visibility.visible_upper_bound((Interval(0),), 9) == 9
    assert visibility.visible_upper_bound((Interval(0, 5),), 9) == 4
    assert visibility.visible_upper_bound((), 9) == 0
    assert visibility.is_visible(visibility.FULL, 1)
