from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from qim.core import ids
from qim.errors import StoreError, StoreUnavailable
from qim.protocol.qim_pb2 import DispatchEvent, GroupDispatch, OutboxRecord
from qim.shard_workers.mailbox.expand import Dispatch, RecentEvents
from qim.shard_workers.mailbox.members import MEMBER_BYTES, MemberDirectory
from qim.stores.api import ShardSnapshot
from qim.stores.memory_message import MemoryMessageStore
from tests.unit.shard_workers.mailbox.making import TENANT, packed_dispatch
from tests.unit.shard_workers.pipeline import snapshots_of

LANES, SHARDS = 4, 4
USERS = [f"u{n}" for n in range(60)]


class CountingMembership(MemoryMessageStore):
    """One shard's snapshots; reads are counted and may wait or fail."""

    def __init__(self) -> None:
        super().__init__()
        slots = {user: n for n, user in enumerate(USERS)}
        shards = {user: ids.mailbox_shard_id(TENANT, user, SHARDS) for user in USERS}
        self.snapshots = snapshots_of(slots, shards, LANES)
        self.users = {n: user for n, user in enumerate(USERS) if shards[user] == 1}
        self.reads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing = False

    async def shard_snapshot(
        self, tenant_id: str, group_id: str, mailbox_shard: int, snapshot_version: int
    ) -> ShardSnapshot:
        self.reads += 1
        await self.gate.wait()
        if self.failing:
            raise StoreUnavailable("down")
        return self.snapshots[mailbox_shard]

    async def slot_users(self, tenant_id: str, group_id: str, mailbox_shard: int) -> Mapping[int, str]:
        return self.users


def group_dispatch(membership: CountingMembership, *, version: int = 1, mask: int | None = None) -> Dispatch:
    record = OutboxRecord(
        tenant_id=TENANT, conversation_id="g:g", conversation_seq=1, message_id=bytes(16),
        events=[DispatchEvent(event_type=1, audience_all=True)],  # type: ignore[arg-type]
    )  # fmt: skip
    frame = GroupDispatch(
        target_mailbox_shard=1, snapshot_version=version, record=record,
        lane_mask=membership.snapshots[1].lane_mask if mask is None else mask,
    )  # fmt: skip
    made = Dispatch(0, frame.SerializeToString())
    made.prepare(RecentEvents())
    return made


def directory(membership: CountingMembership, cache_bytes: int = 1 << 20) -> MemberDirectory:
    return MemberDirectory(membership, lane_count=LANES, mailbox_shard_count=SHARDS, cache_bytes=cache_bytes)


async def test_a_snapshot_becomes_members_per_lane_by_slot_and_is_kept() -> None:
    membership = CountingMembership()
    members = directory(membership)
    dispatch = group_dispatch(membership)
    assert members.known(dispatch) is None
    by_lane = await members.load(dispatch)
    assert members.known(dispatch) == by_lane
    assert {slot: user_id for found in by_lane.values() for slot, user_id in found} == membership.users
    for lane, found in by_lane.items():
        assert list(found) == sorted(found)
        assert all(ids.lane_id(TENANT, user_id, LANES) == lane for _, user_id in found)


async def test_many_who_wait_share_one_read() -> None:
    membership = CountingMembership()
    members = directory(membership)
    membership.gate.clear()
    waiting = [asyncio.ensure_future(members.load(group_dispatch(membership))) for _ in range(5)]
    await asyncio.sleep(0)
    membership.gate.set()
    assert len({id(found) for found in await asyncio.gather(*waiting)}) == 1
    assert membership.reads == 1


async def test_a_failed_read_fails_everybody_and_the_next_one_starts_afresh() -> None:
    membership = CountingMembership()
    members = directory(membership)
    membership.failing = True
    membership.gate.clear()
    waiting = [asyncio.ensure_future(members.load(group_dispatch(membership))) for _ in range(3)]
    await asyncio.sleep(0)
    membership.gate.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3
    membership.failing = False
    assert await members.load(group_dispatch(membership))


async def test_a_reader_that_is_cancelled_leaves_the_others_an_error_not_a_hang() -> None:
    membership = CountingMembership()
    members = directory(membership)
    membership.gate.clear()
    first = asyncio.ensure_future(members.load(group_dispatch(membership)))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(members.load(group_dispatch(membership)))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(StoreError, match="given up"):
        await second


async def test_members_that_do_not_fit_the_dispatch_are_an_error_never_an_empty_expansion() -> None:
    membership = CountingMembership()
    members = directory(membership)
    with pytest.raises(StoreError, match="dispatch names"):
        await members.load(group_dispatch(membership, mask=0b1111 ^ membership.snapshots[1].lane_mask | 1 << 9))
    del membership.users[next(iter(membership.users))]
    with pytest.raises(StoreError, match="has no user"):
        await members.load(group_dispatch(membership, version=2))


async def test_the_cache_is_bounded_in_bytes() -> None:
    membership = CountingMembership()
    members = directory(membership, cache_bytes=int(MEMBER_BYTES * len(membership.users) * 2.5))
    for version in (1, 2, 3):
        await members.load(group_dispatch(membership, version=version))
    assert members.known(group_dispatch(membership, version=1)) is None
    assert members.known(group_dispatch(membership, version=2)) is not None
    assert members.known(group_dispatch(membership, version=3)) is not None


def test_single_chats_and_named_users_need_no_read() -> None:
    membership = CountingMembership()
    members = directory(membership)
    named = Dispatch(0, packed_dispatch(["u1", "u2"]))
    named.prepare(RecentEvents())
    found = members.known(named)
    assert found is not None
    assert {user_id for lane in found.values() for _, user_id in lane} == {"u1", "u2"}
    assert membership.reads == 0
