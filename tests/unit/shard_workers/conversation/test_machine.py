"""The order of one bucket, step by step: what goes in, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qim.config.parameters import default_parameters
from qim.core.hlc import HybridClock
from qim.errors import Detail, ErrorCode
from qim.protocol.qim_pb2 import MESSAGE_TYPE_TEXT, MentionTargets, SendMessage
from qim.shard_workers.conversation import machine as machine_module
from qim.shard_workers.conversation.admission import DENIED, WriterAdmission
from qim.shard_workers.conversation.machine import (
    ATTEMPTS_MAX,
    BACKOFF_INITIAL_MS,
    LANE_SHARE_MAX,
    QUEUE_MAX,
    Acknowledge,
    Action,
    AdoptDek,
    BucketMachine,
    CommitBatch,
    CreateGroup,
    LaneState,
    LoadGroup,
    Prepare,
    PumpAt,
    Refuse,
    RefuseUnlessCommitted,
    Unchanged,
)
from qim.shard_workers.conversation.membership import GroupContext, Placement
from qim.shard_workers.conversation.submission import Change, Create, Send, Submission
from qim.stores.api import CommitOutcome, CommitStatus, GroupMeta, MembershipRewrite, SnapshotRef

UNIX_MS = 1_800_000_000_000
DM = "dm:ann:bob"
GROUP = "g:choir"
LIMITS = default_parameters()
A = TypeVar("A")


def only(actions: Sequence[Action], kind: type[A]) -> A:
    """The one action there is, of this kind."""
    assert len(actions) == 1, actions
    (action,) = actions
    assert isinstance(action, kind), action
    return action


def committed(seq: int) -> CommitOutcome:
    return CommitOutcome(
        status=CommitStatus.COMMITTED, message_id=b"\x01" * 16, conversation_seq=seq, outbox_offset=seq
    )


def outcome(status: CommitStatus, **fields: Any) -> CommitOutcome:
    return CommitOutcome(status=status, **fields)


def meta(version: int = 1, members: int = 3) -> GroupMeta:
    return GroupMeta(
        membership_version=version, member_count=members, next_slot=members, creator_id="ann", create_digest=bytes(16)
    )


def context(version: int = 1, members: int = 3) -> GroupContext:
    return GroupContext(meta(version, members), {0: SnapshotRef(1, members, 1)})


class Bench:
    """A machine on a clock that moves when told."""

    def __init__(self) -> None:
        self.now_ms = 1000.0
        self.unix_ms = UNIX_MS
        clock = HybridClock(writer_id=7, regression_reject_ms=LIMITS.clock_regression_reject_ms)
        self.machine = BucketMachine(7, clock, WriterAdmission(LIMITS, Placement(16, 64)), LIMITS)
        self._count = 0

    def send(self, conversation: str = DM, sender: str = "ann", **fields: Any) -> Send:
        self._count += 1
        message = SendMessage(
            request_id=self._count, client_message_id=f"m{self._count}", conversation_id=conversation,
            message_type=MESSAGE_TYPE_TEXT, payload=b"hello", **fields,
        )  # fmt: skip
        return Send("t", sender, "phone", message, bytes(16), expires_at_ms=self.now_ms + 2000, limits_lifted=True)

    def change(self, *users: str, joining: bool = False, by_subject: bool = True) -> Change:
        self._count += 1
        return Change(
            "t", GROUP, users[0], f"c{self._count}", bytes(16), joining=joining, user_ids=users,
            by_subject=by_subject, expires_at_ms=self.now_ms + 2000,
        )  # fmt: skip

    def create(self, *members: str) -> Create:
        return Create("t", GROUP, members[0], sorted(members), expires_at_ms=self.now_ms + 2000)

    def submit(self, *submissions: Submission) -> list[Action]:
        actions: list[Action] = []
        for submission in submissions:
            actions += self.machine.submit(submission, self.now_ms, self.unix_ms)
        return actions

    def pump(self) -> list[Action]:
        return self.machine.pump(self.now_ms, self.unix_ms)

    def batch(self) -> list[Send | Change]:
        return only(self.pump(), CommitBatch).submissions

    def idle(self) -> bool:
        """True when everything accepted was answered."""
        lanes = self.machine._lanes.values()
        return not self.machine._in_call and all(lane.state is LaneState.IDLE for lane in lanes)

    def load(self, loaded: GroupContext) -> list[Action]:
        return self.machine.group_loaded(("t", GROUP), loaded, self.now_ms, self.unix_ms)

    def group_ready(self, *senders: str, loaded: GroupContext | None = None) -> GroupContext:
        """The group is loaded and these users are known as members."""
        made = loaded or context()
        probe = self.send(GROUP, senders[0])
        only(self.submit(probe), LoadGroup)
        assert self.load(made) == []
        only(self.pump(), Prepare)
        assert self.machine.send_prepared(probe, dict.fromkeys(senders, True), "") == []
        assert self.batch() == [probe]
        only(self.machine.committed([committed(1)]), Acknowledge)
        return made


@pytest.fixture
def bench() -> Bench:
    return Bench()


def rewrite(version: int, *, joining: Sequence[str] = (), leaving: Sequence[str] = (), members: int = 3) -> Any:
    return MembershipRewrite(
        group_id="choir", new_version=version, member_count=members,
        joining={user: 10 + index for index, user in enumerate(joining)}, joining_shards=dict.fromkeys(joining, 0),
        leaving=tuple(leaving), next_slot=12, snapshots={}, index={0: SnapshotRef(version, members, 1)},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- single chats


def test_a_send_is_committed_and_acknowledged(bench: Bench) -> None:
    send = bench.send()
    assert bench.submit(send) == []
    assert bench.batch() == [send]
    assert send.membership_version == 0
    assert send.member_count == 2
    ack = only(bench.machine.committed([committed(5)]), Acknowledge)
    assert (ack.submission, ack.conversation_seq, ack.duplicate) == (send, 5, False)
    assert bench.pump() == []
    assert bench.idle()


def test_one_call_in_flight_and_the_next_carries_what_arrived(bench: Bench) -> None:
    first, second, other = bench.send(), bench.send(), bench.send("dm:ann:cid")
    bench.submit(first)
    assert bench.batch() == [first]
    bench.submit(second, other)
    assert bench.pump() == []
    bench.machine.committed([committed(1)])
    assert bench.batch() == [other, second], "who was just served comes last"


def test_ids_ascend_in_the_order_of_the_call(bench: Bench) -> None:
    bench.submit(*(bench.send(f"dm:ann:u{index}") for index in range(10)))
    ids = [submission.message_id for submission in bench.batch()]
    assert ids == sorted(set(ids))


def test_a_call_is_bounded_and_a_busy_conversation_leaves_room(bench: Bench) -> None:
    bench.submit(*(bench.send() for _ in range(100)), *(bench.send(f"dm:ann:u{index}") for index in range(100)))
    batch = bench.batch()
    assert len(batch) == LIMITS.commit_batch_max
    assert sum(submission.conversation_id == DM for submission in batch) == LANE_SHARE_MAX


def test_a_full_queue_answers_rate_limited(bench: Bench) -> None:
    bench.submit(*(bench.send() for _ in range(QUEUE_MAX)))
    refused = only(bench.submit(bench.send()), Refuse)
    assert refused.refusal.code is ErrorCode.RATE_LIMITED
    assert refused.refusal.retry_after_ms > 0
    bench.batch()
    assert bench.submit(bench.send()) == []


def test_what_nobody_waits_for_is_not_committed(bench: Bench) -> None:
    old, fresh = bench.send(), bench.send()
    fresh.expires_at_ms += 5000
    bench.submit(old, fresh)
    bench.now_ms += 2000
    refused, commit = bench.pump()
    assert isinstance(refused, Refuse)
    assert refused.submission is old
    assert refused.refusal.code is ErrorCode.REGION_FAILOVER
    assert isinstance(commit, CommitBatch)
    assert commit.submissions == [fresh]


def test_a_refused_predecessor_sends_its_followers_back_in_order(bench: Bench) -> None:
    sends = [bench.send() for _ in range(4)]
    other = bench.send("dm:ann:cid")
    bench.submit(*sends, other)
    assert bench.batch() == [*sends, other]
    late = bench.send()
    bench.submit(late)
    unjudged = outcome(CommitStatus.UNJUDGED)
    actions = bench.machine.committed(
        [committed(1), outcome(CommitStatus.OUT_OF_ORDER), unjudged, unjudged, committed(1)]
    )
    refusals = [action for action in actions if isinstance(action, Refuse)]
    assert [action.submission for action in refusals] == [sends[1]]
    assert refusals[0].refusal.code is ErrorCode.RATE_LIMITED
    assert refusals[0].refusal.detail == Detail.OUT_OF_ORDER
    assert 0 < refusals[0].refusal.retry_after_ms <= 500
    assert bench.batch() == [*sends[2:], late]


def test_a_duplicate_gets_the_coordinates_of_the_first_commit(bench: Bench) -> None:
    bench.submit(bench.send())
    bench.batch()
    first = outcome(CommitStatus.DUPLICATE, message_id=b"\x09" * 16, conversation_seq=3)
    ack = only(bench.machine.committed([first]), Acknowledge)
    assert (ack.message_id, ack.conversation_seq, ack.duplicate) == (b"\x09" * 16, 3, True)


def test_a_reused_id_is_a_final_refusal(bench: Bench) -> None:
    bench.submit(bench.send())
    bench.batch()
    refused = only(bench.machine.committed([outcome(CommitStatus.REUSED)]), Refuse)
    assert refused.refusal.code is ErrorCode.PERMISSION_DENIED
    assert refused.refusal.detail == Detail.CLIENT_MESSAGE_ID_REUSED


def test_an_id_that_is_not_greater_is_retried_above_the_stored_one(bench: Bench) -> None:
    send = bench.send()
    bench.submit(send)
    bench.batch()
    first_id = send.message_id
    ahead = HybridClock(writer_id=7, regression_reject_ms=5000)
    stored = ahead.allocate(UNIX_MS + 3000)
    assert bench.machine.committed([outcome(CommitStatus.ID_NOT_GREATER, message_id=stored)]) == []
    assert bench.batch() == [send]
    assert send.message_id > stored > first_id


def test_another_dek_is_adopted_before_the_retry(bench: Bench) -> None:
    send, follower = bench.send(), bench.send()
    bench.submit(send, follower)
    bench.batch()
    mismatch = outcome(CommitStatus.DEK_MISMATCH, dek_id="d1", wrapped_dek=b"w")
    adopted = only(bench.machine.committed([mismatch, outcome(CommitStatus.UNJUDGED)]), AdoptDek)
    assert adopted == AdoptDek(("t", DM), "d1", b"w")
    assert bench.batch() == [send, follower]


def test_a_store_that_contradicts_itself_is_not_asked_for_ever(bench: Bench) -> None:
    bench.submit(bench.send())
    mismatch = outcome(CommitStatus.DEK_MISMATCH, dek_id="d1", wrapped_dek=b"w")
    for _ in range(ATTEMPTS_MAX):
        bench.batch()
        bench.machine.committed([mismatch])
    bench.batch()
    refused = only(bench.machine.committed([mismatch]), Refuse)
    assert refused.refusal.code is ErrorCode.REGION_FAILOVER


def test_an_unknown_commit_is_sent_again_after_a_rest_under_new_ids(bench: Bench) -> None:
    sends = [bench.send(), bench.send()]
    bench.submit(*sends)
    bench.batch()
    first_ids = [send.message_id for send in sends]
    wake = only(bench.machine.commit_unknown(bench.now_ms), PumpAt)
    assert wake.at_ms == bench.now_ms + BACKOFF_INITIAL_MS
    assert bench.pump() == []
    bench.now_ms = wake.at_ms
    assert bench.batch() == sends
    assert min(send.message_id for send in sends) > max(first_ids)
    longer = only(bench.machine.commit_unknown(bench.now_ms), PumpAt)
    assert longer.at_ms == bench.now_ms + 2 * BACKOFF_INITIAL_MS


def test_a_refused_call_refuses_all_of_it(bench: Bench) -> None:
    sends = [bench.send(), bench.send()]
    bench.submit(*sends)
    bench.batch()
    refusals = bench.machine.commit_refused(DENIED)
    assert [action.submission for action in refusals if isinstance(action, Refuse)] == sends
    assert bench.idle()


def test_a_clock_that_went_back_too_far_refuses(bench: Bench) -> None:
    bench.submit(bench.send())
    bench.batch()
    bench.machine.committed([committed(1)])
    bench.unix_ms -= 60_000
    bench.submit(bench.send())
    refused = only(bench.pump(), Refuse)
    assert refused.refusal.code is ErrorCode.CLOCK_UNSAFE
    assert refused.refusal.retry_after_ms > 0
    assert bench.idle()


def test_a_reply_waits_for_the_sender_of_its_target_and_others_do_not(bench: Bench) -> None:
    reply, other = bench.send(reply_to_conversation_seq=3), bench.send("dm:ann:cid")
    bench.submit(reply, other)
    prepare, commit = bench.pump()
    assert prepare == Prepare(reply, None, ())
    assert isinstance(commit, CommitBatch)
    assert commit.submissions == [other]
    bench.machine.committed([committed(1)])
    assert bench.machine.send_prepared(reply, {}, "bob") == []
    assert bench.batch() == [reply]
    assert reply.reply_to_user_id == "bob"


def test_forgotten_lanes_are_idle_ones(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "LANES_MAX", 2)
    busy = bench.send("dm:ann:u0")
    bench.submit(busy)
    for index in range(1, 6):
        bench.submit(bench.send(f"dm:ann:u{index}"))
    assert len(bench.batch()) == 6
    bench.machine.committed([committed(1)] * 6)
    bench.submit(bench.send("dm:ann:u9"))
    assert len(bench.batch()) == 1


# -------------------------------------------------------------------------------------------------------- groups


def test_a_group_is_loaded_and_its_senders_looked_up_once(bench: Bench) -> None:
    first, second, again = bench.send(GROUP, "ann"), bench.send(GROUP, "bob"), bench.send(GROUP, "ann")
    assert only(bench.submit(first, second, again), LoadGroup).key == ("t", GROUP)
    loaded = context(version=4)
    assert bench.load(loaded) == []
    prepare = only(bench.pump(), Prepare)
    assert (prepare.submission, prepare.senders) == (first, ("ann", "bob"))
    assert bench.machine.send_prepared(first, {"ann": True, "bob": True}, "") == []
    assert bench.batch() == [first, second, again]
    assert {submission.membership_version for submission in (first, second, again)} == {4}
    assert first.member_count == 3


def test_who_is_no_member_is_looked_up_in_dedup_before_the_refusal(bench: Bench) -> None:
    stranger, member = bench.send(GROUP, "eve"), bench.send(GROUP, "ann")
    bench.submit(stranger, member)
    bench.load(context())
    bench.pump()
    bench.machine.send_prepared(stranger, {"eve": False, "ann": True}, "")
    denied, commit = bench.pump()
    assert denied == RefuseUnlessCommitted(stranger, DENIED)
    assert isinstance(commit, CommitBatch)
    assert commit.submissions == [member]


def test_no_group_is_answered_like_no_right(bench: Bench) -> None:
    send, leave = bench.send(GROUP), bench.change("ann")
    bench.submit(send, leave)
    bench.load(GroupContext(None, {}))
    assert bench.pump() == [Refuse(send, DENIED), Refuse(leave, DENIED)]
    assert bench.idle()


def test_a_failed_read_refuses_the_lane_and_the_next_request_reads_again(bench: Bench) -> None:
    sends = [bench.send(GROUP), bench.send(GROUP)]
    bench.submit(*sends)
    refusals = bench.machine.load_failed(("t", GROUP))
    assert [action.refusal.code for action in refusals if isinstance(action, Refuse)] == [ErrorCode.REGION_FAILOVER] * 2
    only(bench.submit(bench.send(GROUP)), LoadGroup)


def test_a_stale_version_is_loaded_again_and_keeps_the_order(bench: Bench) -> None:
    bench.group_ready("ann", "bob")
    sends = [bench.send(GROUP, "ann"), bench.send(GROUP, "bob")]
    bench.submit(*sends)
    assert bench.batch() == sends
    late = bench.send(GROUP, "ann")
    bench.submit(late)
    stale = outcome(CommitStatus.STALE_VERSION, membership_version=2)
    only(bench.machine.committed([stale, outcome(CommitStatus.UNJUDGED)]), LoadGroup)
    bench.load(context(version=2))
    only(bench.pump(), Prepare)
    bench.machine.send_prepared(sends[0], {"ann": True, "bob": True}, "")
    assert bench.batch() == [*sends, late]
    assert {send.membership_version for send in sends} == {2}


def test_a_change_is_planned_alone_and_bars_what_follows(bench: Bench) -> None:
    loaded = bench.group_ready("ann", "bob")
    before, leave, after = bench.send(GROUP, "bob"), bench.change("bob"), bench.send(GROUP, "bob")
    bench.submit(before, leave, after)
    assert bench.batch() == [before]
    bench.machine.committed([committed(2)])
    assert only(bench.pump(), Prepare) == Prepare(leave, loaded, ())
    assert bench.machine.change_prepared(leave, rewrite(2, leaving=["bob"], members=2)) == []
    assert bench.batch() == [leave]
    assert (leave.membership_version, leave.member_count) == (1, 2)
    only(bench.machine.committed([committed(3)]), Acknowledge)
    assert loaded.version == 2
    assert bench.pump() == [RefuseUnlessCommitted(after, DENIED)]


def test_who_joined_may_send_at_once_under_the_new_version(bench: Bench) -> None:
    bench.group_ready("ann")
    add, hello = bench.change("cid", joining=True, by_subject=False), bench.send(GROUP, "cid")
    bench.submit(add, hello)
    bench.pump()
    bench.machine.change_prepared(add, rewrite(2, joining=["cid"], members=4))
    assert bench.batch() == [add]
    bench.machine.committed([committed(2)])
    assert bench.batch() == [hello]
    assert (hello.membership_version, hello.member_count) == (2, 4)


def test_a_change_that_changes_nothing_commits_nothing(bench: Bench) -> None:
    loaded = bench.group_ready("ann")
    add = bench.change("ann", joining=True, by_subject=False)
    bench.submit(add)
    bench.pump()
    assert bench.machine.change_prepared(add, None) == [Unchanged(add, loaded)]
    assert bench.pump() == []
    assert bench.idle()


def test_a_refused_plan_is_the_answer(bench: Bench) -> None:
    bench.group_ready("ann")
    leave = bench.change("eve")
    bench.submit(leave)
    bench.pump()
    assert bench.machine.change_prepared(leave, DENIED) == [Refuse(leave, DENIED)]


def test_a_change_whose_fate_is_unknown_is_asked_again_by_its_requester(bench: Bench) -> None:
    bench.group_ready("ann", "bob")
    leave, send = bench.change("bob"), bench.send(GROUP, "ann")
    bench.submit(leave, send)
    bench.pump()
    bench.machine.change_prepared(leave, rewrite(2, leaving=["bob"]))
    bench.batch()
    wake, refused, load = bench.machine.commit_unknown(bench.now_ms)
    assert isinstance(wake, PumpAt)
    assert isinstance(refused, Refuse)
    assert (refused.submission, refused.refusal.code) == (leave, ErrorCode.REGION_FAILOVER)
    assert load == LoadGroup(("t", GROUP))


def test_a_plan_for_an_older_version_is_made_again(bench: Bench) -> None:
    bench.group_ready("ann", "bob")
    leave = bench.change("bob")
    bench.submit(leave)
    bench.pump()
    bench.machine.change_prepared(leave, rewrite(2, leaving=["bob"]))
    bench.batch()
    only(bench.machine.committed([outcome(CommitStatus.STALE_VERSION, membership_version=5)]), LoadGroup)
    newer = context(version=5)
    bench.load(newer)
    assert only(bench.pump(), Prepare) == Prepare(leave, newer, ())


def test_creation_holds_its_lane_until_it_is_answered(bench: Bench) -> None:
    create, hello, other = bench.create("ann", "bob"), bench.send(GROUP, "ann"), bench.send()
    bench.submit(create, hello, other)
    bench.load(GroupContext(None, {}))
    commit, made = bench.pump()
    assert isinstance(commit, CreateGroup) or isinstance(made, CreateGroup)
    assert bench.pump() == []
    bench.machine.committed([committed(1)])
    assert bench.pump() == []
    only(bench.machine.created(create), LoadGroup)
    bench.load(context())
    only(bench.pump(), Prepare)
    bench.machine.send_prepared(hello, {"ann": True}, "")
    assert bench.batch() == [hello]


def test_only_the_owner_of_a_large_group_addresses_everybody(bench: Bench) -> None:
    bench.group_ready("ann", "bob", loaded=context(members=LIMITS.large_group_member_threshold + 1))
    everybody = MentionTargets(all=True)
    by_member, by_owner = (bench.send(GROUP, user, mention_targets=everybody) for user in ("bob", "ann"))
    bench.submit(by_member, by_owner)
    refused, commit = bench.pump()
    assert refused == RefuseUnlessCommitted(by_member, DENIED)
    assert isinstance(commit, CommitBatch)
    assert commit.submissions == [by_owner]


def test_limits_of_a_group_are_judged_when_its_size_is_known(bench: Bench) -> None:
    sends = [bench.send(GROUP, "ann") for _ in range(4)]
    for send in sends:
        send.limits_lifted = False
    bench.submit(*sends)
    refused = bench.load(context(members=50_000))
    assert [action.submission for action in refused if isinstance(action, Refuse)] == sends[2:]
    bench.pump()
    bench.machine.send_prepared(sends[0], {"ann": True}, "")
    assert bench.batch() == sends[:2]


# ------------------------------------------------------------------------------------------------------- any run

MENDABLE = (
    CommitStatus.STALE_VERSION,
    CommitStatus.ID_NOT_GREATER,
    CommitStatus.DEK_MISMATCH,
    CommitStatus.OUT_OF_ORDER,
)


class Run:
    """Random submissions and outcomes; judged like the store judges, so the order of commits can be checked."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.open: list[Action] = []
        self.sent: dict[str, list[Submission]] = {}
        self.committed: dict[str, list[Submission]] = {}
        self.answered: dict[Submission, int] = {}

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Acknowledge | Refuse | RefuseUnlessCommitted):
                self.answered[action.submission] = self.answered.get(action.submission, 0) + 1
            elif not isinstance(action, AdoptDek | PumpAt):
                self.open.append(action)

    def submit(self, conversation: str) -> None:
        send = self.bench.send(conversation)
        send.expires_at_ms = 1e12
        self.sent.setdefault(conversation, []).append(send)
        self.do(self.bench.submit(send))

    def answer(self, pick: int, draw: Callable[[], int]) -> None:
        self.bench.now_ms += 5000
        self.do(self.bench.pump())
        if not self.open:
            return
        action = self.open.pop(pick % len(self.open))
        machine = self.bench.machine
        if isinstance(action, LoadGroup):
            self.do(self.bench.load(context()))
        elif isinstance(action, Prepare):
            assert isinstance(action.submission, Send)
            self.do(machine.send_prepared(action.submission, dict.fromkeys(action.senders, True), ""))
        elif isinstance(action, CommitBatch):
            self.judge(action.submissions, draw)

    def judge(self, batch: Sequence[Send | Change], draw: Callable[[], int]) -> None:
        blocked: set[str] = set()
        outcomes = []
        if draw() == 0:
            self.do(self.bench.machine.commit_unknown(self.bench.now_ms))
            return
        for submission in batch:
            name = submission.conversation_id
            roll = draw()
            if name in blocked:
                outcomes.append(outcome(CommitStatus.UNJUDGED))
            elif roll < len(MENDABLE):
                blocked.add(name)
                stored = submission.message_id
                outcomes.append(outcome(MENDABLE[roll], message_id=stored, dek_id="d", wrapped_dek=b"w"))
            else:
                self.committed.setdefault(name, []).append(submission)
                outcomes.append(committed(len(self.committed[name])))
        self.do(self.bench.machine.committed(outcomes))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_run_answers_each_send_once_and_keeps_the_order_of_a_conversation(data: st.DataObject) -> None:
    run = Run()

    def draw() -> int:
        return data.draw(st.integers(0, 12))

    for _ in range(data.draw(st.integers(1, 60))):
        if data.draw(st.booleans()):
            run.submit(data.draw(st.sampled_from([DM, "dm:ann:cid", GROUP])))
        else:
            run.answer(draw(), draw)
    for _ in range(2000):
        if run.bench.idle():
            break
        run.answer(0, lambda: 12)
    assert run.bench.idle()
    for conversation, sends in run.sent.items():
        assert all(run.answered[send] == 1 for send in sends)
        positions = [sends.index(send) for send in run.committed.get(conversation, [])]
        assert positions == sorted(positions)
