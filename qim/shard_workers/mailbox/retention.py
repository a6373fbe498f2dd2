"""What a MailboxNode forgets: its dispatch logs below the fold, and the oldest entries of mailboxes above the cap.

Entries leave by age without help: their day keys expire on the server (§18.1.2b). The cap is looked at where entries
are written, at a random entry in every few hundred: a mailbox that grows is met long before it is far above the cap,
and one that does not grow needs no look.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from qim.errors import StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.qim_pb2 import GroupDispatch
from qim.runtime.clock import Clock
from qim.shard_workers.log_retention import LogRetention
from qim.stores.api import ChunkAppend, MailboxStore

log = get_logger(__name__)

CAP_SAMPLE_RATIO: Final = 0.004
"""Mean distance of two looks at the cap, in caps: 200 entries at 50,000."""
EVICTED_PER_CALL_MAX: Final = 200
"""About 1 ms of the server."""
SUSPECTS_MAX: Final = 10_000
"""Mailboxes waiting for a look; overflow act: none is added, an entry met later adds them again."""
LOOKS_PER_ROUND_MAX: Final = 1_000
SAVED_OFFSETS_MAX: Final = 64
"""Remembered positions of a shard's stored fold; overflow act: the newest is not taken, the log stays longer."""

Suspect = tuple[int, str, str]
"""(shard, tenant, user) whose mailbox may be above the cap."""


class OwnedShard(Protocol):
    """A shard of this role, as far as retention goes."""

    def retention_view(self) -> tuple[int, int] | None:
        """(shard_epoch, offset of the fold stored last), None while memory is in doubt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxRetentionSettings:
    interval_ms: float = 5_000.0
    entries_max: int = 50_000
    """`max_mailbox_entries_per_user`."""
    hysteresis: float = 0.8
    """`mailbox_entry_cap_hysteresis`."""
    fold_age_ms: float = 60_000.0
    """A stored fold position must be so old before the log below it goes: the instance may lose its last second."""


class CapSampler:
    """Picks recipients of appended entries at random distances."""

    __slots__ = ("_left", "_mean", "_random", "suspects")

    def __init__(self, entries_max: int, random_unit: Callable[[], float]) -> None:
        self._mean = max(1.0, entries_max * CAP_SAMPLE_RATIO)
        self._random = random_unit
        self._left = self._gap()
        self.suspects: dict[Suspect, None] = {}

    def appended(self, shard: int, items: Sequence[ChunkAppend]) -> None:
        """Entries were written."""
        for item in items:
            recipients = item.recipients
            while self._left <= len(recipients):
                suspect = (shard, item.tenant_id, recipients[self._left - 1][0])
                if len(self.suspects) < SUSPECTS_MAX:
                    self.suspects[suspect] = None
                self._left += self._gap()
            self._left -= len(recipients)

    def _gap(self) -> int:
        """1 … twice the mean, evenly: a fixed distance would meet the same member of a group every time."""
        return 1 + int(self._random() * (2 * self._mean - 1))


class FoldHistory:
    """Positions of a shard's stored fold and since when they are known to be stored."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: deque[tuple[float, int]] = deque()

    def observe(self, now_ms: float, offset: int) -> None:
        """The stored fold stands at `offset`; below the last one: the instance went back, what is younger is void."""
        while self._known and self._known[-1][1] > offset:
            self._known.pop()
        if (not self._known or self._known[-1][1] < offset) and len(self._known) < SAVED_OFFSETS_MAX:
            self._known.append((now_ms, offset))

    def safe_offset(self, now_ms: float, age_ms: float) -> int:
        """Records below it are not needed by the fold, even if the instance loses what is younger than `age_ms`."""
        while len(self._known) > 1 and now_ms - self._known[1][0] >= age_ms:
            self._known.popleft()
        if not self._known or now_ms - self._known[0][0] < age_ms:
            return 0
        return self._known[0][1] + 1


class MailboxRetention:
    """The retention task of a mailbox role. `dispatch_log` is None when a broker keeps the log."""

    def __init__(
        self,
        shards: Mapping[int, OwnedShard],
        store: MailboxStore,
        dispatch_log: LogRetention | None,
        clock: Clock,
        settings: MailboxRetentionSettings,
        *,
        random_unit: Callable[[], float],
    ) -> None:
        self._shards = shards
        self._store = store
        self._dispatch_log = dispatch_log
        self._clock = clock
        self._settings = settings
        self._folds: dict[int, FoldHistory] = {}
        self.sampler = CapSampler(settings.entries_max, random_unit)

    async def run(self) -> None:
        """Rounds for ever. A store that does not answer costs a round, an owner that was replaced its shard."""
        while True:
            await asyncio.sleep(self._settings.interval_ms / 1000)
            try:
                await self.trim_logs()
                await self.enforce_caps()
            except StoreError as error:
                log.warning("retention_round_failed", error=error)

    async def trim_logs(self) -> int:
        """Dispatch logs below the fold that is surely stored; how many records went."""
        now_ms = self._clock.monotonic_ms()
        safe: dict[int, int] = {}
        for shard, runner in list(self._shards.items()):
            view = runner.retention_view()
            if view is not None:
                self._folds.setdefault(shard, FoldHistory()).observe(now_ms, view[1])
                safe[shard] = self._folds[shard].safe_offset(now_ms, self._settings.fold_age_ms)
        for shard in self._folds.keys() - self._shards.keys():
            del self._folds[shard]
        if self._dispatch_log is None or not safe:
            return 0
        return await self._dispatch_log.run_once(safe)

    async def enforce_caps(self) -> int:
        """Look at the mailboxes that were met; how many entries went."""
        suspects = self.sampler.suspects
        removed = 0
        for suspect in list(suspects)[:LOOKS_PER_ROUND_MAX]:
            del suspects[suspect]
            removed += await self.enforce_cap(*suspect)
        return removed

    async def enforce_cap(self, shard: int, tenant_id: str, user_id: str) -> int:
        """Trim one mailbox if it is above the cap; how many entries went (§18.3.3)."""
        leave = int(self._settings.entries_max * self._settings.hysteresis)
        above, removed = self._settings.entries_max, 0
        while (runner := self._shards.get(shard)) is not None and (view := runner.retention_view()) is not None:
            result = await self._store.enforce_cap(
                shard, view[0], tenant_id, user_id, above=above, leave=leave, limit=EVICTED_PER_CALL_MAX
            )
            if not result.removed:
                break
            removed += result.removed
            above = leave
            metrics.MAILBOX_ENTRY_CAP_EVICTED_TOTAL.labels(tenant=tenant_id).inc(result.removed)
        if removed:
            log.error(
                "mailbox_entry_cap_evicted", tenant_id=tenant_id, user_id=user_id, mailbox_shard=shard, entries=removed
            )
        return removed


def dispatch_created_at_ms(value: bytes) -> int:
    """When the message of a dispatch was committed (unix ms)."""
    return GroupDispatch.FromString(value).record.created_at
