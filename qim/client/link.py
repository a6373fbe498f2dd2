"""Keeps one device connected: the loop of connections, their timers and token, around the pure `ClientState`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from qim import __version__
from qim.client.actions import Action, Disconnect
from qim.client.dedup import DedupWindow
from qim.client.events import ClientClosed, ClientEvent, MessageReceived, RequestFailed, StateChanged
from qim.client.heartbeat import NEVER_MS, HeartbeatOptions
from qim.client.history import HistoryReader, Rebuilding, contiguous_until
from qim.client.pending import SendOptions
from qim.client.perform import PREFERRED_ENDPOINT, REBUILD, Performer
from qim.client.reconnect import Reconnect
from qim.client.renewal import renewal_delay_ms
from qim.client.state import ClientState, StateOptions
from qim.client.store import LocalStore
from qim.client.sync import SyncOptions
from qim.client.timeline import MessageRow, row_from_history
from qim.client.wire import WireConnection, connect
from qim.core.ids import user_bucket
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.protocol.reader import Frame

TokenProvider = Callable[[], Awaitable[str]]
"""Fetches a fresh access token; OSError or TimeoutError when there is none now."""
RETRYABLE_CODES: Final = frozenset(
    (0, ErrorCode.RATE_LIMITED, ErrorCode.SHARD_MOVED, ErrorCode.REGION_FAILOVER, ErrorCode.CLOCK_UNSAFE,
     ErrorCode.TOKEN_EXPIRED)
)  # fmt: skip
"""0: the connection ended before the answer."""
_SERVER_NAME_DOMAIN: Final = "im.local"
_TIMER_MIN_MS: Final = 1
_RENEWAL_MIN_MS: Final = 1_000
"""Floor of a renewal timer: a clock that differs from the server's must not make it spin."""
_GOODBYE_MS: Final = 1_000
Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Timers and bounds; the defaults are Appendix B's where it names them."""

    capabilities: int = 0
    connect_timeout_ms: int = 10_000
    request_timeout_ms: int = 10_000
    commit_interval_ms: int = 20
    """Pushes and pending messages of this long share one transaction; 0 = one transaction per frame."""
    pending_max: int = 1_000
    """Unacknowledged messages per conversation; overflow act: `send` waits."""
    message_queue_max: int = 10_000
    """Rows an unread `messages()` iterator holds; overflow act: the oldest leave it, the store has them."""
    reconnect_scale: float = 1.0
    history_spacing_ms: float = 250
    resync_min_interval_ms: int = 5_000
    pull_window: int = 4
    pull_max_items: int = 500
    send: SendOptions = field(default_factory=SendOptions)
    heartbeat: HeartbeatOptions = field(default_factory=HeartbeatOptions)


class Link:
    """Connects, logs in, reconnects; carries out the machine's actions and tells `on_event`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tenant_id: str,
        user_id: str,
        device_id: str,
        token: str | TokenProvider,
        store: LocalStore,
        ssl_context: ssl.SSLContext,
        server_name: str | None = None,
        options: ClientOptions | None = None,
        on_event: Callable[[ClientEvent], None] | None = None,
        unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic_ms: Callable[[], float] = lambda: time.monotonic_ns() / 1e6,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self.user_id = user_id
        self.device_id = device_id
        self.store = store
        self.closed_reason = ""
        """Why the client has ended, empty while it has not."""
        self.connects = 0
        """Transports opened so far."""
        self._options = options or ClientOptions()
        self._address = (host, port)
        self._token = token
        self._ssl_context = ssl_context
        self._server_name = server_name or f"b{user_bucket(tenant_id, user_id):04x}.{_SERVER_NAME_DOMAIN}"
        self._on_event = on_event
        self._random = random_unit
        self._monotonic_ms = monotonic_ms
        self._epoch_ms = unix_ms() - monotonic_ms()
        self._reconnect = Reconnect(random_unit, scale=self._options.reconnect_scale)
        self._wire: WireConnection | None = None
        self._outcome: Disconnect | None = None
        self._redirect = ""
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = NEVER_MS
        self._renewal: asyncio.TimerHandle | None = None
        self._last_received_ms = 0
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._queues: list[tuple[deque[MessageRow], asyncio.Event]] = []
        store.bind(tenant_id, user_id, device_id)
        self._history = HistoryReader(
            self._read_history,
            self._restate,
            self._looked_through,
            Rebuilding(self._read_sessions, self._anchors, self._rebuilt),
            spacing_ms=self._options.history_spacing_ms,
        )
        dedup = DedupWindow()
        self.state = self._load_state(dedup)
        """The machine; its counters and its cursor are for reading."""
        self._performer = Performer(user_id, store, dedup, self._history, self._emit, self._options.commit_interval_ms)

    def cut(self) -> None:
        """Lose the connection without a FIN; the client comes back by itself."""
        if self._wire is not None:
            self._wire.abort()

    # ------------------------------------------------------------------ requests

    async def pull_history(
        self,
        conversation_id: str,
        *,
        direction: pb.Direction = pb.OLDER,
        anchor_conversation_seq: int,
        limit: int = 50,
    ) -> pb.HistoryBatch:
        """One page of history, not stored; RequestFailed when it is refused or the connection ends."""
        message = pb.PullHistory(
            conversation_id=conversation_id,
            direction=direction,
            anchor_conversation_seq=anchor_conversation_seq,
            limit=limit,
        )
        return await self._request(Opcode.PULL_HISTORY, message, pb.HistoryBatch)

    async def pull_session_list(self, *, snapshot_revision: int = 0) -> pb.SessionListBatch:
        """Every conversation of the user with its newest message, not stored; RequestFailed as for `pull_history`."""
        message = pb.PullSessionList(snapshot_revision=snapshot_revision)
        return await self._request(Opcode.PULL_SESSION_LIST, message, pb.SessionListBatch)

    async def _request(self, opcode: Opcode, message: Message, answer: type[Answer]) -> Answer:
        if not self.state.live:
            raise RequestFailed(0, "not connected")
        request_id, actions = self.state.request(opcode, message)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._performer.replies[request_id] = future
        self._do(actions)
        try:
            async with asyncio.timeout(self._options.request_timeout_ms / 1000):
                reply = await future
        except TimeoutError:
            raise RequestFailed(0, "no answer") from None
        finally:
            self._performer.replies.pop(request_id, None)
        if not isinstance(reply, answer):
            raise RequestFailed(0, "unexpected answer")
        return reply

    # ------------------------------------------------------------------ connection

    async def _run(self) -> None:
        while not self.closed_reason:
            self._emit(StateChanged(state="connecting"))
            outcome = await self._session()
            if self.closed_reason:
                return
            self._emit(StateChanged(state="offline", reason=outcome.reason))
            if outcome.wipe:
                self.store.wipe()
            if outcome.final or (outcome.refresh_token and not callable(self._token)):
                self._end(outcome.reason)
                return
            if outcome.reason == "rate_limited":
                self._reconnect.rate_limited()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._reconnect.delay_ms(outcome.retry_after_ms) / 1000):
                    await self._wake.wait()

    async def _session(self) -> Disconnect:
        """One connection from its first byte to its end; why it ended."""
        ended = asyncio.Event()
        self._outcome = None
        try:
            access_token = await self._token() if callable(self._token) else self._token
            host, port = self._next_address()
            wire = await connect(
                host,
                port,
                ssl_context=self._ssl_context,
                server_name=self._server_name,
                on_frame=self._on_frame,
                on_closed=lambda _: ended.set(),
                timeout_ms=self._options.connect_timeout_ms,
            )
        except (OSError, TimeoutError) as error:
            self._redirect = ""
            self._performer.set_preferred_endpoint("")
            return Disconnect(reason=f"connect_failed: {error or type(error).__name__}")
        if self.closed_reason:
            wire.abort()
            return Disconnect(reason=self.closed_reason)
        self._wire = self._performer.wire = wire
        self.connects += 1
        self._last_received_ms = self._now_ms()
        self._renew_later(access_token)
        self._do(self.state.connected(access_token, self._last_received_ms))
        self._arm()
        try:
            await ended.wait()
        finally:
            self._disconnected()
        return self._outcome or Disconnect(reason="connection_lost")

    def _disconnected(self) -> None:
        self._wire = self._performer.wire = None
        for timer in (self._timer, self._renewal):
            if timer is not None:
                timer.cancel()
        self._timer = self._renewal = None
        self._timer_at_ms = NEVER_MS
        self._performer.fail_replies()
        self._performer.do(self.state.disconnected())
        self._performer.commit()
        self._notify()

    def _next_address(self) -> tuple[str, int]:
        """Where a REDIRECT points, else the endpoint the server preferred last, else the configured one."""
        endpoint, self._redirect = self._redirect or self.store.meta(PREFERRED_ENDPOINT), ""
        host, _, port = endpoint.rpartition(":")
        return (host, int(port)) if host and port.isdigit() else self._address

    def _on_frame(self, frame: Frame) -> None:
        if self._outcome is not None:
            return
        now_ms = self._last_received_ms = self._now_ms()
        logins = self._performer.logins
        self._do(self.state.receive(frame.opcode, frame.request_id, frame.body, now_ms))
        if frame.opcode != Opcode.PUSH_EVENTS or self.state.sync.dirty:
            self._arm()
        if self._performer.logins != logins:
            self._reconnect.logged_in()

    def _do(self, actions: list[Action]) -> None:
        disconnect = self._performer.do(actions)
        if disconnect is not None and self._outcome is None:
            self._outcome = disconnect
            self._redirect = disconnect.endpoint
            if self._wire is not None:
                self._wire.abort()
        if self._waiters:
            self._notify()

    def _arm(self) -> None:
        """Make the timer fire at the machine's next deadline, if that is earlier than what it is set to."""
        due_ms = self.state.next_deadline_ms()
        if due_ms >= self._timer_at_ms or self._wire is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = due_ms
        delay_ms = max(due_ms - self._now_ms(), _TIMER_MIN_MS)
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at_ms = NEVER_MS
        self._do(self.state.tick(self._now_ms(), self._last_received_ms))
        self._arm()

    def _renew_later(self, access_token: str) -> None:
        delay_ms = renewal_delay_ms(access_token, self._now_ms()) if callable(self._token) else None
        if delay_ms is not None:
            self._renewal = asyncio.get_running_loop().call_later(
                max(delay_ms, _RENEWAL_MIN_MS) / 1000, lambda: self._spawn("qim-client-renew", self._renew())
            )

    async def _renew(self) -> None:
        """Silent renewal inside the connection (§15.3.1); without a token now, the next login gets one."""
        assert callable(self._token)
        try:
            access_token = await self._token()
        except (OSError, TimeoutError):
            return
        if self._wire is not None:
            self._do(self.state.renew(access_token, self._now_ms()))
            self._renew_later(access_token)
            self._arm()

    # ------------------------------------------------------------------ inside

    def _load_state(self, dedup: DedupWindow) -> ClientState:
        options = self._options
        now_ms = self._now_ms()
        dedup.load(self.store.dedup_rows(), now_ms)
        sync = SyncOptions(
            device_id=self.device_id,
            client_version=f"qim-python/{__version__}",
            capabilities=options.capabilities,
            pull_window=options.pull_window,
            pull_max_items=options.pull_max_items,
            resync_min_interval_ms=options.resync_min_interval_ms,
        )
        state = ClientState(
            StateOptions(sync=sync, send=options.send, heartbeat=options.heartbeat),
            self.store.cursor(),
            dedup,
            self._random,
        )
        state.sends.load(self.store.pending(), self.store.pending(failed=True))
        return state

    async def _read_history(
        self, conversation_id: str, direction: pb.Direction, anchor: int, limit: int
    ) -> pb.HistoryBatch | None:
        try:
            return await self.pull_history(
                conversation_id, direction=direction, anchor_conversation_seq=anchor, limit=limit
            )
        except RequestFailed as error:
            return None if error.code in RETRYABLE_CODES else pb.HistoryBatch()

    def _restate(self, conversation_id: str, messages: list[pb.HistoryMessage]) -> None:
        for row in self.store.restate([row_from_history(conversation_id, message) for message in messages]):
            self._emit(MessageReceived(row=row))
        self._performer.commit_soon()
        self._notify()

    async def _read_sessions(self) -> pb.SessionListBatch | None:
        try:
            return await self.pull_session_list()
        except RequestFailed as error:
            return None if error.code in RETRYABLE_CODES else pb.SessionListBatch()

    def _anchors(self, listed: pb.SessionListBatch) -> dict[str, int]:
        """What is to be filled, the last active first: from the greatest contiguous local sequence, or, of what is not
        here at all, the newest page, as for a new device (§9.6.1)."""
        self.store.list_sessions(listed.sessions)
        self._performer.commit_soon()
        latest = {session.conversation_id: session.latest_conversation_seq for session in listed.sessions}
        anchors = {}
        for conversation_id in [*latest, *(name for name in self.store.conversations() if name not in latest)]:
            anchor = contiguous_until(self.store.seqs(conversation_id))
            if latest.get(conversation_id, anchor + 1) > anchor:
                anchors[conversation_id] = anchor
        return anchors

    def _rebuilt(self) -> None:
        self.store.set_meta(REBUILD, "")
        self._performer.commit_soon()
        self._notify()

    def _looked_through(self, conversation_id: str, own: dict[str, tuple[bytes, int]] | None) -> None:
        self._do(self.state.looked_through(conversation_id, own, self._now_ms()))
        self._arm()

    def _emit(self, event: ClientEvent) -> None:
        if isinstance(event, MessageReceived):
            for queue, arrived in self._queues:
                queue.append(event.row)
                arrived.set()
        if self._on_event is not None:
            self._on_event(event)

    def _now_ms(self) -> int:
        return int(self._epoch_ms + self._monotonic_ms())

    async def _wait(self, done: Callable[[], bool], timeout_ms: int | None) -> None:
        if self.closed_reason:
            raise ClientClosed(self.closed_reason)
        if done():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (done, future)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await future
        finally:
            self._waiters.remove(waiter)

    def _notify(self) -> None:
        for done, future in self._waiters:
            if future.done():
                continue
            if self.closed_reason:
                future.set_exception(ClientClosed(self.closed_reason))
            elif done():
                future.set_result(None)

    def _end(self, reason: str) -> None:
        if self.closed_reason:
            return
        self.closed_reason = reason
        self._wake.set()
        handles, self._performer.handles = self._performer.handles, {}
        for handle in handles.values():
            if not handle.done():
                handle.set_exception(ClientClosed(reason))
        for _, arrived in self._queues:
            arrived.set()
        self._notify()
        self._emit(StateChanged(state="closed", reason=reason))

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._end(f"failed: {task.exception()!r}")
            self.cut()

    async def _stop_tasks(self) -> None:
        """The connection gets a second to say goodbye; then everything that still runs is cancelled."""
        if self._wire is not None:
            await asyncio.wait(self._tasks, timeout=_GOODBYE_MS / 1000, return_when=asyncio.FIRST_COMPLETED)
            self.cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
