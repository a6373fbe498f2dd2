"""What a client may send that is not ours: never a traceback, never a dead worker (§20.1, §27.1.2)."""

from __future__ import annotations

import asyncio

import pytest

from qim.errors import ErrorCode
from qim.obs.metrics import REGISTRY
from qim.protocol.header import FLAG_COMPRESSED, HEADER_BYTES, encode_frame, encode_header
from qim.protocol.opcodes import Opcode
from tests.support.gateway_fixture import auth, running_gateway, text
from tests.support.raw_client import with_version


def framing_errors(kind: str) -> float:
    return REGISTRY.get_sample_value("qim_gateway_framing_error_total", {"kind": kind}) or 0.0


async def test_versions_and_flags_we_do_not_speak() -> None:
    async with running_gateway() as gateway:
        client = await gateway.client()
        client.send_bytes(with_version(encode_frame(Opcode.AUTH, auth("ann").SerializeToString(), request_id=1), 3))
        welcome = await client.expect(Opcode.AUTH_OK, 1)
        assert welcome.session_epoch == 1
        client.send_bytes(with_version(encode_frame(Opcode.PING, b"", request_id=2), 3))
        await client.expect_error(ErrorCode.UPGRADE_REQUIRED, 2)
        await client.expect_error(
            ErrorCode.UPGRADE_REQUIRED, client.send(Opcode.PING, request_id=3, flags=FLAG_COMPRESSED)
        )


async def test_frames_split_and_joined_in_any_way() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        stream = b"".join(encode_frame(Opcode.PING, b"", request_id=n) for n in range(1, 6))
        for at in range(0, len(stream), HEADER_BYTES - 3):
            client.send_bytes(stream[at : at + HEADER_BYTES - 3])
            await asyncio.sleep(0)
        for n in range(1, 6):
            await client.expect(Opcode.PONG, n)
        big = text("dm:ann:bob", "m1", b"x" * (32 << 10))
        await client.expect(Opcode.SEND_ACK, client.send(Opcode.SEND_MESSAGE, big))
        assert gateway.node.sent[0].message.payload == big.payload


async def test_answers_of_one_tick_share_a_write() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        connection = next(iter(gateway.role._node._table.by_id.values()))  # type: ignore[union-attr]
        writes: list[int] = []

        class Counting:
            def __init__(self, transport: object) -> None:
                self._transport = transport

            def __getattr__(self, name: str) -> object:
                return getattr(self._transport, name)

            def write_nocheck(self, data: bytes) -> None:
                writes.append(len(data))
                self._transport.write_nocheck(data)  # type: ignore[attr-defined]

        connection.transport = Counting(connection.transport)
        client.send_bytes(b"".join(encode_frame(Opcode.PING, b"", request_id=n) for n in range(1, 21)))
        for n in range(1, 21):
            await client.expect(Opcode.PONG, n)
        assert len(writes) == 1


async def test_wrong_carrier_is_closed() -> None:
    async with running_gateway() as gateway:
        client = await gateway.client(context=gateway.no_alpn_context)
        await client.expect_closed()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "magic"),
        (b"\x00" * 64, "magic"),
        (encode_header(Opcode.AUTH, 5)[:-1] + b"\x00", "crc"),
    ],
)
async def test_garbage_after_tls_closes_the_connection(data: bytes, kind: str) -> None:
    async with running_gateway() as gateway:
        before = framing_errors(kind)
        client = await gateway.client()
        client.send_bytes(data)
        await client.expect_closed()
        assert framing_errors(kind) == before + 1
        online = await gateway.online("ann")
        await online.expect(Opcode.PONG, online.send(Opcode.PING))
        online.send_bytes(data)
        await online.expect_closed()


async def test_oversized_frames_are_refused_by_their_header() -> None:
    async with running_gateway() as gateway:
        client = await gateway.client()
        client.send_bytes(encode_header(Opcode.AUTH, 8193, request_id=9))
        await client.expect_error(ErrorCode.PAYLOAD_TOO_LARGE, 9)
        await client.expect_closed()
        for opcode, size in ((Opcode.SEND_MESSAGE, 100_000), (Opcode.CREATE_GROUP, (4 << 20) + 1)):
            online = await gateway.online("ann")
            online.send_bytes(encode_header(opcode, size, request_id=10))
            await online.expect_error(ErrorCode.PAYLOAD_TOO_LARGE, 10)
            await online.expect_closed()
