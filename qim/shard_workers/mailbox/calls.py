"""Append calls of all shards of one mailbox instance: shards take turns in at most two slots (DESIGN-data §5).

A slot sends the calls of several shards together when they are small: one write of ours and one wake-up of the server
carry what a full call would. One message to a group of 100 spreads over every shard: 16 calls of 6 entries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from qim.errors import Fenced, StoreError
from qim.obs import metrics
from qim.runtime.clock import Clock
from qim.shard_workers.mailbox.lanes import HURRIED_IN_ROW_MAX
from qim.stores.api import MailboxStore

if TYPE_CHECKING:
    from qim.shard_workers.mailbox.machine import PlannedCall
    from qim.shard_workers.mailbox.shard import ShardRunner


class CallScheduler:
    """Whoever has work asks for a turn; each of a few slots sends about `entries_max` entries at a time.

    A shard in which something small waits, or somebody behind something large, goes before those that only have large
    shares to write, but for a turn now and then. While a batch that is not full is under way no other one starts: what
    arrives meanwhile goes together, and a call costs as much as five entries.
    """

    def __init__(self, store: MailboxStore, clock: Clock, *, entries_max: int) -> None:
        self._store = store
        self._clock = clock
        self._entries_max = entries_max
        self._hurried: deque[ShardRunner] = deque()
        self._others: deque[ShardRunner] = deque()
        self._in_row = 0
        """Turns of hurried shards since one of the others had one."""
        self._idle: deque[asyncio.Future[None]] = deque()
        self._small_under_way = False
        self._leaving = False
        """A full batch is planned and not written yet."""

    def want(self, shard: ShardRunner) -> None:
        """The shard may have a call to make; it gets one turn."""
        if shard in self._hurried:
            return
        if shard in self._others:
            if not shard.hurries():
                return
            self._others.remove(shard)
        (self._hurried if shard.hurries() else self._others).append(shard)
        self._wake_one()

    async def run_slot(self) -> None:
        """Send batches of calls for ever, one after another; as many slots run as batches may be in flight."""
        while True:
            if not self._may_start():
                waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(waiting)
                await waiting
                continue
            batch, is_full = self._take_batch()
            if not batch:
                continue
            self._small_under_way = not is_full
            # Always by tasks, a single call too: they start in the order they were planned, whichever slot made them.
            # A call sent at once would overtake the planned ones of the other slot and be refused (W_MOVED).
            sent = asyncio.gather(*(self._send(shard, call) for shard, call in batch))
            if is_full:
                await self._written()
            await sent
            if not is_full:
                self._small_under_way = False

    def _may_start(self) -> bool:
        return not (self._small_under_way or self._leaving) and bool(self._hurried or self._others)

    async def _written(self) -> None:
        """Until the batch just planned has left; then it is the other slot's turn. What leaves in one write is answered
        in one, and from there on both slots would plan while the server waits, and wait while it works."""
        self._leaving = True
        await asyncio.sleep(0)  # its tasks have started
        await asyncio.sleep(0)  # and the write they asked for is done
        self._leaving = False
        self._wake_one()

    def _wake_one(self) -> None:
        """An idle slot, if there is anything for it to do."""
        while self._idle and self._may_start():
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                break

    def forget(self, shard: ShardRunner) -> None:
        """The shard is not of this process any more: its turn goes to whoever serves the id next."""
        for queue in (self._hurried, self._others):
            if shard in queue:
                queue.remove(shard)

    def _take_batch(self) -> tuple[list[tuple[ShardRunner, PlannedCall]], bool]:
        """(calls, full?): one of each shard whose turn it is, until half a full call is reached: at most one and a half
        together."""
        batch: list[tuple[ShardRunner, PlannedCall]] = []
        unfinished: list[ShardRunner] = []
        entries = 0
        while 2 * entries < self._entries_max and (shard := self._next_shard()) is not None:
            call = shard.next_call()
            if call is None:
                continue
            batch.append((shard, call))
            entries += sum(len(item.recipients) for item in call.append.tenant_items)
            if shard.machine.has_work():
                unfinished.append(shard)
        for shard in unfinished:
            self.want(shard)
        return batch, 2 * entries >= self._entries_max

    def _next_shard(self) -> ShardRunner | None:
        if self._hurried and (self._in_row < HURRIED_IN_ROW_MAX or not self._others):
            self._in_row += 1
            return self._hurried.popleft()
        self._in_row = 0
        return self._others.popleft() if self._others else None

    async def _send(self, shard: ShardRunner, call: PlannedCall) -> None:
        metrics.MAILBOX_WRITES_TOTAL.inc()
        try:
            result = await self._store.append(call.append)
        except Fenced as error:
            shard.call_fenced(error)
            return
        except StoreError as error:
            metrics.MAILBOX_WRITE_FAILURES_TOTAL.inc()
            shard.call_failed(call, error)
            return
        metrics.MAILBOX_STORE_WRITE_MS.observe(self._clock.monotonic_ms() - call.sent_ms)
        shard.call_answered(call, result)
