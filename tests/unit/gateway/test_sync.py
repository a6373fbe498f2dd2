"""Login barrier, pull window, dirty mark."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qim.core.coverage import split_range
from qim.gateway.sync import DirtyMark, HeldPush, LoginBarrier, PullWindow, QueuedPull, Verdict
from qim.protocol.qim_pb2 import PullMailbox


def barrier(*, items_max: int = 100, bytes_max: int = 1 << 20) -> LoginBarrier:
    return LoginBarrier(started_ms=0, items_max=items_max, bytes_max=bytes_max)


def opened(applied: int, sync_to: int, *, has_offline: bool = True) -> LoginBarrier:
    made = barrier()
    made.open(last_applied_seq=applied, sync_to_seq=sync_to, has_offline=has_offline)
    return made


def push(seq: int, body: bytes = b"body") -> HeldPush:
    return HeldPush(seq, b"ref", body)


def pull(after: int = 0, up_to: int = 0, request_id: int = 1) -> QueuedPull:
    return QueuedPull(request_id, PullMailbox(after_seq=after, up_to_seq=up_to))


def window(**changes: int) -> PullWindow:
    return PullWindow(**{"window": 2, "queue_max": 2, "resync_interval_ms": 5000, **changes})


# --------------------------------------------------------------------------------------------------------- barrier


def test_complete_needs_the_assigned_seq_and_full_coverage() -> None:
    made = opened(10, 40)
    assert not made.complete(40)
    made.answered(10, 20)
    made.answered(30, 40)
    assert not made.complete(40)
    made.answered(20, 30)
    assert not made.complete(39)
    assert not made.complete(41)
    assert made.complete(40)


def test_nothing_offline_is_covered_already() -> None:
    made = opened(10, 40, has_offline=False)
    assert made.complete(40)
    assert not made.complete(10)


def test_coverage_from_elsewhere_does_not_count() -> None:
    made = opened(10, 40)
    made.answered(11, 40)
    assert not made.complete(40)


@given(st.integers(0, 50), st.integers(1, 100), st.integers(1, 6), st.randoms())
def test_windows_in_any_order_complete_exactly_at_the_last(applied: int, span: int, parts: int, random: object) -> None:
    made = opened(applied, applied + span)
    ranges = split_range(applied, applied + span, parts)
    random.shuffle(ranges)  # type: ignore[attr-defined]
    for after, covered in ranges:
        assert not made.complete(applied + span)
        made.answered(after, covered)
    assert made.complete(applied + span)


def test_login_range() -> None:
    made = opened(10, 40)
    assert made.in_range(10, 40)
    assert made.in_range(25, 30)
    assert made.in_range(10, 0)
    assert not made.in_range(9, 40)
    assert not made.in_range(10, 41)
    assert not made.in_range(9, 0)


def test_held_pushes_come_ascending_and_above_the_barrier() -> None:
    made = barrier()
    for seq in (13, 9, 11, 10, 12):
        assert made.hold(push(seq))
    made.open(last_applied_seq=0, sync_to_seq=10, has_offline=False)
    assert [held.mailbox_seq for held in made.release()] == [11, 12, 13]


def test_overflow_drops_everything_and_stays() -> None:
    by_items = barrier(items_max=2)
    assert by_items.hold(push(1))
    assert by_items.hold(push(2))
    assert not by_items.hold(push(3))
    assert not by_items.hold(push(4))
    assert by_items.release() == []
    by_bytes = barrier(bytes_max=1000)
    assert not by_bytes.hold(push(1, b"x" * 1000))
    assert by_bytes.release() == []


# ---------------------------------------------------------------------------------------------------------- window


def offer(made: PullWindow, asked: QueuedPull, now_ms: float = 0, *, repairs: bool = False, pushed: int = 0) -> Verdict:
    return made.offer(asked, now_ms, repairs=repairs, last_pushed_seq=pushed)


def test_window_then_queue_then_refusal() -> None:
    made = window()
    verdicts = [offer(made, pull(request_id=n), repairs=True) for n in range(5)]
    assert verdicts == [Verdict.START, Verdict.START, Verdict.QUEUED, Verdict.QUEUED, Verdict.TOO_MANY]
    following = made.finished()
    assert following is not None
    assert following.request_id == 2
    assert made.finished() == pull(request_id=3)
    assert made.finished() is None
    assert made.finished() is None
    assert offer(made, pull(), repairs=True) is Verdict.START


def test_fallback_pulls_once_per_interval() -> None:
    made = window(window=10)
    assert offer(made, pull()) is Verdict.START
    assert offer(made, pull(), 4999) is Verdict.TOO_SOON
    assert made.resync_wait_ms(4999) == 1
    assert offer(made, pull(), 4999, repairs=True) is Verdict.START
    assert offer(made, pull(up_to=7), 4999) is Verdict.START
    assert offer(made, pull(), 5000) is Verdict.START
    assert made.resync_wait_ms(20_000) == 0


def test_continuation_of_a_batch_with_more_is_no_fallback() -> None:
    made = window(window=10)
    assert offer(made, pull()) is Verdict.START
    made.answered(asked_up_to_seq=0, covered_through_seq=7, has_more=True)
    made.answered(asked_up_to_seq=5, covered_through_seq=5, has_more=False)
    assert offer(made, pull(after=7), 1) is Verdict.START
    made.answered(asked_up_to_seq=0, covered_through_seq=9, has_more=False)
    assert offer(made, pull(after=9), 2) is Verdict.TOO_SOON


def test_a_push_calls_for_one_pull_that_reaches_it() -> None:
    made = window(window=10)
    assert offer(made, pull()) is Verdict.START
    assert offer(made, pull(after=10), 1, pushed=12) is Verdict.START
    made.answered(asked_up_to_seq=0, covered_through_seq=12, has_more=False)
    assert offer(made, pull(after=10), 2, pushed=12) is Verdict.TOO_SOON
    assert offer(made, pull(after=12), 3, pushed=13) is Verdict.START
    assert offer(made, pull(after=13), 4, pushed=13) is Verdict.TOO_SOON


# ----------------------------------------------------------------------------------------------------------- dirty


def test_mark_is_told_once_until_a_pull_begins() -> None:
    mark = DirtyMark()
    assert mark.mark()
    assert not mark.mark()
    mark.pull_starts(0)
    assert mark.mark(), "the pull may have read before this mark"
    assert not mark.mark()


def test_mark_is_cleared_by_a_pull_to_the_watermark_that_began_after_it() -> None:
    mark = DirtyMark()
    early = mark.pull_starts(0)
    mark.mark()
    mark.pulled(generation=early, asked_up_to_seq=0, up_to_seq=50, covered_through_seq=50)
    assert mark.dirty
    later = mark.pull_starts(0)
    mark.pulled(generation=later, asked_up_to_seq=0, up_to_seq=50, covered_through_seq=50)
    assert not mark.dirty


def test_paged_pull_clears_with_its_last_page() -> None:
    mark = DirtyMark()
    mark.mark()
    generation = mark.pull_starts(0)
    mark.pulled(generation=generation, asked_up_to_seq=0, up_to_seq=50, covered_through_seq=20)
    assert mark.dirty
    mark.pull_starts(50)
    mark.pulled(generation=generation, asked_up_to_seq=50, up_to_seq=50, covered_through_seq=50)
    assert not mark.dirty


def test_ranges_of_the_login_clear_nothing() -> None:
    mark = DirtyMark()
    mark.mark()
    generation = mark.pull_starts(40)
    mark.pulled(generation=generation, asked_up_to_seq=40, up_to_seq=40, covered_through_seq=40)
    assert mark.dirty
