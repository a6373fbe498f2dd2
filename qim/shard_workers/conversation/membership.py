"""What a membership change does to slots, snapshots and the index of a group (§7.9, DESIGN-data §8), pure.

Snapshots are copy-on-write per MailboxShard: a change rewrites only the shards it touches, and a message of any version
finds the snapshot that was current then. Slots ascend and are never reused; who comes back gets the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from blake3 import blake3
from pyroaring import BitMap

from qim.core.ids import lane_id, mailbox_shard_id
from qim.stores.api import GroupMeta, MembershipRewrite, ShardSnapshot, SnapshotRef

FIRST_VERSION: Final = 1


class GroupContext:
    """What the writer knows of a group at one membership version; `version` 0: there is no such group."""

    __slots__ = ("creator_id", "index", "member_count", "next_slot", "senders", "version")

    def __init__(self, meta: GroupMeta | None, index: Mapping[int, SnapshotRef]) -> None:
        self.version = meta.membership_version if meta else 0
        self.member_count = meta.member_count if meta else 0
        self.next_slot = meta.next_slot if meta else 0
        self.creator_id = meta.creator_id if meta else ""
        self.index = index
        self.senders: dict[str, bool] = {}
        """user -> is a member now; who never sent is not in it."""

    def apply(self, rewrite: MembershipRewrite) -> None:
        """The change was committed."""
        self.version = rewrite.new_version
        self.member_count = rewrite.member_count
        self.next_slot = rewrite.next_slot
        self.index = rewrite.index
        self.senders.update(dict.fromkeys(rewrite.joining, True))
        self.senders.update(dict.fromkeys(rewrite.leaving, False))


class Placement:
    """Where users of a tenant live: their MailboxShard and lane."""

    __slots__ = ("lane_count", "mailbox_shard_count")

    def __init__(self, mailbox_shard_count: int, lane_count: int) -> None:
        self.mailbox_shard_count = mailbox_shard_count
        self.lane_count = lane_count

    def shard(self, tenant_id: str, user_id: str) -> int:
        return mailbox_shard_id(tenant_id, user_id, self.mailbox_shard_count)

    def lane(self, tenant_id: str, user_id: str) -> int:
        return lane_id(tenant_id, user_id, self.lane_count)

    def shards(self, tenant_id: str, user_ids: Iterable[str]) -> dict[str, int]:
        return {user_id: self.shard(tenant_id, user_id) for user_id in user_ids}


def create_digest(member_ids: Sequence[str]) -> bytes:
    """16 bytes over the sorted initial members: a repeated CREATE_GROUP is recognised by it."""
    return blake3(b"qim.create-group.v1\x00" + b"\x00".join(user_id.encode() for user_id in member_ids)).digest(16)


class ShardsBuilder:
    """Snapshots of a new group, member by member in slot order."""

    __slots__ = ("_bitmaps", "_masks", "_placement", "_tenant_id")

    def __init__(self, tenant_id: str, placement: Placement) -> None:
        self._tenant_id = tenant_id
        self._placement = placement
        self._bitmaps: dict[int, BitMap] = {}
        self._masks: dict[int, int] = {}

    def add(self, user_id: str, slot: int) -> int:
        """Place one member; its MailboxShard."""
        shard = self._placement.shard(self._tenant_id, user_id)
        bitmap = self._bitmaps.get(shard)
        if bitmap is None:
            bitmap = self._bitmaps[shard] = BitMap()
            self._masks[shard] = 0
        bitmap.add(slot)
        self._masks[shard] |= 1 << self._placement.lane(self._tenant_id, user_id)
        return shard

    def snapshots(self) -> dict[int, ShardSnapshot]:
        return {shard: _snapshot(bitmap, self._masks[shard]) for shard, bitmap in sorted(self._bitmaps.items())}


def index_of(snapshots: Mapping[int, ShardSnapshot], version: int) -> dict[int, SnapshotRef]:
    """References to snapshots that are all of `version`."""
    return {shard: SnapshotRef(version, made.member_count, made.lane_mask) for shard, made in snapshots.items()}


def plan_join(
    tenant_id: str,
    group_id: str,
    context: GroupContext,
    slots: Mapping[str, int | None],
    shards: Mapping[str, int],
    snapshots: Mapping[int, ShardSnapshot],
    placement: Placement,
) -> MembershipRewrite:
    """The rewrite that adds the users of `slots` (user -> old slot or None), none of whom is a member.

    `snapshots` are the current ones of the shards concerned, as far as there are any.
    """
    next_slot = context.next_slot
    joining: dict[str, int] = {}
    bitmaps: dict[int, BitMap] = {}
    masks: dict[int, int] = {}
    for user_id in sorted(slots):
        slot = slots[user_id]
        if slot is None:
            slot = next_slot
            next_slot += 1
        joining[user_id] = slot
        shard = shards[user_id]
        if shard not in bitmaps:
            bitmaps[shard], masks[shard] = _opened(snapshots.get(shard))
        bitmaps[shard].add(slot)
        masks[shard] |= 1 << placement.lane(tenant_id, user_id)
    changed = {shard: _snapshot(bitmap, masks[shard]) for shard, bitmap in bitmaps.items()}
    version = context.version + 1
    return MembershipRewrite(
        group_id=group_id,
        new_version=version,
        member_count=context.member_count + len(joining),
        joining=joining,
        joining_shards={user_id: shards[user_id] for user_id in joining},
        leaving=(),
        next_slot=next_slot,
        snapshots=changed,
        index={**context.index, **index_of(changed, version)},
    )


def plan_leave(
    tenant_id: str,
    group_id: str,
    context: GroupContext,
    slots: Mapping[str, int],
    shards: Mapping[str, int],
    snapshots: Mapping[int, ShardSnapshot],
    slot_users: Mapping[int, Mapping[int, str]],
    placement: Placement,
) -> MembershipRewrite:
    """The rewrite that removes the users of `slots` (user -> slot), all of whom are members.

    `snapshots` and `slot_users` (slot -> user) are those of every shard concerned: a lane leaves the mask only when its
    last member does, because fan-out and MailboxNode trust the mask.
    """
    bitmaps: dict[int, BitMap] = {}
    masks: dict[int, int] = {}
    left_lanes: dict[int, set[int]] = {}
    for user_id in sorted(slots):
        shard = shards[user_id]
        if shard not in bitmaps:
            bitmaps[shard], masks[shard] = _opened(snapshots[shard])
        bitmaps[shard].discard(slots[user_id])
        left_lanes.setdefault(shard, set()).add(placement.lane(tenant_id, user_id))
    version = context.version + 1
    index = dict(context.index)
    changed: dict[int, ShardSnapshot] = {}
    for shard, bitmap in bitmaps.items():
        if not bitmap:
            del index[shard]
            continue
        for lane in _emptied_lanes(tenant_id, left_lanes[shard], bitmap, slot_users[shard], placement):
            masks[shard] &= ~(1 << lane)
        changed[shard] = _snapshot(bitmap, masks[shard])
    return MembershipRewrite(
        group_id=group_id,
        new_version=version,
        member_count=context.member_count - len(slots),
        joining={},
        joining_shards={},
        leaving=tuple(sorted(slots)),
        next_slot=context.next_slot,
        snapshots=changed,
        index={**index, **index_of(changed, version)},
    )


def _emptied_lanes(
    tenant_id: str, lanes: set[int], bitmap: BitMap, users: Mapping[int, str], placement: Placement
) -> set[int]:
    """Those of `lanes` in which no slot of `bitmap` lives any more; stops as soon as each has been seen."""
    empty = set(lanes)
    for slot in bitmap:
        empty.discard(placement.lane(tenant_id, users[slot]))
        if not empty:
            break
    return empty


def _opened(snapshot: ShardSnapshot | None) -> tuple[BitMap, int]:
    if snapshot is None:
        return BitMap(), 0
    return BitMap.deserialize(snapshot.bitmap), snapshot.lane_mask


def _snapshot(bitmap: BitMap, lane_mask: int) -> ShardSnapshot:
    return ShardSnapshot(bitmap.serialize(), len(bitmap), lane_mask)
