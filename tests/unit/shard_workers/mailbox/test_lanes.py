from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from qim.core.seq import lanes_of
from qim.shard_workers.mailbox.expand import Dispatch, Member
from qim.shard_workers.mailbox.lanes import HURRIED_IN_ROW_MAX, LaneQueues, SubTask, Work
from tests.unit.shard_workers.mailbox.making import packed_dispatch

PACKED = packed_dispatch(["a"])


def members(count: int) -> list[Member]:
    return [(n, f"m{n}") for n in range(count)]


def work(offset: int, shares: Mapping[int, int], *, chunk: int = 3, done: int = 0, known: bool = True) -> Work:
    """Lane -> members of it; a sub-task for each lane."""
    mask = sum(1 << lane for lane in shares)
    made = Work(Dispatch(offset, PACKED), mask)
    if known:
        made.tasks = [
            SubTask(made, [(lane, count)], members(count), chunk, mask=1 << lane, done=done)
            for lane, count in shares.items()
        ]
    return made


def put(queues: LaneQueues, made: Work, now_ms: float = 0) -> Work:
    queues.add(made)
    if made.tasks:
        queues.make_ready(made, made.tasks, now_ms)
    return made


def passed(queues: LaneQueues) -> dict[int, list[int]]:
    """Lane -> offsets W may pass."""
    found: dict[int, list[int]] = {}
    for made, mask in sorted(queues.passed(), key=lambda pair: pair[0].offset):
        for lane in lanes_of(mask):
            found.setdefault(lane, []).append(made.offset)
    return found


def test_chunks_are_slices_of_the_members() -> None:
    (made,) = work(0, {0: 7}).tasks
    assert made.chunk_count == 3
    assert [slot for chunk in range(3) for slot, _ in made.chunk_members(chunk)] == list(range(7))
    assert len(made.chunk_members(2)) == 1


def test_done_chunks_are_not_given_again() -> None:
    (made,) = work(0, {0: 9}, done=0b010).tasks
    assert [made.take_chunk(), made.take_chunk()] == [0, 2]
    assert made.all_given()
    assert work(0, {0: 9}, done=0b111).tasks[0].all_given()


def test_members_of_some_lanes_of_a_joined_sub_task() -> None:
    made = Work(Dispatch(0, PACKED), 0b111)
    task = SubTask(made, [(0, 2), (1, 1), (2, 3)], members(6), 3, mask=0b111)
    assert (task.chunk_count, task.next_entries()) == (1, 6)
    assert [slot for slot, _ in task.members_on(0b101)] == [0, 1, 3, 4, 5]


def test_a_task_that_was_finished_before_is_only_passed() -> None:
    queues = LaneQueues(4)
    put(queues, work(0, {1: 3}, done=1))
    assert not queues.has_chunks()
    assert passed(queues) == {1: [0]}
    assert queues.active() == []


def test_a_work_is_passed_lane_by_lane() -> None:
    queues = LaneQueues(4)
    put(queues, work(0, {0: 9, 1: 1, 2: 1}))
    assert len(queues.take(5)) == 3, "one chunk of each"
    assert passed(queues) == {1: [0], 2: [0]}
    put(queues, work(1, {0: 1, 2: 1}))
    queues.take(100)
    assert queues.pending == 3
    assert passed(queues) == {0: [0, 1], 2: [1]}
    assert queues.pending == 0


def test_a_budget_is_kept_but_one_chunk_always_fits() -> None:
    queues = LaneQueues(4)
    put(queues, work(0, dict.fromkeys(range(4), 3)))
    assert [(found.lane, chunk) for found, chunk in queues.take(7)] == [(0, 0), (1, 0)]
    assert len(queues.take(1)) == 1
    assert [found.lane for found, _ in queues.take(100)] == [3]


def test_members_that_come_late_hold_those_behind_but_not_their_entries() -> None:
    queues = LaneQueues(1)
    early = put(queues, work(0, {0: 1}, known=False))
    put(queues, work(1, {0: 1}))
    assert [found.offset for found, _ in queues.take(10)] == [1]
    assert passed(queues) == {}
    assert queues.head_lag_ms(0, 12) == 0, "it is not ready"
    queues.make_ready(early, [SubTask(early, [(0, 1)], members(1), 3, mask=1)], 5)
    assert queues.head_lag_ms(0, 12) == 7
    assert [found.offset for found, _ in queues.take(10)] == [0]
    assert passed(queues) == {0: [0, 1]}
    assert queues.pending == 0


def test_of_several_chunks_the_earlier_dispatch_goes_first_even_if_its_members_came_late() -> None:
    queues = LaneQueues(1)
    early = put(queues, work(0, {0: 6}, known=False))
    put(queues, work(1, {0: 6}))
    queues.make_ready(early, [SubTask(early, [(0, 6)], members(6), 3, mask=1)], 0)
    assert [(found.offset, chunk) for found, chunk in queues.take(99)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_held_chunk_lets_others_pass_and_is_in_work() -> None:
    queues = LaneQueues(2)
    put(queues, work(0, {0: 1}))
    put(queues, work(1, {0: 1, 1: 1}))
    taken = queues.take(10, lambda lane, offset: (lane, offset) == (0, 0))
    assert [(found.lane, found.offset) for found, _ in taken] == [(0, 1), (1, 1)]
    assert passed(queues) == {1: [1]}
    assert queues.head_lag_ms(0, 1000) == 0
    assert [(found.lane, found.offset) for found, _ in queues.take(10)] == [(0, 0)]


def test_a_lane_where_something_waits_behind_a_large_share_goes_first() -> None:
    for seen_first in (True, False):
        queues = LaneQueues(8)
        put(queues, work(0, dict.fromkeys(range(8), 60), chunk=30))
        assert [(found.lane, chunk) for found, chunk in queues.take(30)] == [(0, 0)]
        if seen_first:
            assert passed(queues) == {}
        put(queues, work(1, {5: 1}))
        if not seen_first:
            queues.passed()
        taken = [queues.take(31), queues.take(31)]
        assert sorted((found.offset, found.lane) for call in taken for found, _ in call) == [(0, 5), (0, 5), (1, 5)]
        assert passed(queues)[5] == [0, 1]


def test_one_large_share_behind_another_goes_first_when_its_turn_to_be_waited_for_comes() -> None:
    queues = LaneQueues(8)
    for offset in range(2):
        put(queues, work(offset, dict.fromkeys(range(8), 30), chunk=30))
    put(queues, work(2, {5: 1}))
    queues.passed()
    first = [(found.offset, found.lane) for _ in range(18) for found, _ in queues.take(30)]
    assert len(first) == 17
    assert first.index((1, 5)) < 16


def test_a_large_share_counts_as_lag_once_somebody_waits_behind_it() -> None:
    queues = LaneQueues(1)
    put(queues, work(0, {0: 60}, chunk=30))
    assert queues.head_lag_ms(0, 900) == 0
    put(queues, work(1, {0: 1}))
    assert queues.head_lag_ms(0, 900) == 900


def test_a_small_task_is_not_behind_large_ones() -> None:
    queues = LaneQueues(8)
    put(queues, work(0, dict.fromkeys(range(7), 60), chunk=30))
    put(queues, work(1, {7: 2}))
    assert [found.lane for found, _ in queues.take(32)] == [7, 0]


def test_what_goes_first_leaves_a_turn_to_the_others_now_and_then() -> None:
    queues, rounds = LaneQueues(4), 4
    put(queues, work(0, {3: 120}, chunk=30))
    for offset in range(1, 1 + HURRIED_IN_ROW_MAX * rounds):
        put(queues, work(offset, {0: 25, 1: 25, 2: 25}, chunk=25))
    order = [found.lane for _ in range((HURRIED_IN_ROW_MAX + 1) * rounds) for found, _ in queues.take(30)]
    assert [order.count(lane) for lane in range(3)] == [HURRIED_IN_ROW_MAX * rounds // 3] * 3
    assert [lane == 3 for lane in order] == ([False] * HURRIED_IN_ROW_MAX + [True]) * rounds


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 10))
def test_every_chunk_is_given_once_and_a_prefix_is_passed(seed: int, count: int, budget: int) -> None:
    chance = random.Random(seed)
    queues, works = LaneQueues(3), []
    for offset in range(count):
        lanes = chance.sample(range(3), chance.randint(1, 3))
        shares = {lane: chance.randint(1, 9) for lane in sorted(lanes)}
        works.append(put(queues, work(offset, shares, known=chance.random() < 0.6)))
    given_chunks: list[tuple[int, int, int]] = []
    gone: dict[int, list[int]] = {0: [], 1: [], 2: []}
    unknown = [made for made in works if not made.tasks]
    while queues.pending:
        if unknown and chance.random() < 0.4:
            late = unknown.pop(chance.randrange(len(unknown)))
            late_tasks = work(late.offset, {lane: chance.randint(1, 9) for lane in lanes_of(late.mask)}).tasks
            for task in late_tasks:
                task.work = late
            queues.make_ready(late, late_tasks, 0)
        taken = queues.take(budget)
        assert len(taken) == 1 or sum(len(t.chunk_members(c)) for t, c in taken) <= budget
        given_chunks += [(found.offset, found.lane, chunk) for found, chunk in taken]
        for lane, offsets in passed(queues).items():
            gone[lane] += offsets
        for lane in range(3):
            head = queues.head(lane)
            assert head is None or all(offset < head.offset for offset in gone[lane])
    assert len(set(given_chunks)) == len(given_chunks)
    assert set(given_chunks) == {
        (made.offset, task.lane, chunk) for made in works for task in made.tasks for chunk in range(task.chunk_count)
    }
    assert gone == {lane: [made.offset for made in works if made.mask >> lane & 1] for lane in range(3)}
