"""The order in which one conversation bucket commits (DESIGN-data §3.3), pure.

Every conversation is a lane: a FIFO of what waits for it. A lane whose head needs something first (the group's state,
a sender's membership, the plan of a change) waits for that alone; all others go on. At most one commit call of the
bucket is in flight, what arrives meanwhile goes into the next. Refusals that a fresh id, key or version mends are
retried in place, at the front of their lane, so nothing overtakes.

    IDLE -> WAITING <-> READY -> IN_CALL -> IDLE | WAITING | READY

Every input returns actions; the runner does them and answers each `LoadGroup`, `Prepare`, `CreateGroup` and
`CommitBatch` with exactly one of the inputs named there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from qim.config.parameters import Parameters
from qim.core.hlc import HybridClock
from qim.core.ids import DIRECT_PREFIX
from qim.errors import ClockUnsafe, Detail, ErrorCode
from qim.shard_workers.conversation.admission import DENIED, Refusal, SendFacts, WriterAdmission
from qim.shard_workers.conversation.membership import GroupContext
from qim.shard_workers.conversation.submission import Change, Create, Send, Submission
from qim.stores.api import CommitOutcome, CommitStatus, MembershipRewrite

QUEUE_MAX: Final = 1024
"""Submissions waiting in one bucket; more are answered RATE_LIMITED. A second of the fastest bucket measured."""
LANES_MAX: Final = 4096
"""Conversations remembered per bucket; above it those that wait for nothing are forgotten, oldest first."""
LANE_SHARE_MAX: Final = 16
"""Submissions one conversation may put into a call, so that a busy one leaves room for the others."""
ATTEMPTS_MAX: Final = 8
"""Retries in place of one submission; a store that refuses more often contradicts itself."""
BACKOFF_INITIAL_MS: Final = 20.0
BACKOFF_MAX_MS: Final = 1000.0
OUT_OF_ORDER_RETRY_MS: Final = 200.0
BUSY_RETRY_MS: Final = 500.0

Key = tuple[str, str]
"""(tenant_id, conversation_id)."""


class LaneState(Enum):
    IDLE = "idle"
    WAITING = "waiting"
    """For the answer to LoadGroup, Prepare or CreateGroup."""
    READY = "ready"
    """In turn for the next commit call."""
    IN_CALL = "in_call"


class LoadGroup(NamedTuple):
    """Read the group's state -> `group_loaded` or `load_failed`."""

    key: Key


class Prepare(NamedTuple):
    """Look up what the head of a lane needs -> `send_prepared`, `change_prepared` or `load_failed`."""

    submission: Send | Change
    context: GroupContext | None
    senders: tuple[str, ...]
    """Whose membership is not known yet; the sender of a Send is among them if it is his."""


class CreateGroup(NamedTuple):
    """Create and answer -> `created`."""

    submission: Create


class CommitBatch(NamedTuple):
    """One commit call -> `committed`, `commit_unknown` or `commit_refused`."""

    submissions: list[Send | Change]


class AdoptDek(NamedTuple):
    """The conversation has this DEK already."""

    key: Key
    dek_id: str
    wrapped_dek: bytes


class Acknowledge(NamedTuple):
    submission: Send | Change
    message_id: bytes
    conversation_seq: int
    duplicate: bool


class Unchanged(NamedTuple):
    """Everybody is in the wanted state already: success without a commit."""

    submission: Change
    context: GroupContext


class Refuse(NamedTuple):
    submission: Submission
    refusal: Refusal


class RefuseUnlessCommitted(NamedTuple):
    """A final refusal: look the send up in ClientDedup first, a committed one is acknowledged (DESIGN-data §3.2)."""

    submission: Send
    refusal: Refusal


class PumpAt(NamedTuple):
    """Call `pump` at this monotonic time."""

    at_ms: float


Action = (
    LoadGroup | Prepare | CreateGroup | CommitBatch | AdoptDek | Acknowledge | Unchanged | Refuse
    | RefuseUnlessCommitted | PumpAt
)  # fmt: skip


class _Lane:
    """One conversation. `context` is None until loaded; a single chat needs none."""

    __slots__ = ("context", "direct", "key", "latest_seq", "pending", "state")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.latest_seq = 0
        """The newest `conversation_seq` committed here."""
        self.direct = key[1].startswith(DIRECT_PREFIX)
        self.state = LaneState.IDLE
        self.pending: deque[Submission] = deque()
        self.context: GroupContext | None = None


class BucketMachine:
    """The lanes of one conversation bucket. `pump` starts the next commit call; every other input only moves lanes."""

    def __init__(
        self,
        bucket: int,
        clock: HybridClock,
        admission: WriterAdmission,
        parameters: Parameters,
        *,
        fencing_epoch: int = 0,
    ) -> None:
        self.bucket = bucket
        self.fencing_epoch = fencing_epoch
        """Of the grant this machine works under."""
        self.clock = clock
        self.regressions = 0
        """Commits whose `conversation_seq` was not above the one before: must stay 0 (§19.1)."""
        self._admission = admission
        self._batch_max = parameters.commit_batch_max
        self._at_all_owner_above = parameters.large_group_member_threshold
        self._failover = Refusal(ErrorCode.REGION_FAILOVER, "", parameters.region_failover_retry_after_ms)
        self._lanes: OrderedDict[Key, _Lane] = OrderedDict()
        self._turn: deque[_Lane] = deque()
        self._in_call: list[tuple[_Lane, Send | Change]] = []
        self._queued = 0
        self._abandoned = False
        self._paused_until_ms = 0.0
        self._backoff_ms = BACKOFF_INITIAL_MS
        self._submit_timeout_ms = parameters.submit_timeout_ms
        self._call_since_ms = 0.0
        """When the oldest submission of the call in flight came in."""

    def submit(self, submission: Submission, now_ms: float, unix_ms: int) -> list[Action]:
        """Take a request in; call `pump` afterwards."""
        if self._queued >= QUEUE_MAX:
            return [Refuse(submission, Refusal(ErrorCode.RATE_LIMITED, "", BUSY_RETRY_MS, "writer_queue"))]
        lane = self._lane((submission.tenant_id, submission.conversation_id))
        if isinstance(submission, Send) and (lane.direct or lane.context is not None):
            refusal = self._admit(lane, submission, now_ms, unix_ms)
            if refusal is not None:
                return [Refuse(submission, refusal)]
        lane.pending.append(submission)
        self._queued += 1
        actions: list[Action] = []
        if lane.state is LaneState.IDLE:
            self._advance(lane, actions)
        return actions

    def pump(self, now_ms: float, unix_ms: int) -> list[Action]:
        """Form the next commit call, unless one is in flight or the store rests."""
        if self._abandoned:
            return self._refuse_waiting()
        actions: list[Action] = []
        if self._in_call or now_ms < self._paused_until_ms:
            return actions
        batch = self._in_call
        for _ in range(len(self._turn)):
            if len(batch) >= self._batch_max:
                break
            lane = self._turn.popleft()
            before = len(batch)
            self._take(lane, now_ms, unix_ms, actions)
            if len(batch) > before:
                lane.state = LaneState.IN_CALL
            elif lane.state is LaneState.READY:
                self._advance(lane, actions)
        if batch:
            self._call_since_ms = min(submission.expires_at_ms for _, submission in batch) - self._submit_timeout_ms
            actions.append(CommitBatch([submission for _, submission in batch]))
        return actions

    def is_idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._in_call and all(lane.state is LaneState.IDLE for lane in self._lanes.values())

    def abandon(self) -> list[Action]:
        """Another writer owns the bucket or may soon: nothing is committed any more. What is in a call is answered by
        what the store says of it, everything else may be sent again to the next owner."""
        self._abandoned = True
        return self._refuse_waiting()

    def _refuse_waiting(self) -> list[Action]:
        actions: list[Action] = []
        for lane in self._lanes.values():
            actions += (Refuse(submission, self._failover) for submission in lane.pending)
            self._queued -= len(lane.pending)
            lane.pending.clear()
        return actions

    # ------------------------------------------------------------------------------------ answers to preparations

    def group_loaded(self, key: Key, context: GroupContext, now_ms: float, unix_ms: int) -> list[Action]:
        """The group as stored (`context.version` 0: none)."""
        lane = self._lanes[key]
        lane.context = context
        actions: list[Action] = []
        kept: deque[Submission] = deque()
        for submission in lane.pending:
            refusal = None
            if isinstance(submission, Send) and not submission.admitted and context.version:
                refusal = self._admit(lane, submission, now_ms, unix_ms)
            if refusal is None:
                kept.append(submission)
            else:
                self._queued -= 1
                actions.append(Refuse(submission, refusal))
        lane.pending = kept
        self._advance(lane, actions)
        return actions

    def load_failed(self, key: Key) -> list[Action]:
        """The store did not answer: nothing of this lane was tried, all of it may be sent again."""
        lane = self._lanes[key]
        actions: list[Action] = [Refuse(submission, self._failover) for submission in lane.pending]
        self._queued -= len(lane.pending)
        lane.pending.clear()
        lane.context = None
        lane.state = LaneState.IDLE
        return actions

    def send_prepared(self, submission: Send, senders: Mapping[str, bool], reply_to_user_id: str) -> list[Action]:
        """`senders`: user -> is a member at the version of the context."""
        lane = self._lanes[(submission.tenant_id, submission.conversation_id)]
        if lane.context is not None:
            lane.context.senders.update(senders)
        submission.reply_to_user_id = reply_to_user_id
        actions: list[Action] = []
        self._advance(lane, actions)
        return actions

    def change_prepared(self, change: Change, plan: MembershipRewrite | Refusal | None) -> list[Action]:
        """The plan for the version of the context; None: nothing to change."""
        lane = self._lanes[(change.tenant_id, change.conversation_id)]
        assert lane.context is not None
        actions: list[Action] = []
        if self._abandoned:
            lane.state = LaneState.IDLE
        elif isinstance(plan, MembershipRewrite):
            change.rewrite = plan
            change.membership_version = lane.context.version
        else:
            self._pop(lane)
            actions.append(Unchanged(change, lane.context) if plan is None else Refuse(change, plan))
        if not self._abandoned:
            self._advance(lane, actions)
        return actions

    def created(self, create: Create) -> list[Action]:
        """CREATE_GROUP was answered, whatever came of it."""
        lane = self._lanes[(create.tenant_id, create.conversation_id)]
        lane.context = None
        actions: list[Action] = []
        self._advance(lane, actions)
        return actions

    # ------------------------------------------------------------------------------------- answers to commit calls

    def committed(self, outcomes: Iterable[CommitOutcome]) -> list[Action]:
        """The call was judged; one outcome per submission of the batch, in order."""
        actions: list[Action] = []
        again: dict[_Lane, list[Submission]] = {}
        for (lane, submission), outcome in zip(self._in_call, outcomes, strict=True):
            retry = again.setdefault(lane, [])
            if outcome.status in (CommitStatus.COMMITTED, CommitStatus.DUPLICATE):
                duplicate = outcome.status is CommitStatus.DUPLICATE
                if isinstance(submission, Change):
                    self._changed(lane, submission, duplicate)
                if not duplicate:
                    self.regressions += outcome.conversation_seq <= lane.latest_seq
                    lane.latest_seq = outcome.conversation_seq
                actions.append(Acknowledge(submission, outcome.message_id, outcome.conversation_seq, duplicate))
            elif outcome.status is CommitStatus.UNJUDGED:
                retry.append(submission)
            elif (refusal := self._mend(lane, submission, outcome, actions)) is not None:
                actions.append(Refuse(submission, refusal))
            else:
                retry.append(submission)
        self._backoff_ms = BACKOFF_INITIAL_MS
        self._end_call(again, actions)
        return actions

    def commit_unknown(self, now_ms: float) -> list[Action]:
        """The link broke: the call may have happened. Sends go again under their `client_message_id`, which ClientDedup
        answers; of a membership change its requester asks again."""
        actions: list[Action] = [PumpAt(now_ms + self._backoff_ms)]
        again: dict[_Lane, list[Submission]] = {}
        for lane, submission in self._in_call:
            retry = again.setdefault(lane, [])
            if isinstance(submission, Change):
                lane.context = None
                actions.append(Refuse(submission, self._failover))
            else:
                retry.append(submission)
        self._paused_until_ms = now_ms + self._backoff_ms
        self._backoff_ms = min(self._backoff_ms * 2, BACKOFF_MAX_MS)
        self._end_call(again, actions)
        return actions

    def commit_refused(self, refusal: Refusal) -> list[Action]:
        """The store refused the whole call and wrote nothing."""
        actions: list[Action] = [Refuse(submission, refusal) for _, submission in self._in_call]
        self._end_call({lane: [] for lane, _ in self._in_call}, actions)
        return actions

    # -------------------------------------------------------------------------------------------------- inside

    def _lane(self, key: Key) -> _Lane:
        lane = self._lanes.get(key)
        if lane is not None:
            self._lanes.move_to_end(key)
            return lane
        if len(self._lanes) >= LANES_MAX:
            idle = next((k for k, old in self._lanes.items() if old.state is LaneState.IDLE), None)
            if idle is not None:
                del self._lanes[idle]
        lane = self._lanes[key] = _Lane(key)
        return lane

    def _advance(self, lane: _Lane, actions: list[Action]) -> None:
        """Where a lane goes whose last step has ended."""
        if not lane.pending:
            lane.state = LaneState.IDLE
        elif lane.context is None and not lane.direct:
            lane.state = LaneState.WAITING
            actions.append(LoadGroup(lane.key))
        else:
            lane.state = LaneState.READY
            self._turn.append(lane)

    def _admit(self, lane: _Lane, send: Send, now_ms: float, unix_ms: int) -> Refusal | None:
        context = lane.context
        facts = SendFacts(
            tenant_id=send.tenant_id,
            conversation_id=send.conversation_id,
            sender_id=send.sender_id,
            bucket=self.bucket,
            member_count=context.member_count if context is not None else 2,
            shards=context.index.keys() if context is not None else None,
            mentions_all=send.message.mention_targets.all,
            limits_lifted=send.limits_lifted,
            queued_ms=self._queued_ms(now_ms),
        )
        send.admitted = True
        return self._admission.judge(facts, now_ms, unix_ms)

    def _queued_ms(self, now_ms: float) -> float:
        """Age of the oldest submission that a commit call carries, or will. 0 while the store does not answer: what
        waits then is no queue that drains, it gets REGION_FAILOVER in time (26.8.2)."""
        if self._backoff_ms > BACKOFF_INITIAL_MS:
            return 0.0
        if self._in_call:
            return now_ms - self._call_since_ms
        if self._turn and self._turn[0].pending:
            return now_ms - self._turn[0].pending[0].expires_at_ms + self._submit_timeout_ms
        return 0.0

    def _take(self, lane: _Lane, now_ms: float, unix_ms: int, actions: list[Action]) -> None:
        """Move what the front of a lane allows into the batch."""
        batch = self._in_call
        first = len(batch)
        room = min(first + LANE_SHARE_MAX, self._batch_max)
        while lane.pending and len(batch) < room:
            submission = lane.pending[0]
            if submission.expires_at_ms <= now_ms:
                self._pop(lane)
                actions.append(Refuse(submission, self._failover))
                continue
            need = self._need(lane, submission)
            if isinstance(need, Prepare | CreateGroup):
                if len(batch) == first:
                    lane.state = LaneState.WAITING
                    if isinstance(need, CreateGroup):
                        self._pop(lane)
                    actions.append(need)
                return
            self._pop(lane)
            if need is not None:
                actions.append(need)
            elif self._freeze(lane, submission, unix_ms, actions) and isinstance(submission, Change):
                return

    def _need(
        self, lane: _Lane, submission: Submission
    ) -> Prepare | CreateGroup | Refuse | RefuseUnlessCommitted | None:
        """What stands between the head of a lane and the batch; None: nothing."""
        context = lane.context
        if isinstance(submission, Create):
            return CreateGroup(submission)
        if context is not None and context.version == 0:
            return Refuse(submission, DENIED)
        if isinstance(submission, Change):
            assert context is not None
            planned = submission.rewrite is not None and submission.membership_version == context.version
            return None if planned else Prepare(submission, context, ())
        assert isinstance(submission, Send)
        return self._send_need(lane, submission, context)

    def _send_need(
        self, lane: _Lane, send: Send, context: GroupContext | None
    ) -> Prepare | RefuseUnlessCommitted | None:
        if context is not None:
            member = context.senders.get(send.sender_id)
            if member is False or (member and self._at_all_denied(send, context)):
                return RefuseUnlessCommitted(send, DENIED)
            if member is None:
                waiting = (other.sender_id for other in lane.pending if isinstance(other, Send))
                unknown = tuple(dict.fromkeys(user for user in waiting if user not in context.senders))
                return Prepare(send, context, unknown)
        return Prepare(send, context, ()) if send.reply_to_user_id is None else None

    def _at_all_denied(self, send: Send, context: GroupContext) -> bool:
        """`at_all_min_role`: in a large group only its owner may address everybody (§11.4.2)."""
        return (
            send.message.mention_targets.all
            and context.member_count > self._at_all_owner_above
            and send.sender_id != context.creator_id
        )

    def _freeze(self, lane: _Lane, submission: Submission, unix_ms: int, actions: list[Action]) -> bool:
        """Give a submission its id and version and put it into the batch; False: refused, the clock is unsafe."""
        assert isinstance(submission, Send | Change)
        try:
            submission.message_id = self.clock.allocate(unix_ms)
        except ClockUnsafe:
            actions.append(Refuse(submission, Refusal(ErrorCode.CLOCK_UNSAFE, "", BUSY_RETRY_MS)))
            return False
        if lane.context is not None:
            submission.membership_version = lane.context.version
            submission.member_count = lane.context.member_count
        if isinstance(submission, Change):
            assert submission.rewrite is not None
            submission.member_count = submission.rewrite.member_count
        self._in_call.append((lane, submission))
        return True

    def _pop(self, lane: _Lane) -> None:
        lane.pending.popleft()
        self._queued -= 1

    def _changed(self, lane: _Lane, change: Change, duplicate: bool) -> None:
        if duplicate or lane.context is None or change.rewrite is None:
            lane.context = None
        else:
            lane.context.apply(change.rewrite)

    def _mend(
        self, lane: _Lane, submission: Send | Change, outcome: CommitOutcome, actions: list[Action]
    ) -> Refusal | None:
        """Prepare the retry of a refusal, or say that it is final."""
        if outcome.status is CommitStatus.REUSED:
            return Refusal(ErrorCode.PERMISSION_DENIED, Detail.CLIENT_MESSAGE_ID_REUSED)
        if outcome.status is CommitStatus.OUT_OF_ORDER:
            return Refusal(ErrorCode.RATE_LIMITED, Detail.OUT_OF_ORDER, OUT_OF_ORDER_RETRY_MS, "out_of_order")
        submission.attempts += 1
        if submission.attempts > ATTEMPTS_MAX:
            return self._failover
        if outcome.status is CommitStatus.STALE_VERSION:
            lane.context = None
        elif outcome.status is CommitStatus.ID_NOT_GREATER:
            self.clock.observe(outcome.message_id)
        else:
            actions.append(AdoptDek(lane.key, outcome.dek_id, outcome.wrapped_dek))
        return None

    def _end_call(self, again: Mapping[_Lane, list[Submission]], actions: list[Action]) -> None:
        self._in_call = []
        for lane, submissions in again.items():
            lane.pending.extendleft(reversed(submissions))
            self._queued += len(submissions)
            self._advance(lane, actions)
