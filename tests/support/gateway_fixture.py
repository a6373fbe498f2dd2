"""A whole gateway worker on a real TLS port with a fake node behind it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.app.tls import client_context, ensure_certificates, server_context
from qim.config.parameters import default_parameters
from qim.gateway.node import GatewaySettings
from qim.gateway.role import GatewayRole
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.runtime.clock import SystemClock
from tests.support.fake_backplane import FakeBackplane, FakeNode, FakeRoutes, FakeSessionRegistry
from tests.support.raw_client import RawClient

TENANT = "acme"
BUCKETS = 64
SHARDS = 16
FAST_TICK_MS = 20
_KEY = Ed25519PrivateKey.generate()
_CLOCK = SystemClock()


class Gateway:
    """The role, what stands behind it, and ways to talk to it as a client."""

    def __init__(self, directory: Path, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        files = ensure_certificates(directory / "tls", "127.0.0.1", _CLOCK.unix_ms())
        self.client_context: ssl.SSLContext = client_context(files.ca_path)
        self.no_alpn_context: ssl.SSLContext = client_context(files.ca_path, ("h2",))
        self.run_dir = directory
        self.backplane = FakeBackplane()
        self.routes = FakeRoutes(buckets=BUCKETS, shards=SHARDS)
        self.registry = FakeSessionRegistry()
        self.node = FakeNode(self.backplane)
        self.failures: list[BaseException] = []
        self.clients: list[RawClient] = []
        self.role = GatewayRole(
            "gateway-0",
            GatewaySettings(
                host="127.0.0.1",
                port=0,
                tls_context=server_context(files),
                token_key=_KEY.public_key(),
                run_dir=directory,
                peers=("writer-0", "mailbox-0"),
                other_gateways=("gateway-1",),
                conversation_bucket_count=BUCKETS,
                mailbox_shard_count=SHARDS,
                **{"exempt_addresses": frozenset({"127.0.0.1"}), **settings},
            ),
            parameters=default_parameters(
                **{"heartbeat_wheel_tick": FAST_TICK_MS, "presence_slots_per_worker": 256, **parameters}
            ),
            backplane=self.backplane,
            routes=self.routes,
            registry=self.registry,
            clock=_CLOCK,
            random_unit=random.Random(7).random,
            on_failure=lambda task, error: self.failures.append(error),
        )

    async def client(self, *, context: ssl.SSLContext | None = None, sock: socket.socket | None = None) -> RawClient:
        """A TLS connection that has sent nothing; closed with the gateway."""
        client = await RawClient.connect(self.role.port, context or self.client_context, sock=sock)
        self.clients.append(client)
        return client

    async def login(self, user_id: str, device_id: str = "phone", *, applied: int = 0) -> tuple[RawClient, pb.AuthOk]:
        """A connection that has got AUTH_OK; the barrier stands."""
        client = await self.client()
        request_id = client.send(Opcode.AUTH, auth(user_id, device_id, applied=applied))
        return client, await client.expect(Opcode.AUTH_OK, request_id)

    async def online(self, user_id: str, device_id: str = "phone") -> RawClient:
        """A connection that has got ONLINE_READY."""
        client, welcome = await self.login(user_id, device_id, applied=self.node.watermark)
        client.send(Opcode.SYNC_COMPLETE, pb.SyncComplete(sync_to_seq=welcome.sync_to_seq))
        await client.expect(Opcode.ONLINE_READY)
        return client


def token(user_id: str, device_id: str, *, ttl_s: float = 3600, tenant_id: str = TENANT) -> str:
    """An access token of the key the fixture's gateways trust."""
    expires_s = int(_CLOCK.unix_ms() / 1000 + ttl_s)
    claims = {"tid": tenant_id, "uid": user_id, "did": device_id, "exp": expires_s, "jti": "token-1"}
    return jwt.encode(claims, _KEY, algorithm="EdDSA")


def auth(user_id: str, device_id: str = "phone", *, applied: int = 0, **fields: Any) -> pb.Auth:
    """AUTH with a good token; `applied` 0 is the empty cursor."""
    cursor = pb.MailboxCursorToken(token=b"signed" if applied else b"", last_applied_mailbox_seq=applied)
    values: dict[str, Any] = {
        "access_token": token(user_id, device_id),
        "device_id": device_id,
        "client_version": "1.0.0",
        "mailbox_cursor": cursor,
        **fields,
    }
    return pb.Auth(**values)


def text(conversation_id: str, client_message_id: str, payload: bytes = b"hi", **fields: Any) -> pb.SendMessage:
    """SEND_MESSAGE of a text."""
    return pb.SendMessage(
        client_message_id=client_message_id,
        conversation_id=conversation_id,
        message_type=pb.MESSAGE_TYPE_TEXT,
        payload=payload,
        **fields,
    )


def complete(client: RawClient, sync_to_seq: int) -> int:
    """Send SYNC_COMPLETE; its request_id."""
    return client.send(Opcode.SYNC_COMPLETE, pb.SyncComplete(sync_to_seq=sync_to_seq))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for what the gateway does in its own time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running_gateway(*, settings: dict[str, Any] | None = None, **parameters: Any) -> AsyncIterator[Gateway]:
    """A started gateway; on exit it is stopped and must not have lost a task."""
    with tempfile.TemporaryDirectory(prefix="qim-gateway-") as directory:
        gateway = Gateway(Path(directory), settings or {}, parameters)
        await gateway.role.start()
        try:
            yield gateway
        finally:
            for client in gateway.clients:
                await client.close()
            await gateway.role.stop()
        assert gateway.failures == []
