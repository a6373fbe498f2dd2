"""The backplane contract (DESIGN §4, §11.3.2).

Peers are role instances ("gateway-0", "writer-1", ...). A process may hold several; a message between roles of one
process takes the same path without the socket. One-way messages may be lost with a link, never reordered within one
(link, stream): whoever needs more uses `request` or reads the log. Five stream ids are the five push priorities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from enum import IntEnum
from typing import Any, Protocol

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


class Answer:
    """What a request handler may hand back at once and settle later: an awaitable that needs no future and no task."""

    __slots__ = ("_body", "_take")

    def __init__(self) -> None:
        self._body: bytes | None = None
        self._take: Callable[[bytes], None] | None = None

    def done(self) -> bool:
        return self._body is not None

    def set_result(self, body: bytes) -> None:
        """Send the answer, in the write of this tick."""
        assert self._body is None, "settled twice"
        self._body = body
        if self._take is not None:
            self._take(body)

    def hand_to(self, take: Callable[[bytes], None]) -> None:
        """`take` gets the answer, now or when it is there; for one taker."""
        self._take = take
        if self._body is not None:
            take(self._body)

    def __await__(self) -> Generator[Any, None, bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.hand_to(future.set_result)
        return future.__await__()


NoticeHandler = Callable[[str, bytes], None]
"""(peer, body); must not block; an exception is logged and counted, the link lives on."""
RequestHandler = Callable[[str, bytes], Awaitable[bytes]]
"""(peer, body) -> answer body."""
AnswerHandler = Callable[[bytes | PeerUnavailable], None]
"""Told once how a request ended; must not block; an exception is logged and counted."""
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


class AskingBackplane(Backplane, Protocol):
    """For who asks once per message."""

    def ask(self, peer: str, opcode: int, body: bytes, on_answer: AnswerHandler, *, timeout_ms: int) -> None:
        """`request` without a future or a task: for what happens once a message.

        `on_answer` gets what `request` returns or raises, maybe before `ask` returns.
        """
        ...
