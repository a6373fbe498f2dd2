"""Login barrier, pull window and the dirty mark of one connection (§9.3, §9.4, §11.3.4); pure.

The barrier is state of the server, not discipline of the client: what is pushed before ONLINE_READY waits here, what
lies at or below `sync_to_seq` is the client's to pull.
"""

from __future__ import annotations

from enum import Enum, auto
from operator import itemgetter
from typing import Final, NamedTuple

from qim.core.coverage import CoverageTracker
from qim.protocol.qim_pb2 import PullMailbox

HELD_OVERHEAD_BYTES: Final = 128
"""Fixed cost of a held push beside its bytes (§9.4.2)."""


class HeldPush(NamedTuple):
    """A push that waits: reference and pointer to the shared body (§9.4.2)."""

    mailbox_seq: int
    ref: bytes
    common: bytes


class LoginBarrier:
    """From the moment OPEN is sent until ONLINE_READY.

    Pushes may arrive before the MailboxNode's answer is here, so `hold` works at once and `open` tells the rest.
    """

    __slots__ = (
        "has_offline", "started_ms", "sync_to_seq", "_bytes", "_bytes_max", "_coverage", "_held", "_items_max",
        "_start_seq",
    )  # fmt: skip

    def __init__(self, *, started_ms: float, items_max: int, bytes_max: int) -> None:
        self.started_ms = started_ms
        """When AUTH was received."""
        self.sync_to_seq = 0
        self.has_offline = True
        self._start_seq = 0
        self._coverage = CoverageTracker(0)
        self._held: list[HeldPush] | None = []
        self._bytes = 0
        self._items_max = items_max
        self._bytes_max = bytes_max

    def open(self, *, last_applied_seq: int, sync_to_seq: int, has_offline: bool) -> None:
        """AUTH_OK assigns (last_applied, sync_to_seq] to the pulls."""
        self.sync_to_seq = sync_to_seq
        self._start_seq = last_applied_seq
        self._coverage = CoverageTracker(last_applied_seq)
        self.has_offline = has_offline

    def in_range(self, after_seq: int, up_to_seq: int) -> bool:
        """§9.3.2: a login pull stays inside (last_applied, sync_to_seq]; `up_to_seq` 0 is never refused."""
        return after_seq >= self._start_seq and (up_to_seq == 0 or after_seq <= up_to_seq <= self.sync_to_seq)

    def answered(self, after_seq: int, covered_through_seq: int) -> None:
        """A batch was sent."""
        self._coverage.add(after_seq, covered_through_seq)

    def complete(self, sync_to_seq: int) -> bool:
        """Both checks of §9.3.4; an empty pull range covers itself."""
        if sync_to_seq != self.sync_to_seq:
            return False
        return not self.has_offline or self._coverage.covered_through() >= sync_to_seq

    def hold(self, push: HeldPush) -> bool:
        """Keep a push for ONLINE_READY; False when the queue overflowed: all of it is dropped, the mailbox is dirty."""
        if self._held is None:
            return False
        self._bytes += len(push.ref) + len(push.common) + HELD_OVERHEAD_BYTES
        if len(self._held) >= self._items_max or self._bytes > self._bytes_max:
            self._held = None
            return False
        self._held.append(push)
        return True

    def release(self) -> list[HeldPush]:
        """What to push after ONLINE_READY, ascending; nothing when the queue had overflowed."""
        due = [push for push in self._held or () if push.mailbox_seq > self.sync_to_seq]
        due.sort(key=itemgetter(0))
        return due


class Verdict(Enum):
    """What happens to a PULL_MAILBOX."""

    START = auto()
    QUEUED = auto()
    TOO_MANY = auto()
    """Window and queue are full."""
    TOO_SOON = auto()
    """A fallback pull inside `client_resync_min_interval`: counted, not executed, not disconnected (§20.4.1)."""


class QueuedPull(NamedTuple):
    request_id: int
    pull: PullMailbox


class PullWindow:
    """At most `window` pulls in flight, `queue_max` waiting; fallback pulls once per interval.

    A pull to the current watermark is a fallback unless something calls for it: the login, a dirty mailbox, a push that
    no such pull has reached yet, a batch that had more (§15.1.1).
    """

    __slots__ = (
        "_continue_seq", "_in_flight", "_queue", "_queue_max", "_reached_seq", "_resync_after_ms",
        "_resync_interval_ms", "_window",
    )  # fmt: skip

    def __init__(self, *, window: int, queue_max: int, resync_interval_ms: int) -> None:
        self._window = window
        self._queue_max = queue_max
        self._resync_interval_ms = resync_interval_ms
        self._in_flight = 0
        self._queue: list[QueuedPull] = []
        self._resync_after_ms = 0.0
        self._continue_seq = -1
        self._reached_seq = 0

    def offer(self, pull: QueuedPull, now_ms: float, *, repairs: bool, last_pushed_seq: int) -> Verdict:
        """`repairs`: the login barrier stands, or the mailbox is dirty."""
        if pull.pull.up_to_seq == 0 and not repairs and not self._called_for(pull.pull.after_seq, last_pushed_seq):
            if now_ms < self._resync_after_ms:
                return Verdict.TOO_SOON
            self._resync_after_ms = now_ms + self._resync_interval_ms
        if self._in_flight < self._window:
            self._in_flight += 1
            return Verdict.START
        if len(self._queue) >= self._queue_max:
            return Verdict.TOO_MANY
        self._queue.append(pull)
        return Verdict.QUEUED

    def resync_wait_ms(self, now_ms: float) -> float:
        """How long until the next fallback pull is served."""
        return max(0.0, self._resync_after_ms - now_ms)

    def answered(self, *, asked_up_to_seq: int, covered_through_seq: int, has_more: bool) -> None:
        """A batch was sent; with more to come the client is obliged to go on from its end."""
        if asked_up_to_seq == 0:
            self._continue_seq = covered_through_seq if has_more else -1
            self._reached_seq = max(self._reached_seq, covered_through_seq)

    def finished(self) -> QueuedPull | None:
        """A pull in flight ended; the next one to start takes its place."""
        if self._queue:
            return self._queue.pop(0)
        self._in_flight -= 1
        return None

    def _called_for(self, after_seq: int, last_pushed_seq: int) -> bool:
        return after_seq == self._continue_seq or max(after_seq, self._reached_seq) < last_pushed_seq


class DirtyMark:
    """`mailbox_dirty` of a connection: set when a push may be missing, cleared by a pull that began afterwards.

    §15.1.1. The first pull to the current watermark that starts after the mark fixes how far pulls must reach.
    """

    __slots__ = ("dirty", "_generation", "_pulling", "_target_seq")

    def __init__(self) -> None:
        self.dirty = False
        self._generation = 0
        self._pulling = False
        self._target_seq = -1

    def mark(self) -> bool:
        """True when the client must be told: it was clean, or has begun to repair an earlier mark."""
        tell = not self.dirty or self._pulling
        self.dirty = True
        self._generation += 1
        self._pulling = False
        self._target_seq = -1
        return tell

    def pull_starts(self, asked_up_to_seq: int) -> int:
        """The generation to give back to `pulled`."""
        if asked_up_to_seq == 0:
            self._pulling = True
        return self._generation

    def pulled(self, *, generation: int, asked_up_to_seq: int, up_to_seq: int, covered_through_seq: int) -> None:
        """A pull that started at `generation` was answered."""
        if not self.dirty or generation != self._generation:
            return
        if asked_up_to_seq == 0 and self._target_seq < 0:
            self._target_seq = up_to_seq
        if 0 <= self._target_seq <= covered_through_seq:
            self.dirty = False
