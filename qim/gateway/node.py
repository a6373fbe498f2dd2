"""`ConnectionNode`: the parts of one gateway worker, joined (§5.3).

It owns the connections of the worker: it makes them, hears what happens on them, looks at each when its heartbeat is
due and hands frames and notices to the part that deals with them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from qim.config.parameters import Parameters
from qim.core.rate_limit import RateLimiter
from qim.errors import StartupError
from qim.gateway.admission import Admission, ConnectLimiter
from qim.gateway.auth import TokenVerifier
from qim.gateway.connection import ClientConnection, ReceiveBuffer, TickWriter
from qim.gateway.frames import FrameRouter
from qim.gateway.listen import Listener, open_listener
from qim.gateway.machine import ConnectionMachine, Expiry
from qim.gateway.push import PushDelivery
from qim.gateway.requests import Requests
from qim.gateway.sessions import SessionOpener, Sessions, ShardFollower
from qim.gateway.surroundings import Surroundings
from qim.gateway.sync import PullWindow
from qim.gateway.table import ConnectionIds, ConnectionTable
from qim.gateway.wheel import HeartbeatWheel
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.presence.shm import PresenceTable
from qim.protocol.outbound import OutboundLimits
from qim.protocol.qim_pb2 import MarkDirty, ReplaceSession
from qim.registry.api import LeaseKind, RouteMap

log = get_logger(__name__)

PULLS_QUEUED_MAX: Final = 16
"""PULL_MAILBOX of one connection that wait for a place in its window; more is answered RATE_LIMITED."""
REOPEN_AT_ONCE: Final = 32
"""Sessions opened again at the same time: 20,000 take about a second, and leave the MailboxNode time for logins."""
REOPEN_RETRY_MS: Final = 500

_CLOSE_REASONS: Final = {
    Expiry.UNAUTHENTICATED: "unauthenticated_timeout",
    Expiry.IDLE: "idle_timeout",
    Expiry.TOKEN: "token_expired",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What one gateway worker is told at its start."""

    host: str
    port: int
    """0 asks the kernel for a free one."""
    tls_context: ssl.SSLContext
    """TLS 1.3, ALPN `qim/1`; made before fork."""
    token_key: Ed25519PublicKey
    """Public half of the key that signs access tokens."""
    run_dir: Path
    """Gets `presence-<name>.tbl`."""
    peers: tuple[str, ...]
    """Role instances of the writers and MailboxNodes."""
    other_gateways: tuple[str, ...]
    """Gateway workers of this host, without this one."""
    conversation_bucket_count: int
    mailbox_shard_count: int
    lifted_tenants: frozenset[str] = frozenset()
    """Test tenants without rate limits."""
    exempt_addresses: frozenset[str] = frozenset()
    """Client addresses without limits on connections: exits of many clients (§15.2.3)."""


class ConnectionNode:
    """Exists while the role serves; must be made inside the running loop."""

    __slots__ = (
        "_clock", "_follower", "_ids", "_limits", "_listener", "_parameters", "_presence", "_push", "_receive",
        "_requests", "_routing", "_sessions", "_table", "_wheel", "_writer", "accepting", "frame_received", "now_ms",
    )  # fmt: skip

    def __init__(
        self, name: str, settings: GatewaySettings, surroundings: Surroundings, registry: SessionOpener
    ) -> None:
        """Opens the listening socket and the presence table: StartupError when it cannot."""
        parameters = surroundings.parameters
        clock = surroundings.clock
        self.accepting = True
        self._parameters = parameters
        self._clock = clock
        self._routing = surroundings.routing
        self._ids = ConnectionIds(gateway_index=int(name.rpartition("-")[2]), now_unix_ms=clock.unix_ms())
        self._table = ConnectionTable()
        self._push = PushDelivery(self._table, surroundings.backplane)
        self._writer = TickWriter(asyncio.get_running_loop())
        self._receive = ReceiveBuffer()
        self._limits = _outbound_limits(parameters)
        self._wheel = HeartbeatWheel(now_ms=clock.monotonic_ms(), tick_ms=parameters.heartbeat_wheel_tick)
        listening, self._presence = _opened(name, settings, parameters, clock.unix_ms())
        self._listener = Listener(
            listening,
            context=settings.tls_context,
            limiter=_connect_limiter(parameters),
            exempt_addresses=settings.exempt_addresses,
            new_connection=self._new_connection,
            handshake_timeout_ms=parameters.unauth_connection_timeout,
            tasks=surroundings.work,
            clock=clock,
        )
        self._sessions = Sessions(
            name,
            surroundings,
            other_gateways=settings.other_gateways,
            lifted_tenants=settings.lifted_tenants,
            registry=registry,
            presence=self._presence,
            table=self._table,
            verifier=TokenVerifier(settings.token_key),
        )
        self._follower = ShardFollower(self._sessions, self._table, at_once=REOPEN_AT_ONCE, retry_ms=REOPEN_RETRY_MS)
        self._requests = Requests(surroundings, _admission(parameters))
        router = FrameRouter(sessions=self._sessions, requests=self._requests, parameters=parameters, clock=clock)
        self.frame_received = router.run
        self.now_ms = clock.monotonic_ms

    # -------------------------------------------------------------------------------------------------- life cycle

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def sends_open(self) -> int:
        """Sends that wait for their writer."""
        return self._requests.sends_open

    def __len__(self) -> int:
        """Open connections."""
        return len(self._table)

    def stop_accepting(self) -> None:
        """No new connections and no new frames; what was read is still answered."""
        self.accepting = False
        self._listener.close()
        for connection in list(self._table.by_id.values()):
            connection.stop_reading()

    def close_all(self, reason: str) -> None:
        """Close every connection behind its last frame."""
        for connection in list(self._table.by_id.values()):
            connection.close(reason)

    def abort_all(self, reason: str) -> None:
        """Cut every connection off, those that are closing already too."""
        for connection in list(self._table.by_id.values()):
            connection.abort(reason)

    def close(self) -> None:
        """After the last connection: withdraw the presence table."""
        self._listener.close()
        self._presence.close()

    async def turn_wheel(self) -> None:
        """For ever: look at connections whose heartbeat is due, renew the presence lease."""
        tick_ms = self._parameters.heartbeat_wheel_tick
        beat_ms = self._clock.monotonic_ms()
        while True:
            now_ms = self._clock.monotonic_ms()
            await asyncio.sleep((tick_ms - now_ms % tick_ms) / 1000)
            now_ms = self._clock.monotonic_ms()
            reached, missed = self._wheel.turn(now_ms)
            if missed:
                metrics.TIMEWHEEL_TICK_OVERRUN_TOTAL.inc(missed)
            for connection_id in reached:
                self._look_at(connection_id, now_ms)
            if now_ms - beat_ms >= self._parameters.presence_lease_renew:
                beat_ms = now_ms
                self._presence.beat(self._clock.unix_ms())

    async def follow_shards(self) -> None:
        """For ever: open sessions again where their shard moved."""
        await self._follower.run()

    def _look_at(self, connection_id: int, now_ms: float) -> None:
        connection = self._table.by_id.get(connection_id)
        if connection is None:
            return
        expiry = connection.machine.due(now_ms)
        if expiry is None:
            self._wheel.hang(connection_id, connection.machine.next_check_ms())
        elif expiry is Expiry.TOKEN:
            connection.token_expired()
        else:
            connection.close(_CLOSE_REASONS[expiry])

    def _new_connection(self, address: str) -> ClientConnection:
        parameters = self._parameters
        machine = ConnectionMachine(
            now_ms=self._clock.monotonic_ms(),
            unauthenticated_timeout_ms=parameters.unauth_connection_timeout,
            idle_timeout_ms=parameters.idle_timeout.timeout_ms(parameters.ping_interval_initial),
            token_grace_ms=parameters.token_expiry_grace,
        )
        pulls = PullWindow(
            window=parameters.pull_mailbox_window,
            queue_max=PULLS_QUEUED_MAX,
            resync_interval_ms=parameters.client_resync_min_interval,
        )
        return ClientConnection(
            self._ids.take(),
            address,
            machine,
            pulls=pulls,
            owner=self,
            writer=self._writer,
            receive=self._receive,
            limits=self._limits,
        )

    # ---------------------------------------------------------------------------------------------- ConnectionOwner

    def connection_opened(self, connection: ClientConnection) -> None:
        self._table.add(connection)
        metrics.CONNECTIONS_OPENED_TOTAL.inc()
        metrics.UNAUTH_CONNECTION_COUNT.inc()
        if self.accepting:
            self._wheel.hang(connection.id, connection.machine.next_check_ms())
        else:
            connection.abort("stop")

    def connection_closing(self, connection: ClientConnection, reason: str) -> None:
        metrics.CONNECTIONS_CLOSED_TOTAL.labels(reason=reason).inc()
        if connection.machine.online:
            metrics.CONNECTIONS_ONLINE.dec()
        else:
            metrics.UNAUTH_CONNECTION_COUNT.dec()
        self._sessions.release(connection)

    def connection_lost(self, connection: ClientConnection) -> None:
        self._table.discard(connection)
        self._listener.forget(connection)

    # ------------------------------------------------------------------------------------------ notices and changes

    def on_push_batch(self, peer: str, body: bytes) -> None:
        self._push.on_push_batch(peer, body)

    def on_mark_dirty(self, peer: str, body: bytes) -> None:
        mark = MarkDirty.FromString(body)
        self._push.on_mark_dirty(peer, mark)
        self._follower.want(lambda session: session.shard == mark.shard and session.shard_epoch < mark.shard_epoch)

    def on_replace_session(self, peer: str, body: bytes) -> None:
        self._sessions.on_replace_session(ReplaceSession.FromString(body))

    def on_link_up(self, peer: str) -> None:
        """The replacement of a lost link: the MailboxNode behind it may not know our sessions any more."""
        self._follower.want(lambda session: self._routing.mailbox_of(session.shard) == peer)

    def on_routes(self, routes: RouteMap) -> None:
        """Shards with a newer epoch than a session's last OPEN (DESIGN-data §7)."""
        epochs = {shard: route.epoch for shard, route in routes.routes.get(LeaseKind.MAILBOX_SHARD, {}).items()}
        self._follower.want(lambda session: session.shard_epoch < epochs.get(session.shard, 0))


def _opened(
    name: str, settings: GatewaySettings, parameters: Parameters, now_unix_ms: int
) -> tuple[socket.socket, PresenceTable]:
    listening = open_listener(settings.host, settings.port, parameters)
    try:
        slots = parameters.presence_slots_per_worker
        return listening, PresenceTable(settings.run_dir, name, now_unix_ms=now_unix_ms, capacity=slots)
    except StartupError:
        listening.close()
        raise


def _outbound_limits(parameters: Parameters) -> OutboundLimits:
    return OutboundLimits(
        soft_bytes=parameters.conn_send_soft_watermark.bytes,
        soft_frames=parameters.conn_send_soft_watermark.items,
        hard_bytes=parameters.conn_send_hard_watermark.bytes,
        hard_frames=parameters.conn_send_hard_watermark.items,
        low_bytes=parameters.conn_send_low_watermark,
        quantum_bytes=parameters.stream_scheduling_quantum,
    )


def _connect_limiter(parameters: Parameters) -> ConnectLimiter:
    per_second = parameters.per_ip_connect_rate
    return ConnectLimiter(
        rate=RateLimiter(per_ms=1000 / per_second, burst=per_second),
        connections_max=parameters.per_ip_max_connections,
    )


def _admission(parameters: Parameters) -> Admission:
    sender = parameters.per_sender_in_conversation_rate
    return Admission(
        per_user=RateLimiter(per_ms=1000 / parameters.per_user_msg_rate, burst=parameters.per_user_msg_rate_burst),
        per_sender_in_conversation=RateLimiter(
            per_ms=sender.per_ms / sender.messages, burst=parameters.per_sender_in_conversation_burst
        ),
        history=RateLimiter(
            per_ms=1000 / parameters.per_user_history_pull_rate, burst=parameters.per_user_history_pull_rate
        ),
    )
