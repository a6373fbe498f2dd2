"""Frames over real TLS: one write per loop turn, any split of received bytes, and three ways to end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from qim.client.wire import WireConnection, connect
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.protocol.reader import Frame
from tests.support.fake_server import FakeServer, Peer


class Wire:
    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.frames: list[Frame] = []
        self.arrived = asyncio.Event()
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.connection: WireConnection

    async def open(self, *, context: ssl.SSLContext | None = None, server_name: str = "b00ff.im.local") -> Wire:
        self.connection = await connect(
            "127.0.0.1",
            self.server.port,
            ssl_context=context or self.server.client_context,
            server_name=server_name,
            on_frame=self._on_frame,
            on_closed=self.closed.set_result,
            timeout_ms=5_000,
        )
        return self

    def _on_frame(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.arrived.set()

    async def frame(self) -> Frame:
        async with asyncio.timeout(5):
            while not self.frames:
                self.arrived.clear()
                await self.arrived.wait()
        return self.frames.pop(0)


@pytest.fixture
async def wire(server: FakeServer) -> AsyncIterator[Wire]:
    made = await Wire(server).open()
    yield made
    made.connection.abort()
    await made.closed


async def test_a_frame_and_its_answer(wire: Wire) -> None:
    wire.connection.request(Opcode.PING, pb.Ping(ping_id=5), 9)
    frame = await wire.frame()
    assert (frame.opcode, frame.request_id) == (Opcode.PONG, 9)
    assert pb.Pong.FromString(frame.body).ping_id == 5


async def test_frames_of_one_turn_arrive_together_and_in_order(wire: Wire) -> None:
    for ping_id in range(1, 51):
        wire.connection.send(Opcode.PING, pb.Ping(ping_id=ping_id).SerializeToString(), ping_id)
    assert [(await wire.frame()).request_id for _ in range(50)] == list(range(1, 51))


async def test_a_frame_larger_than_the_receive_buffer(wire: Wire) -> None:
    def answer(peer: Peer, request_id: int, _: Any) -> bool:
        peer.send(Opcode.ERROR, pb.Error(detail="x" * 700_000), request_id)
        return True

    wire.server.script[Opcode.PING].append(answer)
    wire.connection.request(Opcode.PING, pb.Ping(), 1)
    assert len(pb.Error.FromString((await wire.frame()).body).detail) == 700_000


async def test_garbage_ends_the_connection(wire: Wire) -> None:
    def answer(peer: Peer, *_: Any) -> bool:
        peer._writer.write(b"HTTP/1.1 400")
        return True

    wire.server.script[Opcode.PING].append(answer)
    wire.connection.request(Opcode.PING, pb.Ping(), 1)
    assert str(await asyncio.wait_for(wire.closed, 5)) == "wrong magic"


async def test_close_writes_what_is_queued(server: FakeServer) -> None:
    wire = await Wire(server).open()
    wire.connection.request(Opcode.PING, pb.Ping(ping_id=3), 1)
    wire.connection.close()
    await asyncio.wait_for(wire.closed, 5)
    await server.until(lambda: len(server.peer.seen) == 1)


async def test_abort_is_a_reset_and_writes_nothing(server: FakeServer) -> None:
    wire = await Wire(server).open()
    await server.until(lambda: bool(server.peers))
    wire.connection.request(Opcode.PING, pb.Ping(ping_id=3), 1)
    wire.connection.abort()
    wire.connection.send(Opcode.PING, b"", 2)
    await asyncio.wait_for(wire.closed, 5)
    assert server.peer.seen == []


async def test_plain_asyncio_transports_serve_as_well(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qim.client.wire.aiofastnet", None)
    wire = await Wire(server).open()
    wire.connection.request(Opcode.PING, pb.Ping(ping_id=5), 9)
    assert (await wire.frame()).request_id == 9
    wire.connection.abort()
    await wire.closed


async def test_a_cancelled_connect_leaves_nothing_open(server: FakeServer) -> None:
    for turns in range(12):
        opening = asyncio.create_task(Wire(server).open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        for opened in await asyncio.gather(opening, return_exceptions=True):
            if isinstance(opened, Wire):
                opened.connection.abort()
            else:
                assert isinstance(opened, asyncio.CancelledError)


async def test_nobody_listens() -> None:
    with pytest.raises(OSError):
        await connect(
            "127.0.0.1", 1, ssl_context=ssl.create_default_context(), server_name="x", on_frame=print, on_closed=print,
            timeout_ms=1_000,
        )  # fmt: skip


async def test_a_name_the_certificate_does_not_have_is_refused(server: FakeServer) -> None:
    with pytest.raises(ssl.SSLError):
        await Wire(server).open(server_name="example.org")


async def test_a_peer_without_our_protocol_is_refused(server: FakeServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(Path(server.files.ca_path))
    with pytest.raises(ConnectionError, match="qim/1"):
        await Wire(server).open(context=context)
