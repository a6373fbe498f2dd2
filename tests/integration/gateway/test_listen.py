"""Accepting: options of the socket, limits per address, handshakes that fail."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import pytest

from qim.config.parameters import default_parameters
from qim.errors import StartupError
from qim.gateway.listen import open_listener
from qim.protocol.opcodes import Opcode
from tests.support.gateway_fixture import auth, running_gateway
from tests.support.raw_client import RawClient

NOBODY_EXEMPT: dict[str, Any] = {"exempt_addresses": frozenset()}


def test_workers_share_a_port_and_accepted_sockets_inherit_the_options() -> None:
    parameters = default_parameters()
    with open_listener("127.0.0.1", 0, parameters) as first:
        port = first.getsockname()[1]
        with open_listener("127.0.0.1", port, parameters) as second, socket.create_connection(("127.0.0.1", port)):
            accepted = accept_either(first, second)
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3


def accept_either(*listeners: socket.socket) -> socket.socket:
    """Whichever the kernel chose."""
    for listener in listeners:
        try:
            return listener.accept()[0]
        except BlockingIOError:
            continue
    raise AssertionError("nobody got the connection")


def test_used_port_and_bad_address_are_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use"):
            open_listener("127.0.0.1", port, default_parameters())
    with pytest.raises(StartupError, match="cannot listen on 203.0.113.9:0"):
        open_listener("203.0.113.9", 0, default_parameters())


async def test_addresses_are_limited_in_connections() -> None:
    async with running_gateway(settings=NOBODY_EXEMPT, per_ip_max_connections=3) as gateway:
        clients = [await gateway.client() for _ in range(3)]
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await gateway.client()
        await clients[0].close()
        await asyncio.sleep(0.05)
        await gateway.client()


async def test_addresses_are_limited_in_rate_unless_exempt() -> None:
    async with running_gateway(settings=NOBODY_EXEMPT, per_ip_connect_rate=2) as gateway:
        for _ in range(2):
            await gateway.client()
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await gateway.client()
    async with running_gateway(per_ip_connect_rate=1, per_ip_max_connections=1) as gateway:
        for _ in range(4):
            await gateway.client()


async def test_failed_handshakes_cost_an_address_nothing() -> None:
    limits = {"per_ip_max_connections": 2, "unauth_connection_timeout": 200}
    async with running_gateway(settings=NOBODY_EXEMPT, **limits) as gateway:
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.role.port)
            writer.write(b"this is no ClientHello\r\n\r\n")
            async with asyncio.timeout(5):
                while await reader.read(4096):
                    pass
            writer.close()
            await asyncio.sleep(0.02)
        silent = [await asyncio.open_connection("127.0.0.1", gateway.role.port) for _ in range(2)]
        for reader, writer in silent:
            async with asyncio.timeout(5):
                assert await reader.read(1) == b""
            writer.close()
        await asyncio.sleep(0.05)
        clients = [await gateway.client() for _ in range(2)]
        await clients[0].expect(Opcode.AUTH_OK, clients[0].send(Opcode.AUTH, auth("ann")))


async def test_only_tls_1_3() -> None:
    async with running_gateway() as gateway:
        context = gateway.client_context
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await RawClient.connect(gateway.role.port, context)
