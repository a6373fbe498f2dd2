"""The contract of GroupMembership: one suite for the model and for the scripts on a real server (DESIGN-data §8)."""

from __future__ import annotations

import pytest
from pyroaring import BitMap

from qim.core.visibility import FULL, OPEN_END, Interval
from qim.errors import Fenced, StoreError
from qim.stores.api import CommitStatus, GroupMembership, GroupMeta, MessageStore, SnapshotRef
from qim.stores.redis.resp import RespClient
from tests.contract.commit_requests import BUCKET, GRANT, TENANT, GroupPlan, message_id, request
from tests.contract.message_contract import outbox_of

EPOCH = 5
GROUP = "team"
RETENTION_MS = 8 * 86_400_000


class MembershipContract:
    """Subclasses give `store`, `groups` (bucket opened under EPOCH) and, on a real server, `client`."""

    store: MessageStore
    groups: GroupMembership
    client: RespClient | None

    async def stage(self, plan: GroupPlan, user_ids: list[str]) -> None:
        slots = {user_id: plan.slots[user_id] for user_id in user_ids}
        shards = {user_id: plan.shard_of(user_id) for user_id in user_ids}
        await self.groups.stage_members(BUCKET, EPOCH, TENANT, plan.group_id, slots, shards)

    async def publish(self, plan: GroupPlan, number: int, *, epoch: int = EPOCH) -> int | None:
        snapshots = {shard: plan.snapshot(shard) for shard in plan.index}
        return await self.groups.publish_group(
            BUCKET,
            epoch,
            TENANT,
            plan.group_id,
            plan.meta(),
            snapshots,
            plan.index,
            message_id(number),
            b"announcement",
        )

    async def create(self, user_ids: list[str], number: int = 1) -> GroupPlan:
        plan = GroupPlan(GROUP)
        plan.create(user_ids)
        await self.stage(plan, user_ids)
        assert await self.publish(plan, number) is not None
        return plan

    async def change(self, plan: GroupPlan, number: int, joining: list[str], leaving: list[str]) -> int:
        """Commit one membership change; its J."""
        frozen = plan.version
        rewrite = plan.change(joining, leaving)
        (outcome,) = await self.store.commit(
            BUCKET, EPOCH, [request(number, "g:team", membership_version=frozen, membership=rewrite)]
        )
        assert outcome.status is CommitStatus.COMMITTED
        return outcome.conversation_seq

    async def test_a_published_group_has_members_slots_and_a_version(self) -> None:
        plan = await self.create(["ann", "bob", "cid"])
        assert await self.groups.meta(TENANT, GROUP) == GroupMeta(
            membership_version=1, member_count=3, next_slot=3, creator_id="ann", create_digest=bytes(16)
        )
        assert await self.groups.slots_of(TENANT, GROUP, ["bob", "eve", "ann"]) == [1, None, 0]
        assert await self.groups.intervals(TENANT, GROUP, "bob") == FULL
        assert await self.groups.intervals_of_many(TENANT, GROUP, ["eve", "cid"]) == [(), FULL]
        assert await self.groups.member_ids(TENANT, GROUP) == ["ann", "bob", "cid"]
        await self.check_version(plan, 1, {"ann", "bob", "cid"})

    async def test_the_announcement_takes_no_sequence(self) -> None:
        await self.create(["ann", "bob"])
        assert await outbox_of(self.store, self.client) == [b"\x09" + bytes(8) + b"announcement"]
        assert (await self.store.head(TENANT, "g:team")).latest_conversation_seq == 0
        assert (await self.store.open_bucket(BUCKET, EPOCH, GRANT)).last_message_id == message_id(1)
        (outcome,) = await self.store.commit(BUCKET, EPOCH, [request(2, "g:team", membership_version=1)])
        assert (outcome.conversation_seq, outcome.outbox_offset) == (1, 1)

    async def test_a_group_exists_once(self) -> None:
        plan = await self.create(["ann", "bob"])
        assert await self.publish(plan, 2) is None
        with pytest.raises(StoreError):
            await self.stage(plan, ["ann"])
        assert len(await outbox_of(self.store, self.client)) == 1

    async def test_staged_members_are_invisible(self) -> None:
        plan = GroupPlan(GROUP)
        plan.create(["ann", "bob"])
        await self.stage(plan, ["ann", "bob"])
        await self.stage(plan, ["ann", "bob"])
        assert await self.groups.meta(TENANT, GROUP) is None
        assert await self.groups.intervals(TENANT, GROUP, "bob") == ()
        assert await self.groups.slots_of(TENANT, GROUP, ["bob"]) == [None]
        assert await self.groups.member_ids(TENANT, GROUP) == []
        assert await self.groups.slot_users(TENANT, GROUP, plan.shard_of("bob")) == {}
        with pytest.raises(StoreError):
            await self.groups.version_index(TENANT, GROUP, 1)

    async def test_leftovers_of_an_abandoned_creation_never_become_members(self) -> None:
        """The writer died between staging and publishing; later somebody else creates the group with other people."""
        abandoned = GroupPlan(GROUP)
        abandoned.create(["mallory", "eve", "trent"])
        await self.stage(abandoned, ["mallory", "eve", "trent"])
        plan = await self.create(["ann", "bob"])
        assert await self.groups.intervals_of_many(TENANT, GROUP, ["mallory", "eve"]) == [(), ()]
        assert await self.groups.member_ids(TENANT, GROUP) == ["ann", "bob"]
        await self.check_version(plan, 1, {"ann", "bob"})

    async def test_publishing_an_incomplete_stage_is_refused(self) -> None:
        plan = GroupPlan(GROUP)
        plan.create(["ann", "bob", "cid"])
        await self.stage(plan, ["ann", "bob"])
        with pytest.raises(StoreError, match="2 of 3"):
            await self.publish(plan, 1)
        await self.stage(plan, ["cid"])
        assert await self.publish(plan, 1) == 0

    async def test_fenced_and_stale_publications_write_nothing(self) -> None:
        await self.store.commit(BUCKET, EPOCH, [request(7)])
        plan = GroupPlan(GROUP)
        plan.create(["ann", "bob"])
        await self.stage(plan, ["ann", "bob"])
        with pytest.raises(StoreError, match="message_id"):
            await self.publish(plan, 7)
        with pytest.raises(Fenced):
            await self.publish(plan, 8, epoch=EPOCH - 1)
        with pytest.raises(Fenced):
            await self.groups.stage_members(BUCKET, EPOCH - 1, TENANT, GROUP, plan.slots, plan.shards())
        assert await self.groups.meta(TENANT, GROUP) is None
        assert len(await outbox_of(self.store, self.client)) == 1

    async def test_joining_and_leaving_set_intervals_at_their_control_message(self) -> None:
        plan = await self.create(["ann", "bob"])
        await self.store.commit(BUCKET, EPOCH, [request(2, "g:team", membership_version=1)])
        joined = await self.change(plan, 3, ["cid"], [])
        left = await self.change(plan, 4, [], ["cid", "bob"])
        back = await self.change(plan, 5, ["cid"], [])
        assert (joined, left, back) == (2, 3, 4)
        assert await self.groups.intervals(TENANT, GROUP, "cid") == (Interval(1, 3), Interval(3, OPEN_END))
        assert await self.groups.intervals(TENANT, GROUP, "bob") == (Interval(0, 3),)
        assert await self.groups.slots_of(TENANT, GROUP, ["cid"]) == [2]
        assert await self.groups.meta(TENANT, GROUP) == GroupMeta(
            membership_version=4, member_count=2, next_slot=3, creator_id="ann", create_digest=bytes(16)
        )

    async def test_old_versions_stay_readable_and_unchanged_shards_are_not_copied(self) -> None:
        plan = await self.create([f"user{n}" for n in range(20)])
        first = set(plan.active)
        first_index = dict(plan.index)
        await self.change(plan, 2, [], ["user3"])
        await self.check_version(plan, 2, first - {"user3"})
        old = await self.groups.version_index(TENANT, GROUP, 1)
        assert old == first_index
        changed = plan.shard_of("user3")
        assert {shard for shard, ref in plan.index.items() if ref.snapshot_version == 2} == {changed}
        assert {shard for shard in old if old[shard] != plan.index[shard]} == {changed}

    async def test_a_shard_without_members_leaves_the_index(self) -> None:
        plan = await self.create(["ann", "bob"])
        assert plan.shard_of("ann") != plan.shard_of("bob")
        await self.change(plan, 2, [], ["bob"])
        assert set(await self.groups.version_index(TENANT, GROUP, 2)) == {plan.shard_of("ann")}

    async def forget(self, now_ms: int, *, epoch: int = EPOCH) -> int:
        return await self.groups.forget_versions(BUCKET, epoch, TENANT, GROUP, now_ms, RETENTION_MS)

    async def test_versions_superseded_for_the_retention_are_forgotten(self) -> None:
        plan = await self.create([f"user{n}" for n in range(20)])
        for number in range(2, 6):
            await self.change(plan, number, [], [f"user{number}"])
        assert await self.forget(1_000) == 0, "now it is known that version 5 was the current one"
        await self.change(plan, 6, [], ["user6"])
        assert await self.forget(999 + RETENTION_MS) == 0
        kept = dict(await self.groups.version_index(TENANT, GROUP, 5))
        assert await self.forget(1_000 + RETENTION_MS) == 4
        for version in range(1, 5):
            with pytest.raises(StoreError):
                await self.groups.version_index(TENANT, GROUP, version)
        assert await self.groups.version_index(TENANT, GROUP, 5) == kept
        for shard, ref in kept.items():
            assert (await self.groups.shard_snapshot(TENANT, GROUP, shard, ref.snapshot_version)).member_count
        await self.check_version(plan, 6, set(plan.active))
        assert await self.forget(999 + 2 * RETENTION_MS) == 0
        assert await self.forget(1_000 + 2 * RETENTION_MS) == 1

    async def test_snapshots_go_with_their_last_version(self) -> None:
        plan = await self.create(["ann", "bob"])
        shard = plan.shard_of("bob")
        assert shard != plan.shard_of("ann")
        await self.change(plan, 2, [], ["bob"])
        await self.forget(0)
        assert await self.forget(RETENTION_MS) == 1
        with pytest.raises(StoreError):
            await self.groups.shard_snapshot(TENANT, GROUP, shard, 1)
        assert (await self.groups.shard_snapshot(TENANT, GROUP, plan.shard_of("ann"), 1)).member_count == 1

    async def test_versions_are_forgotten_by_the_owner_only_and_a_few_at_a_time(self) -> None:
        plan = await self.create(["ann", "bob"])
        for number in range(2, 113):
            joining, leaving = (["cid"], []) if number % 2 == 0 else ([], ["cid"])
            await self.change(plan, number, joining, leaving)
        await self.forget(0)
        with pytest.raises(Fenced):
            await self.forget(RETENTION_MS, epoch=EPOCH - 1)
        assert await self.forget(RETENTION_MS) == 100
        assert await self.forget(RETENTION_MS) == 11
        assert await self.forget(RETENTION_MS) == 0
        await self.check_version(plan, 112, set(plan.active))
        assert await self.groups.forget_versions(BUCKET, EPOCH, TENANT, "nobody", 0, RETENTION_MS) == 0

    async def test_unknown_versions_and_snapshots_are_errors(self) -> None:
        await self.create(["ann", "bob"])
        with pytest.raises(StoreError):
            await self.groups.version_index(TENANT, GROUP, 2)
        with pytest.raises(StoreError):
            await self.groups.shard_snapshot(TENANT, GROUP, 0, 9)

    async def check_version(self, plan: GroupPlan, version: int, members: set[str]) -> None:
        """Index, snapshots and slot maps of a version name exactly these members."""
        index = await self.groups.version_index(TENANT, GROUP, version)
        found: set[str] = set()
        for shard, ref in index.items():
            snapshot = await self.groups.shard_snapshot(TENANT, GROUP, shard, ref.snapshot_version)
            assert ref == SnapshotRef(ref.snapshot_version, snapshot.member_count, snapshot.lane_mask)
            users = await self.groups.slot_users(TENANT, GROUP, shard)
            here = {users[slot] for slot in BitMap.deserialize(snapshot.bitmap)}
            assert len(here) == snapshot.member_count
            assert {plan.shard_of(user_id) for user_id in here} == {shard}
            found |= here
        assert found == members
