"""One mailbox shard at work: takeover, log, admission, calls (DESIGN-data §5, §6).

Anything doubtful (a broken or unanswered call, W_MOVED, another connection) leads to the same place: `_restore` reads
what is stored, and the log is folded again from there. Until then the shard serves nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qim.commit_log.api import CommitLog, LogRecord
from qim.core.seq import log_offset_of, mailbox_seq
from qim.errors import Fenced, StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.registry.api import EPOCH_MAX, EpochBoundary, Grant, LeaseKind, ShardRegistry, epoch_owning
from qim.runtime.backoff import Backoff
from qim.runtime.clock import Clock
from qim.runtime.crash_point import AFTER_CHUNK, AFTER_WATERMARK, crash_point
from qim.runtime.tasks import TaskSet
from qim.shard_workers.feed import GAP_WAIT_MS, LogFeed
from qim.shard_workers.mailbox.calls import CallScheduler
from qim.shard_workers.mailbox.expand import Dispatch, LaneMembers
from qim.shard_workers.mailbox.fold import Verdict
from qim.shard_workers.mailbox.machine import PlannedCall, ShardMachine
from qim.shard_workers.mailbox.members import MemberDirectory
from qim.shard_workers.mailbox.push import Covered, PushPump
from qim.stores.api import AppendResult, AppendStatus, ChunkAppend, MailboxStore, ProgressRow, ShardState

log = get_logger(__name__)

PENDING_SUBTASKS_MAX: Final = 8192
"""Sub-tasks in memory; above it the shard leaves records in the log (about 3 KB each with an inline body)."""
READ_RECORDS_MAX: Final = 500
_RETRY_INITIAL_MS: Final = 20
_RETRY_MAX_MS: Final = 1000
_TIMER_SLACK_S: Final = 0.002
"""A loop's timers may be a tick early."""

ChunkGate = Callable[[int, int, int], bool]
"""(shard, lane, log offset) -> True to hold the chunk back; installed by tests only (26.1.3, 26.3.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardServices:
    """What the shards of a role share."""

    store: MailboxStore
    dispatch_log: CommitLog
    registry: ShardRegistry
    members: MemberDirectory
    pushes: PushPump
    clock: Clock
    tasks: TaskSet
    poll_interval_ms: float
    chunk_gate: ChunkGate | None
    on_lanes_missed: Callable[[int, Sequence[int] | None], None]
    """(shard, lanes or all): their online devices may have missed a push."""
    on_fenced: Callable[[int, int, Fenced], None]
    """(shard, epoch, error): a store or the registry has a greater epoch."""
    on_appended: Callable[[int, Sequence[ChunkAppend]], None] = lambda shard, items: None
    """Entries of a shard were written."""


class ShardRunner:
    """Runtime of one mailbox shard under one grant."""

    def __init__(self, grant: Grant, machine: ShardMachine, calls: CallScheduler, services: ShardServices) -> None:
        self.shard = grant.shard_id
        self.machine = machine
        self._label = str(grant.shard_id)
        self._grant = grant
        self._calls = calls
        self._services = services
        self._feed = LogFeed(0, poll_interval_ms=services.poll_interval_ms)
        self._opened = False
        self._settled = False
        """Memory is what `_restore` left and answered calls made of it."""
        self._announced = False
        self._draining = False
        self._ended = False
        self._regressions = 0
        self._no_call_until_ms = 0.0
        """A call has failed: nothing is written for a moment, while reads go on."""
        self._quiet = asyncio.Event()
        """Set while no call is in flight."""
        self._quiet.set()
        self._wake: asyncio.Future[None] | None = None
        self._gap_timer: asyncio.TimerHandle | None = None
        self._retry = _backoff()
        self._call_retry = _backoff()

    # -------------------------------------------------------------------------------------------------------- serving

    def serves(self, lane: int) -> bool:
        return self._settled and self.machine.serves(lane)

    def caught_up(self) -> bool:
        """Every lane that is not refused is served."""
        machine = self.machine
        return self._settled and all(
            machine.serves(lane) for lane in range(machine.lane_count) if lane not in machine.refused
        )

    def lane_lags_ms(self, now_ms: float) -> list[int]:
        """Queueing delay per lane (DESIGN-data §4); 0 for a lane that is not served."""
        machine = self.machine
        lags = [0] * machine.lane_count
        if self._settled:
            for lane in machine.lanes.active():
                lags[lane] = machine.lag_ms(lane, now_ms)
        return lags

    def retention_view(self) -> tuple[int, int] | None:
        """(shard_epoch, offset of the fold stored last), None while memory is in doubt or nothing may be written."""
        if not self._settled or self.machine.read_only:
            return None
        return self._grant.epoch, self.machine.saved_offset

    def doubt(self, reason: str) -> None:
        """Memory may not be what is stored: serve nothing until it was read again."""
        self._quiet.set()
        if self._settled:
            log.warning("shard_reloads", mailbox_shard=self.shard, shard_epoch=self._grant.epoch, reason=reason)
        self._settled = False
        self._wake_up()

    def note_regressions(self) -> None:
        """Count and name what the machine saw going back."""
        seen = self.machine.regressions
        if seen != self._regressions:
            metrics.MAILBOX_SEQ_REGRESSION_COUNT.inc(seen - self._regressions)
            log.error("mailbox_seq_went_back", mailbox_shard=self.shard, shard_epoch=self._grant.epoch, count=seen)
            self._regressions = seen

    def fenced(self, error: Fenced) -> None:
        """Somebody else owns the shard."""
        if not self._ended:
            self._services.on_fenced(self.shard, self._grant.epoch, error)

    def end(self) -> None:
        """Serve and send nothing any more; what is in flight is refused by its epoch or is harmless."""
        self._ended = True
        self._draining = True
        self._settled = False
        self._calls.forget(self)
        self._quiet.set()
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        self._wake_up()

    # ------------------------------------------------------------------------------------------------------------ loop

    async def run(self) -> None:
        """Own the shard until `end` or until somebody else does."""
        try:
            await self._run()
        except Fenced as error:
            self.fenced(error)

    async def _run(self) -> None:
        while not self._ended:
            try:
                if self._settled and not self._services.store.is_loaded(self.shard):
                    self.doubt("another connection")
                if not self._settled:
                    await self._restore()
                elif self._feed.read_due_in_ms(self._now_ms()) <= 0:
                    await self._read()
                self.pump()
                self._retry.reset()
            except Fenced:
                raise
            except StoreError as error:
                delay_ms = self._retry.delay_ms()
                log.warning("shard_retry", mailbox_shard=self.shard, delay_ms=delay_ms, error=error)
                await asyncio.sleep(delay_ms / 1000)
                continue
            if self._settled:
                await self._wait(self._feed.read_due_in_ms(self._now_ms()))

    def offer_hint(self, first_offset: int, records: Sequence[bytes]) -> None:
        """Records that became durable in the dispatch log."""
        if self._feed.offer_hint(first_offset, records, self._now_ms()):
            self.pump()
            return
        if self._settled:
            metrics.HINT_GAP_TOTAL.labels(topic="dispatch").inc()
        if self._gap_timer is None:
            self._gap_timer = asyncio.get_running_loop().call_later(GAP_WAIT_MS / 1000, self._gap_over)

    def pump(self) -> None:
        """Admit what has arrived, as far as there is room, and ask for a turn to send."""
        if not self._settled:
            return
        ready = self._feed.ready
        while ready and self.machine.lanes.pending < PENDING_SUBTASKS_MAX:
            self._admit(ready.popleft())
        if self.machine.has_work() and self._now_ms() >= self._no_call_until_ms:
            self._calls.want(self)
        if not self._announced and self.machine.replayed():
            self._announced = True
            self._services.on_lanes_missed(self.shard, None)

    def _admit(self, record: LogRecord) -> None:
        dispatch = Dispatch(record.offset, record.value)
        refused = len(self.machine.refused)
        verdict, work = self.machine.admit(dispatch)
        if len(self.machine.refused) != refused:
            self._alert_refused(list(self.machine.refused)[refused:])
        if verdict is Verdict.DUPLICATE:
            metrics.DISPATCH_DUPLICATE_SUPPRESSED_TOTAL.inc()
        elif verdict is Verdict.ORPHANED:
            metrics.DISPATCH_ORPHANED_TOTAL.inc()
        elif verdict is Verdict.STALE:
            metrics.STALE_EPOCH_DISPATCH_DROPPED_TOTAL.inc()
            log.error("stale_dispatch_dropped", mailbox_shard=self.shard, offset=record.offset, bucket=dispatch.bucket,
                      epoch=dispatch.fencing_epoch)  # fmt: skip
        if work is None:
            return
        members: LaneMembers | None = None
        try:
            members = self._services.members.known(dispatch)
        except StoreError as error:
            log.error("members_do_not_fit", mailbox_shard=self.shard, offset=record.offset, error=error)
        if members is not None:
            self.machine.members_known(dispatch, members, self.machine.incarnation, self._since_ms(dispatch))
        else:
            self._services.tasks.start(
                f"members {self.shard}/{record.offset}", self._load_members(dispatch, self.machine.incarnation)
            )

    def _alert_refused(self, lanes: Sequence[int]) -> None:
        """P1, for a human: nothing is replayed into such a lane (26.6.8)."""
        metrics.LANE_REFUSED.labels(shard=self.shard).set(len(self.machine.refused))
        for lane in lanes:
            log.error("lane_refused", mailbox_shard=self.shard, lane=lane, shard_epoch=self._grant.epoch,
                      found=self.machine.refused[lane], expected=self.machine.acked[lane])  # fmt: skip

    def _since_ms(self, dispatch: Dispatch) -> float:
        """Since when a dispatch has been waiting: its commit, so that the queues before this one count as lag, too.
        What lay in the log at a takeover waits since now: sending does not depend on a recovery (DESIGN-data §4)."""
        now_ms = self._now_ms()
        if dispatch.offset < self.machine.high:
            return now_ms
        return now_ms - max(0, self._services.clock.unix_ms() - dispatch.record.created_at)

    async def _load_members(self, dispatch: Dispatch, incarnation: int) -> None:
        """Until they are there: an unreadable snapshot stops the lanes of this dispatch, nothing else."""
        retry = _backoff()
        while incarnation == self.machine.incarnation and not self._ended:
            try:
                members = await self._services.members.load(dispatch)
            except StoreError as error:
                delay_ms = retry.delay_ms()
                log.warning("members_retry", mailbox_shard=self.shard, offset=dispatch.offset, delay_ms=delay_ms,
                            error=error)  # fmt: skip
                await asyncio.sleep(delay_ms / 1000)
                continue
            self.machine.members_known(dispatch, members, incarnation, self._since_ms(dispatch))
            self.pump()
            return

    async def _read(self) -> None:
        feed = self._feed
        limit = min(feed.room(), READ_RECORDS_MAX)
        records = await self._services.dispatch_log.read(self.shard, feed.next_offset, max_records=limit)
        if feed is self._feed:
            feed.offer_read(records, complete=len(records) < limit, now_ms=self._now_ms())

    # ----------------------------------------------------------------------------------------------------------- calls

    async def drained(self) -> None:
        """Until no call is in flight; nothing new is sent."""
        self._draining = True
        await self._quiet.wait()

    def hurries(self) -> bool:
        """Something small waits for its turn, or somebody behind something large."""
        return self.machine.lanes.hurries()

    def next_call(self) -> PlannedCall | None:
        """The shard's turn to send."""
        if not self._settled or self._draining or self._now_ms() < self._no_call_until_ms:
            return None
        gate = self._services.chunk_gate
        hold = None
        if gate is not None:
            shard = self.shard

            def hold(lane: int, offset: int) -> bool:
                return gate(shard, lane, offset)

        call = self.machine.next_call(self._now_ms(), hold)
        if call is not None:
            self._quiet.clear()
        return call

    def call_answered(self, call: PlannedCall, result: AppendResult) -> None:
        """Push what W now covers; a refusal means that memory is wrong."""
        if result.nondeterministic:
            metrics.EVENT_ID_NONDETERMINISM_TOTAL.inc(result.nondeterministic)
            log.error("entry_differs", mailbox_shard=self.shard, count=result.nondeterministic)
        if result.status is not AppendStatus.OK:
            if call.incarnation == self.machine.incarnation:
                self.doubt(result.status.value)
            return
        _pass_crash_points(call)
        self._call_retry.reset()
        if result.applied:
            self._services.on_appended(self.shard, call.append.tenant_items)
            _count_entries(self._label, call.append.tenant_items)
        machine = self.machine
        covered = machine.answered(call)
        if not machine.calls_in_flight():
            self._quiet.set()
        if covered:
            newest = covered[-1][0].dispatch
            metrics.MATERIALIZED_LAG_MS.observe(self._services.clock.unix_ms() - newest.created_at_ms)
            seq_of = machine.seq_of
            self._services.pushes.push(self.shard, [Covered(work, mask, seq_of(work.offset)) for work, mask in covered])
        self.pump()
        if self._feed.read_due_in_ms(self._now_ms()) <= 0:
            self._wake_up()

    def call_fenced(self, error: Fenced) -> None:
        """The store has a greater epoch: nothing of the call happened."""
        self.fenced(error)

    def call_failed(self, call: PlannedCall, error: StoreError) -> None:
        """The call may have happened. A store without room refuses every one: tried again ever more rarely."""
        if call.incarnation == self.machine.incarnation:
            delay_ms = self._call_retry.delay_ms()
            self._no_call_until_ms = self._now_ms() + delay_ms
            asyncio.get_running_loop().call_later(delay_ms / 1000 + _TIMER_SLACK_S, self.pump)
            self.doubt(str(error))

    # --------------------------------------------------------------------------------------------- takeover and reload

    async def _restore(self) -> None:
        """Start from what is stored: the first time a takeover, later a reload. Same order every time."""
        services = self._services
        shard, epoch = self.shard, self._grant.epoch
        state = await self._stored_state()
        high = (await services.dispatch_log.watermarks(shard)).high
        if not self._opened:
            self.machine.open(await self._boundaries(high), high)
            self._opened = True
        top = max(state.watermarks.values)
        if high <= state.fold_offset or (top and high <= log_offset_of(top)):
            raise StoreError(f"dispatch log of shard {shard} ends at {high}, below what was materialized")
        progress: dict[tuple[int, int], ProgressRow] = {}
        if high > state.fold_offset + 1:
            progress = dict(await services.store.progress(shard, state.fold_offset + 1, high - 1))
            # A late append of ours, from an older connection, may have saved the fold in between and dropped the
            # progress below it: every record there would look unfinished and its lane would be refused for good.
            again = await services.store.load_shard(shard, epoch)
            if again.fold_offset != state.fold_offset:
                raise StoreError(f"mailbox shard {shard}: C moved to {again.fold_offset} while its progress was read")
        ahead = self.machine.restore(state, progress, high, self._now_ms())
        self.note_regressions()
        self._feed = LogFeed(self.machine.next_offset, poll_interval_ms=services.poll_interval_ms)
        self._settled = not self._ended
        if ahead:
            services.on_lanes_missed(shard, ahead)
        log.info("shard_restored", mailbox_shard=shard, shard_epoch=epoch, first_offset=self.machine.next_offset,
                 last_offset=high)  # fmt: skip

    async def _stored_state(self) -> ShardState:
        """W and fold, under our epoch. Fenced when the registry or the instance names a greater one."""
        services = self._services
        shard, epoch = self.shard, self._grant.epoch
        route = await services.registry.current(LeaseKind.MAILBOX_SHARD, shard)
        if route is None or route.epoch != epoch:
            raise Fenced(f"mailbox shard {shard}: the registry names epoch {route and route.epoch}, ours is {epoch}")
        if self._opened:
            state = await services.store.load_shard(shard, epoch)
            if state.stored_epoch >= epoch:
                return state
        try:
            return await services.store.open_shard(shard, epoch, self._grant.grant_id, self.machine.lane_count)
        except Fenced:
            if epoch < EPOCH_MAX[LeaseKind.MAILBOX_SHARD]:
                raise
        return await self._read_only_state()

    async def _read_only_state(self) -> ShardState:
        """The instance knows the last epoch there is under another grant, and no greater one can be had: the shard is
        read, never written again (26.6.6)."""
        shard, epoch = self.shard, self._grant.epoch
        state = await self._services.store.load_shard(shard, epoch)
        if not self.machine.read_only:
            log.error("shard_read_only", mailbox_shard=shard, shard_epoch=epoch)
            self.machine.read_only = True
        return state

    async def _boundaries(self, high: int) -> list[EpochBoundary]:
        """Boundaries of the shard with ours written. The first one of all starts at 0: nobody owned what is there."""
        registry, shard, epoch = self._services.registry, self.shard, self._grant.epoch
        boundaries = await registry.boundaries(shard)
        if any(boundary.shard_epoch == epoch for boundary in boundaries):
            return boundaries
        start = high if boundaries else 0
        previous = mailbox_seq(epoch_owning(boundaries, start - 1), start - 1) if start else 0
        own = EpochBoundary(epoch, mailbox_seq(epoch, start), previous)
        await registry.write_boundary(shard, own)
        return [*boundaries, own]

    # --------------------------------------------------------------------------------------------------------- waiting

    def _now_ms(self) -> float:
        return self._services.clock.monotonic_ms()

    def _gap_over(self) -> None:
        self._gap_timer = None
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _wait(self, timeout_ms: float) -> None:
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timer = loop.call_later(timeout_ms / 1000, self._wake_up)
        try:
            await self._wake
        finally:
            timer.cancel()
            self._wake = None


def _count_entries(shard: str, items: Sequence[ChunkAppend]) -> None:
    """What a call wrote, by tenant; nearly always there is one."""
    entries: dict[str, int] = {}
    for item in items:
        entries[item.tenant_id] = entries.get(item.tenant_id, 0) + len(item.recipients)
    for tenant_id, count in entries.items():
        metrics.FANOUT_ENTRIES_TOTAL.labels(tenant=tenant_id, shard=shard).inc(count)


def _pass_crash_points(call: PlannedCall) -> None:
    """What the call stored: chunks of a lane that has more of them to come, or all that W needed."""
    items = call.append.tenant_items
    if items and items[-1].chunk_index + 1 < items[-1].chunk_count:
        crash_point(AFTER_CHUNK)
    elif call.covered:
        crash_point(AFTER_WATERMARK)


def _backoff() -> Backoff:
    return Backoff(
        initial_ms=_RETRY_INITIAL_MS, factor=2, max_ms=_RETRY_MAX_MS, jitter_ratio=0.3, random_unit=random.random
    )
