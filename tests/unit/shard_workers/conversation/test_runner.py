"""The writer role over the models of its stores: requests in, answers, commits and hints out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from qim.backplane.unix import UnixBackplane
from qim.config.parameters import default_parameters
from qim.core.ids import conversation_bucket
from qim.core.secret import Secret
from qim.errors import Detail, ErrorCode, Fenced, StoreError, StoreUnavailable
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import (
    MESSAGE_TYPE_CONTROL,
    MESSAGE_TYPE_TEXT,
    CreateGroup,
    Error,
    GroupReply,
    LagReport,
    LeaveGroup,
    LogHint,
    OutboxRecord,
    SendAck,
    SendMessage,
    SubmitCreateGroup,
    SubmitGroupChange,
    SubmitLeaveGroup,
    SubmitSend,
    SubmitSendReply,
)
from qim.registry.api import LeaseKind
from qim.registry.memory import MemoryShardRegistry
from qim.registry.routes import RouteCache
from qim.runtime.clock import SystemClock
from qim.runtime.tasks import TaskSet
from qim.shard_workers.conversation.membership import Placement
from qim.shard_workers.conversation.runner import WriterRole
from qim.stores.api import BucketCommit, CommitOutcome, GroupMembership, MessageStore
from qim.stores.crypto import KeyRing
from qim.stores.memory_message import MemoryMessageStore

BUCKETS = 4
DM = "dm:ann:bob"
GROUP = "g:choir"


class FaultyStore(MemoryMessageStore):
    """Does what `fault` says around the next commits: an exception before or after the call happened."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Exception] = []
        self.after: list[Exception] = []
        self.calls: list[int] = []

    async def commit_each(self, calls: Sequence[BucketCommit]) -> list[list[CommitOutcome] | StoreError]:
        self.calls.append(sum(len(call.requests) for call in calls))
        await asyncio.sleep(0)
        if self.before:
            raise self.before.pop()
        outcomes = await super().commit_each(calls)
        if self.after:
            raise self.after.pop()
        return outcomes


class Bench:
    """One writer of all buckets, a fan-out that records hints and a gateway that asks, in one process."""

    def __init__(self, store: MessageStore, membership: GroupMembership) -> None:
        self.store = store
        self.membership = membership
        self.registry = MemoryShardRegistry()
        self.failures: list[BaseException] = []
        self.hints: list[LogHint] = []
        self.full = False
        self.plane = UnixBackplane(
            "core-0", ("gateway-0", "writer-0", "fanout-0"), {}, run_dir=Path("/nonexistent"),
            clock=SystemClock(), on_failure=lambda task, error: self.failures.append(error),
        )  # fmt: skip
        self.plane.on_notice(InternalOpcode.OUTBOX_HINT, lambda peer, body: self.hints.append(LogHint.FromString(body)))
        self.tasks = TaskSet(lambda task, error: self.failures.append(error))
        self.routes = RouteCache(self.registry, self.tasks)
        self.ring = KeyRing(Secret(bytes(32)))
        self.writer = self.new_writer()
        self.request_id = 0

    def new_writer(self) -> WriterRole:
        parameters = default_parameters()
        return WriterRole(
            "writer-0", range(BUCKETS), bucket_count=BUCKETS, placement=Placement(4, 64), parameters=parameters,
            store=self.store, membership=self.membership, registry=self.registry, routes=self.routes,
            backplane=self.plane, key_ring=self.ring, clock=SystemClock(),
            on_failure=lambda task, error: self.failures.append(error), is_full=lambda bucket: self.full,
        )  # fmt: skip

    async def start(self) -> None:
        await self.registry.grant(LeaseKind.OUTBOX_PARTITION, range(BUCKETS), "fanout-0", "f")
        await self.routes.refresh()
        await self.writer.start()

    async def close(self) -> None:
        await self.writer.stop()
        await self.tasks.close()
        await self.plane.close()

    async def ask(self, opcode: int, body: bytes) -> bytes:
        return await self.plane.request("writer-0", opcode, body, timeout_ms=5000)

    async def send(
        self, text: str, *, by: str = "ann", to: str = DM, own_id: str = "", **fields: Any
    ) -> SubmitSendReply:
        self.request_id += 1
        message = SendMessage(
            request_id=self.request_id, client_message_id=own_id or f"m{self.request_id}", conversation_id=to,
            message_type=MESSAGE_TYPE_TEXT, payload=text.encode(), **fields,
        )  # fmt: skip
        request = SubmitSend(tenant_id="t", user_id=by, device_id="phone", message=message, limits_lifted=True)
        return SubmitSendReply.FromString(await self.ask(InternalOpcode.SUBMIT_SEND, request.SerializeToString()))

    async def acked(self, text: str, **fields: Any) -> SendAck:
        reply = await self.send(text, **fields)
        assert reply.HasField("ack"), reply.error
        return reply.ack

    async def refused(self, text: str, **fields: Any) -> Error:
        reply = await self.send(text, **fields)
        assert reply.HasField("error")
        return reply.error

    async def create(self, *invited: str, by: str = "ann", group_id: str = "choir") -> GroupReply:
        request = SubmitCreateGroup(
            tenant_id="t", user_id=by, request=CreateGroup(group_id=group_id, member_ids=invited)
        )
        answer = await self.ask(InternalOpcode.SUBMIT_CREATE_GROUP, request.SerializeToString())
        return GroupReply.FromString(answer)

    async def leave(self, user: str) -> GroupReply:
        request = SubmitLeaveGroup(tenant_id="t", user_id=user, request=LeaveGroup(group_id="choir"))
        answer = await self.ask(InternalOpcode.SUBMIT_LEAVE_GROUP, request.SerializeToString())
        return GroupReply.FromString(answer)

    async def change(self, opcode: int, *users: str, group_id: str = "choir", operator: str = "") -> GroupReply:
        request = SubmitGroupChange(tenant_id="t", group_id=group_id, user_ids=users, operator=operator)
        return GroupReply.FromString(await self.ask(opcode, request.SerializeToString()))

    def hinted(self) -> list[OutboxRecord]:
        return [OutboxRecord.FromString(record) for hint in self.hints for record in hint.records]


class ModelBench(Bench):
    """Over the model of the stores."""

    def __init__(self) -> None:
        self.model = FaultyStore()
        super().__init__(self.model, self.model)


@pytest.fixture
async def bench() -> AsyncIterator[ModelBench]:
    made = ModelBench()
    await made.start()
    yield made
    await made.close()
    assert made.failures == []


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_sends_of_one_tick_share_a_call_and_get_dense_sequences(bench: ModelBench) -> None:
    acks = await asyncio.gather(*(bench.acked(f"line {index}") for index in range(20)))
    assert [ack.conversation_seq for ack in acks] == list(range(1, 21))
    assert [ack.client_message_id for ack in acks] == [f"m{index}" for index in range(1, 21)]
    assert sum(bench.model.calls) == 20
    assert len(bench.model.calls) <= 3
    ids = [ack.message_id for ack in acks]
    assert ids == sorted(set(ids))


async def test_hints_carry_the_records_as_they_are_stored(bench: ModelBench) -> None:
    await asyncio.gather(*(bench.acked(f"line {index}") for index in range(5)))
    await until(lambda: len(bench.hinted()) == 5)
    bucket = conversation_bucket("t", DM, BUCKETS)
    carried = [(hint.first_offset + at, record) for hint in bench.hints for at, record in enumerate(hint.records)]
    assert carried == list(enumerate(bench.model.outbox(bucket)))
    assert {hint.partition for hint in bench.hints} == {bucket}
    assert [record.conversation_seq for record in bench.hinted()] == [1, 2, 3, 4, 5]


async def test_a_retry_gets_the_same_answer_and_another_content_does_not(bench: ModelBench) -> None:
    first = await bench.acked("hello", own_id="m")
    again = await bench.acked("hello", own_id="m")
    assert (again.message_id, again.conversation_seq) == (first.message_id, first.conversation_seq)
    error = await bench.refused("hullo", own_id="m")
    assert (int(error.code), error.detail) == (ErrorCode.PERMISSION_DENIED, Detail.CLIENT_MESSAGE_ID_REUSED)


async def test_a_missing_predecessor_is_a_retryable_refusal(bench: ModelBench) -> None:
    error = await bench.refused("two", own_id="b", after_client_message_id="a")
    assert (int(error.code), error.detail, error.client_message_id) == (
        ErrorCode.RATE_LIMITED, Detail.OUT_OF_ORDER, "b",
    )  # fmt: skip
    assert error.retry_after_ms > 0
    await bench.acked("one", own_id="a")
    await bench.acked("two", own_id="b", after_client_message_id="a")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"to": "dm:bob:cid"}, ErrorCode.PERMISSION_DENIED),
        ({"to": "g:nowhere"}, ErrorCode.PERMISSION_DENIED),
        ({"text": "x" * 40_000}, ErrorCode.PAYLOAD_TOO_LARGE),
    ],
)
async def test_what_may_not_be_sent_leaves_no_trace(bench: ModelBench, fields: dict[str, Any], code: ErrorCode) -> None:
    error = await bench.refused(**{"text": "x", **fields})
    assert int(error.code) == code
    assert error.request_id == bench.request_id
    assert bench.model.calls == []


@pytest.mark.parametrize("happened", [True, False])
async def test_a_broken_link_is_retried_and_nothing_doubled(bench: ModelBench, happened: bool) -> None:
    faults = bench.model.after if happened else bench.model.before
    faults.append(StoreUnavailable("link broke"))
    acks = await asyncio.gather(*(bench.acked(f"line {index}") for index in range(5)))
    assert [ack.conversation_seq for ack in acks] == [1, 2, 3, 4, 5]
    assert len(bench.model.outbox(conversation_bucket("t", DM, BUCKETS))) == 5


@pytest.mark.parametrize(
    ("error", "code", "detail"),
    [("OOM command not allowed", ErrorCode.RATE_LIMITED, Detail.STORE_FULL), ("boom", ErrorCode.REGION_FAILOVER, "")],
)
async def test_a_store_that_refuses_is_said_to_be_full_or_away(
    bench: ModelBench, error: str, code: ErrorCode, detail: str
) -> None:
    bench.model.before.append(StoreError(error))
    answer = await bench.refused("hello")
    assert (int(answer.code), answer.detail) == (code, detail)
    assert answer.retry_after_ms > 0
    assert (await bench.acked("again")).conversation_seq == 1


async def test_a_fenced_writer_fails(bench: ModelBench) -> None:
    bucket = conversation_bucket("t", DM, BUCKETS)
    await bench.model.open_bucket(bucket, 99, "another writer")
    asked = asyncio.create_task(bench.send("hello"))
    await until(lambda: bench.failures)
    assert isinstance(bench.failures.pop(), Fenced)
    asked.cancel()


async def test_a_successor_goes_on_above_what_is_stored_under_the_stored_keys(bench: ModelBench) -> None:
    first = await bench.acked("hello")
    await bench.writer.stop()
    bench.plane._requests.clear()
    bench.plane._notices.pop(InternalOpcode.LAG_REPORT)
    bench.writer = bench.new_writer()
    await bench.writer.start()
    second = await bench.acked("again")
    assert second.conversation_seq == 2
    assert second.message_id > first.message_id
    assert (await bench.acked("hello", own_id="m1")).message_id == first.message_id
    heads = await bench.model.head("t", DM)
    assert heads.latest_conversation_seq == 2


async def test_lag_refuses_sends_but_no_membership_change(bench: ModelBench) -> None:
    await bench.create("bob")
    bucket = conversation_bucket("t", GROUP, BUCKETS)
    report = LagReport(reporter="fanout-0", partitions=[bucket], partition_lag_ms=[700])
    bench.plane.notify("writer-0", InternalOpcode.LAG_REPORT, report.SerializeToString())
    error = await bench.refused("hello", to=GROUP)
    assert (int(error.code), error.detail) == (ErrorCode.RATE_LIMITED, Detail.DELIVERY_LAG)
    assert 490 <= error.retry_after_ms <= 910
    assert (await bench.change(InternalOpcode.SUBMIT_GROUP_ADD, "cid")).conversation_seq == 1


# -------------------------------------------------------------------------------------------------------- groups


async def test_a_new_group_is_announced_and_may_be_written_to(bench: ModelBench) -> None:
    reply = await bench.create("cid", "bob", "bob")
    assert [member.user_id for member in reply.members.members] == ["ann", "bob", "cid"]
    assert (reply.members.total_hint, reply.membership_version) == (3, 1)
    assert await bench.create("bob", "cid") == reply
    await until(lambda: bench.hints)
    (announced,) = bench.hinted()
    assert (announced.conversation_seq, announced.membership_version) == (0, 1)
    assert bench.hints[0].records[0] == bench.model.outbox(conversation_bucket("t", GROUP, BUCKETS))[0]
    assert (await bench.acked("hello", to=GROUP, by="cid")).conversation_seq == 1
    assert int((await bench.create("bob", by="bob")).error.code) == ErrorCode.PERMISSION_DENIED


async def test_members_come_and_go_in_the_order_of_the_conversation(bench: ModelBench) -> None:
    await bench.create("bob")
    results = await asyncio.gather(
        bench.send("one", to=GROUP, by="bob"),
        bench.change(InternalOpcode.SUBMIT_GROUP_ADD, "cid", "dan", "bob", operator="root"),
        bench.send("two", to=GROUP, by="cid"),
        bench.leave("bob"),
        bench.send("three", to=GROUP, by="bob"),
        bench.change(InternalOpcode.SUBMIT_GROUP_REMOVE, "dan", "zoe"),
        bench.send("four", to=GROUP, by="dan"),
    )
    one, added, two, left, three, removed, four = results
    assert isinstance(one, SubmitSendReply) and isinstance(two, SubmitSendReply)
    assert (one.ack.conversation_seq, two.ack.conversation_seq) == (1, 3)
    assert isinstance(added, GroupReply) and isinstance(left, GroupReply) and isinstance(removed, GroupReply)
    assert (added.conversation_seq, added.membership_version, added.members.total_hint) == (2, 2, 4)
    assert (left.conversation_seq, left.membership_version, left.members.total_hint) == (4, 3, 3)
    assert (removed.conversation_seq, removed.membership_version, removed.members.total_hint) == (5, 4, 2)
    assert list(left.members.members) == []
    for late in (three, four):
        assert isinstance(late, SubmitSendReply)
        assert int(late.error.code) == ErrorCode.PERMISSION_DENIED
    intervals = await bench.model.intervals_of_many("t", "choir", ["ann", "bob", "cid", "dan"])
    last = intervals[0][0].left_at
    assert intervals == [((0, last),), ((0, 4),), ((1, last),), ((1, 5),)]


async def test_control_messages_are_committed_under_the_new_version(bench: ModelBench) -> None:
    await bench.create("bob")
    await bench.change(InternalOpcode.SUBMIT_GROUP_ADD, "cid")
    await until(lambda: len(bench.hinted()) == 2)
    control = bench.hinted()[1]
    assert (control.message_type, control.membership_version, control.conversation_seq) == (MESSAGE_TYPE_CONTROL, 2, 1)
    assert await bench.model.version_index("t", "choir", 2)


async def test_nothing_left_to_change_commits_nothing(bench: ModelBench) -> None:
    await bench.create("bob")
    again = await bench.change(InternalOpcode.SUBMIT_GROUP_ADD, "bob", "ann")
    assert (again.conversation_seq, again.membership_version, again.members.total_hint) == (0, 1, 2)
    gone = await bench.change(InternalOpcode.SUBMIT_GROUP_REMOVE, "zoe")
    assert (gone.conversation_seq, gone.HasField("error")) == (0, False)
    assert bench.model.calls == []


@pytest.mark.parametrize("user", ["eve", "bob"])
async def test_to_leave_one_must_be_in(bench: ModelBench, user: str) -> None:
    if user == "eve":
        await bench.create("bob")
    assert int((await bench.leave(user)).error.code) == ErrorCode.PERMISSION_DENIED


async def test_a_removed_members_retry_of_a_committed_message_is_acknowledged(bench: ModelBench) -> None:
    await bench.create("bob")
    first = await bench.acked("hello", to=GROUP, by="bob", own_id="m")
    await bench.leave("bob")
    again = await bench.acked("hello", to=GROUP, by="bob", own_id="m")
    assert (again.message_id, again.conversation_seq) == (first.message_id, first.conversation_seq)
    assert int((await bench.refused("new", to=GROUP, by="bob")).code) == ErrorCode.PERMISSION_DENIED
    reused = await bench.refused("other words", to=GROUP, by="bob", own_id="m")
    assert reused.detail == Detail.CLIENT_MESSAGE_ID_REUSED


async def test_a_reply_mentions_the_sender_of_its_target(bench: ModelBench) -> None:
    await bench.acked("question", by="bob")
    await bench.acked("answer", by="ann", reply_to_conversation_seq=1)
    await until(lambda: len(bench.hinted()) == 2)
    assert bench.hinted()[1].events[0].mention.reply_to_user_id == "bob"


@pytest.mark.parametrize(
    ("users", "group_id", "operator"),
    [((), "choir", ""), (("a b",), "choir", ""), (("ann",), "no group", ""), (("ann",), "choir", "no name")],
)
async def test_malformed_changes_are_refused(
    bench: ModelBench, users: tuple[str, ...], group_id: str, operator: str
) -> None:
    await bench.create("bob")
    reply = await bench.change(InternalOpcode.SUBMIT_GROUP_ADD, *users, group_id=group_id, operator=operator)
    assert int(reply.error.code) == ErrorCode.PERMISSION_DENIED


async def test_more_users_than_a_call_may_carry_are_refused(bench: ModelBench) -> None:
    await bench.create("bob")
    reply = await bench.change(InternalOpcode.SUBMIT_GROUP_ADD, *(f"u{index}" for index in range(501)))
    assert reply.error.detail == Detail.BAD_REQUEST
    whole = await bench.change(InternalOpcode.SUBMIT_GROUP_ADD, *(f"u{index}" for index in range(500)))
    assert whole.members.total_hint == 502


async def test_a_group_with_a_name_that_is_none_is_refused(bench: ModelBench) -> None:
    assert int((await bench.create("bob", group_id="no name")).error.code) == ErrorCode.PERMISSION_DENIED
    assert (await bench.create("b b")).error.detail == Detail.BAD_REQUEST


# ----------------------------------------------------------------------------------------------------- lifecycle


async def test_a_draining_writer_answers_what_it_took_and_refuses_what_is_new(bench: ModelBench) -> None:
    assert bench.writer.ready()
    taken = asyncio.create_task(bench.acked("hello"))
    await until(lambda: bench.model.calls)
    await bench.writer.drain()
    assert not bench.writer.ready()
    assert (await taken).conversation_seq == 1
    error = await bench.refused("late")
    assert int(error.code) == ErrorCode.REGION_FAILOVER
    assert error.retry_after_ms > 0


async def test_a_full_instance_takes_nothing_new_and_is_not_ready(bench: ModelBench) -> None:
    bench.full = True
    error = await bench.refused("hello")
    assert (int(error.code), error.detail) == (ErrorCode.RATE_LIMITED, Detail.STORE_FULL)
    assert not bench.writer.ready()
    bench.full = False
    assert (await bench.acked("hello")).conversation_seq == 1
    assert bench.writer.ready()


async def test_buckets_of_another_writer_are_answered_region_failover(bench: ModelBench) -> None:
    bench.writer._machines.clear()
    assert int((await bench.refused("hello")).code) == ErrorCode.REGION_FAILOVER
