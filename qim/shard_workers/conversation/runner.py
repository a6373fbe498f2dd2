"""The writer role: takes its buckets, feeds the machines, does what they ask and answers (DESIGN §2).

Buckets share commit calls (`commits`) and nothing else: none waits for what another one needs first.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from blake3 import blake3

from qim.backplane.api import Answer, Backplane, Priority
from qim.config.parameters import Parameters
from qim.core.hlc import HybridClock, LatestWall
from qim.core.ids import conversation_bucket, group_conversation_id, is_name
from qim.errors import ClockUnsafe, Detail, ErrorCode, Fenced, StoreError, StoreUnavailable
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import (
    LagReport,
    LogHint,
    SubmitCreateGroup,
    SubmitGroupChange,
    SubmitLeaveGroup,
    SubmitSend,
)
from qim.registry.api import Grant, LeaseKind, RouteMap, ShardRegistry
from qim.registry.keeper import LeaseKeeper
from qim.registry.routes import RouteCache, owners_of
from qim.runtime.clock import Clock
from qim.runtime.tasks import FailureHandler, TaskSet
from qim.shard_workers.conversation import replies
from qim.shard_workers.conversation.admission import BAD_REQUEST, DENIED, FanoutQuota, Refusal, WriterAdmission
from qim.shard_workers.conversation.commits import CommitCalls, Result
from qim.shard_workers.conversation.content import check_send, check_users, request_digest
from qim.shard_workers.conversation.groups import TOO_MANY_MEMBERS, Announcement, GroupCreator, GroupReader
from qim.shard_workers.conversation.machine import (
    Acknowledge,
    Action,
    AdoptDek,
    BucketMachine,
    CreateGroup,
    LoadGroup,
    Prepare,
    PumpAt,
    Refuse,
    RefuseUnlessCommitted,
    Unchanged,
)
from qim.shard_workers.conversation.membership import Placement
from qim.shard_workers.conversation.records import RecordEncoder
from qim.shard_workers.conversation.relay import OutboxRelay
from qim.shard_workers.conversation.retention import (
    DAY_MS,
    OutboxRetention,
    WriterRetention,
    WriterRetentionSettings,
)
from qim.shard_workers.conversation.submission import Change, Create, Send, Submission
from qim.stores.api import (
    BucketCommit,
    CommitOutcome,
    CommitRequest,
    CommitStatus,
    GroupMembership,
    MessageStore,
)
from qim.stores.crypto import KeyRing

log = get_logger(__name__)

OPERATOR_DEFAULT: Final = "qim.admin"
"""Sender of a membership change whose caller names no operator."""
STORE_FULL: Final = Refusal(ErrorCode.RATE_LIMITED, Detail.STORE_FULL, 2000.0, "store_full")
CLOSE_POLL_S: Final = 0.005
"""A bucket that is given back is empty after a commit call or two."""
_FULL_STORE_ERRORS: Final = ("OOM", "MISCONF")
_SEQ_TAG: Final = b"\x09"
"""Field 1 of OutboxRecord, fixed64: what the store puts in front."""


class WriterRole:
    """One instance of the writer pool; `routes` is already started.

    With `leases` it owns the buckets that are its share of the pool, each from `open_shard` to `close_shard` or
    `drop_shard`; without, it takes `buckets` at its start and ends when another writer takes one. A commit that is
    Fenced gives up its bucket, without a retry (R-19.2.1-2). `is_full` says of a bucket that its instance has no room
    left: nothing new is taken then (DESIGN-data §1). `outbox_retention` trims the embedded outbox, and refuses sends
    above its memory bound (§4). `relay` is there when fan-out reads a broker's topic instead of the stream that commits
    write.
    """

    def __init__(
        self,
        name: str,
        buckets: Sequence[int],
        *,
        bucket_count: int,
        placement: Placement,
        parameters: Parameters,
        store: MessageStore,
        membership: GroupMembership,
        registry: ShardRegistry,
        routes: RouteCache,
        backplane: Backplane,
        key_ring: KeyRing,
        clock: Clock,
        on_failure: FailureHandler,
        quota: FanoutQuota | None = None,
        is_full: Callable[[int], bool] = lambda bucket: False,
        relay: OutboxRelay | None = None,
        outbox_retention: OutboxRetention | None = None,
        leases: LeaseKeeper | None = None,
    ) -> None:
        self._name = name
        self._buckets = tuple(buckets)
        self._bucket_count = bucket_count
        self._parameters = parameters
        self._store = store
        self._registry = registry
        self._backplane = backplane
        self._clock = clock
        self._routes = routes
        self._is_full = is_full
        self._relay = relay
        self._tasks = TaskSet(on_failure)
        self._admission = WriterAdmission(parameters, placement, quota=quota)
        self._encoder = RecordEncoder(key_ring, parameters)
        self._reader = GroupReader(store, membership, placement, parameters)
        self._creator = GroupCreator(membership, placement, parameters)
        self._leases = leases
        self._on_failure = on_failure
        self._latest_wall = LatestWall()
        self._machines: dict[int, BucketMachine] = {}
        self._closing: set[int] = set()
        """Buckets that take nothing new."""
        self.retention = WriterRetention(
            lambda: {bucket: machine.fencing_epoch for bucket, machine in self._machines.items()},
            store, membership, outbox_retention, clock,
            WriterRetentionSettings(
                interval_ms=parameters.retention_interval_ms,
                history_retention_ms=parameters.default_history_retention_days * DAY_MS,
                version_retention_ms=parameters.membership_version_retention,
            ),
        )  # fmt: skip
        self._commits = CommitCalls(
            store, self._encoder, clock, start=self._start, perform=self._perform, judged=self._judged
        )
        self._pump_soon = self._commits.pump_soon
        self._serving = False
        self._unanswered = 0
        self._answered = asyncio.Event()
        self._failover = Refusal(ErrorCode.REGION_FAILOVER, "", parameters.region_failover_retry_after_ms)

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Be granted the buckets, raise their fences, learn their clocks, then serve."""
        if self._relay is not None:
            await self._relay.start((), self._hint_fanout)
        if self._leases is None:
            grant_id = secrets.token_hex(16)
            grants = await self._registry.grant(LeaseKind.CONVERSATION_BUCKET, self._buckets, self._name, grant_id)
            await asyncio.gather(*(self.open_shard(grant) for grant in grants))
        self._backplane.on_request(InternalOpcode.SUBMIT_SEND, self._submit_send)
        self._backplane.on_request(InternalOpcode.SUBMIT_CREATE_GROUP, self._submit_create)
        self._backplane.on_request(InternalOpcode.SUBMIT_LEAVE_GROUP, self._submit_leave)
        self._backplane.on_request(InternalOpcode.SUBMIT_GROUP_ADD, self._submit_add)
        self._backplane.on_request(InternalOpcode.SUBMIT_GROUP_REMOVE, self._submit_remove)
        self._backplane.on_notice(InternalOpcode.LAG_REPORT, self._lag_report)
        self._routes.on_change(self._link_fanout)
        self._link_fanout(self._routes.map)
        self._start("retention", self.retention.run())
        self._serving = True
        if self._leases is not None:
            self._leases.start(self)
        log.info("writer_serving", role=self._name, count=len(self._machines))

    async def drain(self) -> None:
        """Refuse what is new, answer what was accepted, give the buckets back."""
        if self._leases is not None:
            await self._leases.leave()
        self._serving = False
        while self._unanswered:
            self._answered.clear()
            await self._answered.wait()
        if self._relay is not None:
            await self._relay.drain()

    async def stop(self) -> None:
        """Cancel what is under way: the store has committed it or not, retries find out."""
        self._serving = False
        if self._leases is not None:
            await self._leases.close()
        await self._tasks.close()
        if self._relay is not None:
            await self._relay.stop()

    def ready(self) -> bool:
        settled = self._leases is None or self._leases.settled()
        return self._serving and settled and not any(map(self._has_no_room, self._machines))

    # --------------------------------------------------------------------------------------------------- buckets

    async def open_shard(self, grant: Grant) -> None:
        """Raise the fence of a bucket, learn its clock, serve it. Fenced when a greater epoch is stored."""
        bucket = grant.shard_id
        state = await self._store.open_bucket(bucket, grant.epoch, grant.grant_id)
        clock = HybridClock(
            writer_id=bucket,
            regression_reject_ms=self._parameters.clock_regression_reject_ms,
            latest=self._latest_wall,
        )
        clock.observe(state.last_message_id)
        if self._relay is not None:
            await self._relay.open_bucket(bucket)
        self._machines[bucket] = BucketMachine(
            bucket, clock, self._admission, self._parameters, fencing_epoch=grant.epoch
        )

    async def close_shard(self, shard_id: int) -> None:
        """Answer what was accepted for the bucket; what comes meanwhile is told to come back."""
        machine = self._machines[shard_id]
        self._closing.add(shard_id)
        try:
            while not machine.is_idle():
                await asyncio.sleep(CLOSE_POLL_S)
            if self._relay is not None:
                await self._relay.close_bucket(shard_id)
        finally:
            self._closing.discard(shard_id)
        self._machines.pop(shard_id, None)

    def drop_shard(self, shard_id: int) -> None:
        """Commit nothing more in the bucket; the requests that wait for it are told to come back."""
        machine = self._machines.pop(shard_id, None)
        if self._relay is not None:
            self._relay.drop_bucket(shard_id)
        if machine is not None:
            self._perform(machine, machine.abandon())

    def _fenced(self, machine: BucketMachine, error: Fenced) -> None:
        """Another writer owns the bucket."""
        if self._leases is None:
            metrics.FENCED_TOTAL.labels(kind=LeaseKind.CONVERSATION_BUCKET).inc()
            self._on_failure(f"{self._name} bucket {machine.bucket}", error)
        elif self._machines.get(machine.bucket) is machine:
            self._leases.fenced(machine.bucket, machine.fencing_epoch)

    def _link_fanout(self, routes: RouteMap) -> None:
        """Keep a link to every fan-out worker."""
        for owner in owners_of(routes, LeaseKind.OUTBOX_PARTITION):
            self._backplane.connect(owner)

    # -------------------------------------------------------------------------------------------------- requests

    def _submit_send(self, _peer: str, body: bytes) -> Answer:
        request = SubmitSend.FromString(body)
        message = request.message
        send = Send(
            request.tenant_id, request.user_id, request.device_id, message, request_digest(message),
            expires_at_ms=self._expiry_ms(), limits_lifted=request.limits_lifted, ticket=Answer(),
        )  # fmt: skip
        return self._submit(send, check_send(message, request.user_id, self._parameters))

    def _submit_create(self, _peer: str, body: bytes) -> Answer:
        request = SubmitCreateGroup.FromString(body)
        asked = request.request
        members = sorted({request.user_id, *asked.member_ids})
        create = Create(
            request.tenant_id, group_conversation_id(asked.group_id), request.user_id, members,
            expires_at_ms=self._expiry_ms(), ticket=Answer(),
        )  # fmt: skip
        refused = check_users(members, len(members)) if is_name(asked.group_id) else DENIED
        if refused is None and len(members) > self._parameters.max_members_per_group:
            refused = TOO_MANY_MEMBERS
        return self._submit(create, refused)

    def _submit_leave(self, _peer: str, body: bytes) -> Answer:
        request = SubmitLeaveGroup.FromString(body)
        return self._submit_change(
            request.tenant_id, request.request.group_id, request.user_id, (request.user_id,),
            joining=False, by_subject=True,
        )  # fmt: skip

    def _submit_add(self, _peer: str, body: bytes) -> Answer:
        request = SubmitGroupChange.FromString(body)
        return self._submit_change(
            request.tenant_id, request.group_id, request.operator or OPERATOR_DEFAULT, request.user_ids,
            joining=True, by_subject=False,
        )  # fmt: skip

    def _submit_remove(self, _peer: str, body: bytes) -> Answer:
        request = SubmitGroupChange.FromString(body)
        return self._submit_change(
            request.tenant_id, request.group_id, request.operator or OPERATOR_DEFAULT, request.user_ids,
            joining=False, by_subject=False,
        )  # fmt: skip

    def _submit_change(
        self, tenant_id: str, group_id: str, by: str, user_ids: Sequence[str], *, joining: bool, by_subject: bool
    ) -> Answer:
        """The control message has an id of its own in ClientDedup: random, so that no client can have taken it."""
        users = tuple(dict.fromkeys(user_ids))
        change_id = secrets.token_hex(16)
        change = Change(
            tenant_id, group_conversation_id(group_id), by, change_id, blake3(change_id.encode()).digest(16),
            joining=joining, user_ids=users, by_subject=by_subject,
            expires_at_ms=self._expiry_ms(), ticket=Answer(),
        )  # fmt: skip
        refused = check_users(users, self._parameters.group_add_max_users)
        if not is_name(group_id):
            refused = DENIED
        elif not is_name(by):
            refused = BAD_REQUEST
        return self._submit(change, refused)

    def _submit(self, submission: Submission, refused: Refusal | None) -> Answer:
        ticket: Answer = submission.ticket
        self._unanswered += 1
        bucket = conversation_bucket(submission.tenant_id, submission.conversation_id, self._bucket_count)
        machine = self._machines.get(bucket)
        if refused is None and (machine is None or not self._serving or bucket in self._closing):
            refused = self._failover
        if refused is None and self._has_no_room(bucket):
            refused = STORE_FULL
        if refused is not None:
            self._refuse(submission, refused)
            return ticket
        assert machine is not None
        actions = machine.submit(submission, self._clock.monotonic_ms(), self._clock.unix_ms())
        if actions:
            self._perform(machine, actions)
        self._pump_soon(machine)
        return ticket

    def _has_no_room(self, bucket: int) -> bool:
        return self._is_full(bucket) or self.retention.full

    def _lag_report(self, _peer: str, body: bytes) -> None:
        report = LagReport.FromString(body)
        now_ms = self._clock.monotonic_ms()
        lags_ms: Sequence[int] = report.partition_lag_ms
        if self._relay is not None:
            lags_ms = [max(lag_ms, self._relay.lag_ms(n)) for n, lag_ms in zip(report.partitions, lags_ms, strict=True)]
        self._admission.lag.update_partitions(report.partitions, lags_ms, now_ms)
        self._admission.lag.update_shards(report.shards, report.shard_lane_lag_ms, now_ms)

    def _expiry_ms(self) -> float:
        return self._clock.monotonic_ms() + self._parameters.submit_timeout_ms

    # --------------------------------------------------------------------------------------------------- actions

    def _perform(self, machine: BucketMachine, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Acknowledge):
                self._acknowledge(action)
            elif isinstance(action, Refuse):
                self._refuse(action.submission, action.refusal)
            elif isinstance(action, AdoptDek):
                self._adopt(action)
            elif isinstance(action, PumpAt):
                delay_ms = action.at_ms - self._clock.monotonic_ms()
                asyncio.get_running_loop().call_later(max(0.0, delay_ms) / 1000, self._pump_soon, machine)
            elif isinstance(action, Unchanged):
                context = action.context
                self._settle(action.submission, replies.unchanged(context.member_count, context.version))
            elif isinstance(action, LoadGroup):
                self._start("load group", self._load_group(machine, action.key))
            elif isinstance(action, Prepare):
                self._start("prepare", self._prepare(machine, action))
            elif isinstance(action, RefuseUnlessCommitted):
                self._start("look up", self._look_up(machine, action))
            elif isinstance(action, CreateGroup):
                self._start("create group", self._create(machine, action.submission))

    def _start(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(f"{self._name} {what}", work)

    def _acknowledge(self, action: Acknowledge) -> None:
        submission = action.submission
        if action.duplicate:
            metrics.DEDUP_HIT_TOTAL.inc()
        if isinstance(submission, Send):
            self._settle(submission, replies.send_ack(submission, action.message_id, action.conversation_seq))
        else:
            metrics.MEMBERSHIP_VERSION_TOTAL.inc()
            self._settle(submission, replies.changed(submission, action.conversation_seq))

    def _adopt(self, action: AdoptDek) -> None:
        """A key of another master key mends nothing: the retries end and the sender is told to come back."""
        try:
            self._encoder.adopt(*action.key, action.dek_id, action.wrapped_dek)
        except StoreError as error:
            log.error("dek_not_ours", conversation_id=action.key[1], error=error)

    def _refuse(self, submission: Submission, refused: Refusal) -> None:
        if refused.dimension:
            metrics.RATE_LIMIT_HIT_TOTAL.labels(tenant=submission.tenant_id, dimension=refused.dimension).inc()
        elif refused.code is ErrorCode.CLOCK_UNSAFE:
            metrics.CLOCK_UNSAFE_TOTAL.inc()
        self._settle(submission, replies.refusal(submission, refused, random.random))

    def _settle(self, submission: Submission, body: bytes) -> None:
        """Answer, once."""
        self._unanswered -= 1
        if not self._serving:
            self._answered.set()
        ticket: Answer = submission.ticket
        if not ticket.done():
            ticket.set_result(body)

    # ---------------------------------------------------------------------------------------------- store calls

    def _judged(self, machine: BucketMachine, call: BucketCommit, result: Result) -> None:
        """The store's answer to one bucket's part of a commit call."""
        count = len(call.requests)
        if not isinstance(result, StoreError):
            actions = machine.committed(result)
            if machine.regressions:
                log.error("conversation_seq_went_back", bucket=call.bucket, count=machine.regressions)
                metrics.CONVERSATION_SEQ_REGRESSION_COUNT.inc(machine.regressions)
                machine.regressions = 0
            self._hint_committed(call.bucket, call.requests, result)
        elif isinstance(result, Fenced):
            self._fenced(machine, result)
            actions = machine.commit_refused(self._failover)
        elif isinstance(result, StoreUnavailable):
            log.warning("commit_unknown", bucket=call.bucket, count=count, error=result)
            actions = machine.commit_unknown(self._clock.monotonic_ms())
        else:
            log.error("commit_refused", bucket=call.bucket, count=count, error=result)
            actions = machine.commit_refused(self._refusal_of(result))
        self._perform(machine, actions)

    async def _load_group(self, machine: BucketMachine, key: tuple[str, str]) -> None:
        try:
            context = await self._reader.load(*key)
        except StoreError as error:
            actions = self._load_failed(machine, key, error)
        else:
            actions = machine.group_loaded(key, context, self._clock.monotonic_ms(), self._clock.unix_ms())
        self._perform(machine, actions)
        self._pump_soon(machine)

    async def _prepare(self, machine: BucketMachine, action: Prepare) -> None:
        submission = action.submission
        key = (submission.tenant_id, submission.conversation_id)
        try:
            if isinstance(submission, Send):
                senders = await self._reader.active(*key, action.senders)
                replied_to = submission.reply_to_user_id
                if replied_to is None:
                    replied_to = await self._reader.reply_target_sender(submission)
                actions = machine.send_prepared(submission, senders, replied_to)
            else:
                assert action.context is not None
                plan = await self._reader.plan(submission, action.context)
                actions = machine.change_prepared(submission, plan)
        except StoreError as error:
            actions = self._load_failed(machine, key, error)
        self._perform(machine, actions)
        self._pump_soon(machine)

    def _load_failed(self, machine: BucketMachine, key: tuple[str, str], error: StoreError) -> list[Action]:
        log.warning("group_read_failed", bucket=machine.bucket, conversation_id=key[1], error=error)
        return machine.load_failed(key)

    async def _look_up(self, machine: BucketMachine, action: RefuseUnlessCommitted) -> None:
        send = action.submission
        try:
            found = await self._store.lookup_dedup(
                machine.bucket, send.tenant_id, send.sender_id, send.client_message_id, send.request_digest
            )
        except StoreError as error:
            log.warning("dedup_read_failed", bucket=machine.bucket, error=error)
            self._refuse(send, self._failover)
            return
        if found is None:
            self._refuse(send, action.refusal)
        elif found.status is CommitStatus.DUPLICATE:
            self._acknowledge(Acknowledge(send, found.message_id, found.conversation_seq, True))
        else:
            self._refuse(send, Refusal(ErrorCode.PERMISSION_DENIED, Detail.CLIENT_MESSAGE_ID_REUSED))

    async def _create(self, machine: BucketMachine, create: Create) -> None:
        bucket, epoch = machine.bucket, machine.fencing_epoch

        def announce() -> Announcement:
            unix_ms = self._clock.unix_ms()
            message_id = machine.clock.allocate(unix_ms)
            return Announcement(message_id, self._encoder.announcement(create, message_id, epoch, unix_ms))

        try:
            refused, offset, outbox = await self._creator.create(create, bucket, epoch, announce)
        except Fenced as error:
            self._fenced(machine, error)
            self._refuse(create, self._failover)
        except ClockUnsafe:
            self._refuse(create, Refusal(ErrorCode.CLOCK_UNSAFE, "", self._failover.retry_after_ms))
        except StoreError as error:
            log.warning("create_group_failed", bucket=bucket, conversation_id=create.conversation_id, error=error)
            self._refuse(create, self._failover)
        else:
            if offset >= 0:
                metrics.MEMBERSHIP_VERSION_TOTAL.inc()
                self._hint(bucket, offset, [_SEQ_TAG + bytes(8) + outbox])
            if refused is not None:
                self._refuse(create, refused)
            else:
                self._settle(create, replies.created(create, self._parameters.member_page_limit))
        self._perform(machine, machine.created(create))
        self._pump_soon(machine)

    def _refusal_of(self, error: StoreError) -> Refusal:
        """What a requester is told when the store refused a call and wrote nothing."""
        if str(error).startswith(_FULL_STORE_ERRORS):
            return STORE_FULL
        return self._failover

    # ---------------------------------------------------------------------------------------------------- hints

    def _hint_committed(
        self, bucket: int, requests: Sequence[CommitRequest], outcomes: Sequence[CommitOutcome]
    ) -> None:
        """Give fan-out the records of this call as they are stored; their offsets are dense (DESIGN-data §4)."""
        first_offset = -1
        records: list[bytes] = []
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome.status is CommitStatus.COMMITTED:
                if not records:
                    first_offset = outcome.outbox_offset
                records.append(_SEQ_TAG + outcome.conversation_seq.to_bytes(8, "little") + request.outbox)
            elif outcome.status is not CommitStatus.DUPLICATE:
                metrics.COMMIT_RETRY_TOTAL.labels(status=outcome.status.value).inc()
        if records:
            metrics.COMMITTED_TOTAL.inc(len(records))
            self._hint(bucket, first_offset, records)

    def _hint(self, bucket: int, first_offset: int, records: list[bytes]) -> None:
        """Tell whoever reads the stream: fan-out, or the relay first."""
        if self._relay is not None:
            self._relay.offer(bucket, first_offset, records)
        else:
            self._hint_fanout(bucket, first_offset, records)

    def _hint_fanout(self, bucket: int, first_offset: int, records: list[bytes]) -> None:
        """A hint that is lost costs fan-out a read of the log, nothing else."""
        owner = self._routes.owner(LeaseKind.OUTBOX_PARTITION, bucket)
        if owner is not None:
            hint = LogHint(partition=bucket, first_offset=first_offset, records=records)
            self._backplane.notify(owner, InternalOpcode.OUTBOX_HINT, hint.SerializeToString(), Priority.CONTROL)
