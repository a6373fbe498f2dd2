"""Logins and what belongs to a session until it ends (DESIGN-data §7, §15.2.2, §15.3.1).

Order of a login: token, `session_epoch`, replacement of what the epoch outdates, presence slot, OPEN at the MailboxNode
of the user's shard, AUTH_OK. Whoever is in the presence table before W is read can be pushed everything above W.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from qim.errors import Detail, ErrorCode, StoreError, WireError
from qim.gateway.auth import Identity, TokenVerifier
from qim.gateway.connection import ClientConnection, Session
from qim.gateway.machine import Event
from qim.gateway.replies import code_of, forwarded_error_body
from qim.gateway.requests import BUSY_RETRY_MS, count_cursor_error, device_target
from qim.gateway.surroundings import Surroundings
from qim.gateway.sync import LoginBarrier
from qim.gateway.table import ConnectionTable
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.presence.layout import PresenceEntry, hash_of_key
from qim.presence.shm import PresenceFull, PresenceTable
from qim.protocol.internal import user_key
from qim.protocol.opcodes import InternalOpcode, Opcode
from qim.protocol.qim_pb2 import (
    REPLACED,
    Auth,
    AuthOk,
    CloseSession,
    DeviceTarget,
    Kicked,
    MailboxCursorToken,
    OpenSession,
    OpenSessionReply,
    ReplaceSession,
    SubmitSend,
)
from qim.protocol.reader import authenticated_limits
from qim.registry.api import SessionGrant

log = get_logger(__name__)

CAPABILITIES_GRANTED: Final = 0
"""End-to-end encryption, compression, chat rooms and offline push are not offered by this node."""
MOVED_DELAYS_MS: Final = (100, 200, 400)
"""Between looks at a shard without an owner; a worker that was killed is replaced in about half a second."""
_AUTH_AGAIN: Final = frozenset(
    {
        ErrorCode.CURSOR_EXPIRED,
        ErrorCode.CURSOR_REBASED,
        ErrorCode.CURSOR_INVALID,
        ErrorCode.SHARD_MOVED,
        ErrorCode.REGION_FAILOVER,
        ErrorCode.RATE_LIMITED,
    }
)
"""Refusals after which the same connection may AUTH again; after any other it is closed."""


class SessionOpener(Protocol):
    """The part of the ShardRegistry a login needs."""

    async def open_session(
        self, tenant_id: str, user_id: str, device_id: str, *, max_devices: int, now_ms: int
    ) -> SessionGrant: ...


class Sessions:
    """Opens, renews, replaces and ends the sessions of one gateway worker."""

    __slots__ = (
        "_around", "_clock", "_frame_limits", "_lifted_tenants", "_name", "_other_gateways", "_parameters",
        "_presence", "_registry", "_table", "_verifier",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        surroundings: Surroundings,
        *,
        other_gateways: Sequence[str],
        lifted_tenants: frozenset[str],
        registry: SessionOpener,
        presence: PresenceTable,
        table: ConnectionTable,
        verifier: TokenVerifier,
    ) -> None:
        self._name = name
        self._around = surroundings
        self._clock = surroundings.clock
        self._parameters = surroundings.parameters
        self._frame_limits = authenticated_limits(
            max_custom_payload_bytes=self._parameters.max_custom_payload_bytes,
            media_thumbnail_max_bytes=self._parameters.media_thumbnail_max_bytes,
            max_frame_bytes=self._parameters.max_frame_bytes,
        )
        self._other_gateways = tuple(other_gateways)
        self._lifted_tenants = lifted_tenants
        self._registry = registry
        self._presence = presence
        self._table = table
        self._verifier = verifier

    # ------------------------------------------------------------------------------------------------------- login

    def authenticate(self, connection: ClientConnection, request_id: int, body: bytes, now_ms: float) -> None:
        """AUTH of a connection without a session."""
        metrics.AUTH_ATTEMPTS_TOTAL.inc()
        try:
            auth, identity = self._accept_token(body)
        except WireError as refusal:
            self._refuse(connection, request_id, refusal)
            return
        connection.machine.token_valid_until(self._until_monotonic_ms(identity, now_ms))
        self._around.work.start("login", self._log_in(connection, request_id, auth, identity, now_ms))

    async def _log_in(
        self, connection: ClientConnection, request_id: int, auth: Auth, identity: Identity, started_ms: float
    ) -> None:
        try:
            grant = await self._registry.open_session(
                identity.tenant_id,
                identity.user_id,
                identity.device_id,
                max_devices=self._parameters.max_devices_per_user,
                now_ms=self._clock.unix_ms(),
            )
        except StoreError as error:
            log.warning("session_not_opened", error=error)
            self._refuse_login(connection, request_id, ErrorCode.REGION_FAILOVER)
            return
        if connection.is_closing():
            return
        try:
            session = self._bind(connection, identity, grant, auth.capabilities)
        except PresenceFull as error:
            log.warning("presence_full", reason=str(error))
            self._refuse_login(connection, request_id, ErrorCode.RATE_LIMITED)
            return
        barrier = LoginBarrier(
            started_ms=started_ms,
            items_max=self._parameters.conn_send_soft_watermark.items,
            bytes_max=self._parameters.conn_send_soft_watermark.bytes,
        )
        connection.barrier = barrier
        session.opened_at_mailbox = True
        reply = await self._open_patiently(connection, session, auth)
        if connection.is_closing():
            return
        if reply is None:
            self.release(connection)
            self._refuse_login(connection, request_id, ErrorCode.SHARD_MOVED)
        elif reply.HasField("error"):
            self.release(connection)
            self._forward_refusal(connection, request_id, reply)
        else:
            self._welcome(connection, session, request_id, auth, reply)
            metrics.AUTH_LATENCY_MS.observe(self._clock.monotonic_ms() - started_ms)

    async def _open_patiently(
        self, connection: ClientConnection, session: Session, auth: Auth
    ) -> OpenSessionReply | None:
        """`_open`, tried again for a moment while the shard changes hands: most of them serve again by then, and a
        client told to come back would cost a whole AUTH each time."""
        for delay_ms in MOVED_DELAYS_MS:
            reply = await self._open(connection, session, auth.mailbox_cursor, auth.capabilities, reopen=False)
            if reply is not None and not (reply.HasField("error") and code_of(reply.error) is ErrorCode.SHARD_MOVED):
                return reply
            await asyncio.sleep(self._around.jittered_ms(delay_ms) / 1000)
            if connection.is_closing():
                return None
        return await self._open(connection, session, auth.mailbox_cursor, auth.capabilities, reopen=False)

    def _bind(
        self, connection: ClientConnection, identity: Identity, grant: SessionGrant, capabilities: int
    ) -> Session:
        """From here on the user is found on this connection; what the grant outdates is replaced."""
        key = user_key(identity.tenant_id, identity.user_id)
        target = SubmitSend(tenant_id=identity.tenant_id, user_id=identity.user_id, device_id=identity.device_id)
        session = Session(
            tenant_id=identity.tenant_id,
            user_id=identity.user_id,
            device_id=identity.device_id,
            user_key=key,
            epoch=grant.session_epoch,
            shard=self._around.routing.shard_of(identity.tenant_id, identity.user_id),
            submit_prefix=target.SerializeToString(),
            limits_lifted=identity.tenant_id in self._lifted_tenants,
        )
        self._replace_everywhere(connection, session, session.device_id)
        if grant.evicted_device_id:
            self._replace_everywhere(connection, session, grant.evicted_device_id)
        entry = PresenceEntry(
            tenant_id=session.tenant_id,
            user_id=session.user_id,
            device_id=session.device_id,
            connection_id=connection.id,
            session_epoch=session.epoch,
            user_hash=hash_of_key(key),
            capabilities=capabilities,
            opened_unix_ms=self._clock.unix_ms(),
        )
        session.presence_slot = self._presence.insert(entry)
        connection.session = session
        self._table.bind(connection, key)
        return session

    def _welcome(
        self, connection: ClientConnection, session: Session, request_id: int, auth: Auth, reply: OpenSessionReply
    ) -> None:
        assert connection.barrier is not None
        cursor = auth.mailbox_cursor
        last_applied_seq = cursor.last_applied_mailbox_seq if cursor.token else 0
        session.zero_cursor = last_applied_seq == 0
        connection.barrier.open(
            last_applied_seq=last_applied_seq,
            sync_to_seq=reply.lane_watermark,
            has_offline=reply.has_offline,
        )
        connection.last_pushed_user_seq = reply.lane_watermark
        session.shard_epoch = reply.shard_epoch
        connection.accept_frames(self._frame_limits)
        connection.machine.on_event(Event.SESSION_OPENED)
        self._send_auth_ok(connection, session, request_id, reply, sync_to_seq=reply.lane_watermark)
        metrics.LOGIN_TOTAL.inc()
        metrics.CONNECTIONS_ONLINE.inc()
        metrics.UNAUTH_CONNECTION_COUNT.dec()

    def _send_auth_ok(
        self,
        connection: ClientConnection,
        session: Session,
        request_id: int,
        reply: OpenSessionReply,
        *,
        sync_to_seq: int,
    ) -> None:
        delay = self._parameters.sync_delay_hint_ms
        answer = AuthOk(
            session_epoch=session.epoch,
            lane_id=reply.lane_id,
            lane_watermark=reply.lane_watermark,
            trim_watermark=reply.trim_watermark,
            sync_to_seq=sync_to_seq,
            has_offline=reply.has_offline,
            pending_entry_count_hint=reply.pending_entry_count,
            pending_bytes_hint=reply.pending_bytes,
            sync_delay_hint_ms=delay.min_ms + int(self._around.random_unit() * (delay.max_ms - delay.min_ms)),
            next_ping_interval_ms=self._parameters.ping_interval_initial,
            capabilities=CAPABILITIES_GRANTED,
            mailbox_cursor=reply.mailbox_cursor,
        )
        connection.reply(Opcode.AUTH_OK, answer.SerializeToString(), request_id)

    # ----------------------------------------------------------------------------------------- renewal and reopening

    def renew(
        self, connection: ClientConnection, session: Session, request_id: int, body: bytes, now_ms: float
    ) -> None:
        """AUTH on a live connection: the token is renewed, nothing else changes (§15.3.1)."""
        metrics.AUTH_ATTEMPTS_TOTAL.inc()
        try:
            auth, identity = self._accept_token(body)
            bound = (session.tenant_id, session.user_id, session.device_id)
            if (identity.tenant_id, identity.user_id, identity.device_id) != bound:
                raise WireError("renewal for another device", detail=Detail.DEVICE_MISMATCH)
        except WireError as refusal:
            connection.error(refusal.code, request_id, detail=refusal.detail)
            if refusal.code is ErrorCode.PERMISSION_DENIED:
                connection.close("auth_refused")
            return
        connection.machine.token_valid_until(self._until_monotonic_ms(identity, now_ms))
        self._around.work.start("renewal", self._renew(connection, session, request_id, auth))

    async def _renew(self, connection: ClientConnection, session: Session, request_id: int, auth: Auth) -> None:
        reply = await self._open(connection, session, auth.mailbox_cursor, auth.capabilities, reopen=True)
        if connection.is_closing():
            return
        if reply is None:
            self._error_with_retry(connection, request_id, ErrorCode.SHARD_MOVED)
        elif reply.HasField("error"):
            connection.reply(Opcode.ERROR, forwarded_error_body(reply.error, request_id), request_id)
        else:
            session.shard_epoch = max(session.shard_epoch, reply.shard_epoch)
            barrier = connection.barrier
            sync_to_seq = barrier.sync_to_seq if barrier is not None else reply.lane_watermark
            self._send_auth_ok(connection, session, request_id, reply, sync_to_seq=sync_to_seq)

    async def reopen(self, connection: ClientConnection) -> bool:
        """OPEN again at a shard that has a new owner or a new link; True when it is done or no longer needed."""
        session = connection.session
        if session is None or not connection.machine.online:
            return True
        reply = await self._open(connection, session, MailboxCursorToken(), 0, reopen=True)
        if reply is None or reply.HasField("error"):
            return connection.is_closing()
        session.shard_epoch = max(session.shard_epoch, reply.shard_epoch)
        return True

    # --------------------------------------------------------------------------------------- replacement and the end

    def on_replace_session(self, replace: ReplaceSession) -> None:
        """REPLACE_SESSION of another gateway worker."""
        device = replace.device
        self._replace_here(device.tenant_id, device.user_id, device.device_id, device.session_epoch, replace)

    def release(self, connection: ClientConnection) -> None:
        """The session ends, on every path: presence, table and MailboxNode forget it (§16.1.2)."""
        session = connection.session
        if session is None:
            return
        connection.session = None
        connection.barrier = None
        self._table.unbind(connection, session.user_key)
        self._presence.remove(session.presence_slot)
        owner = self._around.routing.mailbox_of(session.shard)
        if session.opened_at_mailbox and owner is not None:
            closed = CloseSession(
                device=device_target(connection, session), last_pushed_user_seq=connection.last_pushed_user_seq
            )
            self._around.backplane.notify(owner, InternalOpcode.CLOSE_SESSION, closed.SerializeToString())

    def _replace_everywhere(self, connection: ClientConnection, session: Session, device_id: str) -> None:
        """Older sessions of a device are kicked here and on every other worker of the host (§15.2.2)."""
        replace = ReplaceSession(
            device=DeviceTarget(
                tenant_id=session.tenant_id,
                user_id=session.user_id,
                device_id=device_id,
                connection_id=connection.id,
                session_epoch=session.epoch,
            ),
            reason=REPLACED,
            replaced_by_device=session.device_id,
        )
        self.on_replace_session(replace)
        body = replace.SerializeToString()
        for gateway in self._other_gateways:
            self._around.backplane.notify(gateway, InternalOpcode.REPLACE_SESSION, body)

    def _replace_here(
        self, tenant_id: str, user_id: str, device_id: str, session_epoch: int, replace: ReplaceSession
    ) -> None:
        for found in self._table.of_user(user_key(tenant_id, user_id)):
            session = found.session
            if session is not None and session.device_id == device_id and session.epoch < session_epoch:
                kicked = Kicked(reason=replace.reason, replaced_by_device=replace.replaced_by_device)
                found.reply(Opcode.KICKED, kicked.SerializeToString())
                metrics.KICKED_TOTAL.labels(reason="replaced").inc()
                found.close("replaced")

    # ------------------------------------------------------------------------------------------------------- shared

    def _accept_token(self, body: bytes) -> tuple[Auth, Identity]:
        """WireError for a body or token that is not acceptable."""
        try:
            auth = Auth.FromString(body)
        except DecodeError as error:
            raise WireError("AUTH does not parse", detail=Detail.BAD_REQUEST) from error
        return auth, self._verifier.verify(auth.access_token, auth.device_id, self._clock.unix_ms())

    def _until_monotonic_ms(self, identity: Identity, now_ms: float) -> float:
        return now_ms + identity.expires_unix_ms - self._clock.unix_ms()

    async def _open(
        self,
        connection: ClientConnection,
        session: Session,
        cursor: MailboxCursorToken,
        capabilities: int,
        *,
        reopen: bool,
    ) -> OpenSessionReply | None:
        """None when the shard has no owner or it did not answer."""
        request = OpenSession(
            device=device_target(connection, session),
            gateway=self._name,
            cursor=cursor,
            capabilities=capabilities,
            reopen=reopen,
        )
        owner = self._around.routing.mailbox_of(session.shard)
        answer = await self._around.ask(owner, InternalOpcode.OPEN_SESSION, request.SerializeToString())
        if answer is None:
            return None
        reply = OpenSessionReply.FromString(answer)
        if reply.HasField("error") and code_of(reply.error) is ErrorCode.SHARD_MOVED:
            self._around.routing.peer_failed()
        return reply

    def _refuse(self, connection: ClientConnection, request_id: int, refusal: WireError) -> None:
        connection.machine.on_event(Event.SESSION_REFUSED)
        connection.error(refusal.code, request_id, detail=refusal.detail)
        connection.close("auth_refused")

    def _refuse_login(self, connection: ClientConnection, request_id: int, code: ErrorCode) -> None:
        if connection.is_closing():
            return
        connection.machine.on_event(Event.SESSION_REFUSED)
        self._error_with_retry(connection, request_id, code)

    def _forward_refusal(self, connection: ClientConnection, request_id: int, reply: OpenSessionReply) -> None:
        """ERROR of the MailboxNode with all its fields (new cursor, trim watermark, …)."""
        connection.machine.on_event(Event.SESSION_REFUSED)
        connection.reply(Opcode.ERROR, forwarded_error_body(reply.error, request_id), request_id)
        count_cursor_error(reply.error)
        if code_of(reply.error) not in _AUTH_AGAIN:
            connection.close("auth_refused")

    def _error_with_retry(self, connection: ClientConnection, request_id: int, code: ErrorCode) -> None:
        connection.error(code, request_id, retry_after_ms=self._around.jittered_ms(BUSY_RETRY_MS))


class ShardFollower:
    """Opens sessions again where their shard got a new owner or link, a bounded number at a time."""

    __slots__ = ("_at_once", "_retry_ms", "_sessions", "_table", "_waiting", "_wanted")

    def __init__(self, sessions: Sessions, table: ConnectionTable, *, at_once: int, retry_ms: int) -> None:
        self._sessions = sessions
        self._table = table
        self._at_once = at_once
        self._retry_ms = retry_ms
        self._wanted: dict[int, ClientConnection] = {}
        self._waiting = asyncio.Event()

    def want(self, concerns: Callable[[Session], bool]) -> None:
        """Reopen every session that this concerns."""
        for connection in self._table.sessions():
            if connection.session is not None and concerns(connection.session):
                self._wanted[connection.id] = connection
        if self._wanted:
            self._waiting.set()

    async def run(self) -> None:
        """For ever; a session whose owner does not answer is tried again until it does or the session ends."""
        while True:
            await self._waiting.wait()
            batch = [self._wanted.pop(key) for key in list(self._wanted)[: self._at_once]]
            done = await asyncio.gather(*(self._sessions.reopen(connection) for connection in batch))
            failed = [connection for connection, ok in zip(batch, done, strict=True) if not ok]
            self._wanted |= {connection.id: connection for connection in failed}
            if failed:
                await asyncio.sleep(self._retry_ms / 1000)
            if not self._wanted:
                self._waiting.clear()
