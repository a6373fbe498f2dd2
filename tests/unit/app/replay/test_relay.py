"""A cut closes the device's side and keeps the server's side open and silent."""

from __future__ import annotations

import asyncio

from qim.app.replay.relay import CuttingRelay


async def test_bytes_pass_until_the_cut_which_the_server_does_not_see() -> None:
    received: list[bytes] = []
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(100):
            received.append(chunk)
            writer.write(chunk.upper())
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    relay = CuttingRelay("127.0.0.1", server.sockets[0].getsockname()[1])
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"HELLO"

    assert relay.cut() == 1
    try:
        rest = await reader.read()
    except ConnectionError:
        rest = b""
    assert rest == b""
    await asyncio.sleep(0)
    assert not ended.is_set()
    assert received == [b"hello"]

    assert relay.cut() == 0
    writer.close()
    await relay.close()
    await asyncio.wait_for(ended.wait(), 5)
    server.close()


async def test_an_unreachable_server_closes_the_device() -> None:
    relay = CuttingRelay("127.0.0.1", 1)
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    try:
        assert await reader.read() == b""
    except ConnectionError:
        pass
    writer.close()
    await relay.close()
