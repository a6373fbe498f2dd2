"""The servers of the simulation (one always fsynced, one that loses its last second) and the connections to them.

A connection is a pipe: calls are executed in the order they were sent, answers come back in that order. When it breaks
every call in flight fails, and of those the server has not executed yet a prefix still will be, late, and the rest
never; meanwhile the next connection is at work. That is what a call that "may have happened" means.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from qim.commit_log.api import AppendRun
from qim.core.ids import mailbox_shard_id
from qim.errors import StaleInstance, StoreUnavailable
from qim.stores.api import (
    AppendCall,
    AppendResult,
    AppendStatus,
    CapResult,
    ConversationSeen,
    ProgressRow,
    RangePage,
    RangeRequest,
    ShardState,
    UserStatus,
)
from qim.stores.memory_mailbox import MemoryMailboxStore
from tests.sim.loop import SimLoop, SimProcess

CALL_TIMEOUT_S: Final = 2.0
RECONNECT_S: Final = (0.05, 0.4)
DURABLE_AFTER_S: Final = 2.0
"""An instance that fsyncs every second may lose up to two (§ everysec)."""
WRITES: Final = frozenset({"open_shard", "append", "truncate_before", "enforce_cap"})


class _Call:
    __slots__ = ("args", "connection", "dead", "done", "future", "generation", "method", "target")

    def __init__(
        self,
        connection: Connection,
        target: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        future: asyncio.Future[Any],
    ) -> None:
        self.connection = connection
        self.generation = connection.generation
        self.target = target
        self.method = method
        self.args = (args, kwargs)
        self.future = future
        self.done = False
        """Executed."""
        self.dead = False
        """It never reached the server."""


class Server:
    """One Redis-like server: executes one call after another."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.up = True
        self.frozen = False
        self.connections: list[Connection] = []
        self.executed: Callable[[Connection, str, tuple[Any, ...], Any], None] = lambda *_: None
        """Told of every call that was executed: (connection, method, arguments, outcome)."""
        self._backlog: deque[_Call] = deque()
        self._late: list[list[Any]] = []
        """[calls of others still to be executed before it, call]: what a broken connection left in its buffer."""

    def arrive(self, call: _Call) -> None:
        if call.dead:
            return
        if not self.up:
            call.dead = True
            return
        if self.frozen or self._backlog:
            self._backlog.append(call)
            return
        self._execute(call)

    def freeze(self) -> None:
        """SIGSTOP: calls wait."""
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, deque()
        for call in backlog:
            if not call.dead:
                self._execute(call)

    def crash(self) -> None:
        """It ends; what is not executed is lost."""
        self.up = False
        self._backlog.clear()
        self._late.clear()
        for connection in list(self.connections):
            connection.break_(rest_executed=False)

    def restart(self) -> None:
        self.up = True

    def arrive_late(self, call: _Call, after_calls: int) -> None:
        """Execute the call once so many of other connections were."""
        self._late.append([after_calls, call])

    def _execute(self, call: _Call) -> None:
        self._carry_out(call)
        late, self._late = self._late, []
        for waiting in late:
            waiting[0] -= 1
            if waiting[0] > 0:
                self._late.append(waiting)
            else:
                self._carry_out(waiting[1])

    def _carry_out(self, call: _Call) -> None:
        call.done = True
        args, kwargs = call.args
        outcome: Any
        try:
            outcome = run_now(getattr(call.target, call.method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  the answer is the error
            outcome = error
        self.executed(call.connection, call.method, args, outcome)
        call.connection.answered(call, outcome)


class MailboxServer(Server):
    """The instance of the mailboxes; `shadow` follows it by what an fsync every second leaves behind."""

    def __init__(self, loop: SimLoop, shard_count: int, now_ms: Callable[[], int]) -> None:
        super().__init__(loop, "mailbox")
        self.store = MemoryMailboxStore(shard_count, now_ms)
        self.shadow = MemoryMailboxStore(shard_count, now_ms)
        for store in (self.store, self.shadow):
            store._loaded = _Everything()  # connections know what they loaded
        self._not_durable: deque[tuple[float, str, tuple[Any, ...]]] = deque()

    def _carry_out(self, call: _Call) -> None:
        if call.method in WRITES:
            self._not_durable.append((self.loop.time(), call.method, call.args[0]))
            self._harden(self.loop.time() - DURABLE_AFTER_S)
        super()._carry_out(call)

    def lose_since(self, since_s: float) -> int:
        """Go back to what was durable at `since_s`, at most DURABLE_AFTER_S ago; how many writes are lost."""
        self._harden(max(since_s, self.loop.time() - DURABLE_AFTER_S))
        lost = len(self._not_durable)
        self._not_durable.clear()
        self.store.restart(self.shadow.saved())
        self.store._loaded = _Everything()
        return lost

    def _harden(self, before_s: float) -> None:
        while self._not_durable and self._not_durable[0][0] <= before_s:
            _, method, args = self._not_durable.popleft()
            try:
                run_now(getattr(self.shadow, method)(*args))
            except Exception:  # noqa: BLE001  it failed when it was first executed, too
                continue


class _Everything(set[int]):
    """A set that holds every shard."""

    def __contains__(self, shard: object) -> bool:
        return True

    def clear(self) -> None:
        """Stays full."""


class Connection:
    """One pipelined connection of a process, reconnecting for ever; as `stores/redis/resp.py`."""

    def __init__(self, server: Server, process: SimProcess, purpose: str, seed: int) -> None:
        self.server = server
        self.process = process
        self.purpose = purpose
        self.generation = 1
        self.up = True
        self._in_flight: deque[_Call] = deque()
        self._last_arrival_s = 0.0
        self._last_answer_s = 0.0
        self.slow_s = 0.0
        """Latency added for now."""
        self.cut_until_s = 0.0
        """It does not come back before this time."""
        self._rng = random.Random(f"{seed}/connection/{process.name}/{purpose}")
        server.connections.append(self)

    async def call(self, target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if not self.up:
            raise StoreUnavailable(f"{self.purpose}: not connected")
        loop = self.server.loop
        future: asyncio.Future[Any] = loop.create_future()
        call = _Call(self, target, method, args, kwargs, future)
        self._in_flight.append(call)
        self._last_arrival_s = max(loop.time() + self._latency_s(), self._last_arrival_s)
        loop.world_at(self._last_arrival_s, self.server.arrive, call)
        if self.server.frozen or not self.server.up or self.slow_s > CALL_TIMEOUT_S / 2:
            self.process.later(CALL_TIMEOUT_S, self._check, call)
        return await future

    def answered(self, call: _Call, outcome: Any) -> None:
        """The server executed it: the answer travels back, unless the connection has gone."""
        if call.generation != self.generation or not self.up:
            return
        self._last_answer_s = max(self.server.loop.time() + self._latency_s() / 2, self._last_answer_s)
        self.server.loop.world_at(self._last_answer_s, self._deliver, call, outcome)

    def break_(self, *, rest_executed: bool | None = None) -> None:
        """The connection ends. Of the calls the server has not executed a prefix will be: all, none or some."""
        if not self.up:
            return
        self.up = False
        calls, self._in_flight = list(self._in_flight), deque()
        waiting = [call for call in calls if not call.done]
        some = self._rng.choice((len(waiting), self._rng.randint(0, len(waiting))))
        kept = {True: len(waiting), False: 0, None: some}[rest_executed]
        for call in waiting[kept:]:
            call.dead = True
        after_calls, delay_s = self._rng.choice((0, 1, 2, 2, 3, 6)), self._rng.choice((0.0, 0.01, 0.2, 1.5))
        for call in waiting[:kept]:
            late = _Call(self, call.target, call.method, call.args[0], call.args[1], call.future)
            late.generation = -1
            call.dead = True
            if call is waiting[kept - 1] and getattr(call.target, "splits", False) and call.method == "append_each":
                late.args = (([self._cut_off(run) for run in call.args[0][0]],), {})
            if after_calls:
                self.server.arrive_late(late, after_calls)
            else:
                self.server.loop.world_later(delay_s, self.server.arrive, late)
        for call in calls:
            if not call.future.done():
                call.future.set_exception(StoreUnavailable(f"{self.purpose}: connection lost"))
                call.future.exception()
        self._reconnect_later()

    def cut(self, for_s: float) -> None:
        """The connection ends and none comes instead of it for a while."""
        self.cut_until_s = max(self.cut_until_s, self.server.loop.time() + for_s)
        self.break_()

    def _cut_off(self, run: AppendRun) -> AppendRun:
        """What a broker has of a run whose connection ended."""
        return AppendRun(None, run.records[: self._rng.randint(0, len(run.records))])

    def close(self) -> None:
        """The process is dead: its calls on the way share the fate of those of a broken connection."""
        self.break_()
        self.server.connections.remove(self)

    def _reconnect_later(self) -> None:
        low, high = RECONNECT_S
        self.server.loop.world_later(low + (high - low) * self._rng.random(), self._reconnect)

    def _reconnect(self) -> None:
        if not self.process.alive:
            return
        if not self._reachable():
            self._reconnect_later()
            return
        self.generation += 1
        self.up = True
        self._last_arrival_s = self._last_answer_s = 0.0

    def _reachable(self) -> bool:
        server = self.server
        return server.up and not server.frozen and not self.process.paused and server.loop.time() >= self.cut_until_s

    def _check(self, call: _Call) -> None:
        """An answer is overdue: the connection is broken as a whole."""
        if not call.future.done() and call.generation == self.generation:
            self.break_()

    def _deliver(self, call: _Call, outcome: Any) -> None:
        if call.generation != self.generation or not self.up:
            return
        self._in_flight.remove(call)
        if call.future.done():
            return
        if isinstance(outcome, Exception):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)

    def _latency_s(self) -> float:
        rng = self._rng
        latency_s = 0.0001 + 0.0008 * rng.random()
        if rng.random() < 0.03:
            latency_s += 0.05 * rng.random()
        return latency_s + self.slow_s


class Remote:
    """A store behind a connection: every method is a call."""

    def __init__(self, connection: Connection, target: Any) -> None:
        self._connection = connection
        self._target = target

    def instance_of(self, bucket: int) -> str:
        """Of a MessageStore: there is one."""
        return self._connection.purpose

    @property
    def ends_together(self) -> bool:
        """Of a CommitLog: the model's, or the broker's."""
        ends_together: bool = self._target.ends_together
        return ends_together

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        def call(*args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
            return self._connection.call(self._target, method, *args, **kwargs)

        self.__dict__[method] = call
        return call


class SimMailboxStore:
    """`MailboxStore` as `stores/redis/mailbox.py` behaves around its connection: what was not opened or loaded on this
    one is refused before anything is sent."""

    def __init__(self, connection: Connection, server: MailboxServer, shard_count: int) -> None:
        self._connection = connection
        self._server = server
        self._shard_count = shard_count
        self._generation = 0
        self._loaded: set[int] = set()

    async def open_shard(self, shard: int, shard_epoch: int, grant_id: str, lane_count: int) -> ShardState:
        self._refresh()
        state: ShardState = await self._call("open_shard", shard, shard_epoch, grant_id, lane_count)
        self._loaded.add(shard)
        return state

    async def load_shard(self, shard: int, shard_epoch: int) -> ShardState:
        self._refresh()
        state: ShardState = await self._call("load_shard", shard, shard_epoch)
        if state.stored_epoch == shard_epoch:
            self._loaded.add(shard)
        return state

    def is_loaded(self, shard: int) -> bool:
        self._refresh()
        return shard in self._loaded

    async def append(self, call: AppendCall) -> AppendResult:
        self._refresh()
        if call.shard not in self._loaded:
            return AppendResult(status=AppendStatus.W_MOVED)
        result: AppendResult = await self._call("append", call)
        return result

    async def progress(self, shard: int, first_offset: int, last_offset: int) -> Mapping[tuple[int, int], ProgressRow]:
        rows: Mapping[tuple[int, int], ProgressRow] = await self._call("progress", shard, first_offset, last_offset)
        return rows

    async def range_scan(self, request: RangeRequest) -> RangePage:
        self._require(request.shard)
        page: RangePage = await self._call("range_scan", request)
        return page

    async def user_status(self, request: RangeRequest) -> UserStatus:
        self._require(request.shard)
        status: UserStatus = await self._call("user_status", request)
        return status

    async def truncate_before(self, shard: int, shard_epoch: int, tenant_id: str, user_id: str, seq: int) -> None:
        self._require(shard)
        await self._call("truncate_before", shard, shard_epoch, tenant_id, user_id, seq)

    async def enforce_cap(
        self, shard: int, shard_epoch: int, tenant_id: str, user_id: str, above: int, leave: int, limit: int
    ) -> CapResult:
        self._require(shard)
        result: CapResult = await self._call("enforce_cap", shard, shard_epoch, tenant_id, user_id, above, leave, limit)
        return result

    async def conversations(self, tenant_id: str, user_id: str) -> list[ConversationSeen]:
        self._require(mailbox_shard_id(tenant_id, user_id, self._shard_count))
        seen: list[ConversationSeen] = await self._call("conversations", tenant_id, user_id)
        return seen

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._connection.call(self._server.store, method, *args)

    def _refresh(self) -> None:
        if self._connection.generation != self._generation:
            self._generation = self._connection.generation
            self._loaded.clear()

    def _require(self, shard: int) -> None:
        self._refresh()
        if shard not in self._loaded:
            raise StaleInstance(f"mailbox shard {shard} is not loaded on this connection")


def run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a model store waited")
