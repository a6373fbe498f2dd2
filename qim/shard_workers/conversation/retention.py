"""What a writer forgets of its buckets: the outbox below the fan-out position, message records past their retention,
superseded membership versions (§18.3.4, ADR-0019).

Conversations are found by walking the keys of the message instances, a step per round, so nothing about them has to be
kept. `earliest_available_conversation_seq` moves over an unbroken run of expired records only: one that never expires
holds what is behind it. There is no archive, so records stay in the hot store for their whole retention.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from qim.commit_log.api import CheckpointStore
from qim.core.ids import conversation_kind, group_id_of
from qim.errors import Fenced, StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.qim_pb2 import (
    EPHEMERAL_24H,
    RETENTION_CLASS_UNSPECIFIED,
    MessageRecord,
    OutboxRecord,
)
from qim.runtime.clock import Clock
from qim.shard_workers.log_retention import LogRetention
from qim.stores.api import FORGET_RECORDS_MAX, GroupMembership, MessageStore, StoredName

log = get_logger(__name__)

DAY_MS: Final = 86_400_000
SEQ_BUCKET_WIDTH: Final = 4096
"""`message_seq_bucket_width` (§7.1), immutable."""
_READ_RECORDS_MAX: Final = 50
STEPS_PER_ROUND_MAX: Final = 4
"""Steps of the walk: about 2,000 keys."""


class OutboxRetention(NamedTuple):
    """The embedded logs as a writer sees them: it trims its part of the outbox, and has to stop when either is full."""

    outbox: LogRetention
    checkpoints: CheckpointStore
    dispatch: LogRetention
    dispatch_partitions: range
    """All of them, trimmed by their own workers: here only looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRetentionSettings:
    interval_ms: float = 5_000.0
    history_retention_ms: int = 30 * DAY_MS
    """`default_history_retention_days`."""
    version_retention_ms: int = 8 * DAY_MS
    """`membership_version_retention`."""


class WriterRetention:
    """The retention task of a writer role. `owned` tells its buckets and their fencing epochs at any time."""

    def __init__(
        self,
        owned: Callable[[], Mapping[int, int]],
        store: MessageStore,
        membership: GroupMembership,
        logs: OutboxRetention | None,
        clock: Clock,
        settings: WriterRetentionSettings,
    ) -> None:
        """`logs` is None when somebody else trims the outbox streams."""
        self._owned = owned
        self._store = store
        self._membership = membership
        self._logs = logs
        self._clock = clock
        self._settings = settings
        self._position = b""

    @property
    def full(self) -> bool:
        """A log takes all the memory it may: nothing new is to be taken (DESIGN-data §4)."""
        return self._logs is not None and (self._logs.outbox.full or self._logs.dispatch.full)

    async def run(self) -> None:
        """Rounds for ever; a store that does not answer costs a round."""
        while True:
            await asyncio.sleep(self._settings.interval_ms / 1000)
            try:
                await self.trim_outbox()
                for _ in range(STEPS_PER_ROUND_MAX):
                    if await self.walk_step():
                        break
            except StoreError as error:
                log.warning("retention_round_failed", error=error)

    async def trim_outbox(self) -> int:
        """Outbox streams below the stored fan-out position; how many records went."""
        if self._logs is None:
            return 0
        logs = self._logs
        await logs.dispatch.run_once(dict.fromkeys(logs.dispatch_partitions, 0))
        return await logs.outbox.run_once(
            {bucket: await logs.checkpoints.position(bucket) for bucket in list(self._owned())}
        )

    async def walk_step(self) -> bool:
        """Look at the next few conversations; True when that was the last step of a walk."""
        owned = self._owned()
        self._position, found = await self._store.scan_conversations(owned.keys(), self._position)
        for name in found:
            epoch = owned.get(name.bucket)
            if epoch is None:
                continue
            try:
                await self._forget_history(name, epoch)
                await self._forget_versions(name, epoch)
            except Fenced:
                log.warning("retention_fenced", bucket=name.bucket, epoch=epoch)
        return not self._position

    async def _forget_history(self, name: StoredName, epoch: int) -> None:
        """At most FORGET_RECORDS_MAX records of one conversation; the next walk takes the next ones."""
        head = await self._store.head(name.tenant_id, name.conversation_id)
        earliest = head.earliest_available_conversation_seq
        keep = await self._first_kept(name, earliest, head.latest_conversation_seq)
        if keep > earliest:
            await self._store.forget_history(name.bucket, epoch, name.tenant_id, name.conversation_id, keep)
            metrics.HISTORY_FORGOTTEN_TOTAL.inc(keep - earliest)

    async def _first_kept(self, name: StoredName, earliest: int, latest: int) -> int:
        """The first sequence whose record is not expired, within a call's bound. Most have none to drop: one record is
        read first."""
        at, want = earliest, 1
        end = min(latest + 1, earliest + FORGET_RECORDS_MAX)
        while at < end:
            seq_bucket = at // SEQ_BUCKET_WIDTH
            seqs = range(at, min(at + want, end, (seq_bucket + 1) * SEQ_BUCKET_WIDTH))
            records = await self._store.records(name.tenant_id, name.conversation_id, seq_bucket, seqs)
            for seq, packed in zip(seqs, records, strict=True):
                if packed is not None and not self._is_expired(MessageRecord.FromString(packed)):
                    return seq
            at, want = seqs.stop, _READ_RECORDS_MAX
        return at

    def _is_expired(self, record: MessageRecord) -> bool:
        """Of its retention class (ADR-0019); a class without a policy never expires."""
        age_ms = self._clock.unix_ms() - record.created_at
        if record.retention_class == RETENTION_CLASS_UNSPECIFIED:
            return age_ms >= self._settings.history_retention_ms
        return record.retention_class == EPHEMERAL_24H and age_ms >= DAY_MS

    async def _forget_versions(self, name: StoredName, epoch: int) -> None:
        if conversation_kind(name.conversation_id) != "group":
            return
        forgotten = await self._membership.forget_versions(
            name.bucket,
            epoch,
            name.tenant_id,
            group_id_of(name.conversation_id),
            self._clock.unix_ms(),
            self._settings.version_retention_ms,
        )
        if forgotten:
            metrics.MEMBERSHIP_VERSIONS_FORGOTTEN_TOTAL.inc(forgotten)


def outbox_created_at_ms(value: bytes) -> int:
    """When an outbox record was committed (unix ms)."""
    return OutboxRecord.FromString(value).created_at
