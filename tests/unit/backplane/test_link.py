"""Framing of one link, fed by hand: no socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from qim.backplane.link import BODY_BYTES_MAX, Hello, Link
from qim.errors import FramingError
from qim.protocol.header import encode_frame, encode_header
from qim.protocol.opcodes import InternalOpcode

HELLO = Hello("core-0", ("writer-0", "fanout-0"))
HELLO_FRAME = encode_frame(InternalOpcode.HELLO, HELLO.encode())
PUSH = InternalOpcode.PUSH_BATCH


class Pipe(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self, local: socket.socket) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False
        self._local = local

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._local if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True


class Seen:
    """What the owner of a link was told."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0
        self.frames: list[tuple[int, int, int, bytes]] = []

    def link_opened(self, link: Link) -> None:
        self.opened += 1

    def link_frame(self, link: Link, opcode: int, request_id: int, stream_id: int, body: bytes) -> None:
        self.frames.append((opcode, request_id, stream_id, body))

    def link_closed(self, link: Link) -> None:
        self.closed += 1


class Loop:
    """Collects call_soon callbacks; `turn` runs them."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()


class Bench:
    def __init__(self, queue_bytes_max: int = 1 << 20) -> None:
        self.seen = Seen()
        self.loop = Loop()
        self.sockets = socket.socketpair()
        self.pipe = Pipe(self.sockets[0])
        self.link = Link(self.seen, self.loop, HELLO, queue_bytes_max=queue_bytes_max)  # type: ignore[arg-type]
        self.link.connection_made(self.pipe)

    def close(self) -> None:
        for end in self.sockets:
            end.close()


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.close()


def test_hello_goes_first_and_opens_the_link(bench: Bench) -> None:
    assert bench.pipe.written == [HELLO_FRAME]
    assert not bench.link.send(PUSH, b"too early")
    bench.link.data_received(HELLO_FRAME)
    assert bench.seen.opened == 1
    assert bench.link.remote is not None
    assert bench.link.remote.roles == ("writer-0", "fanout-0")
    assert bench.link.send(PUSH, b"now")


def test_frames_of_one_tick_leave_in_one_write(bench: Bench) -> None:
    bench.link.data_received(HELLO_FRAME)
    bench.link.send(PUSH, b"a", priority=1)
    bench.link.send(PUSH, b"b", priority=1)
    bench.link.send(InternalOpcode.REPLY, b"c", request_id=9)
    assert len(bench.pipe.written) == 1
    bench.loop.turn()
    expected = (
        encode_frame(InternalOpcode.REPLY, b"c", request_id=9)
        + encode_frame(PUSH, b"a", stream_id=1)
        + encode_frame(PUSH, b"b", stream_id=1)
    )
    assert bench.pipe.written[1:] == [expected]


@pytest.mark.parametrize("step", [1, 7, 19, 20, 21, 64])
def test_any_cut_of_the_stream_gives_the_same_frames(bench: Bench, step: int) -> None:
    stream = HELLO_FRAME
    for index in range(20):
        stream += encode_frame(PUSH, b"x" * index * 5, request_id=index, stream_id=index % 5)
    for at in range(0, len(stream), step):
        bench.link.data_received(stream[at : at + step])
    assert bench.seen.frames == [(PUSH, index, index % 5, b"x" * index * 5) for index in range(20)]


@pytest.mark.parametrize(
    "garbage",
    [
        encode_frame(PUSH, b"before hello"),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HELLO_FRAME + b"\x00" * 40,
        HELLO_FRAME + encode_header(PUSH, BODY_BYTES_MAX + 1),
        HELLO_FRAME[:16] + b"\x00\x00\x00\x00" + HELLO_FRAME[20:],
        encode_frame(InternalOpcode.HELLO, "é".encode()),
        encode_frame(InternalOpcode.HELLO, b"only-a-process"),
    ],
)
def test_what_is_no_frame_ends_the_link(bench: Bench, garbage: bytes) -> None:
    bench.link.data_received(garbage)
    assert bench.pipe.aborted
    assert bench.seen.frames == []


def test_a_full_queue_refuses_and_a_body_no_peer_accepts_is_an_error() -> None:
    bench = Bench(queue_bytes_max=100)
    bench.link.data_received(HELLO_FRAME)
    assert bench.link.send(PUSH, b"x" * 60)
    assert not bench.link.send(PUSH, b"x" * 60)
    assert bench.link.send(PUSH, b"x" * 60, priority=4)
    with pytest.raises(ValueError, match="exceeds"):
        bench.link.send(PUSH, bytes(BODY_BYTES_MAX + 1))
    bench.close()


def test_a_paused_transport_gets_nothing_until_it_resumes(bench: Bench) -> None:
    bench.link.data_received(HELLO_FRAME)
    bench.link.pause_writing()
    bench.link.send(PUSH, b"waits")
    bench.loop.turn()
    assert len(bench.pipe.written) == 1
    bench.link.resume_writing()
    assert bench.pipe.written[1:] == [encode_frame(PUSH, b"waits")]


def test_another_user_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    other = Bench()
    assert other.pipe.aborted
    assert other.pipe.written == []
    other.close()


def test_the_end_is_told_once_and_sends_are_refused(bench: Bench) -> None:
    bench.link.data_received(HELLO_FRAME)
    bench.link.connection_lost(None)
    assert bench.seen.closed == 1
    assert not bench.link.send(PUSH, b"x")


def test_hello_needs_a_process_and_a_role() -> None:
    with pytest.raises(FramingError):
        Hello.decode(b"")
    assert Hello.decode(b"p\x00r").process == "p"
