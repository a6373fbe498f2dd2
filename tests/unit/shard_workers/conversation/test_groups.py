"""Reads, plans and creation of groups against the model of the store."""

from __future__ import annotations

from typing import Any

import pytest

from qim.config.parameters import Parameters, default_parameters
from qim.errors import Detail
from qim.protocol.qim_pb2 import MessageRecord, SendMessage
from qim.shard_workers.conversation.admission import DENIED, Refusal
from qim.shard_workers.conversation.groups import (
    GROUP_EXISTS,
    TOO_MANY_MEMBERS,
    Announcement,
    GroupCreator,
    GroupReader,
)
from qim.shard_workers.conversation.membership import Placement
from qim.shard_workers.conversation.submission import Change, Create, Send
from qim.stores.api import CommitRequest, CommitStatus, MembershipRewrite
from qim.stores.memory_message import MemoryMessageStore

PLACEMENT = Placement(4, 8)
BUCKET = 7


class Bench:
    """A store with one open bucket; ids count up."""

    def __init__(self, parameters: Parameters) -> None:
        self.store = MemoryMessageStore()
        self.reader = GroupReader(self.store, self.store, PLACEMENT, parameters)
        self.creator = GroupCreator(self.store, PLACEMENT, parameters)
        self.ids = 0

    def announce(self) -> Announcement:
        self.ids += 1
        return Announcement(self.ids.to_bytes(16, "big"), b"announcement")

    async def create(self, *members: str, creator: str = "") -> tuple[Refusal | None, int, bytes]:
        create = Create("t", "g:choir", creator or members[0], sorted(members), expires_at_ms=1)
        return await self.creator.create(create, BUCKET, 1, self.announce)

    async def change(self, *users: str, joining: bool, by_subject: bool = False) -> MembershipRewrite | Refusal | None:
        change = Change(
            "t", "g:choir", "op", "c", b"", joining=joining, user_ids=users, by_subject=by_subject, expires_at_ms=1
        )
        return await self.reader.plan(change, await self.reader.load("t", "g:choir"))

    async def commit(self, rewrite: Any, record: bytes = b"") -> None:
        self.ids += 1
        request = CommitRequest(
            tenant_id="t", conversation_id="g:choir", sender_id="op", client_message_id=f"c{self.ids}",
            request_digest=bytes(16), after_client_message_id="",
            membership_version=rewrite.new_version - 1 if rewrite else 1, message_id=self.ids.to_bytes(16, "big"),
            record=record, outbox=b"", dek_id="d", wrapped_dek=b"", preview_ciphertext=b"", created_at_ms=1,
            membership=rewrite,
        )  # fmt: skip
        (outcome,) = await self.store.commit(BUCKET, 1, [request])
        assert outcome.status is CommitStatus.COMMITTED


@pytest.fixture
async def bench() -> Bench:
    made = Bench(default_parameters(max_members_per_group=6, membership_stage_max_members=2))
    await made.store.open_bucket(BUCKET, 1, "grant")
    return made


async def test_a_creation_is_staged_in_steps_and_published_once(bench: Bench) -> None:
    refusal, offset, outbox = await bench.create("eve", "ann", "bob", "cid", "dan")
    assert (refusal, offset, outbox) == (None, 0, b"announcement")
    assert await bench.store.slots_of("t", "choir", ["ann", "bob", "cid", "dan", "eve"]) == [0, 1, 2, 3, 4]
    context = await bench.reader.load("t", "g:choir")
    assert (context.version, context.member_count, context.next_slot, context.creator_id) == (1, 5, 5, "eve")
    assert sum(ref.member_count for ref in context.index.values()) == 5


async def test_the_same_creation_again_is_success_and_another_is_not(bench: Bench) -> None:
    await bench.create("ann", "bob")
    assert await bench.create("ann", "bob") == (None, -1, b"")
    assert (await bench.create("ann", "bob", "cid"))[0] == GROUP_EXISTS
    assert (await bench.create("ann", "bob", creator="bob"))[0] == GROUP_EXISTS
    assert len(bench.store.outbox(BUCKET)) == 1


async def test_a_creation_that_was_published_meanwhile_is_compared(bench: Bench) -> None:
    async def no_meta_yet(tenant_id: str, group_id: str) -> None:
        bench.store.meta = real_meta  # type: ignore[method-assign]

    await bench.create("ann", "bob")
    real_meta = bench.store.meta
    real_stage = bench.store.stage_members

    async def stage(*args: Any) -> None:
        bench.store.stage_members = real_stage  # type: ignore[method-assign]

    bench.store.meta = no_meta_yet  # type: ignore[method-assign]
    bench.store.stage_members = stage  # type: ignore[assignment, method-assign]
    assert await bench.create("ann", "bob") == (None, -1, b"")


async def test_too_many_members_are_refused_as_a_whole(bench: Bench) -> None:
    assert (await bench.create(*(f"u{index}" for index in range(7))))[0] == TOO_MANY_MEMBERS
    await bench.create("ann", "bob", "cid", "dan", "eve")
    assert await bench.change("fay", "gus", joining=True) == TOO_MANY_MEMBERS
    assert TOO_MANY_MEMBERS.detail == Detail.GROUP_MEMBER_LIMIT
    assert isinstance(await bench.change("fay", "ann", joining=True), MembershipRewrite)


async def test_users_already_in_the_wanted_state_are_dropped(bench: Bench) -> None:
    await bench.create("ann", "bob")
    assert await bench.change("ann", "bob", joining=True) is None
    assert await bench.change("cid", joining=False) is None
    rewrite = await bench.change("bob", "cid", joining=True)
    assert isinstance(rewrite, MembershipRewrite)
    assert dict(rewrite.joining) == {"cid": 2}


async def test_to_leave_one_must_be_a_member(bench: Bench) -> None:
    await bench.create("ann", "bob")
    assert await bench.change("cid", joining=False, by_subject=True) == DENIED


async def test_who_leaves_and_comes_back_keeps_the_slot(bench: Bench) -> None:
    await bench.create("ann", "bob")
    left = await bench.change("bob", joining=False, by_subject=True)
    await bench.commit(left)
    assert await bench.reader.active("t", "g:choir", ["ann", "bob", "cid"]) == {"ann": True, "bob": False, "cid": False}
    back = await bench.change("bob", "cid", joining=True)
    assert isinstance(back, MembershipRewrite)
    assert dict(back.joining) == {"bob": 1, "cid": 2}
    await bench.commit(back)
    context = await bench.reader.load("t", "g:choir")
    assert (context.version, context.member_count, context.next_slot) == (3, 3, 3)


async def test_an_emptied_group_is_still_a_group(bench: Bench) -> None:
    await bench.create("ann")
    await bench.commit(await bench.change("ann", joining=False, by_subject=True))
    context = await bench.reader.load("t", "g:choir")
    assert (context.version, context.member_count, dict(context.index)) == (2, 0, {})
    assert isinstance(await bench.change("bob", joining=True), MembershipRewrite)


async def test_no_group_loads_as_version_zero(bench: Bench) -> None:
    assert (await bench.reader.load("t", "g:choir")).version == 0


async def test_a_reply_finds_the_sender_of_its_target(bench: Bench) -> None:
    await bench.create("ann", "bob")
    await bench.commit(None, MessageRecord(sender_id="bob").SerializeToString())

    def reply(seq: int) -> Send:
        message = SendMessage(conversation_id="g:choir", reply_to_conversation_seq=seq)
        return Send("t", "ann", "phone", message, b"", expires_at_ms=1)

    assert await bench.reader.reply_target_sender(reply(1)) == "bob"
    assert await bench.reader.reply_target_sender(reply(9)) == ""
    assert await bench.reader.reply_target_sender(reply(0)) == ""
