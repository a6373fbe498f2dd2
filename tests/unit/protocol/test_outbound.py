from __future__ import annotations

from qim.protocol.opcodes import STREAM_BULK, STREAM_CONTROL, STREAM_REALTIME, STREAM_ROOM
from qim.protocol.outbound import OutboundLimits, OutboundQueue, Verdict

ALL = 1 << 30


def _queue(**limits: int) -> OutboundQueue:
    return OutboundQueue(OutboundLimits(**limits))


def _push(queue: OutboundQueue, stream: int, frame: bytes, *, droppable: bool = False) -> Verdict:
    return queue.push(stream, (frame,), droppable=droppable)


def test_control_goes_first() -> None:
    queue = _queue()
    for stream in (STREAM_ROOM, STREAM_BULK, STREAM_REALTIME, STREAM_CONTROL):
        _push(queue, stream, bytes((stream,)))
    assert queue.take(ALL) == [b"\x00", b"\x01", b"\x02", b"\x03"]
    assert (queue.queued_bytes, queue.queued_frames) == (0, 0)
    assert queue.take(ALL) == []


def test_a_stream_keeps_its_order() -> None:
    queue = _queue()
    for number in range(9):
        _push(queue, STREAM_REALTIME, bytes((number,)))
    assert b"".join(queue.take(4) + queue.take(ALL)) == bytes(range(9))


def test_pieces_of_a_frame_stay_together() -> None:
    queue = _queue()
    queue.push(STREAM_REALTIME, (b"head", b"ref", b"body"), droppable=True)
    assert queue.queued_bytes == 11
    assert queue.take(1) == [b"head", b"ref", b"body"]


def test_a_budget_bounds_the_write_but_always_moves_one_frame() -> None:
    queue = _queue()
    for _ in range(3):
        _push(queue, STREAM_BULK, b"x" * 100)
    assert len(queue.take(10)) == 1
    assert len(queue.take(200)) == 2


def test_streams_share_by_weight() -> None:
    queue = _queue(quantum_bytes=10, soft_frames=10_000, hard_frames=10_000)
    for stream in (STREAM_ROOM, STREAM_BULK, STREAM_REALTIME):
        for _ in range(70):
            _push(queue, stream, bytes((stream,)) * 10)
    taken = b"".join(queue.take(700))
    shares = [taken.count(bytes((stream,))) // 10 for stream in (STREAM_REALTIME, STREAM_BULK, STREAM_ROOM)]
    assert shares == [40, 20, 10]


def test_a_large_backlog_does_not_hold_up_realtime_for_more_than_its_slices() -> None:
    queue = _queue()
    for _ in range(8):
        _push(queue, STREAM_BULK, b"b" * 65536)
    queue.take(65536)
    _push(queue, STREAM_REALTIME, b"now")
    waited = 0
    while (taken := queue.take(65536)) != [b"now"] and b"now" not in taken:
        waited += 1
    assert waited <= 2


def test_past_the_soft_bound_pushes_are_dropped_and_the_connection_is_dirty() -> None:
    queue = _queue(soft_bytes=100, low_bytes=20)
    assert _push(queue, STREAM_REALTIME, b"p" * 60, droppable=True) is Verdict.QUEUED
    assert _push(queue, STREAM_REALTIME, b"ack") is Verdict.QUEUED
    assert not queue.dirty
    assert _push(queue, STREAM_REALTIME, b"p" * 60, droppable=True) is Verdict.DROPPED
    assert queue.dirty
    assert queue.degraded
    assert queue.dropped == 2
    assert queue.take(ALL) == [b"ack"]


def test_a_degraded_connection_recovers_at_the_low_bound() -> None:
    queue = _queue(soft_bytes=100, low_bytes=20)
    _push(queue, STREAM_BULK, b"b" * 60)
    _push(queue, STREAM_BULK, b"b" * 60)
    assert queue.degraded
    assert not queue.dirty
    assert _push(queue, STREAM_REALTIME, b"p", droppable=True) is Verdict.DROPPED
    queue.dirty = False
    queue.take(60)
    assert queue.degraded
    queue.take(60)
    assert not queue.degraded
    assert _push(queue, STREAM_REALTIME, b"p", droppable=True) is Verdict.QUEUED
    assert not queue.dirty


def test_frames_bound_it_too() -> None:
    queue = _queue(soft_frames=3, hard_frames=5)
    verdicts = [_push(queue, STREAM_REALTIME, b"p", droppable=True) for _ in range(5)]
    assert verdicts == [Verdict.QUEUED] * 3 + [Verdict.DROPPED] * 2


def test_answers_are_kept_up_to_the_hard_bound() -> None:
    queue = _queue(soft_bytes=100, hard_bytes=200)
    assert _push(queue, STREAM_BULK, b"b" * 150) is Verdict.QUEUED
    assert _push(queue, STREAM_BULK, b"b" * 60) is Verdict.OVERFLOW
    assert queue.queued_bytes == 150


def test_control_is_never_dropped() -> None:
    queue = _queue(soft_bytes=10, hard_bytes=20, soft_frames=1, hard_frames=1)
    _push(queue, STREAM_BULK, b"b" * 20)
    for _ in range(10):
        assert _push(queue, STREAM_CONTROL, b"c" * 20) is Verdict.QUEUED
