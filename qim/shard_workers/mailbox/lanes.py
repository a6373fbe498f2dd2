"""Lanes of one mailbox shard: sub-tasks in order, chunks in turns (§6.5.1, §9.2.2, 26.3.6), pure.

A dispatch becomes one sub-task on every lane that has members of it. A lane's W may reach the offset before its first
unfinished sub-task; chunks are given out lane by lane, so that a big sub-task costs its neighbours one chunk's time.

A large group has members on every lane, so a single-chat message waits for its own lane's share of the group. Lanes
where something waits behind the head therefore go first: their share is done at once instead of with all the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from qim.shard_workers.mailbox.expand import Dispatch, Member
    from qim.stores.api import Recipient

SMALL_CHUNK_ENTRIES: Final = 10
"""A chunk that costs little beside others: its lane goes first too."""
HURRIED_IN_ROW_MAX: Final = 3
"""Lanes that go first take at most this many turns for one of the others."""

HoldChunk = Callable[[int, int], bool]
"""(lane, log offset) -> True to leave that chunk where it is for now; only tests install one."""


class SubTask:
    """The members of one dispatch on one lane. `members` is None until they are known; never empty."""

    __slots__ = (
        "dispatch", "offset", "lane", "members", "chunk_size", "chunk_count", "next_chunk", "done", "ready_ms", "held",
        "built",
    )  # fmt: skip

    def __init__(self, dispatch: Dispatch, lane: int, chunk_size: int, done: int = 0) -> None:
        self.dispatch = dispatch
        self.offset = dispatch.offset
        self.lane = lane
        self.members: Sequence[Member] | None = None
        self.chunk_size = chunk_size
        """n, the members per chunk; on a replay the stored one."""
        self.chunk_count = 0
        self.next_chunk = 0
        self.done = done
        """Chunks given to the store or found done by it: bit k = chunk k."""
        self.ready_ms = 0.0
        self.held = False
        self.built: Sequence[Recipient] | None = None
        """Entries of a sub-task of one event and one chunk, kept for the push."""

    def expand(self, members: Sequence[Member], now_ms: float) -> None:
        """The members became known, ascending by slot."""
        self.members = members
        self.chunk_count = -(-len(members) // self.chunk_size)
        self.ready_ms = now_ms
        self._skip_done()

    def chunk_members(self, chunk: int) -> Sequence[Member]:
        assert self.members is not None
        if self.chunk_count == 1:
            return self.members
        return self.members[chunk * self.chunk_size : (chunk + 1) * self.chunk_size]

    def take_chunk(self) -> int:
        """The next chunk that is not done; it counts as done from here on."""
        chunk = self.next_chunk
        self.done |= 1 << chunk
        self.next_chunk = chunk + 1
        self._skip_done()
        return chunk

    def all_given(self) -> bool:
        return self.members is not None and self.next_chunk >= self.chunk_count

    def started(self) -> bool:
        """In work: a chunk was given to the store, or a test holds one."""
        return self.done != 0 or self.held

    def _skip_done(self) -> None:
        while self.done >> self.next_chunk & 1:
            self.next_chunk += 1


class _Lane:
    __slots__ = ("fifo", "ready", "turn")

    def __init__(self) -> None:
        self.fifo: deque[SubTask] = deque()
        """Everything W has not passed, by offset."""
        self.ready: deque[SubTask] = deque()
        """Those with a chunk to give."""
        self.turn: deque[int] | None = None
        """The queue in which the lane waits for its turn."""

    def hurries(self) -> bool:
        """Something waits behind the first sub-task, or that one is small."""
        if len(self.ready) > 1:
            return True
        task = self.ready[0]
        return len(task.chunk_members(task.next_chunk)) * task.dispatch.event_count <= SMALL_CHUNK_ENTRIES


class LaneQueues:
    """All lanes of a shard and whose turn it is."""

    __slots__ = ("pending", "_lanes", "_active", "_hurried", "_others", "_in_row")

    def __init__(self, lane_count: int) -> None:
        self.pending = 0
        """Sub-tasks not popped yet."""
        self._lanes = [_Lane() for _ in range(lane_count)]
        self._active: set[int] = set()
        self._hurried: deque[int] = deque()
        """Lanes that go first, in turns."""
        self._others: deque[int] = deque()
        self._in_row = 0
        """Turns of hurried lanes since one of the others had one."""

    def add(self, task: SubTask) -> None:
        """Append a sub-task; offsets of a lane ascend."""
        fifo = self._lanes[task.lane].fifo
        assert not fifo or fifo[-1].offset < task.offset, "sub-tasks of a lane ascend"
        fifo.append(task)
        self._active.add(task.lane)
        self.pending += 1
        if task.members is not None:
            self.make_ready(task)

    def make_ready(self, task: SubTask) -> None:
        """The sub-task got its members; one that came late goes before those behind it."""
        if task.all_given():
            return
        lane = self._lanes[task.lane]
        at = len(lane.ready)
        while at and lane.ready[at - 1].offset > task.offset:
            at -= 1
        lane.ready.insert(at, task)
        if lane.turn is self._hurried:
            return
        if lane.turn is not None:
            lane.turn.remove(task.lane)
        self._queue(task.lane)

    def has_chunks(self) -> bool:
        return bool(self._hurried or self._others)

    def take(self, entries_max: int, hold: HoldChunk | None = None) -> list[tuple[SubTask, int]]:
        """(sub-task, chunk) pairs of together at most `entries_max` entries, but at least one, a chunk per lane and
        turn. A chunk has `members × dispatch.events_max` entries at most."""
        taken: list[tuple[SubTask, int]] = []
        entries = 0
        held: set[int] = set()
        while (lane_id := self._next_lane(held)) is not None:
            ready = self._lanes[lane_id].ready
            task = ready[0] if hold is None else _first_not_held(ready, lane_id, hold)
            if task is None:
                held.add(lane_id)
                continue
            size = len(task.chunk_members(task.next_chunk)) * task.dispatch.event_count
            if taken and entries + size > entries_max:
                break
            entries += size
            taken.append((task, task.take_chunk()))
            if task.all_given():
                ready.remove(task)
            self._had_turn(lane_id)
        return taken

    def _next_lane(self, held: Container[int]) -> int | None:
        """Whose turn it is; lanes of which all chunks are held are passed over."""
        fair = self._in_row >= HURRIED_IN_ROW_MAX
        for turn in (self._others, self._hurried) if fair else (self._hurried, self._others):
            for lane_id in turn:
                if lane_id not in held:
                    return lane_id
        return None

    def _had_turn(self, lane_id: int) -> None:
        """To the end of its queue, if it has more to give."""
        lane = self._lanes[lane_id]
        assert lane.turn is not None
        self._in_row = self._in_row + 1 if lane.turn is self._hurried and self._others else 0
        lane.turn.remove(lane_id)
        lane.turn = None
        if lane.ready:
            self._queue(lane_id)

    def _queue(self, lane_id: int) -> None:
        lane = self._lanes[lane_id]
        lane.turn = self._hurried if lane.hurries() else self._others
        lane.turn.append(lane_id)

    def pop_given(self, lane_id: int) -> list[SubTask]:
        """Remove and return the prefix of a lane whose chunks all are given or done."""
        fifo = self._lanes[lane_id].fifo
        popped = []
        while fifo and fifo[0].all_given():
            popped.append(fifo.popleft())
        self.pending -= len(popped)
        if not fifo:
            self._active.discard(lane_id)
        return popped

    def active(self) -> list[int]:
        """Lanes with a sub-task that is not popped, ascending."""
        return sorted(self._active)

    def head(self, lane_id: int) -> SubTask | None:
        """The first sub-task of the lane that is not popped."""
        fifo = self._lanes[lane_id].fifo
        return fifo[0] if fifo else None

    def head_lag_ms(self, lane_id: int, now_ms: float) -> float:
        """Age of the first sub-task that is ready and not yet given to the store; 0 while one is in work, and while it
        is a large share that nobody waits behind: whoever comes next makes it go first."""
        lane = self._lanes[lane_id]
        if lane.turn is not self._hurried or lane.ready[0].started():
            return 0.0
        return now_ms - lane.ready[0].ready_ms


def _first_not_held(ready: deque[SubTask], lane_id: int, hold: HoldChunk) -> SubTask | None:
    for task in ready:
        task.held = hold(lane_id, task.offset)
        if not task.held:
            return task
    return None
