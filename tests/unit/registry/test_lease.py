"""The lease machine: laws of its table, and a whole pool on a virtual clock with lost calls, pauses and fences."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from itertools import product
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qim.config.parameters import default_parameters
from qim.core.seq import SHARD_EPOCH_MAX
from qim.registry.api import Answer, Beat, Grant, LeaseKind
from qim.registry.lease import (
    TABLE,
    Act,
    Action,
    Ask,
    Close,
    Drop,
    Event,
    LeaseMachine,
    LeaseTimes,
    Open,
    Release,
    SendBeat,
    State,
    owner_of,
)
from qim.registry.memory import MemoryShardRegistry

TIMES = LeaseTimes.of(default_parameters())
KIND = LeaseKind.MAILBOX_SHARD
IDS = 4
SERVING = frozenset({State.OPENING, State.HELD, State.CLOSING})
_T = TypeVar("_T")


def test_the_times_are_those_of_the_contract() -> None:
    assert (TIMES.renew_ms, TIMES.self_fence_ms, TIMES.ttl_ms, TIMES.failover_wait_ms) == (5000, 12_000, 15_000, 25_000)
    assert TIMES.wait_ms(LeaseKind.CONVERSATION_BUCKET) == 25_000
    assert TIMES.wait_ms(LeaseKind.MAILBOX_SHARD) == TIMES.wait_ms(LeaseKind.OUTBOX_PARTITION) == 15_000


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_laws_of_the_table(state: State, event: Event) -> None:
    after, act = TABLE.get((state, event), (state, None))
    if event is Event.LOST and state is not State.RELEASING:
        assert after is State.FREE, "nothing is kept of a lease that is gone"
    if event is Event.FENCED and state in SERVING:
        assert after is State.BLOCKED
    assert (act is Act.DROP) == (state in SERVING and after not in SERVING and event in (Event.LOST, Event.FENCED))
    assert (act is Act.RELEASE) == (after is State.RELEASING and state is not State.RELEASING)
    assert (act is Act.ASK) == (state is State.FREE and after is State.ASKED)
    if after is State.OPENING and state is not State.OPENING:
        assert (state, event, act) == (State.ASKED, Event.GRANTED, Act.OPEN), "never served without a grant"


def test_the_share_is_id_mod_n_of_the_sorted_members_but_for_pins_to_live_ones() -> None:
    owners = ("w-0", "w-1", "w-64")
    assert [owner_of(i, owners, {}) for i in range(6)] == ["w-0", "w-1", "w-64"] * 2
    assert owner_of(0, owners, {0: "w-64", 1: "w-9"}) == "w-64"
    assert owner_of(1, owners, {1: "w-9"}) == "w-1"


# ----------------------------------------------------------------------------------------------------------- one member


def joined(now_ms: float = 0.0, count: int = IDS) -> LeaseMachine:
    """A member that is alone and holds everything under epoch 1."""
    machine = LeaseMachine(KIND, count, "m-0", TIMES)
    machine.tick(now_ms)
    (asked,) = machine.beaten(1, Beat(("m-0",), {}, frozenset()), now_ms)
    assert isinstance(asked, Ask)
    opened = machine.answered(1, {shard_id: Answer(1) for shard_id in asked.shard_ids}, now_ms)
    assert [action.shard_id for action in opened if isinstance(action, Open)] == list(range(count))
    for shard_id in range(count):
        machine.opened(shard_id, 1, now_ms)
    assert machine.settled()
    return machine


def test_a_failed_renewal_is_tried_again_every_second_until_the_self_fence() -> None:
    machine = joined()
    sent_ms = []
    now_ms = 0.0
    while machine.joined():
        now_ms = machine.due_ms()
        actions = machine.tick(now_ms)
        if machine.joined() and any(isinstance(action, SendBeat) for action in actions):
            sent_ms.append(now_ms)
            machine.beat_failed(now_ms)
    assert sent_ms == [5000, 6000, 7000, 8000, 9000, 10_000, 11_000]
    assert now_ms == 12_000
    assert [action.shard_id for action in actions if isinstance(action, Drop)] == list(range(IDS))
    assert not machine.settled()
    assert machine.incarnation == 2


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    machine = joined()
    machine.tick(5000)
    machine.beaten(1, Beat(("m-0",), {}, frozenset()), 9000)
    assert machine.due_ms() == 10_000
    machine.tick(10_000)
    assert any(isinstance(action, Drop) for action in machine.tick(17_000))


def test_an_answer_that_comes_after_the_self_fence_changes_nothing() -> None:
    machine = joined()
    machine.tick(5000)
    machine.tick(12_000)
    actions = machine.beaten(1, Beat(("m-0",), {}, frozenset()), 12_001)
    assert not machine.joined()
    assert [action for action in actions if isinstance(action, SendBeat)] == [SendBeat(2, ())]
    assert machine.answered(1, {0: Answer(7)}, 12_002) == []
    assert machine.state(0) is State.FREE


def test_a_fenced_id_goes_alone_and_comes_back_when_the_registry_agrees() -> None:
    machine = joined()
    actions = machine.fenced(2, 1, 100)
    assert Drop(2) in actions
    assert SendBeat(1, (0, 1, 2, 3)) in actions, "the registry is asked at once"
    assert machine.held() == [0, 1, 3]
    assert not machine.settled()
    actions = machine.beaten(1, Beat(("m-0",), {}, frozenset({2})), 101)
    assert Ask(1, (2,)) in actions
    machine.answered(1, {2: Answer(3)}, 102)
    machine.opened(2, 3, 103)
    assert machine.settled()


def test_an_id_the_registry_says_is_ours_while_a_store_denies_it_stays_blocked() -> None:
    """A registry that was lost, or came back older than the stores: nothing is served, nothing is forced."""
    machine = joined()
    machine.fenced(2, 1, 100)
    for now_ms in (101, 5101, 10_101):
        actions = machine.beaten(1, Beat(("m-0",), {}, frozenset()), now_ms) + machine.tick(machine.due_ms())
        assert not any(isinstance(action, Ask | Open) for action in actions)
        assert machine.state(2) is State.BLOCKED
    assert not machine.settled()


def test_reports_of_an_older_epoch_are_ignored() -> None:
    machine = joined()
    machine.fenced(1, 1, 0)
    machine.beaten(1, Beat(("m-0",), {}, frozenset({1})), 1)
    machine.answered(1, {1: Answer(5)}, 2)
    assert machine.opened(1, 1, 3) == []
    assert machine.fenced(1, 1, 3) == []
    assert machine.state(1) is State.OPENING


def test_what_belongs_to_another_is_drained_and_given_back() -> None:
    machine = joined()
    machine.tick(5000)
    actions = machine.beaten(1, Beat(("m-0", "m-1"), {}, frozenset()), 5000)
    assert actions == [Close(1), Close(3)]
    assert machine.closed(1, 1, 5001) == [Release(1, (1,))]
    machine.released(1, (1,), 5002)
    assert machine.state(1) is State.FREE
    machine.closed(3, 1, 5003)
    assert machine.release_failed(1, (3,), 5004) == []
    assert machine.tick(6004) == [Release(1, (3,))]
    assert machine.held() == [0, 2]


def test_used_up_epochs_are_not_asked_for_again_and_again() -> None:
    machine = LeaseMachine(LeaseKind.CONVERSATION_BUCKET, 1, "m-0", TIMES)
    machine.tick(0)
    machine.beaten(1, Beat(("m-0",), {}, frozenset()), 0)
    assert machine.answered(1, {0: Answer(0, -1)}, 0) == []
    asked = [action for now_ms in range(0, 60_000, 500) for action in _asks(machine, now_ms)]
    assert asked == []
    assert not machine.settled()


def test_a_mailbox_shard_whose_epochs_are_used_up_is_opened_under_the_last_one() -> None:
    machine = LeaseMachine(LeaseKind.MAILBOX_SHARD, 1, "m-0", TIMES)
    machine.tick(0)
    machine.beaten(1, Beat(("m-0",), {}, frozenset()), 0)
    assert machine.answered(1, {0: Answer(0, -1)}, 0) == [Open(1, 0, SHARD_EPOCH_MAX)]
    machine.opened(0, SHARD_EPOCH_MAX, 1)
    assert machine.settled()


def _asks(machine: LeaseMachine, now_ms: float) -> list[Action]:
    actions = machine.tick(now_ms)
    if any(isinstance(action, SendBeat) for action in actions):
        actions += machine.beaten(1, Beat(("m-0",), {}, frozenset()), now_ms)
    return [action for action in actions if isinstance(action, Ask)]


def test_leaving_drains_everything_and_asks_for_nothing() -> None:
    machine = joined()
    assert machine.leave(1) == [Close(0), Close(1), Close(2), Close(3)]
    for shard_id in range(IDS):
        machine.closed(shard_id, 1, 2)
    assert not machine.empty()
    machine.released(1, range(IDS), 3)
    assert machine.empty()
    machine.tick(5000)
    assert machine.beaten(1, Beat(("m-0",), {}, frozenset()), 5000) == []
    assert machine.empty()


# --------------------------------------------------------------------------------------------------------- a whole pool


def run_now(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("the model does not wait")


class Member:
    """A machine, its calls on the way in order, and what it serves under which epoch."""

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool = pool
        self.name = name
        self.machine = LeaseMachine(pool.kind, IDS, name, TIMES)
        self.calls: deque[Action] = deque()
        self.paused = False
        self.serving: dict[int, int] = {}

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Drop):
                self.serving.pop(action.shard_id, None)
            else:
                if isinstance(action, Open):
                    self.pool.granted(self, action)
                    self.serving[action.shard_id] = action.epoch
                self.calls.append(action)

    def tick(self) -> None:
        if not self.paused:
            self.take(self.machine.tick(self.pool.now_ms))

    def call(self, outcome: str) -> None:
        """The oldest call is done, is lost on its way, or its answer is."""
        if not self.calls or self.paused:
            return
        action, machine, now_ms = self.calls.popleft(), self.machine, self.pool.now_ms
        if isinstance(action, Open):
            self.take(machine.opened(action.shard_id, action.epoch, now_ms))
        elif isinstance(action, Close):
            epoch = self.serving.get(action.shard_id)
            if epoch is not None:
                if machine.state(action.shard_id) is State.CLOSING:
                    del self.serving[action.shard_id]
                self.take(machine.closed(action.shard_id, epoch, now_ms))
        else:
            self.take(self._registry(action, outcome))

    def _registry(self, action: Action, outcome: str) -> list[Action]:
        machine, now_ms, registry, kind = self.machine, self.pool.now_ms, self.pool.registry, self.pool.kind
        assert isinstance(action, SendBeat | Ask | Release)
        grant_id = f"{self.name}.{action.incarnation}"
        done, answered = outcome != "lost", outcome == "done"
        if isinstance(action, SendBeat):
            if done:
                beat = run_now(registry.beat(kind, self.name, "p", grant_id, action.held, ttl_ms=TIMES.ttl_ms))
            return machine.beaten(action.incarnation, beat, now_ms) if answered else machine.beat_failed(now_ms)
        if isinstance(action, Ask):
            if done:
                wait_ms = TIMES.wait_ms(kind)
                answers = run_now(registry.acquire(kind, action.shard_ids, self.name, grant_id, wait_ms=wait_ms))
            if answered:
                return machine.answered(action.incarnation, answers, now_ms)
            return machine.ask_failed(action.incarnation, action.shard_ids, now_ms)
        if done:
            run_now(registry.release(kind, action.shard_ids, grant_id))
        if answered:
            return machine.released(action.incarnation, action.shard_ids, now_ms)
        return machine.release_failed(action.incarnation, action.shard_ids, now_ms)


class Pool:
    """Three members and the registry."""

    def __init__(self, kind: LeaseKind) -> None:
        self.kind = kind
        self.now_ms = 0.0
        self.registry = MemoryShardRegistry(lambda: self.now_ms)
        self.members = [Member(self, f"m-{i}") for i in range(3)]
        self.epochs: dict[tuple[int, int], str] = {}

    def granted(self, member: Member, action: Open) -> None:
        key = (action.shard_id, action.epoch)
        owner = f"{member.name}.{action.incarnation}"
        assert self.epochs.setdefault(key, owner) == owner, "an epoch has one owner, and one incarnation of it"
        assert action.epoch <= SHARD_EPOCH_MAX

    def check(self) -> None:
        """Of the members that look at their clock at most one serves an id."""
        for shard_id in range(IDS):
            serving = [member.name for member in self.members if shard_id in member.serving and not member.paused]
            assert len(serving) <= 1, f"{serving} serve {shard_id}"

    def advance(self, ms: float) -> None:
        """Time passes; whoever is awake meets each of its deadlines."""
        end_ms = self.now_ms + ms
        while True:
            due = [member.machine.due_ms() for member in self.members if not member.paused]
            step_ms = min([at_ms for at_ms in due if at_ms > self.now_ms], default=end_ms)
            if step_ms >= end_ms:
                break
            self.now_ms = step_ms
            for member in self.members:
                member.tick()
            self.check()
        self.now_ms = end_ms
        for member in self.members:
            member.tick()
        self.check()

    def settle(self) -> None:
        for member in self.members:
            member.paused = False
        for _ in range(400):
            self.advance(250)
            for member in self.members:
                for _ in range(len(member.calls)):
                    member.call("done")
                    self.check()


_steps = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 2), st.sampled_from(["done", "done", "done", "lost", "unanswered"])),
    st.tuples(st.just("advance"), st.sampled_from([1, 50, 400, 1500, 4000, 6000]), st.just("")),
    st.tuples(st.just("pause"), st.integers(0, 2), st.just("")),
    st.tuples(st.just("wake"), st.integers(0, 2), st.just("")),
    st.tuples(st.just("poke"), st.integers(0, 2), st.just("")),
    st.tuples(st.just("pin"), st.integers(0, IDS - 1), st.sampled_from(["m-0", "m-1", "m-2", "m-9", ""])),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([LeaseKind.MAILBOX_SHARD, LeaseKind.CONVERSATION_BUCKET]), st.lists(_steps, max_size=60))
def test_no_two_members_serve_an_id_and_all_is_shared_in_the_end(kind: LeaseKind, steps: list[Any]) -> None:
    pool = Pool(kind)
    for what, first, second in steps:
        if what == "advance":
            pool.advance(first)
        elif what == "pin":
            run_now(pool.registry.pin(kind, first, second))
        else:
            member = pool.members[first]
            if what == "call":
                member.call(second)
            elif what == "pause":
                member.paused = True
            elif what == "wake":
                member.paused = False
                member.tick()
            elif not member.paused:
                member.take(member.machine.poke(pool.now_ms))
        pool.check()
    pool.settle()
    owners = tuple(member.name for member in pool.members)
    pins = pool.registry._pins[kind]
    for shard_id in range(IDS):
        holders = [member.name for member in pool.members if shard_id in member.machine.held()]
        assert holders == [owner_of(shard_id, owners, pins)]
    assert all(member.machine.settled() for member in pool.members)


def test_a_member_that_says_nothing_loses_its_share_after_the_ttl_a_bucket_after_the_wait() -> None:
    for kind, wait_ms in ((LeaseKind.MAILBOX_SHARD, 15_000), (LeaseKind.CONVERSATION_BUCKET, 25_000)):
        pool = Pool(kind)
        pool.settle()
        silent = pool.members[0]
        last_beat_ms = pool.registry._beats[kind]["m-0.1"].at_ms
        silent.paused = True
        taken_ms = 0.0
        while not taken_ms:
            pool.advance(50)
            for member in pool.members[1:]:
                for _ in range(len(member.calls)):
                    member.call("done")
            if all(any(i in m.serving for m in pool.members[1:]) for i in range(IDS)):
                taken_ms = pool.now_ms
        assert wait_ms <= taken_ms - last_beat_ms <= wait_ms + TIMES.renew_ms + 300
        silent.paused = False
        silent.tick()
        assert silent.serving == {}, "it fences itself before it does anything"


def test_a_grant_above_the_last_epoch_is_refused() -> None:
    registry = MemoryShardRegistry()
    registry._leases[KIND][0] = Grant(KIND, 0, "", SHARD_EPOCH_MAX, "")
    assert run_now(registry.acquire(KIND, [0, 1], "m-0", "g", wait_ms=1)) == {0: Answer(0, -1), 1: Answer(1)}


def test_what_it_holds_unknowingly_and_does_not_want_is_given_back() -> None:
    """A question that was executed late: the id must not stay with somebody who believes it is another's."""
    machine = LeaseMachine(LeaseKind.CONVERSATION_BUCKET, 4, "m-0", TIMES)
    machine.tick(0)
    actions = machine.beaten(1, Beat(("m-0", "m-1"), {}, frozenset(), frozenset({0, 1, 3})), 1)
    assert Release(1, (1, 3)) in actions
    assert [action.shard_ids for action in actions if isinstance(action, Ask)] == [(0, 2)]
