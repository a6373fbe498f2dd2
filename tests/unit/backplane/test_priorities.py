"""The send queue: order inside a priority, shares between priorities, bounds."""

from __future__ import annotations

from qim.backplane.api import Priority
from qim.backplane.priorities import QUANTUM_BYTES, PriorityQueues

HEADER = b"h" * 20


def drain(queues: PriorityQueues) -> list[bytes]:
    writes = []
    while queues.queued_bytes:
        writes.append(queues.take())
    return writes


def test_a_small_backlog_leaves_in_one_write_smaller_priority_first() -> None:
    queues = PriorityQueues(1 << 20)
    for priority, body in ((Priority.ROOM, b"room"), (Priority.CONTROL, b"c1"), (Priority.CONTROL, b"c2")):
        assert queues.put(priority, HEADER, body)
    assert queues.take() == HEADER + b"c1" + HEADER + b"c2" + HEADER + b"room"
    assert queues.queued_bytes == 0


def test_a_full_priority_refuses_and_the_others_do_not() -> None:
    queues = PriorityQueues(100)
    assert queues.put(Priority.ROOM, HEADER, b"x" * 80)
    assert not queues.put(Priority.ROOM, HEADER, b"")
    assert queues.put(Priority.CONTROL, HEADER, b"x" * 80)
    assert queues.queued_bytes == 200


def test_room_comes_back_after_a_write() -> None:
    queues = PriorityQueues(100)
    assert queues.put(Priority.ROOM, HEADER, b"x" * 80)
    queues.take()
    assert queues.put(Priority.ROOM, HEADER, b"x" * 80)


def test_a_late_control_frame_overtakes_what_is_not_written_yet() -> None:
    queues = PriorityQueues(64 << 20)
    large = b"L" * 200_000
    for _ in range(10):
        queues.put(Priority.LARGE_GROUP, HEADER, large)
    assert queues.take() == HEADER + large
    queues.put(Priority.CONTROL, HEADER, b"now")
    assert queues.take().startswith(HEADER + b"now")


def test_every_priority_gets_its_share_of_a_long_backlog() -> None:
    queues = PriorityQueues(64 << 20)
    body = b"." * (QUANTUM_BYTES - len(HEADER))
    for priority in Priority:
        for index in range(40):
            queues.put(priority, bytes([priority]) + HEADER[1:], bytes([index]) + body[1:])
    first_round = [write[0] for write in (queues.take() for _ in range(31))]
    assert [first_round.count(priority) for priority in Priority] == [16, 8, 4, 2, 1]


def test_order_inside_a_priority_survives_partial_writes() -> None:
    queues = PriorityQueues(64 << 20)
    for index in range(300):
        queues.put(Priority.SINGLE_CHAT, HEADER, index.to_bytes(2, "big") * 500)
        queues.put(Priority.ROOM, HEADER, b"r" * 1000)
    stream = b"".join(drain(queues))
    frames = [stream[at + 20 : at + 1020] for at in range(0, len(stream), 1020)]
    assert [frame for frame in frames if frame[:1] != b"r"] == [index.to_bytes(2, "big") * 500 for index in range(300)]
    assert len(frames) == 600


def test_clear_forgets_everything() -> None:
    queues = PriorityQueues(1 << 20)
    queues.put(Priority.CONTROL, HEADER, b"x")
    queues.clear()
    assert queues.queued_bytes == 0
    assert queues.take() == b""
