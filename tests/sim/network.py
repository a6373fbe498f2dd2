"""The backplane of the simulation: links between processes that are slow, break, and never reorder one stream.

As `backplane/unix.py`: one outgoing link per process and peer role, answers travel back on the link that brought the
request, a peer hears of a lost link a little later, and what is sent until then goes nowhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from qim.backplane.api import (
    AnswerHandler,
    LinkListener,
    NoticeHandler,
    PeerUnavailable,
    Priority,
    RequestHandler,
)
from tests.sim.loop import SimLoop, SimProcess

RECONNECT_INITIAL_S: Final = 0.02
RECONNECT_MAX_S: Final = 1.0
REPLY_STREAM: Final = -1


class Network:
    """Who listens under which role name, and every link there is."""

    def __init__(self, loop: SimLoop, seed: int, report: Callable[[str], None]) -> None:
        self.loop = loop
        self.seed = seed
        self.report = report
        self.bound: dict[str, SimBackplane] = {}
        self.links: list[Link] = []
        self.slow: dict[tuple[str, str], float] = {}
        """(process, role) -> latency added to every message for now, in s."""
        self.severed: set[tuple[str, str]] = set()
        """(process, role) pairs that cannot connect for now."""

    def bind(self, backplane: SimBackplane) -> None:
        """The process listens now; a new one under an old name takes the name over."""
        for role in backplane.roles:
            self.bound[role] = backplane

    def process_died(self, process: SimProcess, *, deliver_rest: bool) -> None:
        """Its links end; what it had written is delivered or lost."""
        for role, backplane in list(self.bound.items()):
            if backplane.process is process:
                del self.bound[role]
        for link in list(self.links):
            if link.source.process is process:
                link.severed = not deliver_rest
                link.forget()
            elif link.target is not None and link.target.process is process:
                link.sever()

    def cut(self, process: str, role: str, *, for_s: float) -> None:
        """Cut the links of a process to a role and keep them from coming back for a while."""
        pair = (process, role)
        self.severed.add(pair)
        self.loop.world_later(for_s, self.severed.discard, pair)
        for link in list(self.links):
            if link.source.process.name == process and link.role == role:
                link.sever()


class Link:
    """One outgoing link; `target` is the process instance it reached, None while it is down."""

    def __init__(self, network: Network, source: SimBackplane, role: str) -> None:
        self.network = network
        self.source = source
        self.role = role
        self.target: SimBackplane | None = None
        self.up = False
        """As the source sees it."""
        self.severed = False
        """Nothing passes any more, whoever knows."""
        self.generation = 0
        self.in_flight: dict[int, asyncio.Future[bytes]] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._next_id = 0
        self._backoff_s = RECONNECT_INITIAL_S
        self._rng = random.Random(f"{network.seed}/link/{source.process.name}/{role}")

    # -------------------------------------------------------------------------------------------------- life

    def connect(self) -> None:
        self.network.links.append(self)
        self._try_later(0.001)

    def forget(self) -> None:
        """The source is dead."""
        self.up = False
        if self in self.network.links:
            self.network.links.remove(self)

    def _try_later(self, delay_s: float) -> None:
        self.network.loop.world_later(delay_s * (0.8 + 0.4 * self._rng.random()), self._try)

    def _try(self) -> None:
        if not self.source.process.alive or self.up:
            return
        target = self.network.bound.get(self.role)
        pair = (self.source.process.name, self.role)
        reachable = target is not None and not target.process.paused and pair not in self.network.severed
        if not reachable or self.source.process.paused:
            self._backoff_s = min(self._backoff_s * 2, RECONNECT_MAX_S)
            self._try_later(self._backoff_s)
            return
        self._backoff_s = RECONNECT_INITIAL_S
        self.target = target
        self.generation += 1
        self.severed = False
        self.up = True
        self.source.process.soon(self._tell, True, self.generation)

    def _tell(self, up: bool, generation: int) -> None:
        if generation == self.generation:
            self.source.link_changed(self.role, up)

    def sever(self) -> None:
        """The connection breaks; the source learns it a moment later."""
        if not self.up or self.severed:
            return
        self.severed = True
        delay_s = self._rng.choice((0.0002, 0.02, 0.3))
        self.network.loop.world_later(delay_s, self._lost, self.generation)

    def _lost(self, generation: int) -> None:
        if not self.source.process.alive or generation != self.generation:
            return
        self.source.process.soon(self._noticed, generation)

    def _noticed(self, generation: int) -> None:
        if generation != self.generation:
            return
        self.up = False
        self.target = None
        failed, self.in_flight = self.in_flight, {}
        for future in failed.values():
            if not future.done():
                future.set_exception(PeerUnavailable(f"{self.role}: link lost"))
        self.source.link_changed(self.role, False)
        self._try_later(self._backoff_s)

    # ---------------------------------------------------------------------------------------------- messages

    def notify(self, opcode: int, body: bytes, priority: int) -> bool:
        if not self.up:
            return False
        self._carry(priority, self._arrive_notice, opcode, body)
        return True

    async def request(self, opcode: int, body: bytes, timeout_ms: int) -> bytes:
        if not self.up:
            raise PeerUnavailable(f"no link to {self.role}")
        future: asyncio.Future[bytes] = self.network.loop.create_future()
        self._next_id += 1
        request_id = self._next_id
        self.in_flight[request_id] = future
        self._carry(0, self._arrive_request, request_id, opcode, body)
        timer = self.network.loop.call_later(timeout_ms / 1000, _expire, future, self.role)
        try:
            return await future
        finally:
            timer.cancel()
            self.in_flight.pop(request_id, None)

    def _carry(self, stream: int, arrive: Callable[..., None], *args: object) -> None:
        """Deliver on a stream: behind everything sent on it before."""
        if self.severed:
            return
        rng = self._rng
        latency_s = 0.0001 + 0.0007 * rng.random()
        if rng.random() < 0.03:
            latency_s += 0.03 * rng.random()
        latency_s += self.network.slow.get((self.source.process.name, self.role), 0.0)
        key = (self.generation, stream)
        when_s = max(self.network.loop.time() + latency_s, self._last.get(key, 0.0))
        self._last[key] = when_s
        self.network.loop.world_at(when_s, self._pass, self.generation, arrive, args)

    def _pass(self, generation: int, arrive: Callable[..., None], args: tuple[object, ...]) -> None:
        if self.severed or generation != self.generation or self.target is None or not self.target.process.alive:
            return
        arrive(self.target, *args)

    def _arrive_notice(self, target: SimBackplane, opcode: int, body: bytes) -> None:
        target.process.soon(target.run_notice, self.source.roles[0], opcode, body)

    def _arrive_request(self, target: SimBackplane, request_id: int, opcode: int, body: bytes) -> None:
        answer = partial(self._answer, self.generation, request_id)
        target.process.soon(target.run_request, self.source.roles[0], opcode, body, answer)

    def _answer(self, generation: int, request_id: int, answer: bytes | None) -> None:
        """The target has an answer, None when its handler failed; it travels back on this link."""
        if generation == self.generation:
            self._carry(REPLY_STREAM, self._arrive_answer, request_id, answer)

    def _arrive_answer(self, _target: SimBackplane, request_id: int, answer: bytes | None) -> None:
        if self.source.process.alive:
            self.source.process.soon(self._settle, request_id, answer)

    def _settle(self, request_id: int, answer: bytes | None) -> None:
        future = self.in_flight.pop(request_id, None)
        if future is None or future.done():
            return
        if answer is None:
            future.set_exception(PeerUnavailable(f"{self.role}: the handler failed"))
        else:
            future.set_result(answer)


class SimBackplane:
    """`Backplane` of one process with some roles."""

    def __init__(self, network: Network, process: SimProcess, roles: tuple[str, ...]) -> None:
        self.network = network
        self.process = process
        self.roles = roles
        self._notices: dict[int, NoticeHandler] = {}
        self._requests: dict[int, RequestHandler] = {}
        self._listeners: list[LinkListener] = []
        self._links: dict[str, Link] = {}
        self._own: set[str] = set()

    def on_notice(self, opcode: int, handler: NoticeHandler) -> None:
        assert opcode not in self._notices, hex(opcode)
        self._notices[opcode] = handler

    def on_request(self, opcode: int, handler: RequestHandler) -> None:
        assert opcode not in self._requests, hex(opcode)
        self._requests[opcode] = handler

    def on_link(self, listener: LinkListener) -> None:
        self._listeners.append(listener)

    def connect(self, peer: str) -> None:
        if peer in self.roles:
            if peer not in self._own:
                self._own.add(peer)
                self.process.soon(self.link_changed, peer, True)
        elif peer not in self._links:
            self._links[peer] = Link(self.network, self, peer)
            self._links[peer].connect()

    def notify(self, peer: str, opcode: int, body: bytes, priority: Priority = Priority.CONTROL) -> bool:
        if peer in self.roles:
            self.process.soon(self.run_notice, self.roles[0], opcode, body)
            return True
        link = self._links.get(peer)
        return link is not None and link.notify(opcode, body, int(priority))

    async def request(self, peer: str, opcode: int, body: bytes, *, timeout_ms: int) -> bytes:
        if peer not in self.roles:
            link = self._links.get(peer)
            if link is None:
                raise PeerUnavailable(f"no link to {peer}")
            return await link.request(opcode, body, timeout_ms)
        future: asyncio.Future[bytes] = self.network.loop.create_future()
        timer = self.network.loop.call_later(timeout_ms / 1000, _expire, future, peer)
        self.run_request(self.roles[0], opcode, body, partial(_settle_own, future, peer))
        try:
            return await future
        finally:
            timer.cancel()

    def ask(self, peer: str, opcode: int, body: bytes, on_answer: AnswerHandler, *, timeout_ms: int) -> None:
        """A request in a task of its own: it dies with the process, and `on_answer` is never told."""
        self.network.loop.create_task(self._ask(peer, opcode, body, on_answer, timeout_ms))

    async def _ask(self, peer: str, opcode: int, body: bytes, on_answer: AnswerHandler, timeout_ms: int) -> None:
        try:
            outcome: bytes | PeerUnavailable = await self.request(peer, opcode, body, timeout_ms=timeout_ms)
        except PeerUnavailable as error:
            outcome = error
        on_answer(outcome)

    async def start(self) -> None:
        self.network.bind(self)

    async def close(self) -> None:
        """A process of the simulation ends by being killed."""

    # ------------------------------------------------------------------------------------- called as this process

    def link_changed(self, role: str, up: bool) -> None:
        for listener in self._listeners:
            listener(role, up)

    def run_notice(self, caller: str, opcode: int, body: bytes) -> None:
        handler = self._notices.get(opcode)
        if handler is None:
            return
        try:
            handler(caller, body)
        except Exception as error:  # noqa: BLE001  reported, as the product logs it
            self.network.report(f"{self.process.name}: notice {opcode:#06x} failed: {error!r}")

    def run_request(self, caller: str, opcode: int, body: bytes, answer: Callable[[bytes | None], None]) -> None:
        handler = self._requests.get(opcode)
        if handler is None:
            answer(None)
            return
        try:
            outcome = handler(caller, body)
        except Exception as error:  # noqa: BLE001
            self.network.report(f"{self.process.name}: request {opcode:#06x} failed: {error!r}")
            answer(None)
            return
        if isinstance(outcome, asyncio.Future):
            outcome.add_done_callback(lambda done: answer(None if done.cancelled() else done.result()))
        else:
            self.network.loop.create_task(self._finish(opcode, outcome, answer))

    async def _finish(self, opcode: int, work: Awaitable[bytes], answer: Callable[[bytes | None], None]) -> None:
        try:
            body: bytes | None = await work
        except Exception as error:  # noqa: BLE001
            self.network.report(f"{self.process.name}: request {opcode:#06x} failed: {error!r}")
            body = None
        answer(body)


def _expire(future: asyncio.Future[bytes], peer: str) -> None:
    if not future.done():
        future.set_exception(PeerUnavailable(f"{peer}: no answer in time"))


def _settle_own(future: asyncio.Future[bytes], peer: str, answer: bytes | None) -> None:
    if future.done():
        return
    if answer is None:
        future.set_exception(PeerUnavailable(f"{peer}: the handler failed"))
    else:
        future.set_result(answer)
