from __future__ import annotations

from qim.core.coverage import CoverageTracker, PageCut, cut_page, split_range


def test_an_exhausted_scan_covers_its_upper_bound() -> None:
    assert cut_page([3, 5], [10, 10], up_to_seq=9, max_items=500, max_bytes=1000, exhausted=True) == PageCut(
        2, 9, False
    )
    assert cut_page([], [], up_to_seq=9, max_items=500, max_bytes=1000, exhausted=True) == PageCut(0, 9, False)


def test_an_event_group_is_never_cut() -> None:
    seqs = [3, 5, 5, 5, 7]
    assert cut_page(seqs, [10] * 5, up_to_seq=9, max_items=2, max_bytes=1000, exhausted=True) == PageCut(1, 3, True)
    assert cut_page(seqs, [10] * 5, up_to_seq=9, max_items=4, max_bytes=1000, exhausted=True) == PageCut(4, 5, True)


def test_the_first_group_is_returned_whole_whatever_its_size() -> None:
    assert cut_page([5, 5, 7], [900, 900, 1], up_to_seq=9, max_items=1, max_bytes=100, exhausted=True) == PageCut(
        2, 5, True
    )


def test_bytes_cut_too() -> None:
    assert cut_page([1, 2, 3], [60, 60, 60], up_to_seq=9, max_items=10, max_bytes=130, exhausted=True) == PageCut(
        2, 2, True
    )


def test_the_last_group_of_an_unfinished_scan_waits_for_the_next_page() -> None:
    assert cut_page([1, 2, 2], [1, 1, 1], up_to_seq=9, max_items=10, max_bytes=99, exhausted=False) == PageCut(
        1, 1, True
    )
    assert cut_page([2, 2], [1, 1], up_to_seq=9, max_items=10, max_bytes=99, exhausted=False) == PageCut(2, 2, True)


def test_a_page_that_ends_on_the_bound_is_the_last() -> None:
    assert cut_page([1, 9], [1, 1], up_to_seq=9, max_items=10, max_bytes=99, exhausted=True).has_more is False


def test_split_range_is_disjoint_and_complete() -> None:
    parts = split_range(10, 110, 4)
    assert parts == [(10, 35), (35, 60), (60, 85), (85, 110)]
    assert split_range(5, 7, 4) == [(5, 6), (6, 7)]
    assert split_range(7, 7, 4) == []


def test_coverage_has_to_be_unbroken() -> None:
    tracker = CoverageTracker(10)
    assert tracker.covered_through() == 10
    tracker.add(20, 30)
    assert tracker.covered_through() == 10
    tracker.add(10, 20)
    assert tracker.covered_through() == 30
    tracker.add(5, 31)
    tracker.add(40, 40)
    assert tracker.covered_through() == 31
