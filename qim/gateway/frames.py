"""One place where every step of the connection machine is carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from qim.config.parameters import Parameters
from qim.errors import Detail, ErrorCode
from qim.gateway.connection import ClientConnection, Session
from qim.gateway.machine import Event, Step
from qim.gateway.requests import Requests
from qim.gateway.sessions import Sessions
from qim.obs import metrics
from qim.protocol.entry import push_frame_parts
from qim.protocol.opcodes import Opcode
from qim.protocol.qim_pb2 import Ping, Pong, SyncComplete
from qim.protocol.reader import Frame
from qim.runtime.clock import Clock

SessionStep = Callable[[ClientConnection, Session, Frame, float], None]


class FrameRouter:
    """Steps without a session are methods here; the rest is a table."""

    __slots__ = ("_clock", "_parameters", "_sessions", "_with_session")

    def __init__(self, *, sessions: Sessions, requests: Requests, parameters: Parameters, clock: Clock) -> None:
        self._sessions = sessions
        self._parameters = parameters
        self._clock = clock
        self._with_session: Final[dict[Step, SessionStep]] = {
            Step.RENEW: self._renew,
            Step.PULL_MAILBOX: requests.pull_mailbox,
            Step.PULL_HISTORY: requests.pull_history,
            Step.PULL_SESSION_LIST: requests.pull_session_list,
            Step.SUBMIT_SEND: requests.send_message,
            Step.SUBMIT_GROUP: requests.change_group,
            Step.COMPLETE_SYNC: self._complete_sync,
            Step.REPEAT_READY: self._repeat_ready,
        }

    def run(self, connection: ClientConnection, frame: Frame, step: Step, now_ms: float) -> None:
        """Carry out `step` for `frame`."""
        with_session = self._with_session.get(step)
        if with_session is not None:
            session = connection.session
            assert session is not None, "the machine serves only connections with a session"
            with_session(connection, session, frame, now_ms)
        elif step is Step.PONG:
            self._pong(connection, frame)
        elif step is Step.AUTHENTICATE:
            self._sessions.authenticate(connection, frame.request_id, frame.body, now_ms)
        else:
            self._refuse(connection, frame, step)

    def _refuse(self, connection: ClientConnection, frame: Frame, step: Step) -> None:
        if step is Step.REFUSE_UNSERVED:
            metrics.UNKNOWN_OPCODE_DROPPED.inc()
            if frame.request_id:
                connection.error(ErrorCode.UPGRADE_REQUIRED, frame.request_id)
        elif step is Step.REFUSE_EXPIRED:
            connection.error(ErrorCode.TOKEN_EXPIRED, frame.request_id)
        elif step is Step.CLOSE_EXPIRED:
            connection.error(ErrorCode.TOKEN_EXPIRED, frame.request_id)
            connection.close("token_expired")
        elif step is Step.REFUSE_BUSY:
            connection.error(ErrorCode.PERMISSION_DENIED, frame.request_id, detail=Detail.BAD_REQUEST)
        elif step is Step.REFUSE_UNAUTHENTICATED:
            metrics.FRAMING_ERROR_TOTAL.labels(kind="before_auth").inc()
            connection.error(ErrorCode.PERMISSION_DENIED, frame.request_id, detail=Detail.NOT_AUTHENTICATED)
            connection.close("not_authenticated")

    def _pong(self, connection: ClientConnection, frame: Frame) -> None:
        try:
            ping = Ping.FromString(frame.body)
        except DecodeError:
            self._refuse_unreadable(connection, frame)
            return
        metrics.PING_TOTAL.labels(kind="probe" if ping.probe else "periodic").inc()
        interval_ms = self._parameters.ping_interval_initial
        pong = Pong(
            ping_id=ping.ping_id,
            server_time=self._clock.unix_ms(),
            echo_client_time=ping.client_time,
            last_pushed_user_seq=connection.last_pushed_user_seq,
            mailbox_dirty=connection.dirty.dirty,
            next_ping_interval_ms=interval_ms,
            idle_timeout_ms=self._parameters.idle_timeout.timeout_ms(interval_ms),
        )
        connection.reply(Opcode.PONG, pong.SerializeToString(), frame.request_id)

    def _renew(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        self._sessions.renew(connection, session, frame.request_id, frame.body, now_ms)

    def _complete_sync(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        """Lift the barrier when everything up to `sync_to_seq` was answered, then push what waited (§9.3.4)."""
        barrier = connection.barrier
        assert barrier is not None, "SYNCING has a barrier"
        try:
            done = barrier.complete(SyncComplete.FromString(frame.body).sync_to_seq)
        except DecodeError:
            self._refuse_unreadable(connection, frame)
            return
        if not done:
            connection.error(ErrorCode.SYNC_INCOMPLETE, frame.request_id)
            return
        connection.barrier = None
        connection.machine.on_event(Event.BARRIER_LIFTED)
        connection.reply(Opcode.ONLINE_READY, b"", frame.request_id)
        for push in barrier.release():
            connection.push_event(push.mailbox_seq, push_frame_parts(*push))
        if connection.dirty.dirty:
            connection.tell_dirty()
        backlog = "yes" if barrier.has_offline else "no"
        metrics.ONLINE_READY_LATENCY_MS.labels(backlog=backlog).observe(now_ms - barrier.started_ms)

    def _repeat_ready(self, connection: ClientConnection, session: Session, frame: Frame, now_ms: float) -> None:
        """A repeated SYNC_COMPLETE: the barrier is lifted already, saying so again changes nothing."""
        connection.reply(Opcode.ONLINE_READY, b"", frame.request_id)

    def _refuse_unreadable(self, connection: ClientConnection, frame: Frame) -> None:
        metrics.BAD_REQUEST_TOTAL.labels(opcode=Opcode(frame.opcode).name).inc()
        connection.error(ErrorCode.PERMISSION_DENIED, frame.request_id, detail=Detail.BAD_REQUEST)
