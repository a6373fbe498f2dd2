"""What the SDK tells the application, and the errors its calls raise."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qim.client.timeline import MessageRow
from qim.errors import ErrorCode, QimError


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A message is in the local store for the first time; insert it by `timeline_key`, never append (§6.9)."""

    row: MessageRow


class SendResult(NamedTuple):
    """Coordinates of a committed message: COMMITTED, no more (§8.4)."""

    message_id: bytes
    conversation_seq: int
    room_seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSent:
    """A pending message of this device turned to sent, by SEND_ACK or by its own entry."""

    conversation_id: str
    client_message_id: str
    result: SendResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFailed:
    """A pending message will not be sent again by itself; `resendable` keeps its id."""

    client_message_id: str
    code: int
    detail: str
    resendable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """`closed` is final; `reason` names what ended or refused the connection."""

    state: Literal["connecting", "online", "offline", "closed"]
    reason: str = ""


ClientEvent = MessageReceived | MessageSent | MessageFailed | StateChanged


class RequestFailed(QimError):
    """The server refused a request, or the connection ended before its answer (`code` 0)."""

    def __init__(self, code: int, detail: str, retry_after_ms: int = 0) -> None:
        name = ErrorCode(code).name if code in ErrorCode.__members__.values() else f"error {code}"
        super().__init__(f"{name} {detail}".strip() if code else detail)
        self.code = code
        self.detail = detail
        self.retry_after_ms = retry_after_ms


class SendRefused(RequestFailed):
    """A message was finally refused, or given up by the local rules."""


class ClientClosed(QimError):
    """The client has ended: closed by the application, or told by the server not to come back."""


class SendHandle:
    """A message on its way. Awaiting it gives a SendResult or raises SendRefused."""

    __slots__ = ("client_message_id", "future")

    def __init__(self, client_message_id: str, future: asyncio.Future[SendResult]) -> None:
        self.client_message_id = client_message_id
        self.future = future
        future.add_done_callback(_mark_seen)

    def __await__(self) -> Generator[object, None, SendResult]:
        return self.future.__await__()


def _mark_seen(future: asyncio.Future[SendResult]) -> None:
    """A refusal also comes as an event: an application that never awaits the handle has not lost it."""
    if not future.cancelled():
        future.exception()
