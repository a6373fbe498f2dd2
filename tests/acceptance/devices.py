"""Clients that keep every frame they send and receive: a bare device that does only what it is told, and the SDK."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from google.protobuf.message import Message

from qim.client.actions import Action, Transmit
from qim.client.aio import Client
from qim.client.wire import WireConnection, connect
from qim.core.ids import direct_conversation_id
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.protocol.reader import Frame
from tests.support.raw_client import BODY_OF

ANSWER_TIMEOUT_S = 30.0
Triple = tuple[int, int, int]
"""(mailbox_seq, event_ordinal, event_id), the unit of every comparison (26.0)."""


class Sent(NamedTuple):
    opcode: Opcode
    request_id: int
    body: Any
    at_ms: float
    """Monotonic."""


class Received(NamedTuple):
    opcode: Opcode
    request_id: int
    body: Any
    at_ms: float
    """Monotonic."""


class Device:
    """One connection of a device on the bare wire."""

    def __init__(self, device_id: str, access_token: str) -> None:
        self.device_id = device_id
        self.sent: list[Sent] = []
        self.received: list[Received] = []
        self.closed = False
        self.welcome = pb.AuthOk()
        """The last AUTH_OK."""
        self._access_token = access_token
        self._wire: WireConnection | None = None
        self._waiters: list[tuple[Callable[[], object], asyncio.Future[None]]] = []
        self._request_id = 0
        self._messages = 0

    @classmethod
    async def connect(cls, port: int, context: ssl.SSLContext, *, device_id: str, access_token: str) -> Device:
        device = cls(device_id, access_token)
        device._wire = await connect(
            "127.0.0.1", port, ssl_context=context, server_name="localhost", on_frame=device._on_frame,
            on_closed=device._on_closed, timeout_ms=10_000,
        )  # fmt: skip
        return device

    async def close(self) -> None:
        """End the connection; what was received stays."""
        if self._wire is not None and not self.closed:
            self._wire.close()
            await self.until(lambda: self.closed)

    # --------------------------------------------------------------------------------------------------------- frames

    def send(self, opcode: Opcode, message: Message) -> int:
        """Write one frame at the end of this loop turn; its request_id."""
        assert self._wire is not None
        self._request_id += 1
        self.sent.append(Sent(opcode, self._request_id, message, _now_ms()))
        self._wire.request(opcode, message, self._request_id)
        return self._request_id

    async def answer(self, request_id: int) -> Received:
        """The frame that answers a request."""
        found: list[Received] = []

        def arrived() -> bool:
            found.extend(frame for frame in self.received if frame.request_id == request_id)
            return bool(found)

        await self.until(arrived)
        return found[0]

    async def ask(self, opcode: Opcode, message: Message) -> Received:
        return await self.answer(self.send(opcode, message))

    async def until(self, done: Callable[[], object], timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Until the condition holds; looked at after every frame. TimeoutError when that does not happen."""
        if done():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (done, future)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        finally:
            self._waiters.remove(waiter)

    def bodies(self, opcode: Opcode) -> list[Any]:
        """Bodies of all received frames of an opcode, in order."""
        return [frame.body for frame in self.received if frame.opcode is opcode]

    def pushed(self) -> list[pb.Entry]:
        """Entries of all PUSH_EVENTS, in order of arrival."""
        return [entry for body in self.bodies(Opcode.PUSH_EVENTS) for entry in body.events]

    # ----------------------------------------------------------------------------------------------------- mailbox sync

    async def authenticate(self, last_applied: int = 0, token: bytes | None = None) -> Received:
        """AUTH at a position; without a token of its own the one of the last AUTH_OK is used."""
        signed = self.welcome.mailbox_cursor.token if token is None else token
        cursor = pb.MailboxCursorToken(token=signed, last_applied_mailbox_seq=last_applied)
        auth = pb.Auth(
            access_token=self._access_token, device_id=self.device_id, client_version="1.0.0", mailbox_cursor=cursor
        )
        return await self.ask(Opcode.AUTH, auth)

    async def log_in(self, last_applied: int = 0, token: bytes | None = None) -> pb.AuthOk:
        """AUTH that must be accepted."""
        answer = await self.authenticate(last_applied, token)
        assert answer.opcode is Opcode.AUTH_OK, answer
        self.welcome = answer.body
        return self.welcome

    async def complete(self) -> None:
        """SYNC_COMPLETE and its ONLINE_READY."""
        answer = await self.ask(Opcode.SYNC_COMPLETE, pb.SyncComplete(sync_to_seq=self.welcome.sync_to_seq))
        assert answer.opcode is Opcode.ONLINE_READY, answer

    async def go_online(self) -> None:
        """Log in as a new device, pull the backlog, pass the barrier."""
        await self.log_in()
        if self.welcome.has_offline:
            await self.pull_through(0, self.welcome.sync_to_seq)
        await self.complete()

    async def pull(self, after_seq: int, up_to_seq: int, **fields: int) -> Received:
        """One PULL_MAILBOX and whatever answers it."""
        return await self.ask(Opcode.PULL_MAILBOX, pb.PullMailbox(after_seq=after_seq, up_to_seq=up_to_seq, **fields))

    async def pull_batch(self, after_seq: int, up_to_seq: int, **fields: int) -> pb.MailboxBatch:
        """One PULL_MAILBOX that must be answered by a batch."""
        answer = await self.pull(after_seq, up_to_seq, **fields)
        assert answer.opcode is Opcode.MAILBOX_BATCH, answer
        batch: pb.MailboxBatch = answer.body
        return batch

    async def pull_through(self, after_seq: int, up_to_seq: int, **fields: int) -> list[pb.MailboxBatch]:
        """Pull until `has_more` is false."""
        batches = [await self.pull_batch(after_seq, up_to_seq, **fields)]
        while batches[-1].has_more:
            batches.append(await self.pull_batch(batches[-1].covered_through_seq, up_to_seq, **fields))
        return batches

    # --------------------------------------------------------------------------------------------------------- messages

    def say(self, conversation_id: str, payload: bytes = b"hello", **fields: Any) -> int:
        """SEND_MESSAGE of a text; its request_id."""
        self._messages += 1
        message = pb.SendMessage(
            client_message_id=f"{self.device_id}-{self._messages}", conversation_id=conversation_id,
            message_type=pb.MESSAGE_TYPE_TEXT, payload=payload, **fields,
        )  # fmt: skip
        return self.send(Opcode.SEND_MESSAGE, message)

    async def say_all(self, conversation_id: str, payloads: list[bytes], *, ahead: int = 32) -> list[pb.SendAck]:
        """Send texts, at most `ahead` without their SEND_ACK; all must be acknowledged."""
        acks: list[pb.SendAck] = []
        for first in range(0, len(payloads), ahead):
            requests = [self.say(conversation_id, payload) for payload in payloads[first : first + ahead]]
            for request_id in requests:
                answer = await self.answer(request_id)
                assert answer.opcode is Opcode.SEND_ACK, answer
                acks.append(answer.body)
        return acks

    # ---------------------------------------------------------------------------------------------------------- inside

    def _on_frame(self, frame: Frame) -> None:
        self.received.append(decode(frame))
        self._wake()

    def _on_closed(self, error: Exception | None) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        for done, future in self._waiters:
            if not future.done() and done():
                future.set_result(None)


class RecordedClient(Client):
    """The SDK with the frames it sent and received."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[Sent] = []
        self.received: list[Received] = []
        super().__init__(*args, **kwargs)

    def bodies(self, opcode: Opcode) -> list[Any]:
        """Bodies of all received frames of an opcode, in order."""
        return [frame.body for frame in self.received if frame.opcode is opcode]

    def requests(self, opcode: Opcode) -> list[Sent]:
        """Frames of an opcode this client sent, in order."""
        return [frame for frame in self.sent if frame.opcode is opcode]

    def _on_frame(self, frame: Frame) -> None:
        self.received.append(decode(frame))
        super()._on_frame(frame)

    def _do(self, actions: list[Action]) -> None:
        self.sent += [
            Sent(action.opcode, action.request_id, action.message, _now_ms())
            for action in actions
            if isinstance(action, Transmit)
        ]
        super()._do(actions)


def decode(frame: Frame) -> Received:
    """A frame with its body parsed."""
    opcode = Opcode(frame.opcode)
    return Received(opcode, frame.request_id, BODY_OF[opcode].FromString(frame.body), _now_ms())


def triple(entry: pb.Entry) -> Triple:
    return entry.mailbox_seq, entry.event_ordinal, entry.event_id


def triples(batches: list[pb.MailboxBatch]) -> list[Triple]:
    """Of all entries, in order, repeated ones too."""
    return [triple(entry) for batch in batches for entry in batch.entries]


def direct(user: str, other: str) -> str:
    """Conversation id of a single chat."""
    return direct_conversation_id(user, other)


def numbers_in(message: Message) -> Iterator[int]:
    """Every integer anywhere in a message: what a peer could read a sequence from."""
    for field, value in message.ListFields():
        for one in value if field.is_repeated else (value,):
            if isinstance(one, Message):
                yield from numbers_in(one)
            elif isinstance(one, int):
                yield one


def _now_ms() -> float:
    return time.monotonic_ns() / 1e6
