"""Reads and plans of groups: what a lane of the machine waits for (DESIGN-data §8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from qim.config.parameters import Parameters
from qim.core.ids import group_id_of
from qim.core.visibility import is_active
from qim.errors import Detail, ErrorCode, StoreError
from qim.protocol.qim_pb2 import MessageRecord
from qim.shard_workers.conversation.admission import DENIED, Refusal
from qim.shard_workers.conversation.membership import (
    FIRST_VERSION,
    GroupContext,
    Placement,
    ShardsBuilder,
    create_digest,
    index_of,
    plan_join,
    plan_leave,
)
from qim.shard_workers.conversation.submission import Change, Create, Send
from qim.stores.api import GroupMembership, GroupMeta, MembershipRewrite, MessageStore, ShardSnapshot

GROUP_EXISTS: Final = Refusal(ErrorCode.PERMISSION_DENIED, Detail.GROUP_EXISTS)
TOO_MANY_MEMBERS: Final = Refusal(ErrorCode.PERMISSION_DENIED, Detail.GROUP_MEMBER_LIMIT)


class Announcement(NamedTuple):
    """The outbox record of a new group, made at the last moment so that its id is the newest of the bucket."""

    message_id: bytes
    outbox: bytes


class GroupReader:
    """Group state for the lanes of a writer; every method may raise StoreUnavailable."""

    __slots__ = ("_membership", "_parameters", "_placement", "_store")

    def __init__(
        self, store: MessageStore, membership: GroupMembership, placement: Placement, parameters: Parameters
    ) -> None:
        self._store = store
        self._membership = membership
        self._placement = placement
        self._parameters = parameters

    async def load(self, tenant_id: str, conversation_id: str) -> GroupContext:
        """The group at its newest version; `version` 0 when there is none."""
        group_id = group_id_of(conversation_id)
        meta = await self._membership.meta(tenant_id, group_id)
        if meta is None or meta.member_count == 0:
            return GroupContext(meta, {})
        index = await self._membership.version_index(tenant_id, group_id, meta.membership_version)
        return GroupContext(meta, index)

    async def active(self, tenant_id: str, conversation_id: str, user_ids: Iterable[str]) -> dict[str, bool]:
        """user -> is a member now."""
        users = list(user_ids)
        if not users:
            return {}
        intervals = await self._membership.intervals_of_many(tenant_id, group_id_of(conversation_id), users)
        return {user_id: is_active(rows) for user_id, rows in zip(users, intervals, strict=True)}

    async def reply_target_sender(self, send: Send) -> str:
        """Who sent the message `send` replies to; "" when there is no such message."""
        seq = send.message.reply_to_conversation_seq
        if seq == 0:
            return ""
        seq_bucket = seq // self._parameters.message_seq_bucket_width
        found = await self._store.records(send.tenant_id, send.conversation_id, seq_bucket, [seq])
        return MessageRecord.FromString(found[0]).sender_id if found[0] is not None else ""

    async def plan(self, change: Change, context: GroupContext) -> MembershipRewrite | Refusal | None:
        """What `change` does to the group at the version of `context`; None: nothing."""
        tenant_id, group_id = change.tenant_id, group_id_of(change.conversation_id)
        active = await self.active(tenant_id, change.conversation_id, change.user_ids)
        users = [user_id for user_id, member in active.items() if member is not change.joining]
        if not users:
            return DENIED if change.by_subject else None
        if change.joining and context.member_count + len(users) > self._parameters.max_members_per_group:
            return TOO_MANY_MEMBERS
        shards = self._placement.shards(tenant_id, users)
        found = await self._membership.slots_of(tenant_id, group_id, users)
        snapshots = await self._snapshots(tenant_id, group_id, context, set(shards.values()))
        slots = dict(zip(users, found, strict=True))
        if change.joining:
            return plan_join(tenant_id, group_id, context, slots, shards, snapshots, self._placement)
        held = {user_id: slot for user_id, slot in slots.items() if slot is not None}
        if len(held) < len(slots):
            raise StoreError(f"group {group_id}: a member has no slot")
        concerned = sorted(set(shards.values()))
        maps = await asyncio.gather(*(self._membership.slot_users(tenant_id, group_id, shard) for shard in concerned))
        slot_users = dict(zip(concerned, maps, strict=True))
        return plan_leave(tenant_id, group_id, context, held, shards, snapshots, slot_users, self._placement)

    async def _snapshots(
        self, tenant_id: str, group_id: str, context: GroupContext, shards: set[int]
    ) -> Mapping[int, ShardSnapshot]:
        held = sorted(shards & context.index.keys())
        found = await asyncio.gather(
            *(
                self._membership.shard_snapshot(tenant_id, group_id, shard, context.index[shard].snapshot_version)
                for shard in held
            )
        )
        return dict(zip(held, found, strict=True))


class GroupCreator:
    """CREATE_GROUP: members are staged unseen in small scripts, one last script publishes (DESIGN-data §8)."""

    __slots__ = ("_membership", "_parameters", "_placement")

    def __init__(self, membership: GroupMembership, placement: Placement, parameters: Parameters) -> None:
        self._membership = membership
        self._placement = placement
        self._parameters = parameters

    async def create(
        self, create: Create, bucket: int, fencing_epoch: int, announce: Callable[[], Announcement]
    ) -> tuple[Refusal | None, int, bytes]:
        """(refusal or None, outbox offset or -1, outbox record). A repeated request is answered like the first one."""
        tenant_id, group_id = create.tenant_id, group_id_of(create.conversation_id)
        members = create.member_ids
        if len(members) > self._parameters.max_members_per_group:
            return TOO_MANY_MEMBERS, -1, b""
        digest = create_digest(members)
        meta = await self._membership.meta(tenant_id, group_id)
        if meta is not None:
            return _same_request(meta, create, digest), -1, b""
        builder = ShardsBuilder(tenant_id, self._placement)
        step = self._parameters.membership_stage_max_members
        for first in range(0, len(members), step):
            slots = {user_id: first + index for index, user_id in enumerate(members[first : first + step])}
            shards = {user_id: builder.add(user_id, slot) for user_id, slot in slots.items()}
            await self._membership.stage_members(bucket, fencing_epoch, tenant_id, group_id, slots, shards)
        snapshots = builder.snapshots()
        made = GroupMeta(
            membership_version=FIRST_VERSION,
            member_count=len(members),
            next_slot=len(members),
            creator_id=create.sender_id,
            create_digest=digest,
        )
        message_id, outbox = announce()
        offset = await self._membership.publish_group(
            bucket, fencing_epoch, tenant_id, group_id, made, snapshots, index_of(snapshots, FIRST_VERSION),
            message_id, outbox,
        )  # fmt: skip
        if offset is not None:
            return None, offset, outbox
        meta = await self._membership.meta(tenant_id, group_id)
        if meta is None:
            raise StoreError(f"group {group_id} exists and has no meta")
        return _same_request(meta, create, digest), -1, b""


def _same_request(meta: GroupMeta, create: Create, digest: bytes) -> Refusal | None:
    """None when the existing group is what this request made before."""
    if meta.creator_id == create.sender_id and meta.create_digest == digest:
        return None
    return GROUP_EXISTS
