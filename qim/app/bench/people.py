"""The people of a load generator: connections that log in, send marked messages and note when they arrive.

No SDK: that keeps a store per device and would be most of what is measured. What a person does on the wire is the same
but for one thing: no message names its predecessor, because an open loop does not wait to send the next one.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from array import array
from collections import Counter
from typing import Final

from google.protobuf.message import Message

from qim.app.bench.child import ChildFailed
from qim.client.wire import WireConnection, connect
from qim.core.ids import user_bucket
from qim.errors import ErrorCode
from qim.protocol.entry import varint
from qim.protocol.opcodes import Opcode
from qim.protocol.qim_pb2 import (
    MAILBOX_DIRTY,
    MESSAGE_TYPE_TEXT,
    Auth,
    AuthOk,
    CreateGroup,
    Error,
    Ping,
    SendMessage,
    SyncComplete,
)
from qim.protocol.reader import Frame

ANSWER_TIMEOUT_S: Final = 30.0
"""Of a login or CREATE_GROUP: a hundred handshakes wait for one core."""
MARK: Final = b"\x00qim-bench\x00"
"""Begins every payload; the time the message was due (seconds, monotonic) and the sender's number follow."""
_STAMP: Final = struct.Struct("<dI")
PAYLOAD_BYTES_MIN: Final = len(MARK) + _STAMP.size
_CLIENT_MESSAGE_ID_TAG: Final = b"\x12"
_PAYLOAD_TAG: Final = b"\x32"


class Samples:
    """What all people of a generator saw of one run: (due time, latency) of messages due from `from_s` on."""

    def __init__(self, from_s: float = 0.0) -> None:
        self.from_s = from_s
        self.ack_due_s = array("d")
        self.ack_ms = array("d")
        self.delivery_due_s = array("d")
        self.delivery_ms = array("d")
        self.late_ms = array("d")
        """How much later than due a message left: the generator's own doing, part of both latencies."""
        self.sent = 0
        self.refused: Counter[str] = Counter()
        self.dirty = 0
        """MAILBOX_DIRTY: the server gave up pushing something."""


class Person:
    """One connection of one user. `send` needs a target: the conversation everything of this person goes to."""

    __slots__ = (
        "conversation_id", "number", "samples", "user_id", "waiting", "_answers", "_message_head", "_next_id",
        "_padding", "_run_id", "_wire", "closed",
    )  # fmt: skip

    def __init__(self, number: int, user_id: str, samples: Samples) -> None:
        self.number = number
        self.user_id = user_id
        self.samples = samples
        self.conversation_id = ""
        self.waiting: dict[int, float] = {}
        """request_id -> due time of messages without an answer."""
        self.closed: Exception | str = ""
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._next_id = 0
        self._wire: WireConnection | None = None
        self._run_id = b""
        self._message_head = b""
        self._padding = b""

    # --------------------------------------------------------------------------------------------------------- login

    async def log_in(self, host: str, port: int, tenant_id: str, token: str, ssl_context: ssl.SSLContext) -> None:
        """Connect and come online; ChildFailed when the node refuses, or has something stored: people here are new."""
        self._wire = await connect(
            host,
            port,
            ssl_context=ssl_context,
            server_name=f"b{user_bucket(tenant_id, self.user_id):04x}.im.local",
            on_frame=self._on_frame,
            on_closed=self._on_closed,
            timeout_ms=int(ANSWER_TIMEOUT_S * 1000),
        )
        welcome = AuthOk.FromString(
            await self._ask(Opcode.AUTH, Auth(access_token=token, device_id="bench", client_version="bench"))
        )
        if welcome.has_offline:
            raise ChildFailed(f"{self.user_id} is not new")
        await self._ask(Opcode.SYNC_COMPLETE, SyncComplete(sync_to_seq=welcome.sync_to_seq))

    async def create_group(self, group_id: str, member_ids: list[str]) -> None:
        """A repeated request with the same list gets the same answer, so a slow one is asked again."""
        request = CreateGroup(group_id=group_id, member_ids=member_ids)
        for _ in range(10):
            try:
                await self._ask(Opcode.CREATE_GROUP, request)
            except ChildFailed as error:
                if ErrorCode.REGION_FAILOVER.name not in str(error):
                    raise
                await asyncio.sleep(1.0)
            else:
                return
        raise ChildFailed(f"group {group_id} was not created")

    def ping(self) -> None:
        """Keeps the connection from being idle."""
        if self._wire is not None:
            self._wire.request(Opcode.PING, Ping(ping_id=1), 0)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()

    async def _ask(self, opcode: Opcode, message: Message) -> bytes:
        assert self._wire is not None
        request_id = self._new_id()
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        self._wire.request(opcode, message, request_id)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            frame = await answer
        if frame.opcode == Opcode.ERROR:
            error = Error.FromString(frame.body)
            raise ChildFailed(f"{opcode.name} of {self.user_id}: {ErrorCode(error.code).name} {error.detail}")
        body: bytes = frame.body
        return body

    # ------------------------------------------------------------------------------------------------------- messages

    def begin(self, samples: Samples, run_id: str, payload_bytes: int) -> None:
        """Messages of the run `run_id` follow, of this size, counted in `samples`."""
        self.samples = samples
        self._run_id = f"{run_id}-{self.number}-".encode()
        self._padding = bytes(payload_bytes - PAYLOAD_BYTES_MIN)
        head = SendMessage(conversation_id=self.conversation_id, message_type=MESSAGE_TYPE_TEXT)
        self._message_head = head.SerializeToString() + _PAYLOAD_TAG + varint(payload_bytes) + MARK

    def send(self, due_s: float) -> None:
        """SEND_MESSAGE that was due at `due_s`; the body is put together without a protobuf object."""
        request_id = self._new_id()
        client_message_id = self._run_id + b"%d" % request_id
        body = b"".join(
            (
                self._message_head,
                _STAMP.pack(due_s, self.number),
                self._padding,
                _CLIENT_MESSAGE_ID_TAG,
                varint(len(client_message_id)),
                client_message_id,
            )
        )
        self.waiting[request_id] = due_s
        samples = self.samples
        if due_s >= samples.from_s:
            samples.sent += 1
            samples.late_ms.append((time.monotonic() - due_s) * 1000)
        if self._wire is not None:
            self._wire.send(Opcode.SEND_MESSAGE, body, request_id)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _on_frame(self, frame: Frame) -> None:
        opcode = frame.opcode
        if opcode == Opcode.PUSH_EVENTS:
            body = frame.body
            at = body.find(MARK)
            if at >= 0:
                due_s, sender = _STAMP.unpack_from(body, at + len(MARK))
                samples = self.samples
                if sender != self.number and due_s >= samples.from_s:
                    samples.delivery_due_s.append(due_s)
                    samples.delivery_ms.append((time.monotonic() - due_s) * 1000)
            return
        due = self.waiting.pop(frame.request_id, None)
        if due is not None:
            self._answered(frame, due)
            return
        answer = self._answers.pop(frame.request_id, None)
        if answer is not None and not answer.done():
            answer.set_result(frame)
        elif opcode == Opcode.ERROR and Error.FromString(frame.body).code == MAILBOX_DIRTY:
            self.samples.dirty += 1

    def _answered(self, frame: Frame, due_s: float) -> None:
        samples = self.samples
        if due_s < samples.from_s:
            return
        if frame.opcode == Opcode.SEND_ACK:
            samples.ack_due_s.append(due_s)
            samples.ack_ms.append((time.monotonic() - due_s) * 1000)
        else:
            error = Error.FromString(frame.body)
            samples.refused[f"{ErrorCode(error.code).name} {error.detail}".strip()] += 1

    def _on_closed(self, error: Exception | None) -> None:
        self.closed = error or "closed by the node"
        self._wire = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ChildFailed(f"{self.user_id}: the connection ended: {self.closed}"))
