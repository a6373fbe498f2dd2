"""A connection that speaks frames and nothing else: shared by the SDK driver and by load generators.

Frames written during one loop turn leave in one TLS write; received bytes pass through one buffer per process
(measured: 13.5 µs a read against 32 with a buffer per read).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Final, cast

from google.protobuf.message import Message

from qim.errors import FramingError
from qim.protocol.header import MAX_FRAME_BYTES, encode_header
from qim.protocol.opcodes import STREAM_BULK, STREAM_CONTROL, STREAM_REALTIME, Opcode
from qim.protocol.reader import Frame, FrameLimits, FrameReader

try:
    import aiofastnet
except ImportError:  # plain asyncio transports work as well, at twice the cost
    aiofastnet = None  # type: ignore[assignment]

ALPN: Final = "qim/1"
TLS_BUFFER_BYTES: Final = 16_448
"""One TLS record: 38 KiB a connection instead of 280."""
_SHUTDOWN_TIMEOUT_S: Final = 1.0
_RECEIVE_BYTES: Final = 256 << 10
_RECEIVE: Final = memoryview(bytearray(_RECEIVE_BYTES))
_LINGER_NONE: Final = struct.pack("ii", 1, 0)
_LIMITS: Final = FrameLimits(default_bytes=MAX_FRAME_BYTES)
_STREAM_OF_REQUEST: Final[dict[int, int]] = {
    Opcode.AUTH: STREAM_CONTROL,
    Opcode.PING: STREAM_CONTROL,
    Opcode.SYNC_COMPLETE: STREAM_CONTROL,
    Opcode.PULL_MAILBOX: STREAM_BULK,
    Opcode.PULL_HISTORY: STREAM_BULK,
}

OnFrame = Callable[[Frame], None]
OnClosed = Callable[[Exception | None], None]


class WireConnection(asyncio.BufferedProtocol):
    """Frames out by `send`, frames in by `on_frame`, the end once by `on_closed`."""

    __slots__ = ("_loop", "_on_frame", "_on_closed", "_transport", "_reader", "_out", "_framing_error", "paused")

    def __init__(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(_LIMITS)
        self._out: list[bytes] = []
        self._framing_error: Exception | None = None
        self.paused = False
        """The socket does not take more: an open-loop sender should hold back."""

    # ------------------------------------------------------------------ sending

    def send(self, opcode: int, body: bytes, request_id: int = 0) -> None:
        """Queue one frame for the write at the end of this loop turn; ignored after the end."""
        out = self._out
        if not out:
            self._loop.call_soon(self._flush)
        out.append(
            encode_header(
                opcode,
                len(body),
                request_id=request_id,
                stream_id=_STREAM_OF_REQUEST.get(opcode, STREAM_REALTIME),
            )
        )
        out.append(body)

    def request(self, opcode: int, message: Message, request_id: int) -> None:
        """As `send`, for a protobuf body."""
        self.send(opcode, message.SerializeToString(), request_id)

    def close(self) -> None:
        """Write what is queued, then close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Vanish: no close_notify, no FIN (the peer gets a reset), nothing queued is written."""
        self._out.clear()
        transport = self._transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            except OSError:  # the socket is gone already
                pass
        transport.abort()

    def _flush(self) -> None:
        out = self._out
        if out and self._transport is not None:
            self._transport.write(b"".join(out))
        out.clear()

    # ------------------------------------------------------------------ protocol callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The process's receive buffer: its content is consumed before the next read."""
        return _RECEIVE

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.feed(bytes(_RECEIVE[:nbytes])):
                self._on_frame(frame)
        except FramingError as error:
            self._framing_error = error
            self.abort()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        self._on_closed(self._framing_error or exc)


async def connect(
    host: str,
    port: int,
    *,
    ssl_context: ssl.SSLContext,
    server_name: str,
    on_frame: OnFrame,
    on_closed: OnClosed,
    timeout_ms: int,
) -> WireConnection:
    """Open a TLS connection with ALPN `qim/1`; OSError, ssl.SSLError or TimeoutError when it fails.

    `server_name` is sent as SNI and verified; it carries the user's bucket (DESIGN §4, Steering).
    """
    loop = asyncio.get_running_loop()

    def factory() -> WireConnection:
        return WireConnection(on_frame, on_closed)

    async with asyncio.timeout(timeout_ms / 1000):
        # a socket of our own: aiofastnet closes its own one under the transport when a handshake is cancelled
        sock = await _open_socket(loop, host, port)
        if aiofastnet is not None:
            transport, connection = await aiofastnet.create_connection(
                loop, factory, sock=sock, ssl=ssl_context, server_hostname=server_name,
                ssl_incoming_bio_size=TLS_BUFFER_BYTES, ssl_outgoing_bio_size=TLS_BUFFER_BYTES,
                ssl_shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            )  # fmt: skip
        else:
            transport, connection = await loop.create_connection(
                factory,
                sock=sock,
                ssl=ssl_context,
                server_hostname=server_name,
                ssl_shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            )
    if transport.get_extra_info("ssl_object").selected_alpn_protocol() != ALPN:
        connection.abort()
        raise ConnectionError(f"{host}:{port} does not speak {ALPN}")
    return connection


async def _open_socket(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """Connect to the first address that answers; the last OSError when none does."""
    error: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
        except OSError as failed:
            error = failed
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise
        else:
            return sock
    raise error
