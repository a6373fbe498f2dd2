"""FanoutRole: the outbox partitions of one worker, each dispatched in order by a task of its own (DESIGN-data §4)."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from qim.backplane.api import Backplane
from qim.commit_log.api import CheckpointStore, CommitLog, Fence, LogReader, LogRecord
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
from qim.runtime.wakeable import Wakeable
from qim.shard_workers.fanout.dispatch import Chain, ShardTargets, Source, direct_slots, direct_targets, dispatches
from qim.shard_workers.fanout.machine import PartitionMachine
from qim.shard_workers.feed import GAP_WAIT_MS
from qim.stores.api import GroupMembership

log = get_logger(__name__)

INDEX_CACHE_VERSIONS: Final = 4096
"""Version indexes in memory, at most one SnapshotRef per shard each."""
APPEND_RECORDS_MAX: Final = 512
"""Dispatches of one append call: a call blocks the core instance for about 5 µs per record."""
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


class _Partition(Wakeable):
    """Runtime of one outbox partition."""

    __slots__ = ("closing", "epoch", "lag_seconds", "machine", "number", "retry", "task", "timer")

    def __init__(self, number: int, epoch: int, machine: PartitionMachine) -> None:
        super().__init__()
        self.number = number
        self.closing = False
        """Nothing new is read."""
        self.task: asyncio.Task[object] | None = None
        self.epoch = epoch
        self.machine = machine
        self.retry = Backoff(
            initial_ms=_RETRY_INITIAL_MS, factor=2, max_ms=_RETRY_MAX_MS, jitter_ratio=0.3, random_unit=random.random
        )
        self.timer: asyncio.TimerHandle | None = None
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
        for partition in self._partitions.values():
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
        partition.task = self._tasks.start(f"{self.name} partition {number}", self._serve(partition))

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
        if partition.task is not None and partition.task is not asyncio.current_task():
            partition.task.cancel()
        metrics.OUTBOX_LAG_SECONDS.labels(partition=shard_id).set(0)

    async def _finish(self, partition: _Partition) -> None:
        partition.closing = True
        machine = partition.machine
        await partition.idle.wait()
        if machine.durable != machine.saved:
            await self._checkpoints.save(partition.number, partition.epoch, machine.durable)

    async def _serve(self, partition: _Partition) -> None:
        try:
            await self._run(partition)
        except Fenced:
            if self._leases is None:
                raise
            if self._partitions.get(partition.number) is partition:
                self._leases.fenced(partition.number, partition.epoch)

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
            partition.wake()
            return
        metrics.HINT_GAP_TOTAL.labels(topic="outbox").inc()
        if partition.timer is None:
            loop = asyncio.get_running_loop()
            partition.timer = loop.call_later(GAP_WAIT_MS / 1000, self._gap_over, partition)

    def _gap_over(self, partition: _Partition) -> None:
        partition.timer = None
        partition.wake()

    async def _run(self, partition: _Partition) -> None:
        """Dispatch one partition for ever; what fails is tried again and holds up this partition only."""
        machine = partition.machine
        while True:
            try:
                batch = machine.next_batch()
                if batch:
                    await self._dispatch(partition, batch)
                    machine.dispatched()
                elif machine.feed.read_due_in_ms(self._clock.monotonic_ms()) <= 0 and not partition.closing:
                    await self._read(partition)
                await self._save_checkpoint(partition)
                partition.retry.reset()
            except Fenced:
                raise
            except StoreError as error:
                delay_ms = partition.retry.delay_ms()
                log.warning("fanout_retry", partition=partition.number, offset=machine.durable, delay_ms=delay_ms,
                            error=error)  # fmt: skip
                await asyncio.sleep(delay_ms / 1000)
                continue
            if not machine.feed.ready:
                await partition.wait(self._idle_ms(partition))

    def _idle_ms(self, partition: _Partition) -> float:
        """Until the next read or checkpoint."""
        machine = partition.machine
        if partition.closing:
            return self._settings.poll_interval_ms
        due_ms = machine.feed.read_due_in_ms(self._clock.monotonic_ms())
        if machine.durable != machine.saved:
            due_ms = min(due_ms, machine.checkpoint_in_ms(self._clock.monotonic_ms()))
        return due_ms

    async def _read(self, partition: _Partition) -> None:
        feed = partition.machine.feed
        limit = min(feed.room(), READ_RECORDS_MAX)
        records = await self._outbox.read(partition.number, feed.next_offset, max_records=limit)
        feed.offer_read(records, complete=len(records) < limit, now_ms=self._clock.monotonic_ms())

    async def _save_checkpoint(self, partition: _Partition) -> None:
        machine = partition.machine
        if machine.checkpoint_in_ms(self._clock.monotonic_ms()) > 0:
            return
        durable = machine.durable
        await self._checkpoints.save(partition.number, partition.epoch, durable)
        machine.checkpoint_saved(durable, self._clock.monotonic_ms())

    # ------------------------------------------------------------------------------------------------------ dispatches

    async def _dispatch(self, partition: _Partition, batch: Sequence[LogRecord]) -> None:
        """Append the dispatches of a batch and tell the mailbox owners, in order. A call holds records of one
        fencing_epoch: those of the next one follow when all before them are durable (DESIGN-data §4)."""
        made: list[tuple[int, bytes]] = []
        chain: Chain = {}
        sources = [Source(partition.number, record.offset, record.value) for record in batch]
        epoch = sources[0].record.fencing_epoch
        for source in sources:
            if len(made) >= APPEND_RECORDS_MAX or source.record.fencing_epoch != epoch:
                await self._append(partition, made)
                made, chain, epoch = [], {}, source.record.fencing_epoch
            made += await self._dispatches_of(source, chain)
        await self._append(partition, made)
        metrics.FANOUT_LAG_MS.observe(max(0, self._clock.unix_ms() - sources[0].record.created_at))

    async def _dispatches_of(self, source: Source, chain: Chain) -> list[tuple[int, bytes]]:
        settings = self._settings
        version = source.group_version()
        targets: ShardTargets = {}
        slots: dict[str, int] = {}
        if version is None:
            record = source.record
            targets = direct_targets(
                record.tenant_id, record.conversation_id, settings.mailbox_shard_count, settings.lane_count
            )
            slots = {} if source.is_for_all() else direct_slots(source)
        else:
            if source.is_for_all():
                targets = await self._index_of(version)
            subjects = source.subjects()
            if subjects:
                tenant_id, group_id, _ = version
                found = await self._membership.slots_of(tenant_id, group_id, subjects)
                slots = {user_id: slot for user_id, slot in zip(subjects, found, strict=True) if slot is not None}
        made = dispatches(source, targets, slots, settings.mailbox_shard_count, settings.lane_count, chain)
        metrics.FANOUT_TARGET_SHARDS_PER_MESSAGE.observe(len(made))
        return made

    async def _index_of(self, version: tuple[str, str, int]) -> ShardTargets:
        known = self._indexes.get(version)
        if known is not None:
            self._indexes.move_to_end(version)
            return known
        targets = await self._membership.version_index(*version)
        self._indexes[version] = targets
        if len(self._indexes) > INDEX_CACHE_VERSIONS:
            self._indexes.popitem(last=False)
        return targets

    async def _append(self, partition: _Partition, made: Sequence[tuple[int, bytes]]) -> None:
        if not made:
            return
        fence = Fence(partition.number, partition.epoch)
        offsets = await self._dispatch_log.append(made, fence)
        crash_point(AFTER_DISPATCH)
        metrics.DISPATCH_TOTAL.inc(len(made))
        hints: dict[int, list[tuple[int, bytes]]] = {}
        for (shard, value), offset in zip(made, offsets, strict=True):
            hints.setdefault(shard, []).append((offset, value))
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
