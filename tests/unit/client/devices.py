"""A client with its events, options that make it live fast, and answers for a scripted server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qim.client.aio import Client
from qim.client.events import ClientEvent, MessageReceived, StateChanged
from qim.client.heartbeat import HeartbeatOptions
from qim.client.link import ClientOptions, TokenProvider
from qim.client.pending import SendOptions
from qim.client.store import LocalStore
from qim.errors import ErrorCode
from tests.support.fake_server import FakeServer, Peer
from tests.unit.client.scene import DM

FAST = ClientOptions(
    reconnect_scale=0.01,
    history_spacing_ms=1,
    resync_min_interval_ms=0,
    commit_interval_ms=1,
    heartbeat=HeartbeatOptions(probe_timeout_ms=60),
    send=SendOptions(send_ack_timeout_ms=60),
)


class Device:
    """A client with its events."""

    def __init__(
        self, server: FakeServer, *, path: Path | str = ":memory:", options: ClientOptions = FAST,
        token: str | TokenProvider = "token",
    ) -> None:  # fmt: skip
        self.events: list[ClientEvent] = []
        self.client = Client(
            "127.0.0.1",
            server.port,
            tenant_id="t",
            user_id="alice",
            device_id="phone",
            token=token,
            store=LocalStore(path),
            ssl_context=server.client_context,
            options=options,
            on_event=self.events.append,
        )

    async def live(self) -> Client:
        self.client.start()
        await self.client.wait_ready(5_000)
        return self.client

    def texts(self) -> list[str]:
        return [row.payload.decode() for row in self.client.store.messages(DM)]

    def received(self) -> list[str]:
        return [event.row.payload.decode() for event in self.events if isinstance(event, MessageReceived)]

    def states(self) -> list[tuple[str, str]]:
        return [(event.state, event.reason) for event in self.events if isinstance(event, StateChanged)]


Make = Callable[..., Device]


def say(code: ErrorCode, **fields: Any) -> Callable[[Peer, int, Any], bool]:
    """Answer one frame with this error."""

    def script(peer: Peer, request_id: int, _: Any) -> bool:
        peer.error(code, request_id, **fields)
        return True

    return script


def drop(peer: Peer, *_: Any) -> bool:
    """Answer one frame with a reset."""
    peer.reset()
    return True


def ignore(*_: Any) -> bool:
    """Answer one frame with silence."""
    return True
