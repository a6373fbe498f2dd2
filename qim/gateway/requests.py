"""Requests of clients that other parts answer: sends and group changes to writers, pulls to MailboxNodes.

Sends are queued for their writer's link when they are read, so one sender's order is the writer's; everything else is
a task. Answers are matched by `request_id`. A peer that does not answer costs the client a retryable error, never a
final one (DESIGN-data §3.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from qim.backplane.api import PeerUnavailable
from qim.core.ids import group_conversation_id
from qim.errors import Detail, ErrorCode
from qim.gateway.admission import Admission, Refusal
from qim.gateway.checks import BAD_REQUEST, Refused, check_group, check_history, check_pull, check_send
from qim.gateway.connection import ClientConnection, Session
from qim.gateway.replies import code_of, forwarded_error_body, send_ack_body
from qim.gateway.surroundings import Surroundings
from qim.gateway.sync import QueuedPull, Verdict
from qim.obs import metrics
from qim.protocol.entry import varint
from qim.protocol.opcodes import InternalOpcode, Opcode
from qim.protocol.qim_pb2 import (
    CreateGroup,
    DeviceTarget,
    Error,
    GroupReply,
    HistoryPull,
    HistoryPullReply,
    LeaveGroup,
    MailboxPull,
    MailboxPullReply,
    PullHistory,
    PullMailbox,
    PullSessionList,
    SendMessage,
    SessionListPull,
    SessionListPullReply,
    SubmitCreateGroup,
    SubmitLeaveGroup,
    SubmitSendReply,
)
from qim.protocol.reader import Frame

IN_FLIGHT_MAX: Final = 64
"""Sends, group changes and history reads of one connection that wait for an answer: eight conversations of
`sends_in_flight_max` each. More is answered RATE_LIMITED."""
BUSY_RETRY_MS: Final = 500
"""About the time a full window of a connection takes to empty under load."""
PULLS_AT_ONCE: Final = 8
"""Pulls of a worker that one MailboxNode is asked for at the same time; the others wait here in order, where no timeout
runs and a connection that ends takes its own along: a login storm is served as fast as it can be, never twice."""
_DELIVERY_LAG: Final = "delivery_lag"
"""Dimension of a refusal in the name of the writer, who said for how long."""
# looking a member of an enum up costs as much as calling a function
_SEND_ACK: Final = Opcode.SEND_ACK
_SUBMIT_SEND: Final = InternalOpcode.SUBMIT_SEND
_SUBMIT_MESSAGE_TAG: Final = b"\x22"
_SUBMIT_LIMITS_LIFTED: Final = b"\x28\x01"
_BATCH_ENTRY_TAG: Final = b"\x0a"
"""A MailboxBatch that has entries begins with one: they are its first field."""


class Requests:
    """Runs the requests of all connections of a worker."""

    __slots__ = ("_admission", "_around", "_parameters", "_pulls_to", "sends_open")

    def __init__(self, surroundings: Surroundings, admission: Admission) -> None:
        self.sends_open = 0
        """Sends of all connections that wait for an answer; everything else that waits is a task."""
        self._around = surroundings
        self._parameters = surroundings.parameters
        self._admission = admission
        self._pulls_to: dict[str | None, asyncio.Semaphore] = {}
        """By the role that is asked."""

    # ---------------------------------------------------------------------------------------------- to the writers

    def send_message(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        """SEND_MESSAGE: checks, first-level admission, then SUBMIT_SEND."""
        metrics.SEND_TOTAL.inc()
        message = SendMessage()
        if not _parse(message, frame.body):
            self._refuse_send(connection, frame.request_id, "", BAD_REQUEST)
            return
        refused = check_send(message, session.user_id, self._parameters)
        if refused is not None:
            self._refuse_send(connection, frame.request_id, message.client_message_id, refused)
            return
        limited = self._judge_send(connection, session, message.conversation_id, now_ms)
        if limited is not None:
            self._count_limited(session, limited)
            metrics.SEND_REJECT_TOTAL.labels(code=ErrorCode.RATE_LIMITED.name).inc()
            connection.error(
                ErrorCode.RATE_LIMITED,
                frame.request_id,
                retry_after_ms=self._around.jittered_ms(limited.retry_after_ms),
                detail=Detail.DELIVERY_LAG if limited.dimension == _DELIVERY_LAG else "",
                client_message_id=message.client_message_id,
            )
            return
        self._submit(connection, session, frame, message, now_ms)

    def change_group(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        """CREATE_GROUP and LEAVE_GROUP: the actor is the authenticated connection, never a field (§3.17, §3.18)."""
        request = CreateGroup() if frame.opcode == Opcode.CREATE_GROUP else LeaveGroup()
        refused = check_group(request) if _parse(request, frame.body) else BAD_REQUEST
        if refused is not None:
            self._refuse(connection, frame, refused)
            return
        if connection.in_flight >= IN_FLIGHT_MAX:
            self._refuse_busy(connection, session, frame.request_id)
            return
        submit: Message
        if isinstance(request, CreateGroup):
            submit = SubmitCreateGroup(tenant_id=session.tenant_id, user_id=session.user_id, request=request)
            opcode = InternalOpcode.SUBMIT_CREATE_GROUP
        else:
            submit = SubmitLeaveGroup(tenant_id=session.tenant_id, user_id=session.user_id, request=request)
            opcode = InternalOpcode.SUBMIT_LEAVE_GROUP
        writer = self._around.routing.writer_of(session.tenant_id, group_conversation_id(request.group_id))
        work = self._submit_group(connection, frame.request_id, writer, opcode, submit.SerializeToString())
        self._start(connection, "group change", work)

    def _submit(
        self, connection: ClientConnection, session: Session, frame: Frame, message: SendMessage, now_ms: float
    ) -> None:
        connection.in_flight += 1
        self.sends_open += 1
        request_id = frame.request_id
        on_answer = partial(self._submitted, connection, session, request_id, message, now_ms)
        writer = self._around.routing.writer_of(session.tenant_id, message.conversation_id)
        if writer is None:
            on_answer(PeerUnavailable("no writer owns the bucket"))
            return
        lifted = _SUBMIT_LIMITS_LIFTED if session.limits_lifted else b""
        body = b"".join((session.submit_prefix, _SUBMIT_MESSAGE_TAG, varint(len(frame.body)), frame.body, lifted))
        self._around.backplane.ask(writer, _SUBMIT_SEND, body, on_answer, timeout_ms=self._parameters.submit_timeout_ms)

    def _submitted(
        self,
        connection: ClientConnection,
        session: Session,
        request_id: int,
        message: SendMessage,
        started_ms: float,
        answer: bytes | PeerUnavailable,
    ) -> None:
        connection.in_flight -= 1
        self.sends_open -= 1
        if not isinstance(answer, bytes):
            self._around.peer_failed(_SUBMIT_SEND, answer)
            self._send_failed(connection, request_id, message)
            return
        ack = send_ack_body(answer, request_id)
        if ack is None:
            reply = SubmitSendReply()
            if not _parse(reply, answer) or not (reply.HasField("ack") or reply.HasField("error")):
                self._send_failed(connection, request_id, message)
                return
            if reply.HasField("error"):
                self._refused(connection, session, request_id, message, reply.error)
                return
            reply.ack.request_id = request_id
            ack = reply.ack.SerializeToString()
        connection.reply(_SEND_ACK, ack, request_id)
        metrics.SEND_TO_ACK_LATENCY_MS.observe(self._around.clock.monotonic_ms() - started_ms)

    def _send_failed(self, connection: ClientConnection, request_id: int, message: SendMessage) -> None:
        """Committed or not, nobody knows here: the same send again finds out (DESIGN-data §3.6)."""
        metrics.SEND_REJECT_TOTAL.labels(code=ErrorCode.REGION_FAILOVER.name).inc()
        self._failover(connection, request_id, message.client_message_id)

    def _refused(
        self, connection: ClientConnection, session: Session, request_id: int, message: SendMessage, error: Error
    ) -> None:
        """The writer's ERROR."""
        self._learn(error)
        metrics.SEND_REJECT_TOTAL.labels(code=_code_name(error)).inc()
        if error.detail == Detail.DELIVERY_LAG:
            session.held_conversation_id = message.conversation_id
            session.held_until_ms = self._around.clock.monotonic_ms() + error.retry_after_ms
        body = forwarded_error_body(error, request_id, message.client_message_id)
        connection.reply(Opcode.ERROR, body, request_id)

    async def _submit_group(
        self, connection: ClientConnection, request_id: int, writer: str | None, opcode: InternalOpcode, body: bytes
    ) -> None:
        answer = await self._around.ask(writer, opcode, body)
        reply = GroupReply()
        if answer is None or not _parse(reply, answer):
            self._failover(connection, request_id)
        elif reply.HasField("error"):
            self._learn(reply.error)
            connection.reply(Opcode.ERROR, forwarded_error_body(reply.error, request_id), request_id)
        else:
            connection.reply(Opcode.MEMBER_LIST_BATCH, reply.members.SerializeToString(), request_id)

    def _learn(self, error: Error) -> None:
        """Whoever was asked is not the owner, or not yet: look at the map before the retry comes."""
        if code_of(error) in (ErrorCode.REGION_FAILOVER, ErrorCode.SHARD_MOVED):
            self._around.routing.peer_failed()

    # ------------------------------------------------------------------------------------------ to the MailboxNodes

    def pull_mailbox(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        """PULL_MAILBOX: legal range, window, fallback interval; then MAILBOX_PULL."""
        pull = PullMailbox()
        refused = check_pull(pull, self._parameters) if _parse(pull, frame.body) else BAD_REQUEST
        barrier = connection.barrier
        if refused is None and barrier is not None and not barrier.in_range(pull.after_seq, pull.up_to_seq):
            refused = Refused(ErrorCode.CURSOR_INVALID)
        if refused is not None:
            self._refuse(connection, frame, refused)
            return
        queued = QueuedPull(frame.request_id, pull)
        repairs = barrier is not None or connection.dirty.dirty
        verdict = connection.pulls.offer(
            queued, now_ms, repairs=repairs, last_pushed_seq=connection.last_pushed_user_seq
        )
        if verdict is Verdict.START:
            self._around.work.start("pull", self._pulls(connection, session, queued))
        elif verdict is Verdict.TOO_SOON:
            metrics.IGNORED_PULL_TOTAL.inc()
            wait_ms = self._around.jittered_ms(connection.pulls.resync_wait_ms(now_ms))
            connection.error(ErrorCode.RATE_LIMITED, frame.request_id, retry_after_ms=wait_ms)
        elif verdict is Verdict.TOO_MANY:
            self._refuse_busy(connection, session, frame.request_id)

    def pull_history(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        """PULL_HISTORY: checks, `per_user_history_pull_rate`; then HISTORY_PULL."""
        pull = PullHistory()
        refused = check_history(pull, session.user_id, self._parameters) if _parse(pull, frame.body) else BAD_REQUEST
        if refused is not None:
            self._refuse(connection, frame, refused)
            return
        if self._may_read(connection, session, frame.request_id, now_ms):
            self._start(connection, "history", self._history(connection, session, frame.request_id, pull))

    def pull_session_list(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        """PULL_SESSION_LIST: shares the rate of history, for it costs as much; then SESSION_LIST_PULL."""
        pull = PullSessionList()
        if not _parse(pull, frame.body):
            self._refuse(connection, frame, BAD_REQUEST)
        elif self._may_read(connection, session, frame.request_id, now_ms):
            self._start(connection, "session list", self._list_sessions(connection, session, frame.request_id, pull))

    def _may_read(self, connection: ClientConnection, session: Session, request_id: int, now_ms: float) -> bool:
        """Refuses a read beyond the window of the connection or `per_user_history_pull_rate`."""
        if connection.in_flight >= IN_FLIGHT_MAX:
            self._refuse_busy(connection, session, request_id)
            return False
        limited = None if session.limits_lifted else self._admission.judge_history(session.user_key, now_ms)
        if limited is not None:
            self._count_limited(session, limited)
            wait_ms = self._around.jittered_ms(limited.retry_after_ms)
            connection.error(ErrorCode.RATE_LIMITED, request_id, retry_after_ms=wait_ms)
        return limited is None

    async def _pulls(self, connection: ClientConnection, session: Session, first: QueuedPull) -> None:
        """One of the window's places: this pull, then what waited for the place."""
        following: QueuedPull | None = first
        while following is not None and not connection.is_closing():
            await self._pull(connection, session, following)
            following = connection.pulls.finished()

    async def _pull(self, connection: ClientConnection, session: Session, queued: QueuedPull) -> None:
        pull = queued.pull
        request = MailboxPull(device=device_target(connection, session), pull=pull, zero_cursor=session.zero_cursor)
        owner = self._around.routing.mailbox_of(session.shard)
        async with self._pulls_to.setdefault(owner, asyncio.Semaphore(PULLS_AT_ONCE)):
            if connection.is_closing():
                return
            generation = connection.dirty.pull_starts(pull.up_to_seq)
            answer = await self._around.ask(owner, InternalOpcode.MAILBOX_PULL, request.SerializeToString())
        reply = MailboxPullReply()
        if answer is None or not _parse(reply, answer):
            self._shard_moved(connection, queued.request_id)
            return
        if reply.HasField("error"):
            self._learn(reply.error)
            count_cursor_error(reply.error)
            connection.reply(Opcode.ERROR, forwarded_error_body(reply.error, queued.request_id), queued.request_id)
            return
        covered = reply.covered_through_seq
        connection.reply(Opcode.MAILBOX_BATCH, reply.batch, queued.request_id)
        connection.pulls.answered(
            asked_up_to_seq=pull.up_to_seq, covered_through_seq=covered, has_more=covered < reply.up_to_seq
        )
        if connection.barrier is not None:
            connection.barrier.answered(pull.after_seq, covered)
        connection.dirty.pulled(
            generation=generation,
            asked_up_to_seq=pull.up_to_seq,
            up_to_seq=reply.up_to_seq,
            covered_through_seq=covered,
        )
        metrics.PULL_MAILBOX_TOTAL.inc()
        if not reply.batch.startswith(_BATCH_ENTRY_TAG):
            metrics.EMPTY_PULL_TOTAL.inc()

    async def _history(
        self, connection: ClientConnection, session: Session, request_id: int, pull: PullHistory
    ) -> None:
        started_ms = self._around.clock.monotonic_ms()
        body = HistoryPull(device=device_target(connection, session), pull=pull).SerializeToString()
        answer = await self._around.ask(
            self._around.routing.mailbox_of(session.shard), InternalOpcode.HISTORY_PULL, body
        )
        reply = HistoryPullReply()
        if answer is None or not _parse(reply, answer):
            self._shard_moved(connection, request_id)
        elif reply.HasField("error"):
            connection.reply(Opcode.ERROR, forwarded_error_body(reply.error, request_id), request_id)
        else:
            connection.reply(Opcode.HISTORY_BATCH, reply.batch, request_id)
            metrics.PULL_HISTORY_LATENCY_MS.observe(self._around.clock.monotonic_ms() - started_ms)

    async def _list_sessions(
        self, connection: ClientConnection, session: Session, request_id: int, pull: PullSessionList
    ) -> None:
        started_ms = self._around.clock.monotonic_ms()
        body = SessionListPull(device=device_target(connection, session), pull=pull).SerializeToString()
        owner = self._around.routing.mailbox_of(session.shard)
        answer = await self._around.ask(owner, InternalOpcode.SESSION_LIST_PULL, body)
        reply = SessionListPullReply()
        if answer is None or not _parse(reply, answer):
            self._shard_moved(connection, request_id)
        elif reply.HasField("error"):
            connection.reply(Opcode.ERROR, forwarded_error_body(reply.error, request_id), request_id)
        else:
            connection.reply(Opcode.SESSION_LIST_BATCH, reply.batch, request_id)
            metrics.SESSION_LIST_LATENCY_MS.observe(self._around.clock.monotonic_ms() - started_ms)

    # ------------------------------------------------------------------------------------------------------- shared

    def _start(self, connection: ClientConnection, name: str, work: Coroutine[Any, Any, None]) -> None:
        connection.in_flight += 1
        self._around.work.start(name, work).add_done_callback(lambda _: _finished(connection))

    def _judge_send(
        self, connection: ClientConnection, session: Session, conversation_id: str, now_ms: float
    ) -> Refusal | None:
        if connection.in_flight >= IN_FLIGHT_MAX:
            return Refusal("requests_in_flight", BUSY_RETRY_MS)
        if now_ms < session.held_until_ms and conversation_id == session.held_conversation_id:
            return Refusal(_DELIVERY_LAG, session.held_until_ms - now_ms)
        if session.limits_lifted:
            return None
        return self._admission.judge_send(session.user_key, conversation_id, now_ms)

    def _refuse(self, connection: ClientConnection, frame: Frame, refused: Refused) -> None:
        if refused.detail == Detail.BAD_REQUEST:
            metrics.BAD_REQUEST_TOTAL.labels(opcode=Opcode(frame.opcode).name).inc()
        elif refused.code is ErrorCode.CURSOR_INVALID:
            metrics.CURSOR_INVALID_TOTAL.inc()
        connection.error(refused.code, frame.request_id, detail=refused.detail)

    def _refuse_send(
        self, connection: ClientConnection, request_id: int, client_message_id: str, refused: Refused
    ) -> None:
        if refused.detail == Detail.BAD_REQUEST:
            metrics.BAD_REQUEST_TOTAL.labels(opcode=Opcode.SEND_MESSAGE.name).inc()
        metrics.SEND_REJECT_TOTAL.labels(code=refused.code.name).inc()
        connection.error(refused.code, request_id, detail=refused.detail, client_message_id=client_message_id[:64])

    def _refuse_busy(self, connection: ClientConnection, session: Session, request_id: int) -> None:
        self._count_limited(session, Refusal("requests_in_flight", BUSY_RETRY_MS))
        retry_after_ms = self._around.jittered_ms(BUSY_RETRY_MS)
        connection.error(ErrorCode.RATE_LIMITED, request_id, retry_after_ms=retry_after_ms)

    def _count_limited(self, session: Session, refusal: Refusal) -> None:
        metrics.RATE_LIMIT_HIT_TOTAL.labels(tenant=session.tenant_id, dimension=refusal.dimension).inc()

    def _failover(self, connection: ClientConnection, request_id: int, client_message_id: str = "") -> None:
        retry_after_ms = self._around.jittered_ms(self._parameters.region_failover_retry_after_ms)
        connection.error(
            ErrorCode.REGION_FAILOVER, request_id, retry_after_ms=retry_after_ms, client_message_id=client_message_id
        )

    def _shard_moved(self, connection: ClientConnection, request_id: int) -> None:
        retry_after_ms = self._around.jittered_ms(BUSY_RETRY_MS)
        connection.error(ErrorCode.SHARD_MOVED, request_id, retry_after_ms=retry_after_ms)


def device_target(connection: ClientConnection, session: Session) -> DeviceTarget:
    """The connection as other parts name it."""
    return DeviceTarget(
        tenant_id=session.tenant_id,
        user_id=session.user_id,
        device_id=session.device_id,
        connection_id=connection.id,
        session_epoch=session.epoch,
    )


def _parse(message: Message, body: bytes) -> bool:
    try:
        message.ParseFromString(body)
    except DecodeError:
        return False
    return True


def _finished(connection: ClientConnection) -> None:
    connection.in_flight -= 1


def count_cursor_error(error: Error) -> None:
    """CURSOR_* that goes to a client."""
    code = code_of(error)
    if code is ErrorCode.CURSOR_REBASED:
        metrics.MAILBOX_CURSOR_REBASE_COUNT.inc()
    elif code is ErrorCode.CURSOR_EXPIRED:
        metrics.CURSOR_EXPIRED_TOTAL.inc()
    elif code is ErrorCode.CURSOR_INVALID:
        metrics.CURSOR_INVALID_TOTAL.inc()


def _code_name(error: Error) -> str:
    code = code_of(error)
    return code.name if code is not None else "unknown"
