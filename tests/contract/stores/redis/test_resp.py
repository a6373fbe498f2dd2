"""The pipelining client: on a real server, and against a server that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from qim.errors import StartupError, StoreUnavailable
from qim.stores.redis import resp
from qim.stores.redis.resp import RespClient, RespError, parse_address
from tests.support.redis_server import PrivateServer
from tests.support.run_dir import short_run_dir


@pytest.fixture(name="client")
async def _client(message_redis: str) -> AsyncIterator[RespClient]:
    client = RespClient(message_redis, name="message")
    await client.connect()
    yield client
    await client.close()


class ScriptedConnection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.transports.append(self._transport)

    def data_received(self, data: bytes) -> None:
        self._server.received.append(data)
        reply = self._server.answer(data)
        if reply is None:
            self._transport.abort()
        else:
            self._transport.write(reply)


class ScriptedServer:
    """Keeps what each read received and answers with what `answer` makes of it; None closes the connection."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes | None]) -> None:
        self.address = f"unix://{path}/r.sock"
        self.answer = answer
        self.received: list[bytes] = []
        self.transports: list[asyncio.Transport] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        path = self.address.removeprefix("unix://")
        self._server = await loop.create_unix_server(lambda: ScriptedConnection(self), path)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for transport in self.transports:
            transport.abort()
        await self._server.wait_closed()


@asynccontextmanager
async def scripted(
    answer: Callable[[bytes], bytes | None], **options: Any
) -> AsyncIterator[tuple[ScriptedServer, RespClient]]:
    with short_run_dir() as path:
        server = ScriptedServer(path, answer)
        await server.start()
        client = RespClient(server.address, name="scripted", **options)
        await client.connect()
        await until(lambda: len(server.transports) == 1)
        try:
            yield server, client
        finally:
            await client.close()
            await server.stop()


def silent(_: bytes) -> bytes:
    return b""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_kind_of_argument_and_reply(client: RespClient) -> None:
    assert await client.call("SET", b"k\x00\xff", "wört") == b"OK"
    assert await client.call(b"GET", b"k\x00\xff") == "wört".encode()
    assert await client.call("SET", "n", 1 << 62) == b"OK"
    assert await client.call("INCRBY", "n", 1) == (1 << 62) + 1
    assert await client.call("GET", "absent") is None
    assert await client.call("EVAL", "return {1, {'a', {}}, false, 'b'}", 0) == [1, [b"a", []], None, b"b"]
    assert await client.call("SET", "big", bytes(5 << 20)) == b"OK"
    assert await client.call("GET", "big") == bytes(5 << 20)


async def test_an_error_reply_is_an_exception_with_its_code(client: RespClient) -> None:
    await client.call("SET", "k", "text")
    with pytest.raises(RespError, match="not an integer") as caught:
        await client.call("INCR", "k")
    assert caught.value.code == "ERR"
    with pytest.raises(RespError) as caught:
        await client.call("LPUSH", "k", "x")
    assert caught.value.code == "WRONGTYPE"
    assert await client.call("GET", "k") == b"text"


async def test_answers_come_back_in_order_to_many_callers(client: RespClient) -> None:
    async def count(name: str) -> list[int]:
        return [await client.call("INCR", name) for _ in range(200)]

    assert await asyncio.gather(*(count(f"n{i}") for i in range(20))) == [list(range(1, 201))] * 20


async def test_the_calls_of_one_tick_leave_in_one_write() -> None:
    async with scripted(lambda data: b"+OK\r\n" * data.count(b"PING")) as (server, client):
        assert await asyncio.gather(*(client.call("PING") for _ in range(100))) == [b"OK"] * 100
        assert [data.count(b"PING") for data in server.received] == [100]


async def test_a_caller_that_gave_up_does_not_shift_the_answers(client: RespClient) -> None:
    given_up = client.call("INCR", "n")
    given_up.cancel()
    assert await client.call("INCR", "n") == 2


async def test_the_bound_of_calls_in_flight() -> None:
    async with scripted(silent, max_in_flight=3) as (_, client):
        waiting = [client.call("PING") for _ in range(3)]
        with pytest.raises(StoreUnavailable, match="too many calls in flight"):
            client.call("PING")
        assert client.in_flight == 3
        await client.close()
        assert [await outcome(future) for future in waiting] == ["unavailable"] * 3


async def test_a_server_that_does_not_read_is_refused_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp, "UNSENT_BYTES_MAX", 1 << 20)
    async with scripted(silent) as (server, client):
        server.transports[0].pause_reading()
        client.call("SET", "k", bytes(8 << 20))
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="too many"):
            client.call("PING")
        server.transports[0].resume_reading()
        await until(lambda: sum(map(len, server.received)) > 8 << 20)
        client.call("PING")


async def test_a_silent_server_breaks_the_whole_connection() -> None:
    """Replies are ordered: after a missing one nothing can be matched any more."""
    async with scripted(silent, timeout_ms=100) as (server, client):
        first, second = client.call("PING"), client.call("PING")
        assert [await outcome(first), await outcome(second)] == ["unavailable"] * 2
        await until(lambda: len(server.transports) == 2)


async def test_a_slow_but_answering_server_is_not_broken() -> None:
    async with scripted(lambda data: b"+OK\r\n" * data.count(b"PING"), timeout_ms=100) as (server, client):
        for _ in range(30):
            assert await client.call("PING") == b"OK"
            await asyncio.sleep(0.01)
        assert len(server.transports) == 1


@pytest.mark.parametrize("garbage", [b"hello\r\n", b"+OK\r\n+OK\r\n", b"*-7\r\n"])
async def test_garbage_breaks_the_connection(garbage: bytes) -> None:
    async with scripted(lambda _: garbage) as (server, client):
        await outcome(client.call("PING"))
        await until(lambda: client.generation == 2 and len(server.transports) == 2)


async def test_calls_fail_at_once_while_there_is_no_connection() -> None:
    async with scripted(lambda _: None) as (server, client):
        await server.stop()
        await until(lambda: not client.connected)
        with pytest.raises(StoreUnavailable, match="not connected"):
            client.call("PING")
        await server.start()
        await until(lambda: client.connected)


async def test_a_first_connection_that_fails_is_told() -> None:
    with short_run_dir() as path:
        client = RespClient(f"unix://{path}/none.sock", name="nobody")
        with pytest.raises(StoreUnavailable, match="cannot connect"):
            await client.connect()
        assert client.generation == 0
        with pytest.raises(StoreUnavailable, match="not connected"):
            client.call("PING")


async def test_callbacks_enter_a_new_connection_before_anybody_else() -> None:
    seen: list[int] = []

    def hello() -> None:
        seen.append(client.generation)
        client.call("HELLO-FROM-CALLBACK")

    async with scripted(lambda data: b"+OK\r\n" * data.count(b"*1\r\n")) as (server, client):
        client.on_connected(hello)
        for generation in (2, 3):
            await server.stop()
            await until(lambda: not client.connected)
            server.received.clear()
            await server.start()
            while not client.connected:
                await asyncio.sleep(0)
            await client.call("PING")
            assert client.generation == generation
            assert b"".join(server.received).index(b"HELLO") < b"".join(server.received).index(b"PING")
    assert seen == [2, 3]


async def test_a_killed_server_is_found_again(client: RespClient, message_server: PrivateServer) -> None:
    await client.call("SET", "k", "kept")
    with message_server.stopped():
        waiting = client.call("GET", "k")
        await asyncio.sleep(0)
        message_server.restart()
    assert await outcome(waiting) == "unavailable"
    await until(lambda: client.generation == 2)
    assert await client.call("GET", "k") == b"kept"


async def test_a_closed_client_stays_closed(client: RespClient) -> None:
    await client.close()
    await client.close()
    with pytest.raises(StoreUnavailable):
        client.call("PING")


async def test_tcp() -> None:
    scripted_server = ScriptedServer(Path("/none"), lambda _: b":7\r\n")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ScriptedConnection(scripted_server), "127.0.0.1", 0)
    client = RespClient(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", name="tcp")
    await client.connect()
    assert await client.call("DBSIZE") == 7
    await client.close()
    server.close()
    scripted_server.transports[0].abort()
    await server.wait_closed()


@pytest.mark.parametrize(
    "address",
    ["", "unix://", "unix://host/path", "redis://", "redis://h:port", "http://h:1", "redis://u:p@h:1", "h:6379"],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(StartupError, match="neither"):
        parse_address(address)


def test_addresses() -> None:
    assert parse_address("unix:///run/m.sock") == ("/run/m.sock", "", 0)
    assert parse_address("redis://10.0.0.1:7000") == ("", "10.0.0.1", 7000)
    assert parse_address("redis://[::1]:7000/") == ("", "::1", 7000)
    assert parse_address("redis://localhost") == ("", "localhost", 6379)


async def outcome(future: asyncio.Future[Any]) -> str:
    try:
        return repr(await future)
    except StoreUnavailable:
        return "unavailable"
