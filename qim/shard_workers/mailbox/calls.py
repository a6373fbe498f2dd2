"""Append calls of all shards of one mailbox instance: at most two in flight, shards take turns (DESIGN-data §5)."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from qim.errors import Fenced, StoreError
from qim.obs import metrics
from qim.runtime.clock import Clock
from qim.stores.api import MailboxStore

if TYPE_CHECKING:
    from qim.shard_workers.mailbox.shard import ShardRunner


class CallScheduler:
    """Whoever has work asks for a turn; each of a few slots sends one call at a time."""

    def __init__(self, store: MailboxStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._queue: deque[ShardRunner] = deque()
        self._queued: set[int] = set()
        self._idle: deque[asyncio.Future[None]] = deque()

    def want(self, shard: ShardRunner) -> None:
        """The shard may have a call to make; it gets one turn."""
        if shard.shard in self._queued:
            return
        self._queued.add(shard.shard)
        self._queue.append(shard)
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                break

    async def run_slot(self) -> None:
        """Send calls for ever, one after another; as many slots run as calls may be in flight."""
        while True:
            batch = self._take_batch()
            if not batch:
                waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(waiting)
                await waiting
            elif len(batch) == 1:
                await self._send(*batch[0])
            else:
                await asyncio.gather(*(self._send(shard, call) for shard, call in batch))

    def _take_batch(self) -> list[tuple[ShardRunner, PlannedCall]]:
        """Calls of the shards in turn, together about as large as one full call: a small group spreads one message over
        every shard, and one write and one wake-up serve them all."""
        batch: list[tuple[ShardRunner, PlannedCall]] = []
        room = self._entries_max
        again: list[ShardRunner] = []
        while self._queue and room > self._entries_max // 2:
            shard = self._queue.popleft()
            self._queued.discard(shard.shard)
            call = shard.next_call(room)
            if call is None:
                continue
            batch.append((shard, call))
            room -= call.append.entry_count()
            if shard.machine.has_work():
                again.append(shard)
        for shard in again:
            self.want(shard)
        return batch

    async def _send(self, shard: ShardRunner, call: PlannedCall) -> None:
        metrics.MAILBOX_WRITES_TOTAL.inc()
        try:
            result = await self._store.append(call.append)
        except Fenced:
            raise
        except StoreError as error:
            metrics.MAILBOX_WRITE_FAILURES_TOTAL.inc()
            shard.call_failed(call, error)
            return
        metrics.MAILBOX_STORE_WRITE_MS.observe(self._clock.monotonic_ms() - call.sent_ms)
        shard.call_answered(call, result)
