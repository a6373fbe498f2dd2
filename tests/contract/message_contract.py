"""The contract of MessageStore: one suite for the model and for the scripts on a real server (DESIGN-data §3)."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pytest

from qim.errors import Fenced, StoreError
from qim.stores.api import (
    BucketCommit,
    CommitOutcome,
    CommitRequest,
    CommitStatus,
    ConversationHead,
    GroupMembership,
    MessageStore,
    StoredName,
)
from qim.stores.memory_message import MemoryMessageStore
from qim.stores.redis import keys
from qim.stores.redis.message import MessageInstances
from qim.stores.redis.resp import RespClient
from tests.contract.commit_requests import BUCKET, GRANT, TENANT, GroupPlan, message_id, request

EPOCH = 5
DM = "dm:ann:bob"


class OneBucket(MessageInstances):
    """Puts every conversation into BUCKET."""

    def bucket(self, tenant_id: str, conversation_id: str) -> int:
        return BUCKET


async def connected_client(address: str) -> RespClient:
    client = RespClient(address, name="message")
    await client.connect()
    return client


async def outbox_of(store: MessageStore, client: RespClient | None) -> list[bytes]:
    """All outbox records of the bucket; the index is the offset."""
    if isinstance(store, MemoryMessageStore):
        return store.outbox(BUCKET)
    assert client is not None
    rows = await client.call("XRANGE", keys.outbox(BUCKET), "-", "+")
    assert [row[0] for row in rows] == [b"%d-0" % (offset + 1) for offset in range(len(rows))]
    assert all(row[1][0] == keys.STREAM_FIELD for row in rows)
    return [row[1][1] for row in rows]


def statuses(outcomes: list[CommitOutcome]) -> list[CommitStatus]:
    return [outcome.status for outcome in outcomes]


class MessageStoreContract:
    """Subclasses give `store` (bucket opened under EPOCH) and, on a real server, `client`."""

    store: MessageStore
    groups: GroupMembership
    client: RespClient | None

    async def commit(self, *requests: CommitRequest) -> list[CommitOutcome]:
        return await self.store.commit(BUCKET, EPOCH, requests)

    async def test_first_messages_get_dense_sequences_and_offsets(self) -> None:
        outcomes = await self.commit(request(1), request(2, "dm:cid:dan"), request(3))
        assert outcomes == [
            CommitOutcome(
                status=CommitStatus.COMMITTED, message_id=message_id(number), conversation_seq=seq, outbox_offset=offset
            )
            for number, seq, offset in ((1, 1, 0), (2, 1, 1), (3, 2, 2))
        ]
        (again,) = await self.commit(request(4))
        assert (again.conversation_seq, again.outbox_offset) == (3, 3)

    async def test_the_outbox_record_starts_with_the_sequence(self) -> None:
        await self.commit(request(1), request(2))
        assert await outbox_of(self.store, self.client) == [
            b"\x09" + struct.pack("<Q", 1) + b"outbox text 1",
            b"\x09" + struct.pack("<Q", 2) + b"outbox text 2",
        ]

    async def test_records_and_head_are_what_was_committed(self) -> None:
        await self.commit(request(1), request(2, sender_id="bob"))
        assert await self.store.records(TENANT, DM, 0, [2, 1, 3]) == [b"record text 2", b"record text 1", None]
        assert await self.store.records(TENANT, DM, 1, [1]) == [None]
        assert await self.store.records(TENANT, DM, 0, []) == []
        assert await self.store.head(TENANT, DM) == ConversationHead(
            latest_conversation_seq=2,
            last_message_id=message_id(2),
            last_sender_id="bob",
            preview_ciphertext=b"preview 2",
            member_count=2,
            fencing_epoch=EPOCH,
            head_version=2,
            updated_at_ms=1_700_000_000_002,
            dek_id="c1:00000000:1",
            wrapped_dek=b"wrapped",
        )

    async def test_head_of_an_untouched_conversation_is_zero(self) -> None:
        assert await self.store.head(TENANT, DM) == ConversationHead(member_count=2)
        assert await self.store.head(TENANT, "g:nobody") == ConversationHead()

    async def test_repeating_a_call_returns_the_first_coordinates_and_writes_nothing(self) -> None:
        """The answer was lost, the writer or its successor tries again under a new message_id."""
        first = await self.commit(request(1), request(2))
        again = await self.commit(request(1, message_id=message_id(8)), request(2, message_id=message_id(9)))
        assert statuses(again) == [CommitStatus.DUPLICATE] * 2
        assert [(o.message_id, o.conversation_seq) for o in again] == [
            (o.message_id, o.conversation_seq) for o in first
        ]
        assert [o.outbox_offset for o in again] == [-1, -1]
        assert len(await outbox_of(self.store, self.client)) == 2

    async def test_a_duplicate_within_one_call(self) -> None:
        first, second = await self.commit(request(1), request(1, message_id=message_id(2)))
        assert (first.status, second.status) == (CommitStatus.COMMITTED, CommitStatus.DUPLICATE)
        assert second.message_id == message_id(1) and second.conversation_seq == 1

    async def test_other_content_under_a_used_id_is_final_and_blocks_nobody(self) -> None:
        await self.commit(request(1))
        outcomes = await self.commit(request(2, client_message_id="c1"), request(3))
        assert statuses(outcomes) == [CommitStatus.REUSED, CommitStatus.COMMITTED]

    async def test_the_same_digest_in_another_conversation_is_a_reuse(self) -> None:
        await self.commit(request(1))
        (outcome,) = await self.commit(
            request(2, "dm:ann:cid", client_message_id="c1", request_digest=request(1).request_digest)
        )
        assert outcome.status is CommitStatus.REUSED

    async def test_dedup_is_per_tenant_and_sender(self) -> None:
        await self.commit(request(1))
        outcomes = await self.commit(
            request(2, client_message_id="c1", sender_id="bob"), request(3, client_message_id="c1", tenant_id="other")
        )
        assert statuses(outcomes) == [CommitStatus.COMMITTED] * 2
        assert [o.conversation_seq for o in outcomes] == [2, 1]

    async def test_lookup_dedup_reads_and_writes_nothing(self) -> None:
        digest = request(1).request_digest
        assert await self.store.lookup_dedup(BUCKET, TENANT, "ann", "c1", digest) is None
        await self.commit(request(1))
        found = await self.store.lookup_dedup(BUCKET, TENANT, "ann", "c1", digest)
        assert found == CommitOutcome(status=CommitStatus.DUPLICATE, message_id=message_id(1), conversation_seq=1)
        other = await self.store.lookup_dedup(BUCKET, TENANT, "ann", "c1", bytes(16))
        assert other is not None and other.status is CommitStatus.REUSED

    async def test_a_greater_stored_epoch_fences_but_still_answers_duplicates(self) -> None:
        await self.commit(request(1))
        await self.store.open_bucket(BUCKET, EPOCH + 1, "grant-2")
        with pytest.raises(Fenced):
            await self.commit(request(1), request(2))
        (outcome,) = await self.commit(request(1))
        assert outcome.status is CommitStatus.DUPLICATE
        assert len(await outbox_of(self.store, self.client)) == 1

    async def test_a_bucket_that_was_not_opened_refuses(self) -> None:
        """An instance that lost its data forgot the fence: nothing may start over at sequence 1."""
        with pytest.raises(StoreError, match="NOTOPEN"):
            await self.store.commit(BUCKET, EPOCH + 1, [request(1)])

    async def test_buckets_share_a_call_and_each_is_judged_by_itself(self) -> None:
        """One is fenced, one was never opened, one meets a retryable refusal: the others commit all the same."""
        for bucket in (0, 1):
            await self.store.open_bucket(bucket, EPOCH, GRANT)
        await self.store.open_bucket(BUCKET, EPOCH + 1, "grant-2")
        first, fenced, unknown, last = await self.store.commit_each(
            [
                BucketCommit(0, EPOCH, [request(1, "dm:ann:cid"), request(2, "dm:ann:cid")]),
                BucketCommit(BUCKET, EPOCH, [request(3)]),
                BucketCommit(2, EPOCH, [request(4, "dm:ann:dan")]),
                BucketCommit(
                    1, EPOCH, [request(5, "dm:ann:eve", after_client_message_id="c1"), request(1, "dm:ann:fay")]
                ),
            ]
        )
        assert isinstance(first, list) and isinstance(last, list)
        assert [(o.conversation_seq, o.outbox_offset) for o in first] == [(1, 0), (2, 1)]
        assert isinstance(fenced, Fenced)
        assert isinstance(unknown, StoreError) and "NOTOPEN" in str(unknown)
        assert statuses(last) == [CommitStatus.OUT_OF_ORDER, CommitStatus.COMMITTED], "dedup and hlc are per bucket"
        assert last[1].outbox_offset == 0
        assert await outbox_of(self.store, self.client) == []
        assert len({self.store.instance_of(bucket) for bucket in (0, 1, 2, BUCKET)}) == 1

    async def test_open_returns_where_to_start_and_is_idempotent_per_grant(self) -> None:
        await self.commit(request(1), request(2))
        state = await self.store.open_bucket(BUCKET, EPOCH, GRANT)
        assert (state.last_message_id, state.next_outbox_offset) == (message_id(2), 2)
        for epoch, grant in ((EPOCH, "somebody-else"), (EPOCH - 1, GRANT)):
            with pytest.raises(Fenced):
                await self.store.open_bucket(BUCKET, epoch, grant)

    async def test_an_id_that_is_not_greater_is_refused_with_the_stored_one(self) -> None:
        await self.commit(request(5))
        for stale in (message_id(5), message_id(4, 7)):
            (outcome,) = await self.commit(request(6, "dm:cid:dan", message_id=stale))
            assert outcome == CommitOutcome(status=CommitStatus.ID_NOT_GREATER, message_id=message_id(5))

    async def test_ids_are_compared_bytewise_whatever_the_locale(self) -> None:
        """Bytes >= 0x80 and equal heads order differently under en_US.UTF-8."""
        ascending = sorted(
            bytes(position) + bytes((value,)) + bytes((fill,)) * (15 - position)
            for position in range(16)
            for value in (1, 0x41, 0x61, 0x7F, 0x80, 0xC3, 0xE9, 0xFF)
            for fill in (0, 0x7F, 0x80, 0xFF)
        )
        ascending = list(dict.fromkeys(ascending))
        for number, (low, high) in enumerate(pairwise(ascending)):
            up, down = await self.commit(
                request(2 * number, message_id=high), request(2 * number + 1, "dm:cid:dan", message_id=low)
            )
            assert (up.status, down.status) == (CommitStatus.COMMITTED, CommitStatus.ID_NOT_GREATER)

    async def test_another_dek_is_refused_and_told(self) -> None:
        other: dict[str, Any] = {"dek_id": "c1:11111111:1", "wrapped_dek": b"another"}
        told = CommitOutcome(status=CommitStatus.DEK_MISMATCH, dek_id="c1:00000000:1", wrapped_dek=b"wrapped")
        assert (await self.commit(request(1), request(2, **other)))[1] == told
        assert await self.commit(request(3, **other), request(4)) == [
            told,
            CommitOutcome(status=CommitStatus.UNJUDGED),
        ]

    async def test_a_message_without_a_key_is_a_mistake_of_the_caller(self) -> None:
        if self.client is not None:
            with pytest.raises(ValueError, match="dek_id"):
                await self.commit(request(1, dek_id=""))

    async def test_out_of_order_unless_the_predecessor_is_committed(self) -> None:
        (early,) = await self.commit(request(2, after_client_message_id="c1"))
        assert early.status is CommitStatus.OUT_OF_ORDER
        await self.commit(request(3, client_message_id="c1"))
        (late,) = await self.commit(request(4, client_message_id="c2", after_client_message_id="c1"))
        assert late.status is CommitStatus.COMMITTED

    async def test_the_predecessor_may_stand_earlier_in_the_call(self) -> None:
        outcomes = await self.commit(
            request(1), request(2, after_client_message_id="c1"), request(3, after_client_message_id="c2")
        )
        assert statuses(outcomes) == [CommitStatus.COMMITTED] * 3

    async def test_the_predecessor_of_another_sender_does_not_count(self) -> None:
        outcomes = await self.commit(request(1), request(2, sender_id="bob", after_client_message_id="c1"))
        assert statuses(outcomes) == [CommitStatus.COMMITTED, CommitStatus.OUT_OF_ORDER]

    async def test_after_a_retryable_refusal_the_rest_of_the_conversation_is_unjudged(self) -> None:
        """Pipelining past a refused message would reorder one sender's lines."""
        outcomes = await self.commit(
            request(1),
            request(2, after_client_message_id="lost"),
            request(3, "dm:cid:dan"),
            request(4),
            request(1, message_id=message_id(5)),
        )
        assert statuses(outcomes) == [
            CommitStatus.COMMITTED,
            CommitStatus.OUT_OF_ORDER,
            CommitStatus.COMMITTED,
            CommitStatus.UNJUDGED,
            CommitStatus.UNJUDGED,
        ]
        assert [o.outbox_offset for o in outcomes] == [0, -1, 1, -1, -1]
        assert len(await outbox_of(self.store, self.client)) == 2

    async def test_sequences_cross_into_the_next_record_bucket(self) -> None:
        number = 0
        while number < 4_100:
            batch = [request(number + i + 1) for i in range(100)]
            assert statuses(await self.commit(*batch)) == [CommitStatus.COMMITTED] * 100
            number += 100
        assert await self.store.records(TENANT, DM, 0, [4_095]) == [b"record text 4095"]
        assert await self.store.records(TENANT, DM, 1, [4_096, 4_095]) == [b"record text 4096", None]

    async def test_forgotten_history_is_gone_and_its_bound_never_falls(self) -> None:
        for first in range(1, 601, 100):
            await self.commit(*(request(first + i) for i in range(100)))
        forget = (BUCKET, EPOCH, TENANT, DM)
        assert await self.store.forget_history(*forget, 4) == 4
        assert await self.store.forget_history(*forget, 2) == 4
        assert await self.store.records(TENANT, DM, 0, [3, 4, 600]) == [None, b"record text 4", b"record text 600"]
        assert await self.store.forget_history(*forget, 10_000) == 504, "500 in one call"
        assert await self.store.forget_history(*forget, 10_000) == 601
        head = await self.store.head(TENANT, DM)
        assert (head.earliest_available_conversation_seq, head.latest_conversation_seq) == (601, 600)
        (after,) = await self.commit(request(601))
        assert after.conversation_seq == 601
        assert await self.store.records(TENANT, DM, 0, [600, 601]) == [None, b"record text 601"]
        with pytest.raises(Fenced):
            await self.store.forget_history(BUCKET, EPOCH - 1, TENANT, DM, 602)
        assert await self.store.forget_history(BUCKET, EPOCH, TENANT, "dm:eve:fay", 5) == 1

    async def test_a_walk_sees_every_conversation_of_the_buckets(self) -> None:
        await self.commit(*(request(number, f"dm:ann:bob{number}") for number in range(1, 50)))
        await self.commit(*(request(number, f"dm:ann:bob{number}") for number in range(50, 90)))
        seen: list[StoredName] = []
        position, steps = b"", 0
        while steps == 0 or position:
            position, found = await self.store.scan_conversations({BUCKET}, position)
            seen += found
            steps += 1
        assert set(seen) == {StoredName(BUCKET, TENANT, f"dm:ann:bob{number}") for number in range(1, 90)}
        assert await self.store.scan_conversations({BUCKET + 1}, b"") == (b"", [])

    async def test_a_group_message_needs_the_frozen_version(self) -> None:
        await self.create_group(GroupPlan(), 1)
        stale, rest = await self.commit(
            request(2, "g:team", membership_version=2), request(3, "g:team", membership_version=1)
        )
        assert stale == CommitOutcome(status=CommitStatus.STALE_VERSION, membership_version=1)
        assert rest.status is CommitStatus.UNJUDGED
        (outcome,) = await self.commit(request(4, "g:team", membership_version=1))
        assert (outcome.conversation_seq, outcome.outbox_offset) == (1, 1)
        assert (await self.store.head(TENANT, "g:team")).member_count == 2

    async def test_a_group_that_does_not_exist_has_version_0_and_takes_no_message(self) -> None:
        for version in (0, 1):
            (outcome,) = await self.commit(request(1, "g:team", membership_version=version))
            assert outcome == CommitOutcome(status=CommitStatus.STALE_VERSION, membership_version=0)

    async def test_a_version_changed_earlier_in_the_call_is_the_frozen_one(self) -> None:
        plan = GroupPlan()
        await self.create_group(plan, 1)
        rewrite = plan.change(["dan"], [])
        outcomes = await self.commit(
            request(2, "g:team", membership_version=1, membership=rewrite),
            request(3, "g:team", membership_version=2),
            request(4, "g:team", membership_version=1),
        )
        assert statuses(outcomes) == [CommitStatus.COMMITTED, CommitStatus.COMMITTED, CommitStatus.STALE_VERSION]

    async def create_group(self, plan: GroupPlan, number: int) -> None:
        meta, snapshots = plan.create(["ann", "bob"])
        await self.groups.stage_members(BUCKET, EPOCH, TENANT, plan.group_id, plan.slots, plan.shards())
        offset = await self.groups.publish_group(
            BUCKET, EPOCH, TENANT, plan.group_id, meta, snapshots, plan.index, message_id(number), b"announcement"
        )
        assert offset is not None
