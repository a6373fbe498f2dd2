"""What part `push` measures, each alone in its process: a gateway worker, and bare TLS writes as its floor.

Both hang on the backplane and are driven by `push_driver.py`, so a round begins with the same wake-up for both.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import aiofastnet
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.app.bench.child import ChildFailed, Pipe, serve
from qim.app.tls import TlsFiles, server_context
from qim.backplane.unix import UnixBackplane, socket_path
from qim.client.wire import TLS_BUFFER_BYTES
from qim.config.parameters import default_parameters
from qim.gateway.node import GatewaySettings
from qim.gateway.role import GatewayRole
from qim.registry.api import LeaseKind, RouteMap, SessionGrant
from qim.runtime.affinity import pin_to_cpu, usable_cpus
from qim.runtime.clock import SystemClock
from qim.runtime.collector import settle

GATEWAY: Final = "gateway-0"
FLOOR: Final = "floor-0"
DRIVER: Final = "driver"
MAILBOX: Final = "mailbox-0"
WRITER: Final = "writer-0"
FLOOR_WRITE: Final = 0xF0F1
"""Notice of the floor's own: u8 count, then the frame to write that often, joined, to every socket."""
_LISTEN_BACKLOG: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Begin to listen; the answer is the port."""

    run_dir: Path
    tls: TlsFiles
    token_key: bytes
    """Raw private key of the token issuer; the gateway takes its public half."""


def sockets(run_dir: Path) -> dict[str, Path]:
    """Role instance -> socket of its process."""
    hosts = {GATEWAY: GATEWAY, FLOOR: FLOOR, MAILBOX: DRIVER, WRITER: DRIVER}
    return {role: socket_path(run_dir, process) for role, process in hosts.items()}


def backplane(run_dir: Path, process: str, roles: tuple[str, ...], failures: list[str]) -> UnixBackplane:
    """One for a process of this part."""
    return UnixBackplane(
        process,
        roles,
        sockets(run_dir),
        run_dir=run_dir,
        clock=SystemClock(),
        on_failure=lambda task, error: failures.append(f"{task}: {error!r}"),
    )


def pin_measured() -> None:
    """What is measured has the first core, the driver the others."""
    cpus = usable_cpus()
    if len(cpus) > 1:
        pin_to_cpu(cpus[0])


async def serve_gateway(pipe: Pipe) -> None:
    """Main of the gateway's process."""
    pin_measured()
    async with _Closing() as closing:
        await serve(pipe, lambda command: _start_gateway(command, closing))


async def serve_floor(pipe: Pipe) -> None:
    """Main of the floor's process."""
    pin_measured()
    async with _Closing() as closing:
        await serve(pipe, lambda command: _start_floor(command, closing))


class _Closing:
    """Ends what was started, last first."""

    def __init__(self) -> None:
        self.add: list[Callable[[], Any]] = []

    async def __aenter__(self) -> _Closing:
        return self

    async def __aexit__(self, *_: object) -> None:
        for close in reversed(self.add):
            await close()


class _OneOwner:
    """Routes of a node with one writer and one MailboxNode."""

    def owner(self, kind: LeaseKind, shard_id: int) -> str | None:
        return MAILBOX if kind is LeaseKind.MAILBOX_SHARD else WRITER

    def refresh_soon(self) -> None:
        """Nothing ever moves."""

    def on_change(self, listener: Callable[[RouteMap], None]) -> None:
        """Nothing ever changes."""


class _CountingRegistry:
    """Session epochs from memory."""

    def __init__(self) -> None:
        self._epoch = 0

    async def open_session(
        self, tenant_id: str, user_id: str, device_id: str, *, max_devices: int, now_ms: int
    ) -> SessionGrant:
        self._epoch += 1
        return SessionGrant(session_epoch=self._epoch)


async def _start_gateway(command: Serve, closing: _Closing) -> int:
    failures: list[str] = []
    links = backplane(command.run_dir, GATEWAY, (GATEWAY,), failures)
    parameters = default_parameters(per_ip_connect_rate=100_000, per_ip_max_connections=100_000)
    role = GatewayRole(
        GATEWAY,
        GatewaySettings(
            host="127.0.0.1",
            port=0,
            tls_context=server_context(command.tls),
            token_key=Ed25519PrivateKey.from_private_bytes(command.token_key).public_key(),
            run_dir=command.run_dir,
            peers=(MAILBOX,),
            other_gateways=(),
            conversation_bucket_count=parameters.conversation_bucket_count,
            mailbox_shard_count=parameters.single_host_mailbox_shard_count,
        ),
        parameters=parameters,
        backplane=links,
        routes=_OneOwner(),
        registry=_CountingRegistry(),
        clock=SystemClock(),
        random_unit=random.random,
        on_failure=lambda task, error: failures.append(f"{task}: {error!r}"),
    )
    await links.start()
    closing.add.append(links.close)
    await role.start()
    closing.add.append(role.stop)
    settle()
    if failures:
        raise ChildFailed(failures[0])
    return role.port


class _Bare(asyncio.BufferedProtocol):
    """A TLS connection of the floor: it is written to, and what it says is dropped."""

    def __init__(self, transports: list[aiofastnet.Transport]) -> None:
        self._transports = transports
        self._buffer = bytearray(4096)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transports.append(cast(aiofastnet.Transport, transport))

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Nothing is expected."""


async def _start_floor(command: Serve, closing: _Closing) -> int:
    transports: list[aiofastnet.Transport] = []

    def write(_peer: str, body: bytes) -> None:
        frames = body[1:] * body[0]
        for transport in transports:
            transport.write_nocheck(frames)

    links = backplane(command.run_dir, FLOOR, (FLOOR,), [])
    links.on_notice(FLOOR_WRITE, write)
    await links.start()
    closing.add.append(links.close)
    listener = socket.create_server(("127.0.0.1", 0), backlog=_LISTEN_BACKLOG)
    server = await aiofastnet.create_server(
        asyncio.get_running_loop(),
        lambda: _Bare(transports),
        sock=listener,
        ssl=server_context(command.tls),
        ssl_incoming_bio_size=TLS_BUFFER_BYTES,
        ssl_outgoing_bio_size=TLS_BUFFER_BYTES,
    )

    async def close() -> None:
        server.close()
        for transport in transports:
            transport.abort()

    closing.add.append(close)
    settle()
    return int(listener.getsockname()[1])
