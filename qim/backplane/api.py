"""The backplane contract (DESIGN §4, §11.3.2).

Peers are role instances ("gateway-0", "writer-1", ...). A process may hold several; a message between roles of one
process takes the same path without the socket. One-way messages may be lost with a link, never reordered within one
(link, stream): whoever needs more uses `request` or reads the log. Five stream ids are the five push priorities.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Protocol

from qim.errors import QimError


class Priority(IntEnum):
    """Stream ids; smaller goes first (§11.3.2)."""

    CONTROL = 0
    SINGLE_CHAT = 1
    SMALL_GROUP = 2
    LARGE_GROUP = 3
    ROOM = 4


class PeerUnavailable(QimError):
    """The link is down, its window is full or the deadline passed: the request may have been executed."""


NoticeHandler = Callable[[str, bytes], None]
"""(peer, body); must not block; an exception is logged and counted, the link lives on."""
RequestHandler = Callable[[str, bytes], Awaitable[bytes]]
"""(peer, body) -> answer body."""
LinkListener = Callable[[str, bool], None]
"""(peer, up). `up` is reported when a replacement link is ready to carry messages."""


class Backplane(Protocol):
    def on_notice(self, opcode: int, handler: NoticeHandler) -> None: ...

    def on_request(self, opcode: int, handler: RequestHandler) -> None: ...

    def on_link(self, listener: LinkListener) -> None: ...

    def connect(self, peer: str) -> None:
        """Keep a link to `peer`, reconnecting for ever with backoff."""
        ...

    def notify(self, peer: str, opcode: int, body: bytes, priority: Priority = Priority.CONTROL) -> bool:
        """Queue a one-way message, written once per loop tick. False: dropped, the link is down or its queue full."""
        ...

    async def request(self, peer: str, opcode: int, body: bytes, *, timeout_ms: int) -> bytes:
        """PeerUnavailable when the link is down, > 4096 requests are in flight, or no answer came in time."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...
