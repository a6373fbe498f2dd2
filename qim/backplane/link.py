"""One unix-socket connection between two processes: 20-byte frames both ways, one write per loop tick.

A link opens when the other side's HELLO has arrived and ends with any byte that is not a frame. It knows nothing of
roles, handlers or requests: `LinkEvents` does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from functools import lru_cache
from typing import Final, Protocol, cast

from qim.backplane.priorities import QUANTUM_BYTES, PriorityQueues
from qim.errors import FramingError
from qim.obs.logs import get_logger
from qim.protocol.header import HEADER_BYTES, MAX_FRAME_BYTES, decode_header, encode_header
from qim.protocol.opcodes import InternalOpcode

log = get_logger(__name__)

BODY_BYTES_MAX: Final = 2 * MAX_FRAME_BYTES
"""Of one internal frame. The largest body wraps one client frame (CREATE_GROUP, MAILBOX_BATCH) in a few names; twice
that leaves room and still bounds what one peer can make this process hold."""
QUEUE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Default bound of each priority of a link: about a second of the heaviest push traffic measured."""
_PEER_CREDENTIALS: Final = struct.Struct("3i")


class Hello:
    """Body of HELLO: who speaks. The process name and its role instances, separated by 0x00."""

    __slots__ = ("process", "roles")

    def __init__(self, process: str, roles: tuple[str, ...]) -> None:
        self.process = process
        self.roles = roles

    def encode(self) -> bytes:
        return "\x00".join((self.process, *self.roles)).encode("ascii")

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        try:
            process, *roles = body.decode("ascii").split("\x00")
        except UnicodeDecodeError as error:
            raise FramingError("HELLO is not ASCII") from error
        if not process or not roles:
            raise FramingError("HELLO names no role")
        return cls(process, tuple(roles))


class LinkEvents(Protocol):
    """What the owner of a link is told, in this order: opened once, frames, closed once."""

    def link_opened(self, link: Link) -> None:
        """`link.remote` is known. FramingError refuses the peer."""
        ...

    def link_frame(self, link: Link, opcode: int, request_id: int, stream_id: int, body: bytes) -> None: ...

    def link_closed(self, link: Link) -> None:
        """Also for a link that never opened."""
        ...


class Link(asyncio.Protocol):
    """One connection. `remote` is None until it is open."""

    __slots__ = (
        "_closed",
        "_events",
        "_flush_scheduled",
        "_hello",
        "_loop",
        "_partial",
        "_paused",
        "_queues",
        "_transport",
        "_wanted_bytes",
        "remote",
    )  # fmt: skip

    def __init__(
        self,
        events: LinkEvents,
        loop: asyncio.AbstractEventLoop,
        hello: Hello,
        *,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self.remote: Hello | None = None
        self._events = events
        self._loop = loop
        self._hello = hello
        self._queues = PriorityQueues(queue_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._flush_scheduled = False
        self._partial = bytearray()
        self._wanted_bytes = 0
        self._closed = False

    def send(self, opcode: int, body: bytes, *, request_id: int = 0, priority: int = 0) -> bool:
        """Queue one frame for the write of this tick. False: not open, or the priority's queue is full.

        ValueError for a body above BODY_BYTES_MAX: the peer would have to drop the link.
        """
        if self.remote is None or self._closed:
            return False
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"body of {len(body)} bytes exceeds {BODY_BYTES_MAX}")
        if request_id:
            header = encode_header(opcode, len(body), request_id=request_id, stream_id=priority)
        else:
            header = _notice_header(opcode, len(body), priority)
        if not self._queues.put(priority, header, body):
            return False
        if not self._flush_scheduled and not self._paused:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        return True

    def abort(self) -> None:
        """Close at once; what is queued is lost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if _peer_uid(self._transport) != os.getuid():
            log.warning("backplane_peer_refused", reason="another user")
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=QUANTUM_BYTES)
        body = self._hello.encode()
        self._transport.write(encode_header(InternalOpcode.HELLO, len(body)) + body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._queues.clear()
        self._partial.clear()
        self._events.link_closed(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted_bytes:
                return
            data = bytes(self._partial)
            self._partial.clear()
        try:
            used, self._wanted_bytes = self._read_frames(data)
        except FramingError as error:
            log.error("backplane_link_broken", reason=str(error))
            self.abort()
            return
        if used < len(data):
            self._partial += memoryview(data)[used:]

    def _read_frames(self, data: bytes) -> tuple[int, int]:
        """Hand out every whole frame; (bytes used, bytes needed from there on before the next call can use any)."""
        at = 0
        end = len(data)
        link_frame = self._events.link_frame
        while end - at >= HEADER_BYTES:
            _, _, opcode, request_id, stream_id, body_bytes = decode_header(data, at)
            if body_bytes > BODY_BYTES_MAX:
                raise FramingError(f"body of {body_bytes} bytes exceeds {BODY_BYTES_MAX}")
            body_at = at + HEADER_BYTES
            frame_end = body_at + body_bytes
            if frame_end > end:
                return at, HEADER_BYTES + body_bytes
            at = frame_end
            if self.remote is not None:
                link_frame(self, opcode, request_id, stream_id, data[body_at:frame_end])
            elif opcode == InternalOpcode.HELLO:
                self.remote = Hello.decode(data[body_at:frame_end])
                self._events.link_opened(self)
            else:
                raise FramingError("a frame before HELLO")
        return at, HEADER_BYTES

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport = self._transport
        while not self._paused and not self._closed and transport is not None and self._queues.queued_bytes:
            transport.write(self._queues.take())


@lru_cache(maxsize=8192)
def _notice_header(opcode: int, body_bytes: int, priority: int) -> bytes:
    """One-way frames have no id, so equal sizes share a header: 0.1 µs against 0.4."""
    return encode_header(opcode, body_bytes, stream_id=priority)


def _peer_uid(transport: asyncio.Transport) -> int:
    """User id of the process at the other end, from the kernel."""
    connection: socket.socket = transport.get_extra_info("socket")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(packed)[1])
