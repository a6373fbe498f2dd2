"""One mailbox shard: admission, lanes, watermarks and calls to the store (DESIGN-data §5, §6), pure.

The runner feeds dispatches in log order, asks for the next call, and reports what became of it. Whatever goes wrong
with a call ends in `restore`: nothing in memory outlives a doubt, everything is folded again from what is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final

from qim.core.seq import LaneVector, lanes_of, log_offset_of, mailbox_seq
from qim.registry.api import EpochBoundary, epoch_owning, owners_of_any
from qim.shard_workers.mailbox.expand import Dispatch, LaneMembers, RecentEvents, shares_of
from qim.shard_workers.mailbox.fold import AdmissionFold, Verdict
from qim.shard_workers.mailbox.lanes import HoldChunk, LaneQueues, SubTask, Work
from qim.stores.api import AppendCall, ChunkAppend, ProgressRow, ShardState, Watermarks

FOLD_SAVE_RECORDS: Final = 4096
FOLD_SNAPSHOTS_MAX: Final = 16
"""Fold states waiting for W to reach them; when full no newer one is taken until one is saved."""


class CallState(Enum):
    SENT = "sent"
    OK = "ok"


class PlannedCall:
    """An append call with what the machine needs to know when it is answered."""

    __slots__ = ("append", "covered", "state", "incarnation", "sent_ms")

    def __init__(self, append: AppendCall, covered: list[tuple[Work, int]], incarnation: int, now_ms: float) -> None:
        self.append = append
        self.covered = covered
        """(work, mask of lanes) W passes with this call, per lane ascending."""
        self.state = CallState.SENT
        self.incarnation = incarnation
        self.sent_ms = now_ms


class ShardMachine:
    """State of a shard under one grant. Laws: W of a lane never goes back and never passes an unfinished chunk."""

    __slots__ = (
        "shard", "shard_epoch", "lane_count", "high", "acked", "published", "refused", "incarnation", "lanes",
        "boundaries", "_own_start", "_own_base", "_takeover_high", "_chunk_size", "_entries_max", "_join_lanes",
        "_sent", "_floor",
        "_fold", "_snapshots", "_progress", "_in_flight", "_stored_w", "_seen_w", "_moved_ms", "_waiting",
        "_may_work", "_recent", "_top", "_level", "saved_offset", "read_only", "regressions", "_owners",
    )  # fmt: skip

    def __init__(
        self,
        shard: int,
        shard_epoch: int,
        *,
        lane_count: int,
        chunk_size: int,
        entries_max: int,
        recent: RecentEvents | None = None,
        join_lanes: bool = True,
    ) -> None:
        """`recent` may be shared by the shards of a process. `join_lanes`: small shares of several lanes go to the
        store together; a test that holds single lanes back says no."""
        self.shard = shard
        self.shard_epoch = shard_epoch
        self.lane_count = lane_count
        self.high = 0
        """End of the log at the last restore: records below it may have been worked on before."""
        self.acked: list[int] = [0] * lane_count
        """W as the store acknowledged it."""
        self.published: list[int] = [0] * lane_count
        """The highest W anybody was told."""
        self.refused: dict[int, int] = {}
        """Lanes whose recomputed W was below the stored one -> the recomputed one (26.6.8)."""
        self.incarnation = 0
        self.saved_offset = -1
        """C of the fold stored last, as far as is known; -1 = none."""
        self.read_only = False
        """Nothing is materialized and W stays; lanes are served up to the stored W (26.6.6)."""
        self.regressions = 0
        """Times a `mailbox_seq` was seen going back: must stay 0 (26.6.5)."""
        self.lanes = LaneQueues(lane_count)
        self.boundaries: Sequence[EpochBoundary] = ()
        self._owners: Sequence[EpochBoundary] = ()
        self._own_start = 0
        self._own_base = mailbox_seq(shard_epoch, 0)
        self._takeover_high = 0
        self._chunk_size = chunk_size
        self._entries_max = entries_max
        self._join_lanes = join_lanes
        self._sent = LaneVector.zero(lane_count)
        self._top = 0
        """No lane was sent beyond it."""
        self._level = -1
        """The value every lane was sent, -1 when they differ."""
        self._floor: list[int] = [0] * lane_count
        self._fold = AdmissionFold()
        self._snapshots: deque[tuple[int, bytes]] = deque()
        self._progress: Mapping[tuple[int, int], ProgressRow] = {}
        self._in_flight: deque[PlannedCall] = deque()
        self._stored_w: list[int] = [0] * lane_count
        self._seen_w: list[int] = [0] * lane_count
        self._moved_ms: list[float] = [0.0] * lane_count
        self._waiting: dict[int, Work] = {}
        """Works whose members are not known yet, by offset."""
        self._may_work = False
        self._recent = recent or RecentEvents()

    # ------------------------------------------------------------------------------------------ opening and reloading

    def open(self, boundaries: Sequence[EpochBoundary], high: int) -> None:
        """The boundaries of the shard, its own included (which epoch owns which offset), and H, the end of the log: a
        lane is served once its W reached the record before H."""
        self.boundaries = boundaries
        self._owners = owners_of_any(boundaries)
        own = next(boundary for boundary in boundaries if boundary.shard_epoch == self.shard_epoch)
        self._own_start = own.start_offset
        self._takeover_high = high

    def restore(
        self, state: ShardState, progress: Mapping[tuple[int, int], ProgressRow], high: int, now_ms: float
    ) -> list[int]:
        """Start again from what is stored: `progress` holds the rows above C and below `high`, the end of the log.

        Returns the lanes whose stored W is ahead of what was acknowledged here: their online devices may have missed
        pushes. Afterwards `next_offset` is where the log is to be read from.
        """
        first = self.incarnation == 0
        ahead = [] if first else [j for j in range(self.lane_count) if state.watermarks[j] > self.acked[j]]
        self.incarnation += 1
        self.high = high
        self.lanes = LaneQueues(self.lane_count)
        self.refused = {}
        self._fold = AdmissionFold.decode(state.fold)
        self.saved_offset = state.fold_offset
        self._snapshots.clear()
        self._in_flight.clear()
        self._waiting.clear()
        self._progress = progress
        self._stored_w = list(state.watermarks.values)
        self.acked = list(state.watermarks.values)
        self._sent = state.watermarks
        self._top = max(state.watermarks.values)
        if self._top >= self.seq_of(high):
            self.regressions += 1  # the next record would lie below what clients may have been told
        self._level = -1
        self._moved_ms = [now_ms] * self.lane_count
        floor = self.seq_of(self._takeover_high - 1)
        self._floor = [max(floor, told) for told in self.published]
        return ahead

    @property
    def next_offset(self) -> int:
        """Log offset of the next record to admit."""
        return self._fold.next_offset

    def seq_of(self, log_offset: int) -> int:
        """`mailbox_seq` under the epoch that owned the offset; 0 before the first record."""
        if log_offset < 0:
            return 0
        if log_offset >= self._own_start:
            return self._own_base + log_offset
        return mailbox_seq(epoch_owning(self._owners, log_offset), log_offset)

    # ------------------------------------------------------------------------------------------------------ admission

    def admit(self, dispatch: Dispatch) -> tuple[Verdict, Work | None]:
        """Fold the next record; the work it makes waits for `members_known`. One that is folded over makes none, nor
        does one that W has passed on every lane."""
        offset = dispatch.offset
        verdict = self._fold.admit(offset, dispatch.bucket, dispatch.source, dispatch.fencing_epoch, dispatch.follows)
        self._may_work = True
        work = None
        if verdict is Verdict.ADMITTED:
            if offset < self.high:
                work = self._replayed(dispatch)
            else:
                mask = dispatch.lane_mask
                for lane in self.refused:
                    mask &= ~(1 << lane)
                work = Work(dispatch, mask) if mask else None
        if self._fold.next_offset % FOLD_SAVE_RECORDS == 0 and len(self._snapshots) < FOLD_SNAPSHOTS_MAX:
            self._snapshots.append((offset, self._fold.encode()))
        if self._fold.next_offset == self.high:
            self._progress = {}
        if self.read_only:
            work = None
        if work is not None:
            dispatch.prepare(self._recent)
            self.lanes.add(work)
            self._waiting[offset] = work
        return verdict, work

    def _replayed(self, dispatch: Dispatch) -> Work | None:
        """The work of a record that may have been worked on before; a lane whose W passed it unfinished is refused."""
        offset, mask = dispatch.offset, 0
        stored: dict[int, ProgressRow] = {}
        for lane in lanes_of(dispatch.lane_mask):
            row = self._progress.get((offset, lane))
            if row is not None:
                stored[lane] = row
            if lane in self.refused:
                continue
            if not self._stored_w[lane] or log_offset_of(self._stored_w[lane]) < offset:
                mask |= 1 << lane
            elif row is None or not row.is_whole(row.chunk_count):
                self.refused[lane] = self.seq_of(offset - 1)
        return Work(dispatch, mask, stored) if mask else None

    def members_known(self, dispatch: Dispatch, members: LaneMembers, incarnation: int, now_ms: float) -> None:
        """Members of an admitted dispatch arrived; ignored when the shard was restored since."""
        if incarnation != self.incarnation:
            return
        work = self._waiting.pop(dispatch.offset, None)
        if work is not None:
            self.lanes.make_ready(work, self._cut(work, members), now_ms)
        self._may_work = True

    def _cut(self, work: Work, members: LaneMembers) -> list[SubTask]:
        """Sub-tasks of a work. What was begun is done again as it was begun: with its chunk size, lane by lane."""
        members_max = self._entries_max // work.dispatch.event_count if self._join_lanes else 0
        stored = work.stored
        if not stored and work.mask == members.mask:
            size = self._chunk_size
            return [
                SubTask(work, lanes, share, size, mask=mask) for mask, lanes, share in members.shares(size, members_max)
            ]
        tasks = []
        size = self._chunk_size
        for lane, row in (stored or {}).items():
            size = row.chunk_size
            if work.mask >> lane & 1:
                lanes = ((lane, len(members[lane])),)
                tasks.append(SubTask(work, lanes, members[lane], size, mask=1 << lane, done=row.done))
        begun = stored or ()
        rest = {lane: share for lane, share in members.items() if work.mask >> lane & 1 and lane not in begun}
        shares = shares_of(rest, size, members_max)
        return tasks + [SubTask(work, lanes, share, size, mask=mask) for mask, lanes, share in shares]

    # ---------------------------------------------------------------------------------------------------------- calls

    def has_work(self) -> bool:
        """False when `next_call` would make none."""
        return self._may_work

    def next_call(self, now_ms: float, hold: HoldChunk | None = None) -> PlannedCall | None:
        """The next append call: chunks in turns, the W they allow, and the fold if W reached a snapshot of it."""
        if self.read_only:
            self._may_work = False
            return None
        taken = self.lanes.take(self._entries_max, hold)
        self._may_work = self.lanes.has_chunks()
        items = [self._item(task, chunk) for task, chunk in taken]
        for task in {task for task, _ in taken if task.all_given()}:
            task.let_go()
        new, covered = self._advance()
        watermarks = None
        fold, fold_offset = None, -1
        if new != self._sent:
            required = [row for work, mask in covered for row in _required(work, mask)]
            watermarks = Watermarks(previous=self._sent, new=new, required=required)
            self._sent = new
            while self._snapshots and self.seq_of(self._snapshots[0][0]) <= new.minimum():
                fold_offset, fold = self._snapshots.popleft()
        elif not items:
            return None
        append = AppendCall(
            shard=self.shard,
            shard_epoch=self.shard_epoch,
            tenant_items=items,
            watermarks=watermarks,
            fold=fold,
            fold_offset=fold_offset,
        )
        call = PlannedCall(append, covered, self.incarnation, now_ms)
        self._in_flight.append(call)
        return call

    def _item(self, task: SubTask, chunk: int) -> ChunkAppend:
        work = task.work
        dispatch, offset = work.dispatch, work.offset
        seq = self.seq_of(offset)
        lanes, members = task.lanes, task.members
        if task.chunk_count > 1:
            members = task.chunk_members(chunk)
            lanes = ((lanes[0][0], len(members)),)
        common, recipients, lanes = dispatch.chunk(seq, lanes, members)
        if task.chunk_count == 1 and dispatch.event_count == 1:
            task.built = recipients
        return ChunkAppend(
            offset, lanes, chunk, task.chunk_count, task.chunk_size, seq, dispatch.tenant_id,
            dispatch.conversation_id, dispatch.created_at_ms, common, recipients,
        )  # fmt: skip

    def _advance(self) -> tuple[LaneVector, list[tuple[Work, int]]]:
        """W every lane may have once all chunks given so far are stored, and the works passed by it: (work, lanes)."""
        sent, lanes = self._sent, self.lanes
        end = self.seq_of(self.next_offset - 1)
        covered = lanes.passed()
        active = lanes.active()
        if end >= self._top and not active and not self.refused:
            if end == self._level:
                return sent, covered
            self._top = self._level = end
            return LaneVector.level(end, self.lane_count), covered
        self._level = -1
        if end >= self._top:
            new = [end] * self.lane_count
            self._top = end
        else:
            new = [end if end > value else value for value in sent.values]
        for lane in active:
            head = lanes.head(lane)
            assert head is not None
            new[lane] = max(sent[lane], self.seq_of(head.offset - 1))
        for lane in self.refused:
            new[lane] = sent[lane]
        return LaneVector(tuple(new)), covered

    def answered(self, call: PlannedCall) -> list[tuple[Work, int]]:
        """The store took the call. Returns (work, mask of lanes) now covered by the acknowledged W; calls are
        acknowledged in the order they were sent."""
        if call.incarnation != self.incarnation:
            return []
        call.state = CallState.OK
        covered: list[tuple[Work, int]] = []
        while self._in_flight and self._in_flight[0].state is CallState.OK:
            first = self._in_flight.popleft()
            covered += first.covered
            if first.append.watermarks is not None:
                self.acked = list(first.append.watermarks.new.values)
            if first.append.fold is not None:
                self.saved_offset = first.append.fold_offset
        return covered

    def calls_in_flight(self) -> int:
        return len(self._in_flight)

    # -------------------------------------------------------------------------------------------------------- serving

    def replayed(self) -> bool:
        """Everything that was in the log at the last restore is folded."""
        return self._fold.next_offset >= self.high

    def serves(self, lane: int) -> bool:
        """The lane caught up with what was in the log at takeover and with whatever it ever published."""
        return (
            self.incarnation > 0
            and lane not in self.refused
            and (self.acked[lane] >= self._floor[lane] or self.read_only)
            and self.replayed_past(lane)
        )

    def replayed_past(self, lane: int) -> bool:
        """The stored W of the lane was checked against the progress of every record below it."""
        return self._fold.next_offset > log_offset_of(self._stored_w[lane]) or not self._stored_w[lane]

    def watermark(self, lane: int) -> int:
        """W of a served lane as clients may see it; remembers that they did."""
        if self.acked[lane] > self.published[lane]:
            self.published[lane] = self.acked[lane]
        return self.published[lane]

    def publish(self, lane: int, value: int) -> bool:
        """A W read from the store itself is to be told to a client; the answer to its append may still be on the way.
        False: a greater one was told before, so this one must not be."""
        if value < self.published[lane]:
            self.regressions += 1
            return False
        self.published[lane] = value
        return True

    def lag_ms(self, lane: int, now_ms: float) -> int:
        """Queueing delay of the lane (DESIGN-data §4); 0 while the lane is not served."""
        return int(self.lanes.head_lag_ms(lane, now_ms)) if self.serves(lane) else 0

    def stall_ms(self, lane: int, now_ms: float) -> float:
        """Time since W of the lane was seen moving, 0 when nothing waits; as exact as it is asked often."""
        if self.acked[lane] != self._seen_w[lane] or self.lanes.head(lane) is None:
            self._seen_w[lane] = self.acked[lane]
            self._moved_ms[lane] = now_ms
        return now_ms - self._moved_ms[lane]


def _required(work: Work, mask: int) -> Iterator[tuple[int, int, int]]:
    """What the store must find complete before W passes the lanes: (offset, mask of lanes, their chunk count)."""
    single = 0
    for task in work.tasks:
        if task.chunk_count == 1:
            single |= task.mask
        elif task.mask & mask:
            yield work.offset, task.mask, task.chunk_count
    if single & mask:
        yield work.offset, single & mask, 1
