"""The SDK's front door: `Client`, one device of one user on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final

from google.protobuf.message import Message

from qim.client.events import ClientClosed, RequestFailed, SendHandle, SendResult
from qim.client.link import RETRYABLE_CODES, Answer, Link
from qim.client.pending import Pending
from qim.client.reconnect import jittered_ms
from qim.client.timeline import MessageRow
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode

_RETRY_MS: Final = 500


class Client(Link):
    """One device of one user: connects, stays connected, and keeps its local store complete.

    `token` is an access token or a coroutine function that fetches a fresh one. `server_name` is the TLS name, by
    default `b<hex4>.im.local`: it carries the user's bucket. `on_event` runs in the event loop and must not block.
    `unix_ms`, `monotonic_ms` and `random_unit` are injected by tests.
    """

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._spawn("qim-client-run", self._run())
        self._spawn("qim-client-history", self._history.run())

    async def close(self) -> None:
        """End: what is queued is written, the store committed and closed. Pending messages stay in it."""
        self._end("closed")
        if self._wire is not None:
            self._wire.close()
        await self._stop_tasks()
        self._performer.commit()
        self.store.close()

    async def abort(self) -> None:
        """Die like a killed process: no FIN, the open transaction is lost."""
        self._end("aborted")
        self.cut()
        self.store.abandon()
        await self._stop_tasks()

    def network_changed(self) -> None:
        """The platform reports another network: one attempt may be immediate (§15.2.1)."""
        self._reconnect.network_changed()
        self._wake.set()

    @property
    def live(self) -> bool:
        """Synchronised and receiving."""
        return self.state.live

    async def wait_ready(self, timeout_ms: int | None = None) -> None:
        """Until live; TimeoutError, or ClientClosed when the client ends first."""
        await self._wait(lambda: self.state.live, timeout_ms)

    async def wait_closed(self) -> str:
        """Until the client has ended; the reason."""
        with contextlib.suppress(ClientClosed):
            await self._wait(lambda: False, None)
        return self.closed_reason

    async def wait_synced_to(self, mailbox_seq: int, timeout_ms: int | None = None) -> None:
        """Until the cursor covers `mailbox_seq`."""
        await self._wait(lambda: self.state.sync.cursor.last_applied_mailbox_seq >= mailbox_seq, timeout_ms)

    async def wait_sent(self, timeout_ms: int | None = None) -> None:
        """Until no message is unacknowledged."""
        await self._wait(lambda: self.state.sends.total() == 0, timeout_ms)

    # ------------------------------------------------------------------ messages

    async def send(
        self,
        conversation_id: str,
        payload: bytes | str,
        *,
        client_message_id: str | None = None,
        message_type: pb.MessageType = pb.MESSAGE_TYPE_TEXT,
        custom_type: str = "",
        mention_user_ids: Sequence[str] = (),
        mention_all: bool = False,
        reply_to_conversation_seq: int = 0,
    ) -> SendHandle:
        """Queue a message; it is sent now or after any number of reconnects, in the order of these calls.

        Waits while `pending_max` messages of the conversation are unacknowledged. ClientClosed after the end,
        ValueError when `client_message_id` is on its way already.
        """
        await self._wait(lambda: self.state.sends.depth(conversation_id) < self._options.pending_max, None)
        request = pb.SendMessage(
            client_message_id=client_message_id or uuid.uuid4().hex,
            conversation_id=conversation_id,
            message_type=message_type,
            custom_type=custom_type,
            payload=payload.encode() if isinstance(payload, str) else payload,
            reply_to_conversation_seq=reply_to_conversation_seq,
        )
        if mention_all or mention_user_ids:
            request.mention_targets.CopyFrom(pb.MentionTargets(all=mention_all, user_ids=mention_user_ids))
        if request.client_message_id in self._performer.handles:
            raise ValueError(f"{request.client_message_id} is on its way already")
        return self._enqueue(Pending(request, self._now_ms()))

    def resend(self, client_message_id: str) -> SendHandle:
        """Send a failed message again: under its id within `client_pending_max_age`, then under a new one (§8.3)."""
        pending = self.state.sends.take_failed(client_message_id)
        if pending is None:
            raise KeyError(client_message_id)
        now_ms = self._now_ms()
        if now_ms - pending.created_ms > self._options.send.pending_max_age_ms:
            self.store.settle_pending(client_message_id, None)
            request = pb.SendMessage()
            request.CopyFrom(pending.request)
            request.client_message_id = uuid.uuid4().hex
            pending = Pending(request, now_ms)
        pending.failover_since_ms = 0
        return self._enqueue(pending)

    async def messages(self) -> AsyncIterator[MessageRow]:
        """Rows as they become known, from now on; the store holds everything before."""
        queue: deque[MessageRow] = deque(maxlen=self._options.message_queue_max)
        arrived = asyncio.Event()
        self._queues.append((queue, arrived))
        try:
            while not self.closed_reason:
                while queue:
                    yield queue.popleft()
                arrived.clear()
                await arrived.wait()
        finally:
            self._queues.remove((queue, arrived))

    async def resync(self, timeout_ms: int | None = None) -> int:
        """Pull everything there is now, at most once in 5 s; the cursor reached."""
        performer = self._performer
        if self.state.live:
            logins = performer.logins
            target = performer.finished_pulls + 1 + self.state.sync.pulling
            self._do(self.state.resync(self._now_ms()))
            self._arm()
            await self._wait(lambda: performer.finished_pulls >= target or performer.logins != logins, timeout_ms)
        else:
            await self.wait_ready(timeout_ms)
        return self.state.sync.cursor.last_applied_mailbox_seq

    # ------------------------------------------------------------------ groups

    async def create_group(self, group_id: str, member_ids: Sequence[str] = ()) -> pb.MemberListBatch:
        """Create a group with this user as owner; repeated until answered, repeating is harmless (DESIGN-data §8)."""
        message = pb.CreateGroup(group_id=group_id, member_ids=member_ids)
        reply = await self._insist(Opcode.CREATE_GROUP, message, pb.MemberListBatch)
        assert reply is not None
        return reply

    async def leave_group(self, group_id: str) -> pb.MemberListBatch | None:
        """Leave; None when an earlier, unanswered attempt had already done it (DESIGN-data §8)."""
        message = pb.LeaveGroup(group_id=group_id)
        return await self._insist(Opcode.LEAVE_GROUP, message, pb.MemberListBatch, repeated_denial_is_done=True)

    async def _insist(
        self,
        opcode: Opcode,
        message: Message,
        answer: type[Answer],
        *,
        repeated_denial_is_done: bool = False,
    ) -> Answer | None:
        """Ask until there is a final answer; the caller bounds the time."""
        repeated = False
        while True:
            await self.wait_ready()
            try:
                return await self._request(opcode, message, answer)
            except RequestFailed as error:
                if repeated and repeated_denial_is_done and error.code == ErrorCode.PERMISSION_DENIED:
                    return None
                if error.code not in RETRYABLE_CODES:
                    raise
                delay_ms = jittered_ms(error.retry_after_ms or _RETRY_MS, self._random)
            repeated = True
            await asyncio.sleep(delay_ms / 1000)

    def _enqueue(self, pending: Pending) -> SendHandle:
        client_message_id = pending.request.client_message_id
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        self._performer.handles[client_message_id] = future
        self.store.add_pending(pending)
        self._do(self.state.send(pending, self._now_ms()))
        self._arm()
        return SendHandle(client_message_id, future)
