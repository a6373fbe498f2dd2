"""Covered-through arithmetic of mailbox pulls (§9.3.2 to §9.3.4)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class PageCut:
    """Where a page ends: `count` rows are returned, everything up to `covered_through_seq` is answered."""

    count: int
    covered_through_seq: int
    has_more: bool


def cut_page(
    seqs: Sequence[int], sizes: Sequence[int], *, up_to_seq: int, max_items: int, max_bytes: int, exhausted: bool
) -> PageCut:
    """Cut a scan at an event-group boundary (rules 1 and 2 of §9.3.3).

    `seqs` ascend inside (after_seq, up_to_seq], one per row; rows of one `mailbox_seq` form a group that is never cut,
    and the first group is always returned whole. `exhausted` tells that the scan reached `up_to_seq`; if it did not,
    the last group may be incomplete and is left for the next page unless it is the only one.
    """
    total = 0
    index = 0
    while index < len(seqs):
        end = index + 1
        while end < len(seqs) and seqs[end] == seqs[index]:
            end += 1
        if end == len(seqs) and not exhausted and index > 0:
            break
        group_bytes = sum(sizes[index:end])
        if index > 0 and (end > max_items or total + group_bytes > max_bytes):
            break
        total += group_bytes
        index = end
    if index == len(seqs) and exhausted:
        return PageCut(index, up_to_seq, False)
    covered = seqs[index - 1]
    return PageCut(index, covered, covered != up_to_seq)


def split_range(after_seq: int, up_to_seq: int, parts: int) -> list[tuple[int, int]]:
    """Split (after, up_to] by value into at most `parts` disjoint ascending (after, up_to] ranges (§9.3.2)."""
    span = up_to_seq - after_seq
    if span <= 0:
        return []
    parts = min(parts, span)
    bounds = [after_seq + span * k // parts for k in range(parts + 1)]
    return [(low, high) for low, high in pairwise(bounds) if high > low]


class CoverageTracker:
    """Which sub-ranges of (start, target] the batches of a session have answered (§9.3.4 check 2)."""

    __slots__ = ("_ranges", "_start")

    def __init__(self, start: int) -> None:
        self._start = start
        self._ranges: list[tuple[int, int]] = []

    def add(self, after_seq: int, covered_through_seq: int) -> None:
        """A batch answered (after_seq, covered_through_seq]."""
        if covered_through_seq > after_seq:
            insort(self._ranges, (after_seq, covered_through_seq))
            self._merge()

    def covered_through(self) -> int:
        """Greatest seq reached from the start without a break."""
        if self._ranges and self._ranges[0][0] <= self._start:
            return max(self._start, self._ranges[0][1])
        return self._start

    def _merge(self) -> None:
        merged = [self._ranges[0]]
        for low, high in self._ranges[1:]:
            last_low, last_high = merged[-1]
            if low <= last_high:
                merged[-1] = (last_low, max(last_high, high))
            else:
                merged.append((low, high))
        self._ranges = merged
