"""Commit calls of a writer: at most one per instance is in flight, with the work of all its buckets (DESIGN-data §3.3).

What arrives while a call is in flight goes into the next one. So under load one script, one write and one fsync commit
many messages, and no bucket ever has two calls in flight. Each bucket is judged by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from qim.errors import StoreError
from qim.obs import metrics
from qim.runtime.clock import Clock
from qim.runtime.crash_point import AFTER_COMMIT, crash_point
from qim.shard_workers.conversation.machine import Action, BucketMachine, CommitBatch
from qim.shard_workers.conversation.records import RecordEncoder
from qim.shard_workers.conversation.submission import Change, Send
from qim.stores.api import BucketCommit, CommitOutcome, MessageStore

CALL_MESSAGES_MAX: Final = 256
"""Of one commit call, the batch of one bucket more at most: it blocks the instance for some 25 µs per message."""

Result = list[CommitOutcome] | StoreError
"""What the store says of one bucket's part of a call."""


class _Instance:
    """What the next commit call of one instance will carry."""

    __slots__ = ("batches", "in_flight", "scheduled", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[BucketMachine, None] = {}
        """To be pumped, in order."""
        self.scheduled = False
        self.in_flight = False
        self.batches: list[tuple[BucketMachine, list[Send | Change]]] = []


class CommitCalls:
    """Pumps machines and carries their batches to the store.

    `perform` does what a machine asked for, `judged` takes the result of a bucket's part of a call and `start` runs a
    task by name.
    """

    def __init__(
        self,
        store: MessageStore,
        encoder: RecordEncoder,
        clock: Clock,
        *,
        start: Callable[[str, Coroutine[Any, Any, None]], None],
        perform: Callable[[BucketMachine, Sequence[Action]], None],
        judged: Callable[[BucketMachine, BucketCommit, Result], None],
    ) -> None:
        self._store = store
        self._encoder = encoder
        self._clock = clock
        self._start = start
        self._perform = perform
        self._judged = judged
        self._instances: dict[str, _Instance] = {}

    def pump_soon(self, machine: BucketMachine) -> None:
        """One pump per bucket and tick: what arrives in one read goes into one call."""
        name = self._store.instance_of(machine.bucket)
        instance = self._instances.get(name)
        if instance is None:
            instance = self._instances[name] = _Instance()
        instance.waiting[machine] = None
        if not instance.scheduled and not instance.in_flight:
            instance.scheduled = True
            asyncio.get_running_loop().call_soon(self._pump, instance)

    def _pump(self, instance: _Instance) -> None:
        """Form the next call of an instance."""
        instance.scheduled = False
        now_ms, unix_ms = self._clock.monotonic_ms(), self._clock.unix_ms()
        waiting, messages = instance.waiting, 0
        while waiting and messages < CALL_MESSAGES_MAX:
            machine = next(iter(waiting))
            del waiting[machine]
            for action in machine.pump(now_ms, unix_ms):
                if isinstance(action, CommitBatch):
                    instance.batches.append((machine, action.submissions))
                    messages += len(action.submissions)
                else:
                    self._perform(machine, (action,))
        if instance.batches:
            instance.in_flight = True
            self._start("commit", self._commit(instance))

    async def _commit(self, instance: _Instance) -> None:
        batches, instance.batches = instance.batches, []
        unix_ms = self._clock.unix_ms()
        calls = [self._encoded(machine, submissions, unix_ms) for machine, submissions in batches]
        metrics.COMMIT_BATCH_MESSAGES.observe(sum(len(call.requests) for call in calls))
        started_ms = self._clock.monotonic_ms()
        results: Sequence[Result]
        try:
            results = await self._store.commit_each(calls)
            crash_point(AFTER_COMMIT)
            metrics.CONVERSATION_SEQ_ALLOC_MS.observe(self._clock.monotonic_ms() - started_ms)
        except StoreError as error:
            results = [error] * len(calls)
        instance.in_flight = False
        for (machine, _), call, result in zip(batches, calls, results, strict=True):
            self._judged(machine, call, result)
            self.pump_soon(machine)

    def _encoded(
        self, machine: BucketMachine, submissions: Sequence[Send | Change], created_at_ms: int
    ) -> BucketCommit:
        epoch, encoder = machine.fencing_epoch, self._encoder
        requests = [
            encoder.send(submission, epoch, created_at_ms)
            if isinstance(submission, Send)
            else encoder.change(submission, epoch, created_at_ms)
            for submission in submissions
        ]
        return BucketCommit(machine.bucket, epoch, requests)
