"""LeaseKeeper: runs the leases of one role instance against the registry (§19.2.2)."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from qim.errors import Fenced, StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.registry.api import Answer, Grant, LeaseKind, ShardRegistry
from qim.registry.lease import Action, Ask, Close, Drop, LeaseMachine, LeaseTimes, Open, Release, SendBeat, State
from qim.runtime.backoff import Backoff
from qim.runtime.clock import Clock
from qim.runtime.tasks import FailureHandler, TaskSet

log = get_logger(__name__)


class LeaseHolder(Protocol):
    """A role that can take and let go of single ids."""

    async def open_shard(self, grant: Grant) -> None:
        """Take the id under this grant. Fenced when a store has a greater epoch; StoreError: tried again."""
        ...

    async def close_shard(self, shard_id: int) -> None:
        """Take nothing new, finish what is in flight, let go."""
        ...

    def drop_shard(self, shard_id: int) -> None:
        """Let go at once, whatever is in flight; also of an id that is being opened or is not here any more."""
        ...


class LeaseKeeper:
    """Leases of one kind for the member `owner` of its pool, hosted by `process`.

    `fenced` is how the holder reports that a store refused its epoch, after it has dropped the id itself or not.
    """

    def __init__(
        self,
        kind: LeaseKind,
        count: int,
        owner: str,
        process: str,
        *,
        registry: ShardRegistry,
        times: LeaseTimes,
        clock: Clock,
        on_failure: FailureHandler,
    ) -> None:
        """`count` ids there are of this kind."""
        self.kind = kind
        self._owner = owner
        self._process = process
        self._registry = registry
        self._times = times
        self._clock = clock
        self._machine = LeaseMachine(kind, count, owner, times)
        self._token = secrets.token_hex(8)
        self._tasks = TaskSet(on_failure)
        self._work: dict[int, asyncio.Task[object]] = {}
        """id -> its opening or closing."""
        self._epochs: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._holder: LeaseHolder
        self._incarnation = self._machine.incarnation
        self._started = False

    # ---------------------------------------------------------------------------------------------------------- life

    def start(self, holder: LeaseHolder) -> None:
        """Join the pool and keep its share for `holder`."""
        self._holder = holder
        self._started = True
        self._perform(self._machine.tick(self._now_ms()))

    def poke(self) -> None:
        """The route map has changed."""
        if self._started:
            self._perform(self._machine.poke(self._now_ms()))

    def fenced(self, shard_id: int, epoch: int) -> None:
        """A store refused this epoch of the id."""
        metrics.FENCED_TOTAL.labels(kind=self.kind).inc()
        log.warning("lease_fenced", role=self._owner, shard=shard_id, epoch=epoch)
        self._perform(self._machine.fenced(shard_id, epoch, self._now_ms()))

    async def leave(self) -> None:
        """Drain every id, give it back, be no member any more."""
        if not self._started:
            return
        self._empty.clear()
        self._perform(self._machine.leave(self._now_ms()))
        if not self._machine.empty():
            await self._empty.wait()
        self._halt()
        try:
            await self._registry.leave(self.kind, self._grant_id(self._machine.incarnation))
        except StoreError as error:
            log.warning("lease_not_left", role=self._owner, error=error)

    async def close(self) -> None:
        """Stop without a word: the leases end by themselves."""
        self._halt()
        await self._tasks.close()

    def _halt(self) -> None:
        """No beat may follow the leaving: it would make this a member again."""
        self._started = False
        if self._timer is not None:
            self._timer.cancel()

    def settled(self) -> bool:
        """The share is here."""
        return self._machine.settled()

    def held(self) -> list[int]:
        """Ids that are open here."""
        return self._machine.held()

    def state(self, shard_id: int) -> State:
        """Of one id."""
        return self._machine.state(shard_id)

    # ------------------------------------------------------------------------------------------------------- actions

    def _perform(self, actions: Sequence[Action]) -> None:
        if not self._started:
            return
        for action in actions:
            if isinstance(action, SendBeat):
                self._tasks.start(f"{self._owner} beat", self._beat(action))
            elif isinstance(action, Ask):
                self._tasks.start(f"{self._owner} acquire", self._ask(action))
            elif isinstance(action, Open):
                self._begin(action.shard_id, "open", self._open(action))
            elif isinstance(action, Close):
                self._begin(action.shard_id, "close", self._close(action.shard_id))
            elif isinstance(action, Drop):
                self._drop(action.shard_id)
            elif isinstance(action, Release):
                self._tasks.start(f"{self._owner} release", self._release(action))
        self._notice_fence()
        if self._machine.empty():
            self._empty.set()
        self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_ms = min(max(1.0, self._machine.due_ms() - self._now_ms()), self._times.renew_ms)
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._perform(self._machine.tick(self._now_ms()))

    def _notice_fence(self) -> None:
        if self._machine.incarnation != self._incarnation:
            self._incarnation = self._machine.incarnation
            metrics.LEASE_SELF_FENCED_TOTAL.labels(kind=self.kind).inc()
            log.error("lease_self_fenced", role=self._owner, timeout_ms=self._times.self_fence_ms)
        metrics.LEASES_HELD.labels(kind=self.kind).set(len(self._machine.held()))

    async def _beat(self, action: SendBeat) -> None:
        grant_id = self._grant_id(action.incarnation)
        try:
            beat = await self._registry.beat(
                self.kind, self._owner, self._process, grant_id, action.held, ttl_ms=self._times.ttl_ms
            )
        except StoreError as error:
            log.warning("lease_not_renewed", role=self._owner, error=error)
            self._perform(self._machine.beat_failed(self._now_ms()))
            return
        if beat.lost:
            log.warning("lease_lost", role=self._owner, count=len(beat.lost))
        self._perform(self._machine.beaten(action.incarnation, beat, self._now_ms()))

    async def _ask(self, action: Ask) -> None:
        grant_id = self._grant_id(action.incarnation)
        wait_ms = self._times.wait_ms(self.kind)
        try:
            answers = await self._registry.acquire(self.kind, action.shard_ids, self._owner, grant_id, wait_ms=wait_ms)
        except StoreError as error:
            log.warning("lease_not_acquired", role=self._owner, error=error)
            self._perform(self._machine.ask_failed(action.incarnation, action.shard_ids, self._now_ms()))
            return
        self._alert_exhausted(answers)
        self._perform(self._machine.answered(action.incarnation, answers, self._now_ms()))

    def _alert_exhausted(self, answers: dict[int, Answer]) -> None:
        for shard_id, answer in answers.items():
            if answer.wait_ms < 0:
                metrics.LEASE_EPOCH_EXHAUSTED_TOTAL.labels(kind=self.kind).inc()
                log.error("lease_epochs_exhausted", role=self._owner, shard=shard_id)

    async def _release(self, action: Release) -> None:
        try:
            await self._registry.release(self.kind, action.shard_ids, self._grant_id(action.incarnation))
        except StoreError as error:
            log.warning("lease_not_released", role=self._owner, error=error)
            self._perform(self._machine.release_failed(action.incarnation, action.shard_ids, self._now_ms()))
            return
        self._perform(self._machine.released(action.incarnation, action.shard_ids, self._now_ms()))

    # ------------------------------------------------------------------------------------------------------ the role

    def _begin(self, shard_id: int, what: str, work: Coroutine[Any, Any, None]) -> None:
        self._work[shard_id] = self._tasks.start(f"{self._owner} {what} {shard_id}", work)

    async def _open(self, action: Open) -> None:
        shard_id, epoch = action.shard_id, action.epoch
        self._epochs[shard_id] = epoch
        grant = Grant(self.kind, shard_id, self._owner, epoch, self._grant_id(action.incarnation))
        retry = Backoff(initial_ms=20, factor=2, max_ms=1000, jitter_ratio=0.3, random_unit=random.random)
        while True:
            try:
                await self._holder.open_shard(grant)
                break
            except Fenced as error:
                log.error("lease_refused_by_store", role=self._owner, shard=shard_id, epoch=epoch, error=error)
                self.fenced(shard_id, epoch)
                return
            except StoreError as error:
                log.warning("lease_not_opened", role=self._owner, shard=shard_id, error=error)
                await asyncio.sleep(retry.delay_ms() / 1000)
        self._work.pop(shard_id, None)
        self._perform(self._machine.opened(shard_id, epoch, self._now_ms()))

    async def _close(self, shard_id: int) -> None:
        epoch = self._epochs[shard_id]
        try:
            await self._holder.close_shard(shard_id)
        except Fenced:
            self.fenced(shard_id, epoch)
            return
        except StoreError as error:
            # what was in flight is known to the stores or will be asked for again; nothing new was taken
            log.warning("lease_closed_in_doubt", role=self._owner, shard=shard_id, error=error)
            self._holder.drop_shard(shard_id)
        self._work.pop(shard_id, None)
        self._perform(self._machine.closed(shard_id, epoch, self._now_ms()))

    def _drop(self, shard_id: int) -> None:
        work = self._work.pop(shard_id, None)
        if work is not None and work is not asyncio.current_task():
            work.cancel()
        self._holder.drop_shard(shard_id)

    # -------------------------------------------------------------------------------------------------------- inside

    def _grant_id(self, incarnation: int) -> str:
        return f"{self._token}.{incarnation}"

    def _now_ms(self) -> float:
        return self._clock.monotonic_ms()
