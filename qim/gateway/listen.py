"""The listening socket of one worker and the TLS handshakes of what it accepts (§5.3.5, §15.2.3).

Every worker has its own socket on the same port (SO_REUSEPORT) and the kernel spreads connections over them. The TLS
context comes from before the fork, so that a session ticket of one worker resumes on any other.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

import aiofastnet

from qim.config.parameters import Parameters
from qim.errors import StartupError
from qim.gateway.admission import ConnectLimiter
from qim.gateway.connection import ClientConnection
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.runtime.clock import Clock
from qim.runtime.tasks import TaskSet

log = get_logger(__name__)

BACKLOG: Final = 1024
"""Never the rate limiter: what the kernel drops would wait for a retransmission (§15.2.3)."""
ACCEPTS_PER_TURN_MAX: Final = 64
"""A reconnect storm must not keep the loop from open connections."""
TLS_BUFFER_BYTES: Final = 16_448
"""One TLS record and its overhead: 38 KiB a connection idle, 44 after a burst; the default keeps 121 (measured)."""
TLS_SHUTDOWN_TIMEOUT_S: Final = 5.0
"""A peer that does not read what is left to send is cut off after this."""
ACCEPT_PAUSE_S: Final = 1.0
"""Out of file descriptors: look again after this."""


def open_listener(host: str, port: int, parameters: Parameters) -> socket.socket:
    """A bound, listening socket that shares its port with the other workers; StartupError when it cannot be had.

    Options are set here once: accepted sockets inherit them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, parameters.tcp_user_timeout)
        keepalive = parameters.tcp_keepalive
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle_ms // 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval_ms // 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.count)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}; free the port or name another") from None
    listener.setblocking(False)
    return listener


class Listener:
    """Accepts, refuses what an address may not have (before TLS, without an application frame), shakes hands."""

    __slots__ = (
        "_clock", "_context", "_exempt", "_handshake_timeout_s", "_limiter", "_listener", "_loop", "_new_connection",
        "_tasks",
    )  # fmt: skip

    def __init__(
        self,
        listener: socket.socket,
        *,
        context: ssl.SSLContext,
        limiter: ConnectLimiter,
        exempt_addresses: frozenset[str],
        new_connection: Callable[[str], ClientConnection],
        handshake_timeout_ms: int,
        tasks: TaskSet,
        clock: Clock,
    ) -> None:
        """`exempt_addresses`: exits of many clients, outside the limits per address (§15.2.3)."""
        self._listener = listener
        self._context = context
        self._limiter = limiter
        self._exempt = exempt_addresses
        self._new_connection = new_connection
        self._handshake_timeout_s = handshake_timeout_ms / 1000
        self._tasks = tasks
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Accept nothing more; open connections stay."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def forget(self, connection: ClientConnection) -> None:
        """The socket of an opened connection is gone."""
        if connection.address not in self._exempt:
            self._limiter.release(connection.address)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN_MAX):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("accept_failed", error=error)
                self._pause()
                return
            self._admit(accepted, address[0])

    def _admit(self, accepted: socket.socket, address: str) -> None:
        if address not in self._exempt:
            exceeded = self._limiter.admit(address, self._clock.monotonic_ms())
            if exceeded is not None:
                metrics.RATE_LIMIT_HIT_TOTAL.labels(tenant="", dimension=exceeded).inc()
                accepted.close()
                return
        accepted.setblocking(False)
        connection = self._new_connection(address)
        self._tasks.start("tls handshake", self._shake_hands(accepted, connection))

    async def _shake_hands(self, accepted: socket.socket, connection: ClientConnection) -> None:
        try:
            await aiofastnet.connect_accepted_socket(
                self._loop,
                lambda: connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S,
                ssl_incoming_bio_size=TLS_BUFFER_BYTES,
                ssl_outgoing_bio_size=TLS_BUFFER_BYTES,
            )
        except OSError:
            # ssl.SSLError and TimeoutError included: not our protocol, or gone again
            metrics.FRAMING_ERROR_TOTAL.labels(kind="tls").inc()
        finally:
            if connection.transport is None:
                self.forget(connection)

    def _pause(self) -> None:
        """Without a free descriptor the socket would stay readable and the loop would spin."""
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)
