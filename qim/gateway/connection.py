"""Driver of one client connection: socket bytes to frames, frames to one socket write per loop tick.

Decisions are in `machine.py` and `sync.py`; what a frame asks of other parts is done by the `ConnectionOwner`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

from aiofastnet import Transport

from qim.errors import ErrorCode, FrameTooLarge, FramingError
from qim.gateway.machine import FRAME_OF, ConnectionMachine, Event, State, Step
from qim.gateway.machine import Frame as FrameKind
from qim.gateway.replies import error_body, frame_bytes
from qim.gateway.sync import DirtyMark, LoginBarrier, PullWindow
from qim.obs import metrics
from qim.protocol.entry import push_frame_parts
from qim.protocol.header import FLAG_COMPRESSED, FLAG_FRAGMENT, VERSION
from qim.protocol.opcodes import STREAM_OF, STREAM_REALTIME, Opcode
from qim.protocol.outbound import OutboundLimits, OutboundQueue, Parts, Verdict
from qim.protocol.reader import Frame, FrameLimits, FrameReader

ALPN: Final = "qim/1"
RECEIVE_BUFFER_BYTES: Final = 64 << 10
"""One per worker, shared by all connections: a read is copied out before the next one begins."""
PUSH_HEAD_BYTES: Final = 96
"""About what a PUSH_EVENTS frame has beside the body; the account of a tick needs no more precision."""
# looking a member of an enum up costs as much as calling a function, and a frame passes several
_CLOSING: Final = State.CLOSING
_UNKNOWN: Final = FrameKind.UNKNOWN
_UNREADABLE_FLAGS: Final = FLAG_COMPRESSED | FLAG_FRAGMENT
"""Not offered to clients, so a frame that has them is one of a version we do not speak."""


FrameHandler = Callable[["ClientConnection", Frame, Step, float], None]


class ConnectionOwner(Protocol):
    """Who is told what happens on a connection."""

    @property
    def now_ms(self) -> Callable[[], float]:
        """The monotonic clock."""
        ...

    @property
    def frame_received(self) -> FrameHandler:
        """(connection, frame, what to do with it, now in ms); called for every frame, so no layer is in between."""
        ...

    def connection_opened(self, connection: ClientConnection) -> None: ...

    def connection_closing(self, connection: ClientConnection, reason: str) -> None:
        """Once, before the socket is gone: the session ends here."""
        ...

    def connection_lost(self, connection: ClientConnection) -> None:
        """Once, when the socket is gone."""
        ...


class TickWriter:
    """Writes every connection that has something to send once per loop tick (§10.3.1)."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[ClientConnection] = []

    def add(self, connection: ClientConnection) -> None:
        """The connection asks at most once before its `write_now`."""
        if not self._waiting:
            self._loop.call_soon(self._write_all)
        self._waiting.append(connection)

    def _write_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.write_now()


class ReceiveBuffer:
    """Where every connection of a worker receives: one read is copied out before the next begins."""

    __slots__ = ("raw", "view")

    def __init__(self, size_bytes: int = RECEIVE_BUFFER_BYTES) -> None:
        self.raw = bytearray(size_bytes)
        self.view = memoryview(self.raw)


class Session:
    """Who a connection is, from the moment its AUTH was accepted."""

    __slots__ = (
        "tenant_id", "user_id", "device_id", "user_key", "epoch", "shard", "shard_epoch", "presence_slot",
        "submit_prefix", "limits_lifted", "opened_at_mailbox", "held_conversation_id", "held_until_ms", "zero_cursor",
    )  # fmt: skip

    def __init__(
        self,
        *,
        tenant_id: str,
        user_id: str,
        device_id: str,
        user_key: bytes,
        epoch: int,
        shard: int,
        submit_prefix: bytes,
        limits_lifted: bool,
    ) -> None:
        self.tenant_id = tenant_id
        self.user_id = user_id
        self.device_id = device_id
        self.user_key = user_key
        self.epoch = epoch
        self.shard = shard
        self.shard_epoch = 0
        """Of the last OPEN that was answered."""
        self.presence_slot = -1
        self.submit_prefix = submit_prefix
        """Encoded (tenant, user, device) fields of SubmitSend: the message is appended unread."""
        self.limits_lifted = limits_lifted
        self.held_conversation_id = ""
        self.held_until_ms = 0.0
        """The conversation a writer refused last because delivery lags, and until when it wants to hear nothing of it:
        under overload a refusal here costs a fraction of one there."""
        self.opened_at_mailbox = False
        """An OPEN was sent: the MailboxNode must be told when the session ends."""
        self.zero_cursor = False
        """It logged in without a position: none of its pulls is CURSOR_EXPIRED (§9.6.1)."""


class ClientConnection(asyncio.BufferedProtocol):
    """One socket of a client. Slotted: a worker holds tens of thousands."""

    __slots__ = (
        "id", "address", "machine", "session", "last_pushed_user_seq", "barrier", "pulls", "dirty", "in_flight",
        "transport", "_owner", "_writer", "_reader", "_receive", "_parts", "_room_bytes", "_queue", "_limits",
        "_quantum_bytes", "_paused", "_scheduled",
    )  # fmt: skip

    def __init__(
        self,
        connection_id: int,
        address: str,
        machine: ConnectionMachine,
        *,
        pulls: PullWindow,
        owner: ConnectionOwner,
        writer: TickWriter,
        receive: ReceiveBuffer,
        limits: OutboundLimits,
    ) -> None:
        self.id = connection_id
        self.address = address
        self.machine = machine
        self.session: Session | None = None
        self.last_pushed_user_seq = 0
        self.barrier: LoginBarrier | None = None
        """Stands from OPEN to ONLINE_READY."""
        self.pulls = pulls
        self.dirty = DirtyMark()
        self.in_flight = 0
        """Requests that wait for a writer, or for history."""
        self.transport: Transport | None = None
        self._owner = owner
        self._writer = writer
        self._reader = FrameReader()
        self._receive = receive
        self._parts: list[bytes] = []
        self._room_bytes = limits.quantum_bytes
        """What this tick's write may still take past the queue; none while the peer does not keep up."""
        self._queue: OutboundQueue | None = None
        self._limits = limits
        self._quantum_bytes = limits.quantum_bytes
        self._paused = False
        self._scheduled = False

    # ------------------------------------------------------------------------------------------------ receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(Transport, transport)
        self._owner.connection_opened(self)
        if self.transport.get_extra_info("ssl_object").selected_alpn_protocol() != ALPN:
            metrics.FRAMING_ERROR_TOTAL.labels(kind="alpn").inc()
            self.abort("alpn")

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._receive.raw

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_closing():
            return
        machine, owner = self.machine, self._owner
        data = self._receive.view[:nbytes].tobytes()
        now_ms = owner.now_ms()
        try:
            for frame in self._reader.feed(data):
                if machine.state is _CLOSING:
                    return
                kind = FRAME_OF.get(frame.opcode, _UNKNOWN)
                if frame.flags & _UNREADABLE_FLAGS or (frame.version != VERSION and not _speaks(frame.version, kind)):
                    kind = _UNKNOWN
                owner.frame_received(self, frame, machine.on_frame(kind, now_ms), now_ms)
        except FrameTooLarge as error:
            metrics.FRAMING_ERROR_TOTAL.labels(kind="too_large").inc()
            self.error(ErrorCode.PAYLOAD_TOO_LARGE, error.request_id)
            self.close("too_large")
        except FramingError as error:
            kind_of_error = "crc" if "CRC" in str(error) else "magic"
            metrics.FRAMING_ERROR_TOTAL.labels(kind=kind_of_error).inc()
            self.abort(kind_of_error)

    def accept_frames(self, limits: FrameLimits) -> None:
        """The session is open: frames may now be as large as it allows."""
        self._reader.limits = limits

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("lost")
        self._parts.clear()
        if self._queue is not None and self._queue.degraded:
            metrics.SLOW_CONNECTIONS_DEGRADED.dec()
        self._queue = None
        self._owner.connection_lost(self)

    # -------------------------------------------------------------------------------------------------- sending

    def push_event(self, mailbox_seq: int, parts: Parts) -> None:
        """PUSH_EVENTS of one entry; its body is shared by all recipients and never copied before the write.

        `parts` are those of `push_frame_parts` for `mailbox_seq`; only a connection that was pushed more already needs
        another head.
        """
        if mailbox_seq < self.last_pushed_user_seq:
            parts = push_frame_parts(self.last_pushed_user_seq, parts[1], parts[2])
            mailbox_seq = self.last_pushed_user_seq
        if self._room_bytes > 0:
            self._room_bytes -= len(parts[2]) + PUSH_HEAD_BYTES
            self._parts += parts
            self.last_pushed_user_seq = mailbox_seq
            if not self._scheduled:
                self._scheduled = True
                self._writer.add(self)
        elif self._enqueue(STREAM_REALTIME, parts, droppable=True):
            self.last_pushed_user_seq = mailbox_seq

    def reply(self, opcode: Opcode, body: bytes, request_id: int = 0) -> None:
        """One frame on its stream."""
        whole = frame_bytes(opcode, body, request_id)
        if self._room_bytes > 0:
            self._room_bytes -= len(whole)
            self._parts.append(whole)
            self._schedule()
        else:
            self._enqueue(STREAM_OF[opcode], (whole,), droppable=False)

    def error(
        self,
        code: ErrorCode,
        request_id: int = 0,
        *,
        retry_after_ms: float = 0,
        detail: str = "",
        client_message_id: str = "",
    ) -> None:
        """ERROR on stream 0."""
        body = error_body(code, request_id, retry_after_ms, detail, client_message_id)
        self.reply(Opcode.ERROR, body, request_id)

    def mark_dirty(self) -> None:
        """A push may be missing: the client is told once, at once or with ONLINE_READY (§9.4.4)."""
        if self.dirty.mark() and self.machine.state is State.READY:
            self.tell_dirty()

    def tell_dirty(self) -> None:
        metrics.MAILBOX_DIRTY_SENT_TOTAL.inc()
        self.error(ErrorCode.MAILBOX_DIRTY)

    def write_now(self) -> None:
        """One socket write of what this tick collected, then of what had to wait, while the peer keeps up."""
        self._scheduled = False
        parts = self._parts
        if self._queue is None and not self._paused:
            self._room_bytes = self._quantum_bytes
        else:
            self._take_queued(parts)
        written = b"".join(parts)
        parts.clear()
        if written and self.transport is not None:
            self.transport.write_nocheck(written)

    def pause_writing(self) -> None:
        """The peer does not keep up: what comes next waits here, bounded, and nothing more is read from it."""
        self._paused = True
        self._room_bytes = 0
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.transport is not None and self.machine.state is not State.CLOSING:
            self._paused = False
            self.transport.resume_reading()
            self._schedule()

    # -------------------------------------------------------------------------------------------------- closing

    def is_closing(self) -> bool:
        """The session has ended; what is sent now goes nowhere."""
        return self.machine.state is _CLOSING

    def stop_reading(self) -> None:
        """Take no more frames; what was taken is still answered."""
        if self.transport is not None:
            self.transport.pause_reading()

    def token_expired(self) -> None:
        """The read-only grace is over (§15.3.1)."""
        self.error(ErrorCode.TOKEN_EXPIRED)
        self.close("token_expired")

    def close(self, reason: str) -> None:
        """End the session, write what is queued, then close; a peer that does not read is cut off after a while."""
        if self._end(reason):
            self.write_now()
            if self.transport is not None:
                if self._queue is not None:
                    self.transport.write_nocheck(b"".join(self._taken(self._queue)))
                # it may have been paused, and TLS ends with what the peer answers
                self.transport.resume_reading()
                self.transport.close()

    def abort(self, reason: str) -> None:
        """End the session and drop the socket at once, also while it is closing."""
        self._end(reason)
        if self.transport is not None:
            self.transport.abort()

    def _end(self, reason: str) -> bool:
        """False when it had ended before."""
        if self.machine.state is State.CLOSING:
            return False
        self._owner.connection_closing(self, reason)
        self.machine.on_event(Event.CLOSE)
        # from here on a frame can only go to the queue, which takes none of a closing connection
        self._paused = True
        self._room_bytes = 0
        return True

    def _take_queued(self, parts: list[bytes]) -> None:
        """Add what waited to this tick's write, while the peer keeps up; once all of it went, frames pass by again.

        An empty queue is below the low watermark, so a degraded connection recovers with it (§11.3.1).
        """
        queue = self._queue
        if queue is None or self._paused:
            return
        parts += self._taken(queue)
        if queue.queued_frames:
            self._schedule()
        else:
            self._queue = None
            self._room_bytes = self._quantum_bytes

    def _taken(self, queue: OutboundQueue) -> list[bytes]:
        degraded = queue.degraded
        taken = queue.take(self._quantum_bytes)
        if degraded and not queue.degraded:
            metrics.SLOW_CONNECTIONS_DEGRADED.dec()
        return taken

    def _enqueue(self, stream_id: int, parts: Parts, *, droppable: bool) -> bool:
        if self.machine.state is _CLOSING:
            return False
        self._room_bytes = 0
        if self._queue is None:
            self._queue = OutboundQueue(self._limits)
        degraded = self._queue.degraded
        verdict = self._queue.push(stream_id, parts, droppable=droppable)
        if self._queue.degraded and not degraded:
            metrics.SLOW_CONNECTIONS_DEGRADED.inc()
        if verdict is Verdict.OVERFLOW:
            metrics.SLOW_CONNECTION_CLOSED_TOTAL.inc()
            self.abort("overflow")
            return False
        self._schedule()
        if self._queue.dirty:
            self._queue.dirty = False
            self.mark_dirty()
        return verdict is Verdict.QUEUED

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._writer.add(self)


def _speaks(version: int, kind: FrameKind) -> bool:
    """A version that is not the session's: AUTH carries the client's highest, everything later the effective one
    (§27.1.1)."""
    return kind is FrameKind.AUTH and version > VERSION
