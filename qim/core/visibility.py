"""Membership intervals and what a member may see (§7.5, ADR-0021).

An interval is `(joined_at, left_at)`: `joined_at` is an open lower bound, `left_at` itself and everything after is
invisible. People leave and come back, so a member has a list of intervals in ascending order; only the last may be
open.
Packed form: big-endian u64 pairs, an open end is `OPEN_END`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

OPEN_END: Final = (1 << 63) - 1


class Interval(NamedTuple):
    joined_at: int
    left_at: int = OPEN_END

    def contains(self, conversation_seq: int) -> bool:
        return self.joined_at < conversation_seq < self.left_at


FULL: Final = (Interval(0, OPEN_END),)
"""Single chat: always the whole conversation (§7.5)."""


def is_visible(intervals: tuple[Interval, ...], conversation_seq: int) -> bool:
    """True if any interval contains the sequence."""
    return any(interval.contains(conversation_seq) for interval in intervals)


def is_active(intervals: tuple[Interval, ...]) -> bool:
    """True if the last interval is still open."""
    return bool(intervals) and intervals[-1].left_at == OPEN_END


def visible_upper_bound(intervals: tuple[Interval, ...], latest: int) -> int:
    """Greatest sequence this member may ever see in a conversation whose head is `latest`."""
    return min(latest, intervals[-1].left_at - 1) if intervals else 0


def pack_intervals(intervals: tuple[Interval, ...]) -> bytes:
    return b"".join(struct.pack(">QQ", *interval) for interval in intervals)


def unpack_intervals(packed: bytes) -> tuple[Interval, ...]:
    return tuple(Interval(*pair) for pair in struct.iter_unpack(">QQ", packed))
