from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qim.core.ids import lane_id
from qim.core.seq import LaneVector, log_offset_of, mailbox_seq
from qim.errors import Fenced
from qim.registry.api import EpochBoundary
from qim.shard_workers.mailbox.expand import Dispatch, LaneMembers
from qim.shard_workers.mailbox.fold import Verdict
from qim.shard_workers.mailbox.machine import FOLD_SAVE_RECORDS, PlannedCall, ShardMachine
from qim.stores.api import AppendCall, AppendStatus, ProgressRow, RangeRequest, ShardState
from qim.stores.memory_mailbox import MemoryMailboxStore
from tests.unit.shard_workers.mailbox.making import CREATED_AT_MS, TENANT, admit, boundary, know, packed_dispatch, run

LANES = 4
USERS = [f"u{n}" for n in range(12)]


def fresh(
    epoch: int = 1, *, stored: ShardState | None = None, high: int = 0, start: int = 0, chunk: int = 3, budget: int = 8
) -> ShardMachine:
    machine = ShardMachine(0, epoch, lane_count=LANES, chunk_size=chunk, entries_max=budget)
    machine.open([boundary(1, 0), boundary(epoch, start)] if epoch > 1 else [boundary(1, 0)], high)
    zero = ShardState(watermarks=LaneVector.zero(LANES), fold=b"", fold_offset=-1, stored_epoch=epoch)
    machine.restore(stored or zero, {}, high, 0)
    return machine


def lane_of(user: str) -> int:
    return lane_id(TENANT, user, LANES)


A = next(user for user in USERS if lane_of(user) == 0)
B = next(user for user in USERS if lane_of(user) == 1)


def test_an_empty_shard_serves_at_once() -> None:
    machine = fresh()
    assert all(machine.serves(lane) for lane in range(LANES))
    assert machine.watermark(0) == 0
    assert machine.next_call(0) is None


def test_one_record_goes_out_with_its_watermark_on_every_lane() -> None:
    machine = fresh()
    admit(machine, packed_dispatch([A]))
    call = machine.next_call(0)
    assert call is not None
    (item,) = call.append.tenant_items
    assert (item.lanes, item.chunk_index, item.chunk_count, item.mailbox_seq) == ([(0, 1)], 0, 1, mailbox_seq(1, 0))
    assert call.append.watermarks is not None
    assert call.append.watermarks.new.values == (mailbox_seq(1, 0),) * LANES
    assert call.append.watermarks.required == [(0, 0b1, 1)]
    assert machine.acked == [0] * LANES, "nothing is published before the store took it"
    assert [work.offset for work, _ in machine.answered(call)] == [0]
    assert machine.watermark(3) == mailbox_seq(1, 0)
    assert machine.next_call(0) is None


def test_empty_lanes_advance_while_a_lane_waits_for_its_members() -> None:
    machine = fresh()
    dispatch = admit(machine, packed_dispatch([A]), members=False)
    admit(machine, packed_dispatch([B], source=(1, 0)))
    call = machine.next_call(0)
    assert call is not None
    assert call.append.watermarks is not None
    assert call.append.watermarks.new.values == (0, *(mailbox_seq(1, 1),) * (LANES - 1))
    machine.answered(call)
    assert machine.stall_ms(0, 500) == 500
    know(machine, dispatch)
    call = machine.next_call(0)
    assert call is not None
    machine.answered(call)
    assert machine.acked == [mailbox_seq(1, 1)] * LANES
    assert machine.stall_ms(0, 600) == 0


def test_items_behind_a_held_chunk_are_stored_but_not_visible() -> None:
    machine = fresh()
    for n in range(3):
        admit(machine, packed_dispatch([A], source=(n, 0)))
    call = machine.next_call(0, lambda lane, offset: offset == 1)
    assert call is not None
    assert [item.log_offset for item in call.append.tenant_items] == [0, 2]
    assert [work.offset for work, _ in machine.answered(call)] == [0]
    assert log_offset_of(machine.watermark(0)) == 0
    assert log_offset_of(machine.watermark(1)) == 2
    assert machine.lag_ms(0, 10_000) == 0, "a head in work is no queueing"
    assert machine.next_call(0, lambda lane, offset: True) is None
    call = machine.next_call(0)
    assert call is not None
    assert [work.offset for work, _ in machine.answered(call)] == [1, 2]
    assert log_offset_of(machine.watermark(0)) == 2


def test_lanes_take_turns_chunk_by_chunk() -> None:
    same_lane = [f"a{n}" for n in range(200) if lane_of(f"a{n}") == 0][:9]
    machine = fresh(chunk=3, budget=4)
    admit(machine, packed_dispatch(same_lane))
    admit(machine, packed_dispatch([B], source=(1, 0)))
    calls = []
    while (call := machine.next_call(0)) is not None:
        calls.append([(item.lanes[0][0], item.chunk_index) for item in call.append.tenant_items])
        machine.answered(call)
    assert calls == [[(0, 0), (1, 0)], [(0, 1)], [(0, 2)]]


def test_small_shares_of_many_lanes_are_one_item_unless_single_lanes_are_held() -> None:
    for join_lanes in (True, False):
        machine = ShardMachine(0, 1, lane_count=LANES, chunk_size=3, entries_max=8, join_lanes=join_lanes)
        machine.open([boundary(1, 0)], 0)
        machine.restore(
            ShardState(watermarks=LaneVector.zero(LANES), fold=b"", fold_offset=-1, stored_epoch=1), {}, 0, 0
        )
        admit(machine, packed_dispatch([A, B]))
        call = machine.next_call(0)
        assert call is not None
        lanes = [[lane for lane, _ in item.lanes] for item in call.append.tenant_items]
        assert lanes == ([[0, 1]] if join_lanes else [[0], [1]])
        assert call.append.watermarks is not None
        assert call.append.watermarks.required == [(0, 0b11, 1)]
        ((_, mask),) = machine.answered(call)
        assert mask == 0b11


def test_what_an_earlier_life_began_is_finished_with_its_chunk_size() -> None:
    same_lane = [f"a{n}" for n in range(200) if lane_of(f"a{n}") == 0][:5]
    machine = ShardMachine(0, 1, lane_count=LANES, chunk_size=9, entries_max=99)
    machine.open([boundary(1, 0)], 1)
    zero = ShardState(watermarks=LaneVector.zero(LANES), fold=b"", fold_offset=-1, stored_epoch=1)
    machine.restore(zero, {(0, 0): ProgressRow(chunk_size=2, chunk_count=3, done=0b010)}, 1, 0)
    admit(machine, packed_dispatch([*same_lane, B]))
    call = machine.next_call(0)
    assert call is not None
    chunks = [(item.lanes[0][0], item.chunk_index, item.chunk_size) for item in call.append.tenant_items]
    assert sorted(chunks) == [(0, 0, 2), (0, 2, 2), (1, 0, 2)], "of the lane that was not begun, too"
    assert call.append.watermarks is not None
    assert sorted(call.append.watermarks.required) == [(0, 0b1, 3), (0, 0b10, 1)]


def test_a_second_call_builds_on_the_first_and_is_acknowledged_after_it() -> None:
    machine = fresh()
    admit(machine, packed_dispatch([A]))
    first = machine.next_call(0)
    admit(machine, packed_dispatch([A], source=(1, 0)))
    second = machine.next_call(0)
    assert first is not None
    assert second is not None
    assert first.append.watermarks is not None
    assert second.append.watermarks is not None
    assert second.append.watermarks.previous == first.append.watermarks.new
    assert machine.answered(second) == []
    assert machine.acked == [0] * LANES
    assert [work.offset for work, _ in machine.answered(first)] == [0, 1]


def test_duplicates_and_stale_records_are_empty_on_every_lane() -> None:
    machine = fresh()
    admit(machine, packed_dispatch([A], epoch=2))
    duplicate, none = machine.admit(Dispatch(1, packed_dispatch([A], epoch=2)))
    stale, none_either = machine.admit(Dispatch(2, packed_dispatch([A], source=(1, 0), epoch=1)))
    assert (duplicate, none) == (Verdict.DUPLICATE, None)
    assert (stale, none_either) == (Verdict.STALE, None)
    call = machine.next_call(0)
    assert call is not None
    assert len(call.append.tenant_items) == 1
    machine.answered(call)
    assert machine.acked == [mailbox_seq(1, 2)] * LANES


def test_the_fold_is_saved_once_w_passed_it() -> None:
    machine = fresh()
    dispatch = admit(machine, packed_dispatch([A]), members=False)
    for n in range(1, FOLD_SAVE_RECORDS + 5):
        admit(machine, packed_dispatch([B], source=(n, 0)))
    folds = []
    while (call := machine.next_call(0)) is not None:
        folds.append(call.append.fold)
        machine.answered(call)
    assert set(folds) == {None}, "lane 0 is still at the start"
    know(machine, dispatch)
    call = machine.next_call(0)
    assert call is not None
    assert call.append.fold_offset == FOLD_SAVE_RECORDS - 1
    assert call.append.fold is not None


def test_takeover_keeps_the_owner_of_every_offset_and_serves_when_caught_up() -> None:
    stored = ShardState(
        watermarks=LaneVector((mailbox_seq(1, 1), 0, mailbox_seq(1, 1), mailbox_seq(1, 1))),
        fold=b"", fold_offset=-1, stored_epoch=3,
    )  # fmt: skip
    machine = ShardMachine(0, 3, lane_count=LANES, chunk_size=3, entries_max=8)
    machine.open([boundary(1, 0), boundary(3, 3)], 3)
    done = ProgressRow(chunk_size=3, chunk_count=1, done=1)
    machine.restore(stored, {(0, 0): done}, 3, 0)
    assert machine.next_offset == 0
    admit(machine, packed_dispatch([A]))
    admit(machine, packed_dispatch([B], source=(1, 0)))
    assert not machine.serves(0)
    admit(machine, packed_dispatch([A], source=(2, 0)))
    admit(machine, packed_dispatch([A], source=(3, 0)))
    assert machine.refused == {}
    call = machine.next_call(0)
    assert call is not None
    assert [(item.lanes[0][0], item.mailbox_seq) for item in call.append.tenant_items] == [
        (1, mailbox_seq(1, 1)), (0, mailbox_seq(1, 2)), (0, mailbox_seq(3, 3)),
    ]  # fmt: skip
    machine.answered(call)
    assert machine.acked == [mailbox_seq(3, 3)] * LANES
    assert all(machine.serves(lane) for lane in range(LANES))


def test_a_lane_whose_w_passed_an_unfinished_chunk_is_refused_alone() -> None:
    at_1 = mailbox_seq(1, 1)
    stored = ShardState(watermarks=LaneVector((at_1,) * LANES), fold=b"", fold_offset=-1, stored_epoch=1)
    machine = ShardMachine(0, 1, lane_count=LANES, chunk_size=3, entries_max=8)
    machine.open([boundary(1, 0)], 2)
    machine.restore(stored, {(0, 0): ProgressRow(chunk_size=3, chunk_count=2, done=1)}, 2, 0)
    admit(machine, packed_dispatch([A]))
    admit(machine, packed_dispatch([A], source=(1, 0)))
    admit(machine, packed_dispatch([A, B], source=(2, 0)))
    assert machine.refused == {0: 0}, "W recomputed: before the first record"
    call = machine.next_call(0)
    assert call is not None
    assert [item.lanes for item in call.append.tenant_items] == [[(1, 1)]]
    machine.answered(call)
    assert machine.acked == [at_1, *(mailbox_seq(1, 2),) * (LANES - 1)]
    assert [machine.serves(lane) for lane in range(LANES)] == [False, True, True, True]


def test_a_reload_serves_a_lane_only_when_w_is_back_at_what_was_published() -> None:
    machine = fresh()
    admit(machine, packed_dispatch([A]))
    call = machine.next_call(0)
    assert call is not None
    machine.answered(call)
    published = machine.watermark(0)
    lost = ShardState(watermarks=LaneVector.zero(LANES), fold=b"", fold_offset=-1, stored_epoch=1)
    assert machine.restore(lost, {}, 1, 0) == []
    assert not machine.serves(0)
    admit(machine, packed_dispatch([A]))
    call = machine.next_call(0)
    assert call is not None
    assert not machine.serves(0)
    machine.answered(call)
    assert machine.serves(0)
    assert machine.watermark(0) == published


def test_a_reload_names_the_lanes_that_moved_without_an_answer() -> None:
    machine = fresh()
    moved = ShardState(watermarks=LaneVector((mailbox_seq(1, 0), 0, 0, 0)), fold=b"", fold_offset=-1, stored_epoch=1)
    assert machine.restore(moved, {(0, 0): ProgressRow(chunk_size=3, chunk_count=1, done=1)}, 1, 0) == [0]


def test_answers_and_members_of_an_earlier_life_are_ignored() -> None:
    machine = fresh()
    dispatch = admit(machine, packed_dispatch([A]), members=False)
    incarnation = machine.incarnation
    call = machine.next_call(0)
    assert call is not None
    zero = ShardState(watermarks=LaneVector.zero(LANES), fold=b"", fold_offset=-1, stored_epoch=1)
    machine.restore(zero, {}, 1, 0)
    assert machine.answered(call) == []
    machine.members_known(dispatch, LaneMembers(), incarnation, 0)
    assert machine.acked == [0] * LANES


def test_lag_is_the_age_of_what_is_ready_and_not_given() -> None:
    machine = fresh()
    dispatch = admit(machine, packed_dispatch([A]), members=False)
    assert machine.lag_ms(0, 1000) == 0
    know(machine, dispatch, now_ms=100)
    assert machine.lag_ms(0, 350) == 250
    machine.next_call(350)
    assert machine.lag_ms(0, 1000) == 0


# ------------------------------------------------------------------------------------------ walks with a store's model


class World:
    """A shard, its store and its log, under calls that fail before or after they happened, restarts and takeovers."""

    def __init__(self, seed: int, count: int) -> None:
        self.chance = random.Random(seed)
        self.store = MemoryMailboxStore(1, lambda: CREATED_AT_MS)
        self.log: list[bytes] = []
        self.expected: dict[tuple[str, int], int] = {}
        """(user, log offset) -> entries."""
        self.boundaries: list[EpochBoundary] = []
        self.epoch = 0
        self.floor = [0] * LANES
        self.late: list[AppendCall] = []
        self.waiting: list[Dispatch] = []
        self.in_flight: list[PlannedCall] = []
        self.troubles: Counter[str] = Counter()
        for n in range(count):
            users = self.chance.sample(USERS, self.chance.randint(1, len(USERS)))
            kinds = self.chance.choice([(1,), (1,), (1, 2, 3)])
            packed = packed_dispatch(users, source=(n, 0), lane_count=LANES, event_types=kinds)
            self.expected |= {(user, len(self.log)): len(kinds) for user in users}
            self.log.append(packed)
            if self.chance.random() < 0.2:
                self.log.append(packed)
        self.machine = self.take_over()

    def take_over(self) -> ShardMachine:
        """The next epoch begins somewhere behind what is materialized; the log may go on behind that."""
        self.epoch += 1
        state = run(self.store.open_shard(0, self.epoch, f"g{self.epoch}", LANES))
        top = max(state.watermarks.values)
        high = self.chance.randint(log_offset_of(top) + 1 if top else 0, len(self.log))
        high = max(high, self.boundaries[-1].start_offset if self.boundaries else 0)
        self.boundaries.append(boundary(self.epoch, high if self.boundaries else 0))
        self.machine = ShardMachine(
            0, self.epoch, lane_count=LANES, chunk_size=self.chance.randint(1, 4), entries_max=self.chance.randint(1, 9)
        )
        self.machine.open(list(self.boundaries), high)
        self._restore(state)
        return self.machine

    def reload(self) -> None:
        self._restore(run(self.store.load_shard(0, self.epoch)))

    def _restore(self, state: ShardState) -> None:
        progress = run(self.store.progress(0, state.fold_offset + 1, len(self.log)))
        self.machine.restore(state, progress, len(self.log), 0)
        self.waiting.clear()
        self.in_flight.clear()

    def check(self) -> None:
        """W never falls, and everything at or below the stored W is there, once."""
        stored = run(self.store.load_shard(0, self.epoch)).watermarks
        for lane in range(LANES):
            assert stored[lane] >= self.floor[lane]
            self.floor[lane] = stored[lane]
        found = self.entries()
        assert all(count == self.expected[key] for key, count in found.items())
        for user, offset in self.expected:
            if stored[lane_of(user)] and log_offset_of(stored[lane_of(user)]) >= offset:
                assert (user, offset) in found
        assert self.machine.refused == {}

    def entries(self) -> Counter[tuple[str, int]]:
        """(user, log offset) -> stored entries."""
        return Counter(
            (user, log_offset_of(row.mailbox_seq))
            for user in USERS
            for row in run(
                self.store.range_scan(
                    RangeRequest(
                        tenant_id=TENANT,
                        user_id=user,
                        shard=0,
                        shard_epoch=self.epoch,
                        lane=lane_of(user),
                        after_seq=0,
                        up_to_seq=(1 << 63) - 1,
                        max_items=10_000,
                        max_bytes=1 << 30,
                    )
                )
            ).rows
        )

    def step(self) -> None:
        """One thing happens."""
        chance, machine = self.chance.random(), self.machine
        if chance < 0.02:
            self.troubles["takeover"] += 1
            self.take_over()
        elif chance < 0.35 and machine.next_offset < len(self.log):
            self.waiting.append(admit(machine, self.log[machine.next_offset], members=self.chance.random() < 0.7))
        elif chance < 0.5 and self.waiting:
            know(machine, self.waiting.pop(self.chance.randrange(len(self.waiting))))
        elif chance < 0.75 and len(self.in_flight) < 2:
            call = machine.next_call(0)
            if call is not None:
                self.in_flight.append(call)
        elif self.in_flight:
            self._answer(self.in_flight.pop(0))
            self.check()

    def _answer(self, call: PlannedCall) -> None:
        fate = self.chance.random()
        if fate < 0.08:
            self.troubles["unanswered, executed late or never"] += 1
            self.late.append(call.append)
            self.reload()
            return
        result = run(self.store.append(call.append))
        assert result.nondeterministic == 0
        if fate < 0.16 or result.status is not AppendStatus.OK:
            self.troubles["executed, answer lost" if result.status is AppendStatus.OK else result.status.value] += 1
            self.reload()
            return
        self.machine.answered(call)
        if self.late and self.chance.random() < 0.3:
            try:
                status = run(self.store.append(self.late.pop())).status
                self.troubles[f"late call: {status.value}"] += 1
            except Fenced:
                self.troubles["late call: fenced"] += 1

    def finish(self) -> None:
        """Nothing fails any more."""
        for _ in range(1000):
            while self.machine.next_offset < len(self.log):
                self.waiting.append(admit(self.machine, self.log[self.machine.next_offset]))
            for dispatch in self.waiting:
                know(self.machine, dispatch)
            self.waiting.clear()
            call = self.in_flight.pop(0) if self.in_flight else self.machine.next_call(0)
            if call is None:
                return
            if run(self.store.append(call.append)).status is AppendStatus.OK:
                self.machine.answered(call)
            else:
                self.reload()
        raise AssertionError("the shard does not come to rest")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 14))
def test_no_order_of_answers_failures_and_takeovers_moves_w_past_an_unfinished_chunk(seed: int, count: int) -> None:
    world = World(seed, count)
    for _ in range(150):
        world.step()
    world.finish()
    world.check()
    assert {log_offset_of(value) for value in world.machine.acked} == {len(world.log) - 1}
    assert world.entries() == world.expected
    assert all(world.machine.serves(lane) for lane in range(LANES))


def test_the_walks_meet_every_kind_of_trouble() -> None:
    troubles: Counter[str] = Counter()
    for seed in range(240):
        world = World(seed, 10)
        for _ in range(150):
            world.step()
        troubles += world.troubles
    assert {"takeover", "unanswered, executed late or never", "executed, answer lost", "w_moved"} <= set(troubles)
    assert {"late call: ok", "late call: w_moved", "late call: fenced"} <= set(troubles)


@pytest.mark.parametrize("lane", range(LANES))
def test_every_lane_of_the_walks_has_users(lane: int) -> None:
    assert any(lane_of(user) == lane for user in USERS)


def test_an_epoch_below_what_is_stored_is_seen_as_going_back() -> None:
    stored = ShardState(watermarks=LaneVector((mailbox_seq(3, 0),) * LANES), fold=b"", fold_offset=-1, stored_epoch=2)
    assert fresh(2, stored=stored, high=1, start=1).regressions == 1
    assert fresh(4, stored=stored, high=1, start=1).regressions == 0
