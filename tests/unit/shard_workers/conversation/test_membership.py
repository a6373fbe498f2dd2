"""Slots, snapshots and lane masks under joins and leaves, against a plain model."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from qim.shard_workers.conversation.membership import (
    GroupContext,
    Placement,
    ShardsBuilder,
    create_digest,
    index_of,
    plan_join,
    plan_leave,
)
from qim.stores.api import GroupMeta, MembershipRewrite, ShardSnapshot

PLACEMENT = Placement(4, 8)
USERS = [f"user{index}" for index in range(24)]


class Group:
    """What a store would hold after each rewrite."""

    def __init__(self, members: list[str]) -> None:
        builder = ShardsBuilder("t", PLACEMENT)
        self.slots = {user: slot for slot, user in enumerate(sorted(members))}
        self.slot_users: dict[int, dict[int, str]] = {shard: {} for shard in range(4)}
        for user, slot in self.slots.items():
            self.slot_users[builder.add(user, slot)][slot] = user
        made = builder.snapshots()
        self.snapshots: dict[tuple[int, int], ShardSnapshot] = {(shard, 1): value for shard, value in made.items()}
        meta = GroupMeta(
            membership_version=1, member_count=len(members), next_slot=len(members), creator_id=members[0],
            create_digest=create_digest(sorted(members)),
        )  # fmt: skip
        self.context = GroupContext(meta, index_of(made, 1))
        self.active = set(members)

    def current(self, shards: set[int]) -> Mapping[int, ShardSnapshot]:
        index = self.context.index
        return {shard: self.snapshots[shard, index[shard].snapshot_version] for shard in shards if shard in index}

    def join(self, users: set[str]) -> MembershipRewrite:
        shards = PLACEMENT.shards("t", users)
        rewrite = plan_join(
            "t", "choir", self.context, {user: self.slots.get(user) for user in users}, shards,
            self.current(set(shards.values())), PLACEMENT,
        )  # fmt: skip
        for user, slot in rewrite.joining.items():
            assert self.slots.get(user, slot) == slot, "a returning user keeps the slot"
            self.slots[user] = slot
            self.slot_users[rewrite.joining_shards[user]][slot] = user
        self.active |= users
        self._store(rewrite)
        return rewrite

    def leave(self, users: set[str]) -> MembershipRewrite:
        shards = PLACEMENT.shards("t", users)
        concerned = set(shards.values())
        rewrite = plan_leave(
            "t", "choir", self.context, {user: self.slots[user] for user in users}, shards, self.current(concerned),
            {shard: self.slot_users[shard] for shard in concerned}, PLACEMENT,
        )  # fmt: skip
        assert rewrite.leaving == tuple(sorted(users))
        self.active -= users
        self._store(rewrite)
        return rewrite

    def _store(self, rewrite: MembershipRewrite) -> None:
        assert rewrite.new_version == self.context.version + 1
        for shard, snapshot in rewrite.snapshots.items():
            self.snapshots[shard, rewrite.new_version] = snapshot
        self.context.apply(rewrite)

    def check(self) -> None:
        assert self.context.member_count == len(self.active)
        assert len(set(self.slots.values())) == len(self.slots) <= self.context.next_slot
        found: set[str] = set()
        for shard, ref in self.context.index.items():
            snapshot = self.snapshots[shard, ref.snapshot_version]
            members = [self.slot_users[shard][slot] for slot in BitMap.deserialize(snapshot.bitmap)]
            mask = 0
            for user in members:
                assert PLACEMENT.shard("t", user) == shard
                mask |= 1 << PLACEMENT.lane("t", user)
            assert snapshot.member_count == ref.member_count == len(members) > 0
            assert snapshot.lane_mask == ref.lane_mask == mask
            found.update(members)
        assert found == self.active


@settings(max_examples=200, deadline=None)
@given(st.sets(st.sampled_from(USERS), min_size=1), st.lists(st.sets(st.sampled_from(USERS), min_size=1), max_size=12))
def test_snapshots_hold_exactly_the_members_and_masks_exactly_their_lanes(
    members: set[str], changes: list[set[str]]
) -> None:
    group = Group(sorted(members))
    group.check()
    for users in changes:
        if joining := users - group.active:
            group.join(joining)
            group.check()
        if leaving := users & group.active - joining:
            group.leave(leaving)
            group.check()


def test_a_change_rewrites_only_the_shards_it_touches() -> None:
    group = Group(USERS[:12])
    before = dict(group.context.index)
    rewrite = group.join({USERS[20]})
    shard = PLACEMENT.shard("t", USERS[20])
    assert set(rewrite.snapshots) == {shard}
    assert {other: ref for other, ref in rewrite.index.items() if other != shard} == {
        other: ref for other, ref in before.items() if other != shard
    }


def test_the_last_member_leaves_an_empty_index() -> None:
    group = Group(["user0"])
    rewrite = group.leave({"user0"})
    assert (rewrite.index, rewrite.snapshots, rewrite.member_count) == ({}, {}, 0)
    group.join({"user0"})
    group.check()


def test_the_context_knows_who_may_send_after_a_change() -> None:
    group = Group(["user0", "user1"])
    group.join({"user2"})
    group.leave({"user1"})
    assert group.context.senders == {"user2": True, "user1": False}


def test_no_group_has_version_zero() -> None:
    assert GroupContext(None, {}).version == 0


def test_the_digest_of_a_creation_depends_on_every_member() -> None:
    assert create_digest(["a", "b"]) == create_digest(["a", "b"])
    assert len({create_digest(members) for members in (["a", "b"], ["ab"], ["a"], ["a", "c"])}) == 4
