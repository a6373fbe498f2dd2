"""Requests for the message store's contract suite."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyroaring import BitMap

from qim.core.ids import lane_id, mailbox_shard_id
from qim.core.seq import compose_message_id
from qim.stores.api import CommitRequest, GroupMeta, MembershipRewrite, ShardSnapshot, SnapshotRef

TENANT = "acme"
BUCKET = 3
BUCKET_COUNT = 4
SHARD_COUNT = 4
GRANT = "grant-1"


def message_id(hlc_ms: int, seq_in_ms: int = 0) -> bytes:
    return compose_message_id(hlc_ms, 0, BUCKET, seq_in_ms)


def request(number: int, conversation_id: str = "dm:ann:bob", **changes: Any) -> CommitRequest:
    """The `number`-th message of the bucket; everything about it follows from the number unless changed."""
    text = f"text {number}"
    base = CommitRequest(
        tenant_id=TENANT,
        conversation_id=conversation_id,
        sender_id="ann",
        client_message_id=f"c{number}",
        request_digest=hashlib.blake2b(f"{conversation_id} {text}".encode(), digest_size=16).digest(),
        after_client_message_id="",
        membership_version=0,
        message_id=message_id(number),
        record=f"record {text}".encode(),
        outbox=f"outbox {text}".encode(),
        dek_id="c1:00000000:1",
        wrapped_dek=b"wrapped",
        preview_ciphertext=b"preview %d" % number,
        created_at_ms=1_700_000_000_000 + number,
    )
    return replace(base, **changes)


class GroupPlan:
    """Members of a group and what each version of it looks like: slots, shards, snapshots, index."""

    def __init__(self, group_id: str = "team") -> None:
        self.group_id = group_id
        self.slots: dict[str, int] = {}
        self.active: set[str] = set()
        self.version = 0
        self.index: dict[int, SnapshotRef] = {}

    def shard_of(self, user_id: str) -> int:
        return mailbox_shard_id(TENANT, user_id, SHARD_COUNT)

    def shards(self) -> dict[str, int]:
        return {user_id: self.shard_of(user_id) for user_id in self.slots}

    def create(self, user_ids: list[str]) -> tuple[GroupMeta, Mapping[int, ShardSnapshot]]:
        self.slots = {user_id: slot for slot, user_id in enumerate(user_ids)}
        self.active = set(user_ids)
        snapshots = self._next_version({self.shard_of(user_id) for user_id in user_ids})
        return self.meta(), snapshots

    def meta(self) -> GroupMeta:
        return GroupMeta(
            membership_version=self.version,
            member_count=len(self.active),
            next_slot=len(self.slots),
            creator_id=next(iter(self.slots)),
            create_digest=bytes(16),
        )

    def change(self, joining: list[str], leaving: list[str]) -> MembershipRewrite:
        for user_id in joining:
            self.slots.setdefault(user_id, len(self.slots))
        self.active = (self.active | set(joining)) - set(leaving)
        snapshots = self._next_version({self.shard_of(user_id) for user_id in (*joining, *leaving)})
        return MembershipRewrite(
            group_id=self.group_id,
            new_version=self.version,
            member_count=len(self.active),
            joining={user_id: self.slots[user_id] for user_id in joining},
            joining_shards={user_id: self.shard_of(user_id) for user_id in joining},
            leaving=tuple(leaving),
            next_slot=len(self.slots),
            snapshots=snapshots,
            index=dict(self.index),
        )

    def _next_version(self, shards: set[int]) -> dict[int, ShardSnapshot]:
        self.version += 1
        snapshots = {shard: self.snapshot(shard) for shard in sorted(shards)}
        for shard, snapshot in snapshots.items():
            self.index[shard] = SnapshotRef(self.version, snapshot.member_count, snapshot.lane_mask)
            if snapshot.member_count == 0:
                del self.index[shard]
        return snapshots

    def snapshot(self, shard: int) -> ShardSnapshot:
        """What the newest version holds of one shard."""
        members = [user_id for user_id in sorted(self.active) if self.shard_of(user_id) == shard]
        lanes = 0
        for user_id in members:
            lanes |= 1 << lane_id(TENANT, user_id, 64)
        return ShardSnapshot(BitMap(self.slots[user_id] for user_id in members).serialize(), len(members), lanes)
