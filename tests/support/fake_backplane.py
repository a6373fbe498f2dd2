"""A backplane without sockets for tests of one role, and the writer and MailboxNode behind it.

`FakeBackplane` records one-way messages and hands requests to `answers[opcode]`. `FakeNode` fills these with an honest
writer and an honest MailboxNode of one watermark; a test replaces single answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from qim.backplane.api import (
    AnswerHandler,
    LinkListener,
    NoticeHandler,
    PeerUnavailable,
    Priority,
    RequestHandler,
)
from qim.protocol import qim_pb2 as pb
from qim.protocol.internal import PushRecipient, encode_push_batch, user_key
from qim.protocol.opcodes import InternalOpcode
from qim.registry.api import LeaseKind, Route, RouteMap, SessionGrant

EPOCH_1 = 1 << 48


class Notice(NamedTuple):
    peer: str
    opcode: int
    body: bytes


class FakeBackplane:
    """`Backplane`; a peer in `down` neither answers nor takes notices."""

    def __init__(self) -> None:
        self.answers: dict[int, RequestHandler] = {}
        self.connected: list[str] = []
        self.down: set[str] = set()
        self.notices: list[Notice] = []
        self.requests: list[Notice] = []
        self._notice_handlers: dict[int, NoticeHandler] = {}
        self._listeners: list[LinkListener] = []
        self._asking: set[asyncio.Task[None]] = set()

    def on_notice(self, opcode: int, handler: NoticeHandler) -> None:
        self._notice_handlers[opcode] = handler

    def on_request(self, opcode: int, handler: RequestHandler) -> None:
        self.answers[opcode] = handler

    def on_link(self, listener: LinkListener) -> None:
        self._listeners.append(listener)

    def connect(self, peer: str) -> None:
        self.connected.append(peer)

    def notify(self, peer: str, opcode: int, body: bytes, priority: Priority = Priority.CONTROL) -> bool:
        if peer in self.down:
            return False
        self.notices.append(Notice(peer, opcode, body))
        return True

    async def request(self, peer: str, opcode: int, body: bytes, *, timeout_ms: int) -> bytes:
        if peer in self.down:
            raise PeerUnavailable(f"no link to {peer}")
        self.requests.append(Notice(peer, opcode, body))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self.answers[opcode](peer, body)
        except TimeoutError:
            raise PeerUnavailable(f"{peer}: no answer in time") from None

    def ask(self, peer: str, opcode: int, body: bytes, on_answer: AnswerHandler, *, timeout_ms: int) -> None:
        """A request that runs as a task of its own."""
        task = asyncio.create_task(self._ask(peer, opcode, body, on_answer, timeout_ms))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, peer: str, opcode: int, body: bytes, on_answer: AnswerHandler, timeout_ms: int) -> None:
        try:
            outcome: bytes | PeerUnavailable = await self.request(peer, opcode, body, timeout_ms=timeout_ms)
        except PeerUnavailable as error:
            outcome = error
        on_answer(outcome)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def deliver(self, opcode: int, body: bytes, peer: str = "mailbox-0") -> None:
        """A one-way message from `peer` arrives."""
        self._notice_handlers[opcode](peer, body)

    def link(self, peer: str, up: bool) -> None:
        """The link to `peer` came up or went down."""
        for listener in self._listeners:
            listener(peer, up)

    def sent(self, opcode: int) -> list[bytes]:
        """Bodies of the one-way messages of an opcode, in order."""
        return [notice.body for notice in self.notices if notice.opcode == opcode]

    def asked(self, opcode: int) -> list[bytes]:
        """Bodies of the requests of an opcode, in order."""
        return [request.body for request in self.requests if request.opcode == opcode]


class FakeRoutes:
    """Everything belongs to one writer and one MailboxNode."""

    def __init__(self, *, buckets: int = 64, shards: int = 16) -> None:
        self.refreshes = 0
        self._buckets = buckets
        self._shards = shards
        self._listeners: list[Callable[[RouteMap], None]] = []
        self.map = self._made(version=1, epoch=1)

    def owner(self, kind: LeaseKind, shard_id: int) -> str | None:
        return self.map.owner(kind, shard_id)

    def refresh_soon(self) -> None:
        self.refreshes += 1

    def on_change(self, listener: Callable[[RouteMap], None]) -> None:
        self._listeners.append(listener)

    def grant(self, epoch: int) -> None:
        """Every shard was granted again."""
        self.change(self._made(version=epoch, epoch=epoch))

    def change(self, found: RouteMap) -> None:
        """The map is another one now."""
        self.map = found
        for listener in self._listeners:
            listener(self.map)

    def _made(self, *, version: int, epoch: int) -> RouteMap:
        return RouteMap(
            version,
            {
                LeaseKind.CONVERSATION_BUCKET: {n: Route("writer-0", epoch) for n in range(self._buckets)},
                LeaseKind.MAILBOX_SHARD: {n: Route("mailbox-0", epoch) for n in range(self._shards)},
            },
        )


class FakeSessionRegistry:
    """Counts session epochs; `evict` names the device the next login pushes out; `error` fails it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.evict = ""
        self.error: Exception | None = None

    async def open_session(
        self, tenant_id: str, user_id: str, device_id: str, *, max_devices: int, now_ms: int
    ) -> SessionGrant:
        if self.error is not None:
            raise self.error
        self.epoch += 1
        return SessionGrant(
            session_epoch=self.epoch, evicted_device_id=self.evict, evicted_session_epoch=self.epoch - 1
        )


class FakeNode:
    """An honest writer and an honest MailboxNode with one watermark and the same mailbox for everybody."""

    def __init__(self, backplane: FakeBackplane) -> None:
        self.backplane = backplane
        self.watermark = EPOCH_1 | 10
        self.shard_epoch = 1
        self.mailbox: list[int] = []
        """`mailbox_seq` of the stored entries."""
        self.sent: list[pb.SubmitSend] = []
        self.opened: list[pb.OpenSession] = []
        self.open_error: pb.Error | None = None
        backplane.on_request(InternalOpcode.SUBMIT_SEND, self.submit_send)
        backplane.on_request(InternalOpcode.SUBMIT_CREATE_GROUP, self.change_group)
        backplane.on_request(InternalOpcode.SUBMIT_LEAVE_GROUP, self.change_group)
        backplane.on_request(InternalOpcode.OPEN_SESSION, self.open_session)
        backplane.on_request(InternalOpcode.MAILBOX_PULL, self.pull_mailbox)
        backplane.on_request(InternalOpcode.HISTORY_PULL, self.pull_history)

    async def submit_send(self, peer: str, body: bytes) -> bytes:
        submit = pb.SubmitSend.FromString(body)
        self.sent.append(submit)
        ack = pb.SendAck(
            client_message_id=submit.message.client_message_id,
            message_id=len(self.sent).to_bytes(16, "big"),
            conversation_seq=len(self.sent),
        )
        return pb.SubmitSendReply(ack=ack).SerializeToString()

    async def change_group(self, peer: str, body: bytes) -> bytes:
        return pb.GroupReply(members=pb.MemberListBatch(total_hint=3)).SerializeToString()

    async def open_session(self, peer: str, body: bytes) -> bytes:
        opened = pb.OpenSession.FromString(body)
        self.opened.append(opened)
        if self.open_error is not None and not opened.reopen:
            return pb.OpenSessionReply(error=self.open_error).SerializeToString()
        applied = opened.cursor.last_applied_mailbox_seq
        waiting = [seq for seq in self.mailbox if applied < seq <= self.watermark]
        return pb.OpenSessionReply(
            lane_watermark=self.watermark,
            lane_id=5,
            has_offline=bool(waiting),
            pending_entry_count=len(waiting),
            mailbox_cursor=pb.MailboxCursorToken(token=b"signed", last_applied_mailbox_seq=applied),
            shard_epoch=self.shard_epoch,
        ).SerializeToString()

    async def pull_mailbox(self, peer: str, body: bytes) -> bytes:
        pull = pb.MailboxPull.FromString(body).pull
        up_to = pull.up_to_seq or self.watermark
        found = [seq for seq in self.mailbox if pull.after_seq < seq <= up_to]
        page = found[: pull.max_items]
        covered = up_to if len(page) == len(found) else page[-1]
        batch = pb.MailboxBatch(
            entries=[pb.Entry(mailbox_seq=seq) for seq in page],
            covered_through_seq=covered,
            lane_watermark=self.watermark,
            has_more=covered != up_to,
        )
        return pb.MailboxPullReply(
            covered_through_seq=covered, up_to_seq=up_to, batch=batch.SerializeToString()
        ).SerializeToString()

    async def pull_history(self, peer: str, body: bytes) -> bytes:
        pull = pb.HistoryPull.FromString(body).pull
        batch = pb.HistoryBatch(conversation_id=pull.conversation_id, latest_conversation_seq=7)
        return pb.HistoryPullReply(batch=batch.SerializeToString()).SerializeToString()

    def push(
        self,
        opened: pb.OpenSession,
        mailbox_seq: int,
        *,
        session_epoch: int | None = None,
        user_id: str | None = None,
        payload: bytes = b"hello",
    ) -> None:
        """PUSH_BATCH of one entry to the connection of `opened`; other epochs and users can be claimed."""
        device = opened.device
        recipient = PushRecipient(
            user_key(device.tenant_id, user_id or device.user_id),
            device.connection_id,
            device.session_epoch if session_epoch is None else session_epoch,
            mailbox_seq,
            pb.Entry(mailbox_seq=mailbox_seq, event_id=mailbox_seq).SerializeToString(),
        )
        common = pb.Entry(conversation_id="dm:ann:bob", payload_or_ciphertext=payload).SerializeToString()
        self.backplane.deliver(InternalOpcode.PUSH_BATCH, encode_push_batch(device.tenant_id, common, [recipient]))
