"""The backplane of one process: unix sockets to the other processes of the host, plain calls to its own roles.

Every process listens on `<run_dir>/<process>.sock` and keeps one outgoing link to each process it talks to; all roles
of that process share it. Answers travel back on the link that brought the request. The directory belongs to the owner
alone and the kernel names the user at the other end, so a connection from another account is refused (§17.3).
"""

from __future__ import annotations

import asyncio
import os
import random
import stat
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from qim.backplane.api import (
    Answer,
    AnswerHandler,
    LinkListener,
    NoticeHandler,
    PeerUnavailable,
    Priority,
    RequestHandler,
)
from qim.backplane.link import QUEUE_BYTES_MAX, Hello, Link
from qim.backplane.requests import IN_FLIGHT_MAX, DeadlineSweeper, InFlight
from qim.errors import FramingError, StartupError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.opcodes import InternalOpcode
from qim.runtime.backoff import Backoff
from qim.runtime.clock import Clock
from qim.runtime.tasks import FailureHandler, TaskSet

log = get_logger(__name__)

SOCKET_PATH_BYTES_MAX: Final = 107
"""`sun_path` of Linux without its final 0."""
RECONNECT_INITIAL_MS: Final = 20
RECONNECT_MAX_MS: Final = 1000
HELLO_TIMEOUT_S: Final = 5.0
"""A process that accepts but does not speak for this long is stuck; the next try gets a fresh connection."""


# looking a member of an enum up costs as much as calling a function
_REPLY: Final = InternalOpcode.REPLY
_REPLY_FAILED: Final = InternalOpcode.REPLY_FAILED


def socket_path(run_dir: Path, process_name: str) -> Path:
    """Where `process_name` listens."""
    return run_dir / f"{process_name}.sock"


class _Peer:
    """An outgoing link and its requests, to one process: `roles` are its role instances we know of."""

    __slots__ = ("closed", "in_flight", "link", "opened", "path", "roles", "wanted")

    def __init__(self, path: Path, in_flight_max: int) -> None:
        self.path = path
        self.roles: list[str] = []
        self.link: Link | None = None
        self.in_flight = InFlight(path.stem, in_flight_max)
        self.wanted: list[str] = []
        """Roles somebody connected to: their listeners hear of the link."""
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()


class UnixBackplane:
    """`Backplane` over unix sockets.

    `sockets` names, for every role instance of the topology, the socket of the process that hosts it. Handlers see as
    `peer` the first role instance of the calling process. A handler that returns an `Answer` instead of a coroutine
    costs no task. `on_failure` is told of a dead internal task.
    """

    def __init__(
        self,
        process_name: str,
        roles: Sequence[str],
        sockets: Mapping[str, Path],
        *,
        run_dir: Path,
        clock: Clock,
        on_failure: FailureHandler,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        in_flight_max: int = IN_FLIGHT_MAX,
    ) -> None:
        self._hello = Hello(process_name, tuple(roles))
        self._path = socket_path(run_dir, process_name)
        self._run_dir = run_dir
        self._clock = clock
        self._queue_bytes_max = queue_bytes_max
        self._in_flight_max = in_flight_max
        self._unknown: set[str] = set()
        """Roles somebody wants a link to and nobody has named a process of."""
        self._notices: dict[int, NoticeHandler] = {}
        self._requests: dict[int, RequestHandler] = {}
        self._listeners: list[LinkListener] = []
        self._peer_of_role: dict[str, _Peer] = {}
        self._own = InFlight(process_name, in_flight_max)
        self._own_wanted: set[str] = set()
        self._accepted: set[Link] = set()
        self._sweeper = DeadlineSweeper(clock.monotonic_ms)
        self._tasks = TaskSet(on_failure)
        self._server: asyncio.AbstractServer | None = None
        self._started = False
        self._add_peers(sockets, in_flight_max)

    @property
    def process_name(self) -> str:
        """Whose socket this is."""
        return self._hello.process

    def on_notice(self, opcode: int, handler: NoticeHandler) -> None:
        """One handler per opcode and process; ValueError on a second one."""
        if opcode in self._notices:
            raise ValueError(f"opcode {opcode:#06x} has a notice handler")
        self._notices[opcode] = handler

    def on_request(self, opcode: int, handler: RequestHandler) -> None:
        """One handler per opcode and process; ValueError on a second one."""
        if opcode in self._requests:
            raise ValueError(f"opcode {opcode:#06x} has a request handler")
        self._requests[opcode] = handler

    def on_link(self, listener: LinkListener) -> None:
        """Told of every role instance passed to `connect`; a role of this process is up at once and for ever."""
        self._listeners.append(listener)

    def connect(self, peer: str) -> None:
        """See Backplane. A role instance outside the topology (a pool that shrank) is not up until `learn` names it."""
        if peer in self._hello.roles:
            if peer not in self._own_wanted:
                self._own_wanted.add(peer)
                asyncio.get_running_loop().call_soon(self._tell_link, peer, True)
            return
        target = self._peer_of_role.get(peer)
        if target is None:
            if peer not in self._unknown:
                log.warning("backplane_peer_unknown", peer=peer)
            self._unknown.add(peer)
            return
        if peer in target.wanted:
            return
        target.wanted.append(peer)
        if target.link is not None:
            asyncio.get_running_loop().call_soon(self._tell_link, peer, True)
        elif self._started and len(target.wanted) == 1:
            self._tasks.start(f"backplane link to {target.path.stem}", self._keep_connected(target))

    def learn(self, processes: Mapping[str, str]) -> None:
        """Role instance -> process of this host, of those that joined later; known ones keep their place."""
        new = {
            role: socket_path(self._run_dir, process)
            for role, process in processes.items()
            if role not in self._peer_of_role and role not in self._hello.roles
        }
        if not new:
            return
        self._add_peers(new, self._in_flight_max)
        for role in self._unknown.intersection(new):
            self._unknown.discard(role)
            self.connect(role)

    def notify(self, peer: str, opcode: int, body: bytes, priority: Priority = Priority.CONTROL) -> bool:
        """See Backplane. A role of this process gets it on the next loop tick, in the order of the calls."""
        if peer in self._hello.roles:
            asyncio.get_running_loop().call_soon(self._deliver_notice, self._hello.roles[0], opcode, body)
            return True
        target = self._peer_of_role.get(peer)
        if target is not None and target.link is not None and target.link.send(opcode, body, priority=priority):
            return True
        metrics.BACKPLANE_DROPPED_TOTAL.labels(peer=peer).inc()
        return False

    def ask(self, peer: str, opcode: int, body: bytes, on_answer: AnswerHandler, *, timeout_ms: int) -> None:
        """See Backplane. A handler that failed answers PeerUnavailable too: what it did is not known."""
        if peer in self._hello.roles:
            in_flight, link = self._own, None
        else:
            target = self._peer_of_role.get(peer)
            if target is None or target.link is None:
                on_answer(PeerUnavailable(f"no link to {peer}"))
                return
            in_flight, link = target.in_flight, target.link
        try:
            request_id = in_flight.open(on_answer)
        except PeerUnavailable as error:
            on_answer(error)
            return
        self._sweeper.watch(in_flight, request_id, timeout_ms)
        if link is None:
            self._run_request(None, self._hello.roles[0], opcode, request_id, 0, body)
        elif not link.send(opcode, body, request_id=request_id):
            in_flight.fail(request_id, "the send queue is full")

    async def request(self, peer: str, opcode: int, body: bytes, *, timeout_ms: int) -> bytes:
        """See Backplane."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.ask(peer, opcode, body, partial(_settle, future), timeout_ms=timeout_ms)
        return await future

    async def start(self) -> None:
        """Listen and begin to connect. StartupError when the directory is not ours alone or the path is too long."""
        self._prepare_directory()
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, str(self._path))
        self._started = True
        for target in set(self._peer_of_role.values()):
            if target.wanted:
                self._tasks.start(f"backplane link to {target.path.stem}", self._keep_connected(target))

    async def close(self) -> None:
        """Stop listening, drop every link, fail what is in flight."""
        self._started = False
        await self._tasks.close()
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for link in [*self._accepted, *(peer.link for peer in set(self._peer_of_role.values()) if peer.link)]:
            link.abort()
        self._own.fail_all("closed")
        self._sweeper.close()
        await asyncio.sleep(0)

    # ------------------------------------------------------------------------------------------------ links

    def link_opened(self, link: Link) -> None:
        """An accepting side has nothing to check: whoever may open the socket may speak."""

    def link_frame(self, link: Link, opcode: int, request_id: int, stream_id: int, body: bytes) -> None:
        """A frame of an accepted link."""
        assert link.remote is not None
        caller = link.remote.roles[0]
        if request_id:
            self._run_request(link, caller, opcode, request_id, stream_id, body)
        else:
            self._deliver_notice(caller, opcode, body)

    def link_closed(self, link: Link) -> None:
        self._accepted.discard(link)

    def _accept(self) -> Link:
        loop = asyncio.get_running_loop()
        link = Link(self, loop, self._hello, queue_bytes_max=self._queue_bytes_max)
        self._accepted.add(link)
        return link

    async def _keep_connected(self, target: _Peer) -> None:
        """Connect, tell, wait for the end, tell, back off; for ever."""
        backoff = Backoff(
            initial_ms=RECONNECT_INITIAL_MS,
            factor=2,
            max_ms=RECONNECT_MAX_MS,
            jitter_ratio=0.2,
            random_unit=random.random,
            alive_reset_ms=RECONNECT_MAX_MS,
        )
        while True:
            started_ms = self._clock.monotonic_ms()
            await self._connect_once(target)
            await asyncio.sleep(backoff.delay_after_run_ms(self._clock.monotonic_ms() - started_ms) / 1000)

    async def _connect_once(self, target: _Peer) -> None:
        loop = asyncio.get_running_loop()
        target.opened.clear()
        target.closed.clear()
        events = _OutgoingEvents(self, target)
        link = Link(events, loop, self._hello, queue_bytes_max=self._queue_bytes_max)
        try:
            await loop.create_unix_connection(lambda: link, str(target.path))
        except OSError:
            return
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await target.opened.wait()
            await target.closed.wait()
        except TimeoutError:
            log.warning("backplane_peer_silent", peer=target.path.stem)
        finally:
            link.abort()

    def outgoing_opened(self, target: _Peer, link: Link) -> None:
        """The peer spoke: the link carries messages from now on. FramingError when it is not who it should be."""
        assert link.remote is not None
        missing = [role for role in target.roles if role not in link.remote.roles]
        if missing:
            raise FramingError(f"{target.path.name} hosts {link.remote.roles}, not {missing}")
        target.link = link
        target.opened.set()
        metrics.BACKPLANE_LINK_UP.labels(peer=target.path.stem).set(1)
        log.info("backplane_link_up", peer=target.path.stem)
        for role in target.wanted:
            self._tell_link(role, True)

    def outgoing_closed(self, target: _Peer, link: Link) -> None:
        was_up = target.link is link
        if was_up:
            target.link = None
            target.in_flight.fail_all("link lost")
            metrics.BACKPLANE_LINK_UP.labels(peer=target.path.stem).set(0)
            log.info("backplane_link_down", peer=target.path.stem)
        target.opened.set()
        target.closed.set()
        if was_up:
            for role in target.wanted:
                self._tell_link(role, False)

    def _tell_link(self, role: str, up: bool) -> None:
        for listener in self._listeners:
            try:
                listener(role, up)
            except Exception as error:  # noqa: BLE001  a listener's fault is not the link's
                log.error("backplane_listener_failed", peer=role, error=error)

    def _add_peers(self, sockets: Mapping[str, Path], in_flight_max: int) -> None:
        peers = {peer.path: peer for peer in self._peer_of_role.values()}
        for role, path in sockets.items():
            if role in self._hello.roles:
                continue
            peer = peers.get(path)
            if peer is None:
                peer = peers[path] = _Peer(path, in_flight_max)
            peer.roles.append(role)
            self._peer_of_role[role] = peer

    def _prepare_directory(self) -> None:
        if len(os.fsencode(self._path)) > SOCKET_PATH_BYTES_MAX:
            raise StartupError(f"socket path {self._path} exceeds {SOCKET_PATH_BYTES_MAX} bytes: use a shorter run_dir")
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._run_dir.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StartupError(f"run directory {self._run_dir} is open to others: chmod 700 it or name another")
        self._path.unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------------- messages

    def _deliver_notice(self, caller: str, opcode: int, body: bytes) -> None:
        handler = self._notices.get(opcode)
        if handler is None:
            self._handler_failed(caller, opcode, None)
            return
        try:
            handler(caller, body)
        except Exception as error:  # noqa: BLE001  a handler's fault is not the link's
            self._handler_failed(caller, opcode, error)

    def _run_request(
        self, link: Link | None, caller: str, opcode: int, request_id: int, stream_id: int, body: bytes
    ) -> None:
        """Run the handler; `link` None is a request of this process to itself."""
        handler = self._requests.get(opcode)
        if handler is None:
            self._handler_failed(caller, opcode, None)
            self._reply(link, request_id, stream_id, None)
            return
        try:
            outcome = handler(caller, body)
        except Exception as error:  # noqa: BLE001
            self._handler_failed(caller, opcode, error)
            self._reply(link, request_id, stream_id, None)
            return
        if isinstance(outcome, Answer):
            outcome.hand_to(partial(self._reply, link, request_id, stream_id))
            return
        task = self._tasks.start("backplane request", _guarded(outcome))
        task.add_done_callback(partial(self._request_done, link, caller, opcode, request_id, stream_id))

    def _request_done(
        self,
        link: Link | None,
        caller: str,
        opcode: int,
        request_id: int,
        stream_id: int,
        outcome: asyncio.Future[bytes | Exception],
    ) -> None:
        if outcome.cancelled():
            self._reply(link, request_id, stream_id, None)
            return
        answer = outcome.exception() or outcome.result()
        if isinstance(answer, bytes):
            self._reply(link, request_id, stream_id, answer)
            return
        self._handler_failed(caller, opcode, answer)
        self._reply(link, request_id, stream_id, None)

    def _reply(self, link: Link | None, request_id: int, stream_id: int, answer: bytes | None) -> None:
        """Answer, or REPLY_FAILED without a word of why for None."""
        if link is None:
            if answer is None:
                self._own.fail(request_id, "the handler failed")
            else:
                self._own.answer(request_id, answer)
            return
        opcode = _REPLY_FAILED if answer is None else _REPLY
        if not link.send(opcode, answer or b"", request_id=request_id, priority=stream_id) and link.remote is not None:
            metrics.BACKPLANE_DROPPED_TOTAL.labels(peer=link.remote.roles[0]).inc()

    def _handler_failed(self, caller: str, opcode: int, error: BaseException | None) -> None:
        """`error` None: no handler."""
        metrics.BACKPLANE_HANDLER_FAILED_TOTAL.labels(opcode=f"{opcode:#06x}").inc()
        log.error("backplane_handler_failed", peer=caller, opcode=opcode, error=error)


class _OutgoingEvents:
    """Events of the outgoing link to one peer: answers come back here."""

    __slots__ = ("_backplane", "_target")

    def __init__(self, backplane: UnixBackplane, target: _Peer) -> None:
        self._backplane = backplane
        self._target = target

    def link_opened(self, link: Link) -> None:
        self._backplane.outgoing_opened(self._target, link)

    def link_frame(self, link: Link, opcode: int, request_id: int, stream_id: int, body: bytes) -> None:
        if opcode == _REPLY:
            self._target.in_flight.answer(request_id, body)
        elif opcode == _REPLY_FAILED:
            self._target.in_flight.fail(request_id, "the handler failed")
        else:
            raise FramingError(f"opcode {opcode:#06x} on an outgoing link")

    def link_closed(self, link: Link) -> None:
        self._backplane.outgoing_closed(self._target, link)


def _settle(future: asyncio.Future[bytes], outcome: bytes | PeerUnavailable) -> None:
    """The caller may have gone."""
    if future.done():
        return
    if isinstance(outcome, bytes):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


async def _guarded(work: Awaitable[bytes]) -> bytes | Exception:
    """The handler's exception as a value: it belongs to the request, not to the process."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001
        return error
