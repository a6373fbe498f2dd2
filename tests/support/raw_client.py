"""A client that sends exactly what it is told, for tests of the gateway: frames or bytes over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, NamedTuple

from google.protobuf.message import Message
from google_crc32c import value as crc32c

from qim.protocol import qim_pb2 as pb
from qim.protocol.header import HEADER_BYTES, VERSION, encode_frame
from qim.protocol.opcodes import Opcode
from qim.protocol.reader import FrameLimits, FrameReader

ANSWER_TIMEOUT_S = 5.0
BODY_OF: dict[int, type[Message]] = {
    Opcode.AUTH_OK: pb.AuthOk,
    Opcode.PONG: pb.Pong,
    Opcode.KICKED: pb.Kicked,
    Opcode.ERROR: pb.Error,
    Opcode.MAILBOX_BATCH: pb.MailboxBatch,
    Opcode.ONLINE_READY: pb.OnlineReady,
    Opcode.SEND_ACK: pb.SendAck,
    Opcode.PUSH_EVENTS: pb.PushEvents,
    Opcode.HISTORY_BATCH: pb.HistoryBatch,
    Opcode.MEMBER_LIST_BATCH: pb.MemberListBatch,
    Opcode.SESSION_LIST_BATCH: pb.SessionListBatch,
}


class Received(NamedTuple):
    opcode: Opcode
    request_id: int
    stream_id: int
    body: Any


class RawClient:
    """One connection; `receive` gives frames in order, None at the end of the stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._frames = FrameReader(FrameLimits(default_bytes=8 << 20))
        self._received: list[Received] = []
        self._request_id = 0

    @classmethod
    async def connect(cls, port: int, context: ssl.SSLContext, *, sock: socket.socket | None = None) -> RawClient:
        """`sock`: an unconnected socket that the caller has prepared."""
        sock = sock or socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            return cls(*await asyncio.open_connection(sock=sock, ssl=context, server_hostname="localhost"))
        except OSError:
            sock.close()
            raise

    def send(
        self, opcode: int, message: Message | bytes = b"", *, request_id: int | None = None, flags: int = 0
    ) -> int:
        """Write one frame; its request_id, counted from 1 unless given."""
        if request_id is None:
            self._request_id += 1
            request_id = self._request_id
        body = message if isinstance(message, bytes) else message.SerializeToString()
        self.writer.write(encode_frame(opcode, body, request_id=request_id, flags=flags))
        return request_id

    def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Received | None:
        """The next frame; None when the server has closed. TimeoutError when neither comes."""
        async with asyncio.timeout(timeout_s):
            while not self._received:
                try:
                    data = await self._reader.read(1 << 16)
                except (ConnectionError, ssl.SSLError):
                    return None
                if not data:
                    return None
                for frame in self._frames.feed(data):
                    opcode = Opcode(frame.opcode)
                    assert frame.version == VERSION
                    body = BODY_OF[opcode].FromString(frame.body)
                    self._received.append(Received(opcode, frame.request_id, frame.stream_id, body))
        return self._received.pop(0)

    async def expect(self, opcode: Opcode, request_id: int | None = None) -> Any:
        """Body of the next frame, which must be this one."""
        received = await self.receive()
        assert received is not None, f"closed instead of {opcode.name}"
        assert received.opcode is opcode, f"{received} instead of {opcode.name}"
        assert request_id is None or received.request_id == request_id
        return received.body

    async def expect_error(self, code: int, request_id: int | None = None) -> pb.Error:
        """The next frame, which must be ERROR with this code."""
        error: pb.Error = await self.expect(Opcode.ERROR, request_id)
        assert error.code == code, error
        if request_id is not None:
            assert error.request_id == request_id
        return error

    async def expect_closed(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        assert await self.receive(timeout_s) is None

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl.SSLError, TimeoutError):
            pass


def with_version(frame: bytes, version: int) -> bytes:
    """The same frame under another protocol version, with its CRC."""
    prefix = frame[:2] + bytes((version,)) + frame[3:16]
    checksum: int = crc32c(prefix)
    return prefix + checksum.to_bytes(4, "big") + frame[HEADER_BYTES:]
