"""FanoutRole: the outbox partitions of one worker, each dispatched in order (DESIGN-data §4).

One append call carries what all partitions have ready; what arrives meanwhile goes into the next. On a log whose
partitions may be away one by one, each has a call of its own. A partition is in one call at most, and while it reads,
waits for a group's index or rests after a failure it holds up no other.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from qim.backplane.api import Backplane
from qim.commit_log.api import AppendRun, CheckpointStore, CommitLog, Fence, LogReader, LogRecord
from qim.errors import Fenced, StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import LagReport, LogHint, OutboxRecord
from qim.registry.api import Grant, LeaseKind, RouteMap, ShardRegistry
from qim.registry.keeper import LeaseKeeper
from qim.registry.routes import RouteCache, owners_of
from qim.runtime.backoff import Backoff
from qim.runtime.clock import Clock
from qim.runtime.crash_point import AFTER_DISPATCH, crash_point
from qim.runtime.tasks import FailureHandler, TaskSet
from qim.shard_workers.fanout.dispatch import Chain, ShardTargets, Source, direct_slots, direct_targets, dispatches
from qim.shard_workers.fanout.machine import PartitionMachine
from qim.shard_workers.feed import GAP_WAIT_MS
from qim.stores.api import GroupMembership

log = get_logger(__name__)

INDEX_CACHE_VERSIONS: Final = 4096
"""Version indexes in memory, at most one SnapshotRef per shard each."""
APPEND_RECORDS_MAX: Final = 512
"""Dispatches of one append call: a call blocks the core instance for about 5 µs per record."""
HOUSEKEEPING_MS: Final = 50.0
"""How often due reads and checkpoints are looked for, and partitions that wait behind a call that takes long."""
READ_RECORDS_MAX: Final = 500
_RETRY_INITIAL_MS: Final = 20
_RETRY_MAX_MS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutSettings:
    """Counts are those of the cluster map, intervals in ms."""

    conversation_bucket_count: int
    mailbox_shard_count: int
    lane_count: int = 64
    poll_interval_ms: float = 1000.0
    lag_report_interval_ms: float = 100.0


Record = tuple[int, bytes]
"""(mailbox shard, encoded GroupDispatch)."""


class _Partition:
    """Runtime of one outbox partition."""

    __slots__ = (
        "busy", "closing", "committed_at_ms", "epoch", "idle", "lag_seconds", "machine", "made", "number", "retry",
        "timer",
    )  # fmt: skip

    def __init__(self, number: int, epoch: int, machine: PartitionMachine) -> None:
        self.number = number
        self.closing = False
        """Nothing new is read."""
        self.busy = False
        """A call, a look-up or a rest is under way."""
        self.idle = asyncio.Event()
        """Set while there is nothing left to do."""
        self.epoch = epoch
        self.machine = machine
        self.made: list[list[Record]] = []
        """Dispatches of the batch in work that are not durable yet, by fencing_epoch: those of the next one follow when
        all before them are durable (DESIGN-data §4)."""
        self.committed_at_ms = 0
        """Of the oldest record of that batch."""
        self.retry = Backoff(
            initial_ms=_RETRY_INITIAL_MS, factor=2, max_ms=_RETRY_MAX_MS, jitter_ratio=0.3, random_unit=random.random
        )
        self.timer: asyncio.TimerHandle | None = None
        """Of a gap between hints, or of the rest after a failure."""
        self.lag_seconds = metrics.OUTBOX_LAG_SECONDS.labels(partition=number)


class FanoutRole:
    """Role "fanout-<i>": owns the outbox partitions that are its share of the pool, as `leases` says; without `leases`
    those with number mod pool_size = index, from its start to its end. `routes` is already started."""

    def __init__(
        self,
        name: str,
        index: int,
        pool_size: int,
        *,
        settings: FanoutSettings,
        registry: ShardRegistry,
        routes: RouteCache,
        outbox: LogReader,
        dispatch_log: CommitLog,
        checkpoints: CheckpointStore,
        membership: GroupMembership,
        backplane: Backplane,
        clock: Clock,
        on_failure: FailureHandler,
        leases: LeaseKeeper | None = None,
    ) -> None:
        self.name = name
        self._leases = leases
        self._numbers = [n for n in range(settings.conversation_bucket_count) if n % pool_size == index]
        self._settings = settings
        self._registry = registry
        self._outbox = outbox
        self._dispatch_log = dispatch_log
        self._checkpoints = checkpoints
        self._membership = membership
        self._backplane = backplane
        self._clock = clock
        self._on_failure = on_failure
        self._routes = routes
        self._tasks = TaskSet(self._failed)
        self._partitions: dict[int, _Partition] = {}
        self._indexes: OrderedDict[tuple[str, str, int], ShardTargets] = OrderedDict()
        self._due: dict[_Partition, None] = {}
        """To be looked at, in order."""
        self._pump_scheduled = False
        self._appends = 0
        """Append calls in flight."""
        self._ready = False

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Grant the partitions, take their checkpoints, begin. StoreError when registry or core do not answer."""
        grants: list[Grant] = []
        if self._leases is None:
            grant_id = secrets.token_hex(8)
            grants = await self._registry.grant(LeaseKind.OUTBOX_PARTITION, self._numbers, self.name, grant_id)
        self._routes.on_change(self._link_owners)
        self._link_owners(self._routes.map)
        self._backplane.on_notice(InternalOpcode.OUTBOX_HINT, self._on_hint)
        await asyncio.gather(*(self.open_shard(grant) for grant in grants))
        self._tasks.start(f"{self.name} report", self._report_lag())
        self._tasks.start(f"{self.name} housekeeping", self._keep_house())
        self._tasks.start(f"{self.name} checkpoints", self._keep_checkpoints())
        self._ready = True
        if self._leases is not None:
            self._leases.start(self)
        log.info("fanout_started", role=self.name, count=len(self._partitions))

    def _link_owners(self, routes: RouteMap) -> None:
        """Keep a link to everybody who is sent hints or lag."""
        for kind in (LeaseKind.MAILBOX_SHARD, LeaseKind.CONVERSATION_BUCKET):
            for owner in owners_of(routes, kind):
                self._backplane.connect(owner)

    async def drain(self) -> None:
        """Dispatch what has arrived, save every checkpoint, give the partitions back."""
        if self._leases is not None:
            await self._leases.leave()
        for partition in list(self._partitions.values()):
            await self._finish(partition)

    async def stop(self) -> None:
        self._ready = False
        if self._leases is not None:
            await self._leases.close()
        await self._tasks.close()

    def ready(self) -> bool:
        return self._ready and (self._leases is None or self._leases.settled())

    # ----------------------------------------------------------------------------------------------------- partitions

    async def open_shard(self, grant: Grant) -> None:
        """Take the checkpoint of a partition and dispatch from there. Fenced when a greater epoch is stored."""
        number = grant.shard_id
        next_offset = await self._checkpoints.open_partition(number, grant.epoch, grant.grant_id)
        now_ms = self._clock.monotonic_ms()
        machine = PartitionMachine(next_offset, poll_interval_ms=self._settings.poll_interval_ms, now_ms=now_ms)
        partition = self._partitions[number] = _Partition(number, grant.epoch, machine)
        self._look_soon(partition)

    async def close_shard(self, shard_id: int) -> None:
        """Dispatch what has arrived and save the checkpoint; the rest is the next owner's."""
        await self._finish(self._partitions[shard_id])
        self.drop_shard(shard_id)

    def drop_shard(self, shard_id: int) -> None:
        """Dispatch nothing more; a call in flight is refused by its epoch or is harmless."""
        partition = self._partitions.pop(shard_id, None)
        if partition is None:
            return
        if partition.timer is not None:
            partition.timer.cancel()
        metrics.OUTBOX_LAG_SECONDS.labels(partition=shard_id).set(0)

    async def _finish(self, partition: _Partition) -> None:
        partition.closing = True
        machine = partition.machine
        self._look_soon(partition)
        await partition.idle.wait()
        if machine.durable != machine.saved:
            await self._checkpoints.save(partition.number, partition.epoch, machine.durable)

    def _owns(self, partition: _Partition) -> bool:
        """False once it was dropped, or granted anew."""
        return self._partitions.get(partition.number) is partition

    def _refused(self, partition: _Partition, error: StoreError) -> None:
        """A call for a partition failed: it is tried again after a rest, unless another worker owns it now."""
        if not self._owns(partition):
            return
        partition.made = []
        if isinstance(error, Fenced):
            self.drop_shard(partition.number)
            if self._leases is None:
                self._failed(f"{self.name} partition {partition.number}", error)
            else:
                self._leases.fenced(partition.number, partition.epoch)
            return
        delay_ms = partition.retry.delay_ms()
        log.warning("fanout_retry", partition=partition.number, offset=partition.machine.durable, delay_ms=delay_ms,
                    error=error)  # fmt: skip
        self._set_timer(partition, delay_ms, self._rested)

    def _set_timer(self, partition: _Partition, delay_ms: float, then: Callable[[_Partition], None]) -> None:
        if partition.timer is not None:
            partition.timer.cancel()
        partition.timer = asyncio.get_running_loop().call_later(delay_ms / 1000, then, partition)

    def _rested(self, partition: _Partition) -> None:
        partition.timer = None
        self._done(partition)

    def _done(self, partition: _Partition) -> None:
        """What made it busy has ended."""
        partition.busy = False
        self._look_soon(partition)

    def _failed(self, task: str, error: BaseException) -> None:
        self._ready = False
        if isinstance(error, Fenced):
            metrics.FENCED_TOTAL.labels(kind="fanout").inc()
        self._on_failure(task, error)

    # -------------------------------------------------------------------------------------------------------- records

    def _on_hint(self, peer: str, body: bytes) -> None:
        hint = LogHint.FromString(body)
        partition = self._partitions.get(hint.partition)
        if partition is None or partition.closing:
            return
        if partition.machine.feed.offer_hint(hint.first_offset, hint.records, self._clock.monotonic_ms()):
            self._look_soon(partition)
            return
        metrics.HINT_GAP_TOTAL.labels(topic="outbox").inc()
        if partition.timer is None:
            self._set_timer(partition, GAP_WAIT_MS, self._gap_over)

    def _gap_over(self, partition: _Partition) -> None:
        partition.timer = None
        self._look_soon(partition)

    def _look_soon(self, partition: _Partition) -> None:
        """Look at a partition in this tick, or when the append call in flight has ended."""
        partition.idle.clear()
        self._due[partition] = None
        if not self._appends:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Start whatever the due partitions need next, their dispatches in one append call if these end together."""
        self._pump_scheduled = False
        now_ms = self._clock.monotonic_ms()
        calls: list[tuple[_Partition, list[Record]]] = []
        room = APPEND_RECORDS_MAX
        while self._due and room > 0:
            partition = next(iter(self._due))
            del self._due[partition]
            if partition.busy or not self._owns(partition):
                continue
            machine = partition.machine
            if partition.made or machine.next_batch():
                partition.busy = True
                if not partition.made and not self._make(partition):
                    continue
                taken = partition.made[0][:room]
                calls.append((partition, taken))
                room -= len(taken)
            elif machine.feed.read_due_in_ms(now_ms) <= 0 and not partition.closing:
                partition.busy = True
                self._tasks.start(f"{self.name} read {partition.number}", self._read(partition))
            else:
                partition.idle.set()
        for call in [calls] if self._dispatch_log.ends_together and calls else [[one] for one in calls]:
            self._appends += 1
            self._tasks.start(f"{self.name} append", self._append(call))

    async def _keep_house(self) -> None:
        """Find partitions whose log is to be read, or that wait behind a call that takes long."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_MS / 1000)
            now_ms = self._clock.monotonic_ms()
            for partition in self._partitions.values():
                if not partition.busy and partition.machine.feed.read_due_in_ms(now_ms) <= 0:
                    self._look_soon(partition)
            if self._due:
                self._pump_soon()

    async def _keep_checkpoints(self) -> None:
        """Save those that are due, all in one write."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_MS / 1000)
            now_ms = self._clock.monotonic_ms()
            due = [found for found in self._partitions.values() if found.machine.checkpoint_in_ms(now_ms) <= 0]
            if due:
                await asyncio.gather(*map(self._save_checkpoint, due))

    async def _save_checkpoint(self, partition: _Partition) -> None:
        machine = partition.machine
        durable = machine.durable
        try:
            await self._checkpoints.save(partition.number, partition.epoch, durable)
        except Fenced as error:
            self._refused(partition, error)
        except StoreError as error:
            # it may be late: the next round tries again
            log.warning("checkpoint_not_saved", partition=partition.number, offset=durable, error=error)
        else:
            machine.checkpoint_saved(durable, self._clock.monotonic_ms())

    async def _read(self, partition: _Partition) -> None:
        feed = partition.machine.feed
        limit = min(feed.room(), READ_RECORDS_MAX)
        try:
            records = await self._outbox.read(partition.number, feed.next_offset, max_records=limit)
        except StoreError as error:
            self._refused(partition, error)
            return
        feed.offer_read(records, complete=len(records) < limit, now_ms=self._clock.monotonic_ms())
        partition.retry.reset()
        self._done(partition)

    # ------------------------------------------------------------------------------------------------------ dispatches

    def _make(self, partition: _Partition) -> bool:
        """Make the dispatches of the next batch; False when something must be read first, which has begun, or when
        they are none."""
        sources = [Source(partition.number, record.offset, record.value) for record in partition.machine.next_batch()]
        if not all(map(self._is_known, sources)):
            self._tasks.start(f"{self.name} look up {partition.number}", self._make_slowly(partition, sources))
            return False
        made: list[list[Record]] = []
        for _, group in groupby(sources, _fencing_epoch):
            chain: Chain = {}
            made.append([record for source in group for record in self._dispatches_of(source, {}, chain)])
        return self._made(partition, sources, made)

    async def _make_slowly(self, partition: _Partition, sources: Sequence[Source]) -> None:
        """`_make`, for a batch with groups of which something is not known here."""
        made: list[list[Record]] = []
        try:
            for _, group in groupby(sources, _fencing_epoch):
                records: list[Record] = []
                chain: Chain = {}
                for source in group:
                    slots = {} if self._is_known(source) else await self._look_up(source)
                    records += self._dispatches_of(source, slots, chain)
                made.append(records)
        except StoreError as error:
            self._refused(partition, error)
            return
        if self._made(partition, sources, made):
            self._done(partition)

    def _made(self, partition: _Partition, sources: Sequence[Source], made: list[list[Record]]) -> bool:
        """Take what is to be appended; False when a batch needs no append: nobody is to hear of it."""
        partition.made = [records for records in made if records]
        partition.committed_at_ms = sources[0].record.created_at
        if partition.made:
            return True
        partition.machine.dispatched()
        self._done(partition)
        return False

    def _is_known(self, source: Source) -> bool:
        """Nothing must be looked up first: not the group's index, nor the slots of its subjects."""
        version = source.group_version()
        return version is None or (not source.subjects() and (version in self._indexes or not source.is_for_all()))

    def _dispatches_of(self, source: Source, slots: Mapping[str, int], chain: Chain) -> list[Record]:
        """`slots`: of the subjects of a group's record."""
        settings = self._settings
        version = source.group_version()
        targets: ShardTargets = {}
        if version is None:
            record = source.record
            targets = direct_targets(
                record.tenant_id, record.conversation_id, settings.mailbox_shard_count, settings.lane_count
            )
            slots = {} if source.is_for_all() else direct_slots(source)
        elif source.is_for_all():
            self._indexes.move_to_end(version)
            targets = self._indexes[version]
        made = dispatches(source, targets, slots, settings.mailbox_shard_count, settings.lane_count, chain)
        metrics.FANOUT_TARGET_SHARDS_PER_MESSAGE.observe(len(made))
        return made

    async def _look_up(self, source: Source) -> dict[str, int]:
        """Read the slots of the subjects and then the index of the group's version: it is there when this returns, and
        other partitions put theirs into the same bounded cache meanwhile."""
        version = source.group_version()
        assert version is not None
        slots: dict[str, int] = {}
        subjects = source.subjects()
        if subjects:
            tenant_id, group_id, _ = version
            found = await self._membership.slots_of(tenant_id, group_id, subjects)
            slots = {user_id: slot for user_id, slot in zip(subjects, found, strict=True) if slot is not None}
        if source.is_for_all() and version not in self._indexes:
            self._indexes[version] = await self._membership.version_index(*version)
            if len(self._indexes) > INDEX_CACHE_VERSIONS:
                self._indexes.popitem(last=False)
        return slots

    async def _append(self, calls: Sequence[tuple[_Partition, list[Record]]]) -> None:
        """Append dispatches of several partitions and tell the mailbox owners, in order."""
        runs = [AppendRun(Fence(partition.number, partition.epoch), records) for partition, records in calls]
        results: Sequence[list[int] | StoreError]
        try:
            results = await self._dispatch_log.append_each(runs)
            crash_point(AFTER_DISPATCH)
        except StoreError as error:
            results = [error] * len(runs)
        self._appends -= 1
        hints: dict[int, list[Record]] = {}
        for (partition, records), result in zip(calls, results, strict=True):
            if isinstance(result, StoreError):
                self._refused(partition, result)
                continue
            for (shard, value), offset in zip(records, result, strict=True):
                hints.setdefault(shard, []).append((offset, value))
            if self._owns(partition):  # a checkpoint that was fenced meanwhile has dropped it, and what it had made
                self._appended(partition, len(records))
        self._hint(hints)
        if self._due:
            self._pump_soon()

    def _appended(self, partition: _Partition, count: int) -> None:
        metrics.DISPATCH_TOTAL.inc(count)
        del partition.made[0][:count]
        if not partition.made[0]:
            del partition.made[0]
        if not partition.made:
            metrics.FANOUT_LAG_MS.observe(max(0, self._clock.unix_ms() - partition.committed_at_ms))
            partition.machine.dispatched()
            partition.retry.reset()
        self._done(partition)

    def _hint(self, hints: Mapping[int, Sequence[tuple[int, bytes]]]) -> None:
        """Give the mailbox owners their records, by shard: (offset, record), ascending."""
        for shard, records in hints.items():
            owner = self._routes.owner(LeaseKind.MAILBOX_SHARD, shard)
            if owner is not None:
                for hint in contiguous_hints(shard, records):
                    self._backplane.notify(owner, InternalOpcode.DISPATCH_HINT, hint)

    # ------------------------------------------------------------------------------------------------------------- lag

    async def _report_lag(self) -> None:
        """Tell every writer, each 100 ms, how old the oldest record without durable dispatches is."""
        while True:
            await asyncio.sleep(self._settings.lag_report_interval_ms / 1000)
            report = self._lag_report().SerializeToString()
            for writer in self._routes.owners(LeaseKind.CONVERSATION_BUCKET):
                self._backplane.notify(writer, InternalOpcode.LAG_REPORT, report)

    def _lag_report(self) -> LagReport:
        now_unix_ms = self._clock.unix_ms()
        lags = []
        for partition in self._partitions.values():
            oldest = partition.machine.oldest()
            lag_ms = 0 if oldest is None else max(0, now_unix_ms - created_at_ms(oldest))
            partition.lag_seconds.set(lag_ms / 1000)
            lags.append(lag_ms)
        return LagReport(reporter=self.name, partitions=list(self._partitions), partition_lag_ms=lags)


def _fencing_epoch(source: Source) -> int:
    return source.record.fencing_epoch


def created_at_ms(record: LogRecord) -> int:
    """Commit time of an outbox record, unix ms."""
    return OutboxRecord.FromString(record.value).created_at


def contiguous_hints(shard: int, records: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """Encoded hints of (offset, record) pairs that ascend: one per run of adjacent offsets."""
    hints: list[LogHint] = []
    expected = -1
    for offset, value in records:
        if offset != expected:
            hints.append(LogHint(partition=shard, first_offset=offset))
        hints[-1].records.append(value)
        expected = offset + 1
    return [hint.SerializeToString() for hint in hints]
