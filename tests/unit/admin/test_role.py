"""The admin role listens with TLS while it runs and frees its port afterwards."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from qim.admin.http import AdminPlane
from qim.admin.role import AdminRole
from qim.app.tls import TlsFiles, client_context, ensure_certificates, server_context
from qim.errors import StartupError
from qim.runtime.clock import SystemClock
from tests.support.ports import free_port

HTTP = ("http/1.1",)


class Plane:
    def application(self) -> web.Application:
        async def hello(_: web.Request) -> web.Response:
            return web.Response(text="hello")

        app = web.Application()
        app.router.add_get("/", hello)
        return app


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return ensure_certificates(tmp_path, "127.0.0.1", SystemClock().unix_ms())


def role(files: TlsFiles, port: int) -> AdminRole:
    plane = cast(AdminPlane, Plane())
    return AdminRole(plane, host="127.0.0.1", port=port, tls_context=server_context(files, alpn=HTTP))


async def test_it_serves_until_it_is_drained(files: TlsFiles) -> None:
    port = free_port()
    admin = role(files, port)
    assert not admin.ready()
    await admin.start()
    assert admin.ready()
    context = client_context(files.ca_path, alpn=HTTP)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"https://127.0.0.1:{port}/", ssl=context) as response,
    ):
        assert await response.text() == "hello"
    await admin.drain()
    await admin.stop()
    assert not admin.ready()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


async def test_a_used_port_is_one_line(files: TlsFiles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = role(files, taken.getsockname()[1])
        with pytest.raises(StartupError, match="--admin-port"):
            await admin.start()
        await admin.stop()
