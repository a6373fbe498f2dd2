"""Lanes of one mailbox shard: what each still needs of which dispatch, chunks in turns (§6.5.1, §9.2.2, 26.3.6), pure.

A dispatch is one `Work`, cut into sub-tasks: lanes with few members together, one with more than a chunk alone. The W
of a lane may reach the offset before the first work that is not all given on it; sub-tasks take turns, chunk by chunk,
so that a big one costs its neighbours one chunk's time.

A large group has members on every lane, so a single-chat message waits for its own lane's share of the group. What
somebody waits behind therefore goes first: it is done at once instead of with all the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from qim.core.seq import lanes_of

if TYPE_CHECKING:
    from qim.shard_workers.mailbox.expand import Dispatch, Member
    from qim.stores.api import ProgressRow, Recipient

SMALL_CHUNK_ENTRIES: Final = 25
"""A chunk that costs little beside others goes first too."""
HURRIED_IN_ROW_MAX: Final = 15
"""What goes first takes at most this many turns for one of the others. Beside a message to 100,000 most of what goes
first is a share of it that a single chat waits behind, no extra work: with 3 that queued for 150 ms, with 15 for 20."""

HoldChunk = Callable[[int, int], bool]
"""(lane, log offset) -> True to leave that chunk where it is for now; only tests install one."""


class Work:
    """One dispatch on the lanes of this shard. `tasks` are there once its members are known."""

    __slots__ = ("dispatch", "offset", "mask", "given", "ready_ms", "tasks", "stored")

    def __init__(self, dispatch: Dispatch, mask: int, stored: dict[int, ProgressRow] | None = None) -> None:
        self.dispatch = dispatch
        self.offset = dispatch.offset
        self.mask = mask
        """Lanes with members of it whose W it holds back."""
        self.given = 0
        """Those of which all chunks are given to the store, or were found done by it."""
        self.ready_ms = 0.0
        """Since when it has been waiting."""
        self.tasks: Sequence[SubTask] = ()
        self.stored = stored
        """Progress of its lanes that an earlier life began; None when it began none."""

    def task_of(self, lane: int) -> SubTask | None:
        for task in self.tasks:
            if task.mask >> lane & 1:
                return task
        return None


class SubTask:
    """Members of one dispatch that take turns together: the only chunks of some lanes, or one lane with several."""

    __slots__ = (
        "work", "lanes", "mask", "members", "chunk_size", "chunk_count", "next_chunk", "done", "held", "turn", "built",
    )  # fmt: skip

    def __init__(
        self, work: Work, lanes: Sequence[tuple[int, int]], members: Sequence[Member], chunk_size: int, *, mask: int,
        done: int = 0,
    ) -> None:  # fmt: skip
        """`members` lane by lane, as `lanes` = (lane, members of it) says, ascending by slot within a lane."""
        self.work = work
        self.lanes = lanes
        self.mask = mask
        self.members = members
        self.chunk_size = chunk_size
        """n, the members per chunk; on a replay the stored one."""
        self.chunk_count = 1 if len(lanes) > 1 else -(-len(members) // chunk_size)
        self.next_chunk = 0
        self.done = done
        """Chunks given to the store or found done by it: bit k = chunk k."""
        self.held = False
        self.turn: deque[SubTask | _ChunkedLane] | None = None
        """The queue in which it waits for its turn, unless its lane does."""
        self.built: Sequence[Recipient] | None = None
        """Entries of a sub-task of one event and one chunk, kept for the push."""
        if done:
            self._skip_done()

    @property
    def lane(self) -> int:
        """The first one."""
        return self.lanes[0][0]

    @property
    def offset(self) -> int:
        return self.work.offset

    def chunk_members(self, chunk: int) -> Sequence[Member]:
        if self.chunk_count == 1:
            return self.members
        return self.members[chunk * self.chunk_size : (chunk + 1) * self.chunk_size]

    def next_entries(self) -> int:
        """How many the next chunk has at most."""
        members = len(self.members)
        if self.chunk_count > 1:
            members = min(self.chunk_size, members - self.next_chunk * self.chunk_size)
        return members * self.work.dispatch.event_count

    def take_chunk(self) -> int:
        """The next chunk that is not done; it counts as done from here on."""
        chunk = self.next_chunk
        self.done |= 1 << chunk
        self.next_chunk = chunk + 1
        if self.next_chunk < self.chunk_count:
            self._skip_done()
        return chunk

    def all_given(self) -> bool:
        return self.next_chunk >= self.chunk_count

    def started(self) -> bool:
        """In work: a chunk was given to the store, or a test holds one."""
        return self.done != 0 or self.held

    def members_on(self, mask: int) -> Iterable[Member]:
        """Those of some lanes."""
        first = 0
        for lane, count in self.lanes:
            if mask >> lane & 1:
                yield from self.members[first : first + count]
            first += count

    def let_go(self) -> None:
        """Its last chunk was taken: whatever it made must be free with the work, not wait for the collector."""
        del self.work

    def _skip_done(self) -> None:
        while self.done >> self.next_chunk & 1:
            self.next_chunk += 1


class _ChunkedLane:
    """Sub-tasks of several chunks on one lane, by offset: they wait for a turn together, the first one has it."""

    __slots__ = ("lane", "ready", "turn")

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.ready: deque[SubTask] = deque()
        self.turn: deque[SubTask | _ChunkedLane] | None = None


_Entry = SubTask | _ChunkedLane


class LaneQueues:
    """All lanes of a shard and whose turn it is."""

    __slots__ = (
        "pending", "_fifos", "_active", "_recent", "_unfinished", "_chunked", "_hurried", "_others", "_in_row",
    )  # fmt: skip

    def __init__(self, lane_count: int) -> None:
        self.pending = 0
        """(work, lane) pairs that W has not passed."""
        self._fifos: list[deque[Work]] = [deque() for _ in range(lane_count)]
        """Per lane everything W has not passed, by offset, but for `_recent`."""
        self._active = 0
        """Mask of the lanes whose fifo has something."""
        self._recent: list[Work] = []
        """Added while nothing large was waiting: mostly all of it is given at the next turn and enters no fifo."""
        self._unfinished = 0
        """Works that are not given on all their lanes."""
        self._chunked: dict[int, _ChunkedLane] = {}
        self._hurried: deque[_Entry] = deque()
        """What goes first, in turns."""
        self._others: deque[_Entry] = deque()
        self._in_row = 0
        """Turns of what goes first since one of the others had one."""

    # -------------------------------------------------------------------------------------------------------- arriving

    def add(self, work: Work) -> None:
        """The next work, by offset; `make_ready` follows when its members are known."""
        self.pending += work.mask.bit_count()
        self._unfinished += 1
        self._recent.append(work)
        if self._active or self._others:
            self._settle()

    def make_ready(self, work: Work, tasks: Sequence[SubTask], now_ms: float) -> None:
        """The work was cut into sub-tasks; `now_ms`: since when it has been waiting."""
        work.tasks = tasks
        work.ready_ms = now_ms
        for task in tasks:
            if task.all_given():
                self._give(task)
                task.let_go()
            elif task.chunk_count == 1:
                self._queue(task)
            else:
                self._queue_chunked(task)

    def _queue_chunked(self, task: SubTask) -> None:
        """One that came late goes before those behind it."""
        lane = self._chunked.setdefault(task.lane, _ChunkedLane(task.lane))
        at = len(lane.ready)
        while at and lane.ready[at - 1].offset > task.offset:
            at -= 1
        lane.ready.insert(at, task)
        if lane.turn is self._others:
            lane.turn.remove(lane)
            self._queue(lane)
        elif lane.turn is None:
            self._queue(lane)

    def _queue(self, entry: _Entry) -> None:
        entry.turn = self._hurried if self._goes_first(entry) else self._others
        entry.turn.append(entry)

    def _goes_first(self, entry: _Entry) -> bool:
        """Something waits behind it, or its next chunk is small."""
        if isinstance(entry, _ChunkedLane):
            task = entry.ready[0]
            if len(entry.ready) > 1:
                return True
        else:
            task = entry
        if task.next_entries() <= SMALL_CHUNK_ENTRIES:
            return True
        if not self._active & task.mask:
            return False
        fifos, work = self._fifos, task.work
        return any(len(fifos[lane]) > 1 and fifos[lane][0] is work for lane, _ in task.lanes)

    def _entry_of(self, work: Work, lane: int) -> _Entry | None:
        """Where the work waits for a turn on the lane, if it does."""
        chunked = self._chunked.get(lane)
        if chunked is not None and chunked.ready and chunked.ready[0].work is work:
            return chunked
        return work.task_of(lane)

    def _hurry(self, lane: int) -> None:
        """Somebody waits behind the head of the lane."""
        work = self._fifos[lane][0]
        if work.given >> lane & 1:
            return
        entry = self._entry_of(work, lane)
        if entry is not None and entry.turn is self._others:
            entry.turn.remove(entry)
            entry.turn = self._hurried
            entry.turn.append(entry)

    # ----------------------------------------------------------------------------------------------------------- turns

    def hurries(self) -> bool:
        """Something waits that goes first."""
        return bool(self._hurried)

    def has_chunks(self) -> bool:
        return bool(self._hurried or self._others)

    def take(self, entries_max: int, hold: HoldChunk | None = None) -> list[tuple[SubTask, int]]:
        """(sub-task, chunk) pairs of together at most `entries_max` entries, but at least one, a chunk per turn. A
        chunk has `members × dispatch.event_count` entries at most."""
        taken: list[tuple[SubTask, int]] = []
        entries = 0
        held: list[_Entry] = []
        while (entry := self._next_entry(held)) is not None:
            task = _takes_turn(entry, hold)
            if task is None:
                held.append(entry)
                continue
            size = task.next_entries()
            if taken and entries + size > entries_max:
                break
            entries += size
            taken.append((task, task.take_chunk()))
            self._had_turn(entry, task)
        return taken

    def _next_entry(self, held: Sequence[_Entry]) -> _Entry | None:
        """Whose turn it is; what is held is passed over."""
        fair = self._in_row >= HURRIED_IN_ROW_MAX
        for turn in (self._others, self._hurried) if fair else (self._hurried, self._others):
            for entry in turn:
                if entry not in held:
                    return entry
        return None

    def _had_turn(self, entry: _Entry, task: SubTask) -> None:
        """To the end of its queue, if it has more to give."""
        turn = entry.turn
        assert turn is not None
        self._in_row = self._in_row + 1 if turn is self._hurried and self._others else 0
        if turn[0] is entry:
            turn.popleft()
        else:
            turn.remove(entry)
        entry.turn = None
        if task.all_given():
            self._give(task)
            if isinstance(entry, _ChunkedLane):
                entry.ready.remove(task)
        if isinstance(entry, _ChunkedLane) and entry.ready:
            self._queue(entry)

    def _give(self, task: SubTask) -> None:
        work = task.work
        work.given |= task.mask
        if work.given == work.mask:
            self._unfinished -= 1

    # --------------------------------------------------------------------------------------------------------- passing

    def passed(self) -> list[tuple[Work, int]]:
        """Take out what W may pass: (work, mask of lanes), per lane the prefix that is given."""
        if not self._active and not self._unfinished:
            recent, self._recent = self._recent, []
            self.pending = 0
            return [(work, work.mask) for work in recent]
        self._settle()
        passed: dict[Work, int] = {}
        for lane in lanes_of(self._active):
            fifo, bit = self._fifos[lane], 1 << lane
            before = len(fifo)
            while fifo and fifo[0].given & bit:
                work = fifo.popleft()
                passed[work] = passed.get(work, 0) | bit
            if len(fifo) == before:
                continue
            self.pending -= before - len(fifo)
            if not fifo:
                self._active &= ~bit
            elif len(fifo) > 1:
                self._hurry(lane)
        return list(passed.items())

    def _settle(self) -> None:
        """What was added last enters the fifos."""
        for work in self._recent:
            for lane in lanes_of(work.mask):
                fifo = self._fifos[lane]
                fifo.append(work)
                if len(fifo) == 2:
                    self._hurry(lane)
            self._active |= work.mask
        self._recent = []

    def active(self) -> list[int]:
        """Lanes with work that W has not passed, ascending."""
        self._settle()
        return lanes_of(self._active)

    def head(self, lane: int) -> Work | None:
        """The first work of the lane that W has not passed."""
        self._settle()
        fifo = self._fifos[lane]
        return fifo[0] if fifo else None

    def head_lag_ms(self, lane: int, now_ms: float) -> float:
        """Age of the first work that is ready and not yet given to the store; 0 while it is in work, and while it is a
        large share that nobody waits behind: whoever comes next makes it go first."""
        work = self.head(lane)
        if work is None or work.given >> lane & 1:
            return 0.0
        entry, task = self._entry_of(work, lane), work.task_of(lane)
        if entry is None or task is None or entry.turn is not self._hurried or task.started():
            return 0.0
        return now_ms - work.ready_ms


def _takes_turn(entry: _Entry, hold: HoldChunk | None) -> SubTask | None:
    """The sub-task that gives a chunk; None when all are held."""
    candidates: Iterable[SubTask] = (entry,) if isinstance(entry, SubTask) else entry.ready
    for task in candidates:
        task.held = hold is not None and any(hold(lane, task.offset) for lane, _ in task.lanes)
        if not task.held:
            return task
    return None
