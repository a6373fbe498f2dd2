"""RESP2 client of the hot path: auto-pipelining on `hiredis.Reader` (DESIGN §4, "Redis on the hot path").

Every call of one loop tick leaves in one write; replies resolve one future each, in order. A call belongs to one
connection and is never sent again on another (DESIGN-data §5): when the link breaks, every call in flight fails with
`StoreUnavailable` (it may have happened) and the client reconnects for ever in the background.
A GET at depth 64 costs 2.1 µs of this process (the design's floor: 2.5; redis-py pipelined: 23).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import urlsplit

import hiredis

from qim.errors import Fenced, StartupError, StoreError, StoreUnavailable
from qim.obs import metrics
from qim.obs.logs import get_logger

log = get_logger(__name__)

TIMEOUT_MS: Final = 5_000
MAX_IN_FLIGHT: Final = 8_192
BACKOFF_MIN_MS: Final = 100
BACKOFF_MAX_MS: Final = 2_000
UNSENT_BYTES_MAX: Final = 32 << 20
"""What the socket did not take yet; above it calls are refused until the server reads again."""
_SWEEPS_PER_TIMEOUT: Final = 10
_NOTHING: Final = object()

Argument = bytes | str | int | float
_pack: Final = cast("Callable[[tuple[Argument, ...]], bytes]", hiredis.pack_command)  # its stub knows one argument only


class RespError(StoreError):
    """The server's error reply; nothing is known to have been written. `code` is its first word, e.g. NOSCRIPT."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]

    def refusal(self, what: str) -> StoreError:
        """Fenced for the error our scripts call so, `what` being what they refused; any other error is itself."""
        return Fenced(f"{what}: {self}") if self.code == "FENCED" else self


class _Link(asyncio.Protocol):
    """One connection: its parser, its futures in order of their commands, the commands of this tick."""

    __slots__ = ("_on_lost", "_out", "_reader", "closed", "done", "loop", "paused", "pending", "transport")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[_Link, str], None]) -> None:
        self.loop = loop
        self.pending: deque[asyncio.Future[Any]] = deque()
        self.done = 0
        self.paused = False
        self.closed = False
        self.transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._on_lost = on_lost
        self._reader = hiredis.Reader(protocolError=StoreError, replyError=RespError, notEnoughData=_NOTHING)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.loop.create_future()
        out = self._out
        if not out:
            self.loop.call_soon(self._flush)
        out.append(packed)
        self.pending.append(future)
        return future

    def _flush(self) -> None:
        out = self._out
        if out and self.transport is not None and not self.closed:
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        gets = reader.gets
        pending = self.pending
        try:
            while (reply := gets()) is not _NOTHING:
                future = pending.popleft()
                self.done += 1
                if future.done():
                    continue
                if reply.__class__ is RespError:
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (StoreError, IndexError) as error:
            self.abort(f"protocol error: {error!r}")

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort(str(exc) if exc else "closed by the server")

    def abort(self, reason: str) -> None:
        """Close the connection and fail all its calls; idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.transport is not None:
            self.transport.abort()
        self._out.clear()
        pending, self.pending = self.pending, deque()
        for future in pending:
            if not future.done():
                future.set_exception(StoreUnavailable(reason))
                future.exception()  # a caller that gave up must not make one log line per call of a broken link
        self._on_lost(self, reason)


class RespClient:
    """One auto-pipelined connection to a standalone server. Not thread-safe; one event loop.

    `address` is `unix:///path` or `redis://host:port`. `max_in_flight` bounds the unanswered calls; the next one fails
    at once. A connection whose oldest call is unanswered for `timeout_ms` (up to 10 % more) is broken as a whole.
    """

    def __init__(
        self, address: str, *, name: str, timeout_ms: int = TIMEOUT_MS, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self.name = name
        self.address = address
        self.generation = 0
        """Rises with every connection made; 0 before the first."""
        self.call_ms = metrics.STORE_CALL_MS.labels(instance=name)
        """Observed by scripts: one observation costs as much as half a call."""
        self._unix_path, self._host, self._port = parse_address(address)
        self._timeout_ms = timeout_ms
        self._max_in_flight = max_in_flight
        self._link: _Link | None = None
        self._marks: deque[int] = deque(maxlen=_SWEEPS_PER_TIMEOUT)
        self._callbacks: list[Callable[[], None]] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def in_flight(self) -> int:
        return len(self._link.pending) if self._link else 0

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Call `callback` on every new connection, the first one too, before any other call can enter it.

        It may call and start tasks; it must not raise.
        """
        self._callbacks.append(callback)

    async def connect(self) -> None:
        """Make the first connection; StoreUnavailable if there is none now. Later ones are made in the background."""
        if self._reconnecting is not None and not self._reconnecting.done():
            raise StoreUnavailable(f"{self.name}: reconnecting to {self.address}")
        if self._link is None:
            await self._open()

    def call(self, *args: Argument) -> asyncio.Future[Any]:
        """Send one command. Reply: bytes, int, list (nested) or None; RespError for an error reply.

        StoreUnavailable is raised at once when nothing was sent (no connection, bound reached), and is the future's
        exception when the command may have happened.
        """
        link = self._link
        if link is None or link.paused or len(link.pending) >= self._max_in_flight:
            raise StoreUnavailable(f"{self.name}: {'not connected' if link is None else 'too many calls in flight'}")
        return link.send(_pack(args))

    async def close(self) -> None:
        """Fail what is in flight and stop reconnecting; idempotent."""
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reconnecting
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._link is not None:
            self._link.abort(f"{self.name}: client closed")

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        link = _Link(loop, self._lost)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                if self._unix_path:
                    await loop.create_unix_connection(lambda: link, self._unix_path)
                else:
                    await loop.create_connection(lambda: link, self._host, self._port)
        except (OSError, TimeoutError) as error:
            link.closed = True
            raise StoreUnavailable(f"{self.name}: cannot connect to {self.address}: {error}") from error
        if link.closed or self._closed:
            link.abort("closed while connecting")
            raise StoreUnavailable(f"{self.name}: {self.address} closed the connection")
        self._link = link
        self.generation += 1
        metrics.STORE_RECONNECT_TOTAL.labels(instance=self.name).inc()
        self._marks.clear()
        self._sweep(link)
        for callback in self._callbacks:
            callback()

    def _sweep(self, link: _Link) -> None:
        """Break the link if something sent `_SWEEPS_PER_TIMEOUT` sweeps ago is unanswered: no timer per call."""
        if link.closed or link is not self._link:
            return
        if len(self._marks) == _SWEEPS_PER_TIMEOUT and link.done < self._marks[0]:
            link.abort(f"{self.name}: no answer for {self._timeout_ms} ms")
            return
        self._marks.append(link.done + len(link.pending))
        self._sweeper = link.loop.call_later(self._timeout_ms / 1000 / _SWEEPS_PER_TIMEOUT, self._sweep, link)

    def _lost(self, link: _Link, reason: str) -> None:
        if link is not self._link:
            return
        self._link = None
        if self._sweeper is not None:
            self._sweeper.cancel()
        if not self._closed:
            log.warning("store_connection_lost", instance=self.name, generation=self.generation, reason=reason)
            self._reconnecting = link.loop.create_task(self._reconnect(), name=f"reconnect {self.name}")

    async def _reconnect(self) -> None:
        backoff_ms = BACKOFF_MIN_MS
        while not self._closed:
            try:
                await self._open()
                return
            except StoreUnavailable:
                await asyncio.sleep(backoff_ms / 1000 * random.uniform(0.5, 1.0))
                backoff_ms = min(backoff_ms * 2, BACKOFF_MAX_MS)


def parse_address(address: str) -> tuple[str, str, int]:
    """(unix path, host, port) of `unix:///path` or `redis://host:port`; StartupError for anything else."""
    parts = urlsplit(address)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return parts.path, "", 0
    with contextlib.suppress(ValueError):
        if parts.scheme == "redis" and parts.hostname and parts.path in ("", "/") and parts.username is None:
            return "", parts.hostname, parts.port or 6379
    raise StartupError(f"Redis address {address!r} is neither unix:///path nor redis://host:port")
