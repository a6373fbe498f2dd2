from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from qim.shard_workers.mailbox.expand import Dispatch, Member
from qim.shard_workers.mailbox.lanes import LaneQueues, SubTask
from tests.unit.shard_workers.mailbox.making import packed_dispatch

PACKED = packed_dispatch(["a"])


def task(offset: int, lane: int, members: int, *, chunk: int = 3, done: int = 0, known: bool = True) -> SubTask:
    made = SubTask(Dispatch(offset, PACKED), lane, chunk, done)
    if known:
        made.expand([Member(n, f"m{n}") for n in range(members)], 0)
    return made


def test_chunks_are_slices_of_the_members() -> None:
    made = task(0, 0, 7)
    assert made.chunk_count == 3
    assert [member.slot for chunk in range(3) for member in made.chunk_members(chunk)] == list(range(7))
    assert len(made.chunk_members(2)) == 1


def test_done_chunks_are_not_given_again() -> None:
    made = task(0, 0, 9, done=0b010)
    assert [made.take_chunk(), made.take_chunk()] == [0, 2]
    assert made.all_given()
    assert task(0, 0, 9, done=0b111).all_given()


def test_a_task_that_was_finished_before_is_only_popped() -> None:
    queues = LaneQueues(4)
    queues.add(task(0, 1, 3, done=1))
    assert not queues.has_chunks()
    assert [found.offset for found in queues.pop_given(1)] == [0]
    assert queues.active() == []


def test_a_budget_is_kept_but_one_chunk_always_fits() -> None:
    queues = LaneQueues(4)
    for lane in range(4):
        queues.add(task(0, lane, 3))
    assert [(found.lane, chunk) for found, chunk in queues.take(7)] == [(0, 0), (1, 0)]
    assert len(queues.take(1)) == 1
    assert [found.lane for found, _ in queues.take(100)] == [3]


def test_members_that_come_late_go_before_those_behind() -> None:
    queues = LaneQueues(1)
    early = task(0, 0, 1, known=False)
    queues.add(early)
    queues.add(task(1, 0, 1))
    assert queues.pop_given(0) == []
    early.expand([Member(0, "m")], 5)
    queues.make_ready(early)
    assert queues.head_lag_ms(0, 12) == 7
    assert [found.offset for found, _ in queues.take(10)] == [0, 1]
    assert [found.offset for found in queues.pop_given(0)] == [0, 1]
    assert queues.pending == 0


def test_a_held_chunk_lets_others_pass_and_is_in_work() -> None:
    queues = LaneQueues(2)
    queues.add(task(0, 0, 1))
    queues.add(task(1, 0, 1))
    queues.add(task(1, 1, 1))
    taken = queues.take(10, lambda lane, offset: (lane, offset) == (0, 0))
    assert [(found.lane, found.offset) for found, _ in taken] == [(0, 1), (1, 1)]
    assert queues.pop_given(0) == []
    assert queues.head_lag_ms(0, 1000) == 0
    assert [(found.lane, found.offset) for found, _ in queues.take(10)] == [(0, 0)]


def test_a_lane_where_something_waits_behind_a_large_share_goes_first() -> None:
    queues = LaneQueues(8)
    for lane in range(8):
        queues.add(task(0, lane, 60, chunk=30))
    assert [(found.lane, chunk) for found, chunk in queues.take(30)] == [(0, 0)]
    queues.add(task(1, 5, 1))
    taken = [queues.take(31), queues.take(31)]
    assert [(found.offset, found.lane) for call in taken for found, _ in call] == [(0, 5), (0, 5), (1, 5)]
    assert [found.offset for found in queues.pop_given(5)] == [0, 1]


def test_a_large_share_counts_as_lag_once_somebody_waits_behind_it() -> None:
    queues = LaneQueues(1)
    queues.add(task(0, 0, 60, chunk=30))
    assert queues.head_lag_ms(0, 900) == 0
    queues.add(task(1, 0, 1))
    assert queues.head_lag_ms(0, 900) == 900


def test_a_small_task_is_not_behind_large_ones() -> None:
    queues = LaneQueues(8)
    for lane in range(7):
        queues.add(task(0, lane, 60, chunk=30))
    queues.add(task(1, 7, 2))
    assert [found.lane for found, _ in queues.take(32)] == [7, 0]


def test_lanes_that_go_first_leave_every_fourth_turn_to_the_others() -> None:
    queues = LaneQueues(4)
    queues.add(task(0, 3, 120, chunk=30))
    for lane in range(3):
        for offset in range(20):
            queues.add(task(offset, lane, 30, chunk=30))
    order = [found.lane for _ in range(16) for found, _ in queues.take(30)]
    assert order.count(3) == 4
    assert [order.count(lane) for lane in range(3)] == [4, 4, 4]
    assert [lane == 3 for lane in order] == [False, False, False, True] * 4


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 10))
def test_every_chunk_is_given_once_and_a_prefix_is_popped(seed: int, count: int, budget: int) -> None:
    chance = random.Random(seed)
    queues, tasks = LaneQueues(3), []
    for offset in range(count):
        made = task(offset, chance.randrange(3), chance.randint(1, 9), known=chance.random() < 0.6)
        queues.add(made)
        tasks.append(made)
    given_chunks: list[tuple[int, int]] = []
    popped: dict[int, list[int]] = {0: [], 1: [], 2: []}
    unknown = [made for made in tasks if made.members is None]
    while queues.pending:
        if unknown and chance.random() < 0.4:
            late = unknown.pop(chance.randrange(len(unknown)))
            late.expand([Member(n, f"m{n}") for n in range(chance.randint(1, 9))], 0)
            queues.make_ready(late)
        taken = queues.take(budget)
        assert len(taken) == 1 or sum(len(t.chunk_members(c)) for t, c in taken) <= budget
        given_chunks += [(found.offset, chunk) for found, chunk in taken]
        for lane in range(3):
            popped[lane] += [found.offset for found in queues.pop_given(lane)]
            head = queues.head(lane)
            assert head is None or all(offset < head.offset for offset in popped[lane])
    assert len(set(given_chunks)) == len(given_chunks)
    assert set(given_chunks) == {(made.offset, chunk) for made in tasks for chunk in range(made.chunk_count)}
    assert sorted(offset for offsets in popped.values() for offset in offsets) == list(range(count))
