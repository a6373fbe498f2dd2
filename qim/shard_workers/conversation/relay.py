"""The outbox relay: copies what a bucket's stream holds to the broker's outbox topic (DESIGN-data §4).

Part of the writer, whose buckets it serves. Commits are handed to it as they happen; what it missed it reads from the
stream. One run of records per bucket is under way at a time, and fan-out hears of records when the topic has them:
consumers read the topic only, so a position of theirs never lies beyond it. A copied record stays in Redis for ten
minutes, so that a topic that lost its newest records can be filled up again by a start of the writer.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from qim.commit_log.api import LogReader, LogRecord
from qim.errors import StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.runtime.backoff import Backoff
from qim.runtime.clock import Clock
from qim.runtime.tasks import FailureHandler, TaskSet
from qim.runtime.wakeable import Wakeable
from qim.shard_workers.feed import GAP_WAIT_MS, LogFeed

log = get_logger(__name__)

KEEP_MS: Final = 600_000.0
"""How long a record stays in Redis after the topic acknowledged it."""
TRIM_INTERVAL_MS: Final = 10_000.0
RUN_RECORDS_MAX: Final = 500
RUN_BYTES_MAX: Final = 512 << 10
_RETRY_INITIAL_MS: Final = 20
_RETRY_MAX_MS: Final = 1000

OnRelayed = Callable[[int, int, list[bytes]], None]
"""(bucket, first offset, records): the topic has them."""


class OutboxStream(LogReader, Protocol):
    """The buckets' streams, which the commit script writes."""

    async def trim(self, partition: int, safe_offset: int) -> int: ...


class OutboxTopic(Protocol):
    """The broker's side."""

    async def next_offset(self, partition: int) -> int | None:
        """Stream offset after the newest record of the topic, None when it holds none."""
        ...

    async def append_run(self, partition: int, first_offset: int, records: Sequence[bytes]) -> None:
        """Durable, and whole, when it returns; waits for a broker that is away."""
        ...


class _Bucket(Wakeable):
    """One stream on its way."""

    __slots__ = (
        "appending_since_ms",
        "copied",
        "feed",
        "marks",
        "number",
        "retry",
        "task",
        "timer",
        "trimmed",
    )

    def __init__(self, number: int, feed: LogFeed) -> None:
        super().__init__()
        self.number = number
        self.feed = feed
        self.appending_since_ms: float | None = None
        self.copied = feed.next_offset
        """The topic has everything below."""
        self.marks: deque[tuple[float, int]] = deque()
        """(monotonic ms, `copied` at that time), one per TRIM_INTERVAL_MS, the oldest one being due last or next."""
        self.trimmed = 0
        self.retry = Backoff(
            initial_ms=_RETRY_INITIAL_MS, factor=2, max_ms=_RETRY_MAX_MS, jitter_ratio=0.3, random_unit=random.random
        )
        self.task: asyncio.Task[object] | None = None
        self.timer: asyncio.TimerHandle | None = None


class OutboxRelay:
    """One per writer. `start` once the buckets are fenced, before anything is committed."""

    def __init__(
        self,
        stream: OutboxStream,
        topic: OutboxTopic,
        *,
        clock: Clock,
        on_failure: FailureHandler,
        poll_interval_ms: float = 1000.0,
        keep_ms: float = KEEP_MS,
        trim_interval_ms: float = TRIM_INTERVAL_MS,
    ) -> None:
        self._stream = stream
        self._topic = topic
        self._clock = clock
        self._poll_interval_ms = poll_interval_ms
        self._keep_ms = keep_ms
        self._trim_interval_ms = trim_interval_ms
        self._tasks = TaskSet(on_failure)
        self._buckets: dict[int, _Bucket] = {}
        self._on_relayed: OnRelayed = lambda bucket, first_offset, records: None

    async def start(self, buckets: Iterable[int], on_relayed: OnRelayed) -> None:
        """Find where each bucket goes on and begin. StoreError when Redis or the broker does not answer."""
        self._on_relayed = on_relayed
        await asyncio.gather(*map(self.open_bucket, buckets))
        self._tasks.start("relay trim", self._keep_trimming())

    async def open_bucket(self, number: int) -> None:
        """Find where a bucket goes on and begin; its fence is raised. StoreError as for `start`."""
        resume = await self._resume_at(number)
        self.drop_bucket(number)
        bucket = self._buckets[number] = _Bucket(number, LogFeed(resume, poll_interval_ms=self._poll_interval_ms))
        bucket.task = self._tasks.start(f"relay {number}", self._run(bucket))

    async def close_bucket(self, number: int) -> None:
        """Let go of a bucket once the topic has everything that was committed in it."""
        bucket = self._buckets.get(number)
        if bucket is not None:
            await bucket.idle.wait()
            self.drop_bucket(number)

    def drop_bucket(self, number: int) -> None:
        """Let go of a bucket at once: whoever writes it next goes on from the topic's tail."""
        bucket = self._buckets.pop(number, None)
        if bucket is not None and bucket.task is not None:
            bucket.task.cancel()

    async def drain(self) -> None:
        """Until the topic has everything that was committed."""
        for bucket in self._buckets.values():
            await bucket.idle.wait()

    async def stop(self) -> None:
        await self._tasks.close()

    def offer(self, number: int, first_offset: int, records: list[bytes]) -> None:
        """Records a commit has just written, as they are stored."""
        bucket = self._buckets.get(number)
        if bucket is None:
            return
        if bucket.feed.offer_hint(first_offset, records, self._clock.monotonic_ms()):
            bucket.wake()
            return
        metrics.HINT_GAP_TOTAL.labels(topic="relay").inc()
        if bucket.timer is None:
            bucket.timer = asyncio.get_running_loop().call_later(GAP_WAIT_MS / 1000, self._gap_over, bucket)

    def lag_ms(self, number: int) -> int:
        """How long the run under way has been waiting for the broker; fan-out cannot know of these records."""
        bucket = self._buckets.get(number)
        if bucket is None or bucket.appending_since_ms is None:
            return 0
        return int(self._clock.monotonic_ms() - bucket.appending_since_ms)

    # ------------------------------------------------------------------------------------------------------- a bucket

    async def _resume_at(self, number: int) -> int:
        """The topic's tail + 1, or the first record that is not trimmed: whatever the topic lost below is gone here as
        well, and its readers will refuse the hole."""
        low = (await self._stream.watermarks(number)).low
        after_tail = await self._topic.next_offset(number)
        if after_tail is not None and after_tail < low:
            log.error("relay_hole", bucket=number, offset=after_tail, first_offset=low)
        return max(after_tail or 0, low)

    async def _run(self, bucket: _Bucket) -> None:
        """Copy one bucket for ever; what fails is tried again and holds up this bucket only."""
        feed = bucket.feed
        run: list[LogRecord] = []
        while True:
            try:
                run = run or take_run(feed.ready)
                if run:
                    await self._append(bucket, run)
                    run = []
                elif feed.read_due_in_ms(self._clock.monotonic_ms()) <= 0:
                    await self._read(bucket)
                bucket.retry.reset()
            except StoreError as error:
                delay_ms = bucket.retry.delay_ms()
                log.warning("relay_retry", bucket=bucket.number, offset=bucket.copied, delay_ms=delay_ms,
                            error=error)  # fmt: skip
                await asyncio.sleep(delay_ms / 1000)
                continue
            if not feed.ready:
                await bucket.wait(feed.read_due_in_ms(self._clock.monotonic_ms()))

    async def _append(self, bucket: _Bucket, run: Sequence[LogRecord]) -> None:
        first_offset, records = run[0].offset, [record.value for record in run]
        if bucket.appending_since_ms is None:
            bucket.appending_since_ms = self._clock.monotonic_ms()
        await self._topic.append_run(bucket.number, first_offset, records)
        bucket.appending_since_ms = None
        bucket.copied = first_offset + len(run)
        self._on_relayed(bucket.number, first_offset, records)

    async def _read(self, bucket: _Bucket) -> None:
        feed = bucket.feed
        limit = min(feed.room(), RUN_RECORDS_MAX)
        records = await self._stream.read(bucket.number, feed.next_offset, max_records=limit)
        feed.offer_read(records, complete=len(records) < limit, now_ms=self._clock.monotonic_ms())

    def _gap_over(self, bucket: _Bucket) -> None:
        bucket.timer = None
        bucket.wake()

    # ------------------------------------------------------------------------------------------------------- trimming

    async def _keep_trimming(self) -> None:
        while True:
            await asyncio.sleep(self._trim_interval_ms / 1000)
            try:
                for bucket in list(self._buckets.values()):
                    await self._trim(bucket)
            except StoreError as error:
                log.warning("relay_trim_failed", error=error)

    async def _trim(self, bucket: _Bucket) -> None:
        """Drop what the topic had already `keep_ms` ago."""
        now_ms = self._clock.monotonic_ms()
        marks = bucket.marks
        if not marks or marks[-1][1] < bucket.copied:
            marks.append((now_ms, bucket.copied))
        safe_offset = 0
        while len(marks) > 1 and marks[1][0] <= now_ms - self._keep_ms:
            marks.popleft()
        if marks[0][0] <= now_ms - self._keep_ms:
            safe_offset = marks[0][1]
        if safe_offset > bucket.trimmed:
            await self._stream.trim(bucket.number, safe_offset)
            bucket.trimmed = safe_offset


def take_run(ready: deque[LogRecord]) -> list[LogRecord]:
    """The next records to copy, bounded by RUN_RECORDS_MAX and, but for the first, RUN_BYTES_MAX."""
    run: list[LogRecord] = []
    run_bytes = 0
    while ready and len(run) < RUN_RECORDS_MAX:
        run_bytes += len(ready[0].value)
        if run and run_bytes > RUN_BYTES_MAX:
            break
        run.append(ready.popleft())
    return run
