from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from qim.commit_log.api import LogRecord
from qim.shard_workers.feed import GAP_WAIT_MS, READY_RECORDS_MAX, STASHED_HINTS_MAX, LogFeed


def _feed(next_offset: int = 0) -> LogFeed:
    feed = LogFeed(next_offset, poll_interval_ms=1000)
    feed.offer_read([], complete=True, now_ms=0)
    return feed


def _values(feed: LogFeed) -> list[bytes]:
    return [record.value for record in feed.ready]


def test_a_new_feed_reads_the_log_first() -> None:
    assert LogFeed(7, poll_interval_ms=1000).read_due_in_ms(0) == 0


def test_the_next_offset_is_used_at_once_and_the_poll_stays_slow() -> None:
    feed = _feed()
    assert feed.offer_hint(0, [b"a", b"b"], 10)
    assert feed.ready.popleft() == LogRecord(0, b"a")
    assert feed.next_offset == 2
    assert feed.read_due_in_ms(10) == 1000, "the poll is for silence"


def test_what_was_seen_is_not_taken_twice() -> None:
    feed = _feed()
    feed.offer_hint(0, [b"a", b"b"], 0)
    assert feed.offer_hint(0, [b"a", b"b"], 0)
    assert feed.offer_hint(1, [b"b", b"c"], 0)
    assert _values(feed) == [b"a", b"b", b"c"]


def test_a_gap_waits_for_the_crossing_hint_then_reads() -> None:
    feed = _feed()
    assert not feed.offer_hint(2, [b"c"], 100)
    assert feed.read_due_in_ms(100) == GAP_WAIT_MS
    assert feed.offer_hint(0, [b"a", b"b"], 101)
    assert _values(feed) == [b"a", b"b", b"c"]
    assert feed.read_due_in_ms(101) > GAP_WAIT_MS
    assert not feed.offer_hint(5, [b"f"], 200)
    assert feed.read_due_in_ms(200 + GAP_WAIT_MS) == 0
    feed.offer_read([LogRecord(3, b"d"), LogRecord(4, b"e")], complete=True, now_ms=204)
    assert _values(feed) == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_hints_beyond_the_bounds_are_left_in_the_log() -> None:
    feed = _feed()
    for first in range(2, 2 + STASHED_HINTS_MAX + 1):
        feed.offer_hint(first, [b"x"], 0)
    assert feed.read_due_in_ms(0) == 0
    feed = _feed()
    feed.offer_hint(0, [b"x"] * READY_RECORDS_MAX, 0)
    assert not feed.offer_hint(READY_RECORDS_MAX, [b"y"], 0)
    assert feed.room() == 0
    assert feed.read_due_in_ms(0) == 1000, "nothing is read while there is no room"
    feed.ready.clear()
    assert feed.read_due_in_ms(0) == 0


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_mix_of_hints_and_reads_gives_every_record_once_in_order(seed: int, count: int) -> None:
    chance = random.Random(seed)
    log = [bytes((n,)) for n in range(count)]
    hints = [(first, log[first : first + chance.randint(1, 5)]) for first in range(count)]
    chance.shuffle(hints)
    feed, taken = LogFeed(0, poll_interval_ms=1000), []
    for first, values in hints:
        if chance.random() < 0.7:
            feed.offer_hint(first, values, 0)
        if chance.random() < 0.3:
            limit = chance.randint(1, 10)
            found = [LogRecord(n, log[n]) for n in range(feed.next_offset, min(count, feed.next_offset + limit))]
            feed.offer_read(found, complete=len(found) < limit, now_ms=0)
        while feed.ready and chance.random() < 0.5:
            taken.append(feed.ready.popleft())
    feed.offer_read([LogRecord(n, log[n]) for n in range(feed.next_offset, count)], complete=True, now_ms=0)
    taken += feed.ready
    assert taken == [LogRecord(n, value) for n, value in enumerate(log)]
