"""The model of MessageStore and GroupMembership: what the Redis scripts must do, in plain Python.

Used by property tests and the simulation; one contract suite runs on both. Nothing awaits, so a call is atomic.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from qim.core.ids import GROUP_PREFIX
from qim.core.visibility import Interval
from qim.errors import Fenced, StoreError
from qim.stores.api import (
    FORGET_RECORDS_MAX,
    FORGET_VERSIONS_MAX,
    BucketCommit,
    BucketState,
    CommitOutcome,
    CommitRequest,
    CommitStatus,
    ConversationHead,
    GroupMeta,
    ShardSnapshot,
    SnapshotRef,
    StoredName,
)

_ZERO_ID: Final = bytes(16)
_RECORDS_PER_BUCKET: Final = 4_096


@dataclass(slots=True)
class _Dedup:
    conversation_id: str
    request_digest: bytes
    message_id: bytes
    conversation_seq: int

    def judge(self, request_digest: bytes) -> CommitOutcome:
        if self.request_digest != request_digest:
            return CommitOutcome(status=CommitStatus.REUSED)
        return CommitOutcome(
            status=CommitStatus.DUPLICATE, message_id=self.message_id, conversation_seq=self.conversation_seq
        )


@dataclass(slots=True)
class _Group:
    meta: GroupMeta | None = None
    slots: dict[str, int] = field(default_factory=dict)
    intervals: dict[str, tuple[Interval, ...]] = field(default_factory=dict)
    users: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    snapshots: dict[tuple[int, int], ShardSnapshot] = field(default_factory=dict)
    index: dict[int, dict[int, SnapshotRef]] = field(default_factory=dict)
    mark: tuple[int, int] | None = None
    """A version that was the current one at a time (unix ms)."""

    def place(self, user_id: str, slot: int, mailbox_shard: int) -> None:
        self.slots[user_id] = slot
        self.users[mailbox_shard][slot] = user_id


@dataclass(slots=True)
class _Bucket:
    epoch: int = 0
    grant_id: str = ""
    hlc: bytes = _ZERO_ID
    outbox: list[bytes] = field(default_factory=list)
    dedup: dict[tuple[str, str, str], _Dedup] = field(default_factory=dict)


class MemoryMessageStore:
    """stores.api.MessageStore and stores.api.GroupMembership over one state."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = defaultdict(_Bucket)
        self._heads: dict[tuple[str, str], ConversationHead] = {}
        self._records: dict[tuple[str, str, int], bytes] = {}
        self._places: dict[StoredName, None] = {}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._staged: dict[tuple[str, str], _Group] = {}

    def outbox(self, bucket: int) -> list[bytes]:
        """Records of a bucket's outbox; the index is the offset."""
        return self._buckets[bucket].outbox

    # ------------------------------------------------------------------------------------------- MessageStore

    async def open_bucket(self, bucket: int, fencing_epoch: int, grant_id: str) -> BucketState:
        state = self._buckets[bucket]
        if state.epoch > fencing_epoch or (state.epoch == fencing_epoch and state.grant_id != grant_id):
            raise Fenced(f"bucket {bucket}: epoch {state.epoch} is stored")
        state.epoch, state.grant_id = fencing_epoch, grant_id
        return BucketState(last_message_id=state.hlc, next_outbox_offset=len(state.outbox))

    async def commit(self, bucket: int, fencing_epoch: int, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        state = self._buckets[bucket]
        if any(self._find_dedup(state, request) is None for request in requests):
            self._check_fence(bucket, fencing_epoch)
        outcomes: list[CommitOutcome] = []
        blocked: set[tuple[str, str]] = set()
        for request in requests:
            name = (request.tenant_id, request.conversation_id)
            if name in blocked:
                outcomes.append(CommitOutcome(status=CommitStatus.UNJUDGED))
                continue
            outcome = self._answered(state, request) or self._refusal(state, request)
            if outcome is None:
                outcome = self._accept(bucket, fencing_epoch, request)
            elif outcome.status not in (CommitStatus.DUPLICATE, CommitStatus.REUSED):
                blocked.add(name)
            outcomes.append(outcome)
        return outcomes

    async def commit_each(self, calls: Sequence[BucketCommit]) -> list[list[CommitOutcome] | StoreError]:
        results: list[list[CommitOutcome] | StoreError] = []
        for call in calls:
            try:
                results.append(await self.commit(*call))
            except StoreError as error:
                results.append(error)
        return results

    def instance_of(self, bucket: int) -> str:
        return "model"

    async def lookup_dedup(
        self, bucket: int, tenant_id: str, sender_id: str, client_message_id: str, request_digest: bytes
    ) -> CommitOutcome | None:
        found = self._buckets[bucket].dedup.get((tenant_id, sender_id, client_message_id))
        return None if found is None else found.judge(request_digest)

    async def head(self, tenant_id: str, conversation_id: str) -> ConversationHead:
        member_count = 2
        if conversation_id.startswith(GROUP_PREFIX):
            meta = await self.meta(tenant_id, conversation_id[len(GROUP_PREFIX) :])
            member_count = meta.member_count if meta else 0
        head = self._heads.get((tenant_id, conversation_id), ConversationHead())
        return replace(head, member_count=member_count)

    async def records(
        self, tenant_id: str, conversation_id: str, seq_bucket: int, seqs: Sequence[int]
    ) -> list[bytes | None]:
        name = (tenant_id, conversation_id)
        return [self._records.get((*name, seq)) if seq // _RECORDS_PER_BUCKET == seq_bucket else None for seq in seqs]

    async def scan_conversations(self, buckets: Collection[int], position: bytes) -> tuple[bytes, list[StoredName]]:
        return b"", [name for name in self._places if name.bucket in buckets]

    async def forget_history(
        self, bucket: int, fencing_epoch: int, tenant_id: str, conversation_id: str, earliest_seq: int
    ) -> int:
        self._check_fence(bucket, fencing_epoch)
        name = (tenant_id, conversation_id)
        head = self._heads.get(name, ConversationHead())
        earliest = head.earliest_available_conversation_seq
        keep = max(earliest, min(earliest_seq, head.latest_conversation_seq + 1, earliest + FORGET_RECORDS_MAX))
        for seq in range(earliest, keep):
            self._records.pop((*name, seq), None)
        if keep > earliest:
            self._heads[name] = replace(head, earliest_available_conversation_seq=keep)
        return keep

    def _check_fence(self, bucket: int, fencing_epoch: int) -> None:
        stored = self._buckets[bucket].epoch
        if stored > fencing_epoch:
            raise Fenced(f"bucket {bucket}: epoch {stored} is stored")
        if stored < fencing_epoch:
            raise StoreError(f"bucket {bucket}: NOTOPEN epoch {stored} is stored")

    @staticmethod
    def _find_dedup(state: _Bucket, request: CommitRequest) -> _Dedup | None:
        return state.dedup.get((request.tenant_id, request.sender_id, request.client_message_id))

    def _answered(self, state: _Bucket, request: CommitRequest) -> CommitOutcome | None:
        found = self._find_dedup(state, request)
        if found is None:
            return None
        if found.conversation_id != request.conversation_id:
            return CommitOutcome(status=CommitStatus.REUSED)
        return found.judge(request.request_digest)

    def _refusal(self, state: _Bucket, request: CommitRequest) -> CommitOutcome | None:
        tenant_id, conversation_id = request.tenant_id, request.conversation_id
        if conversation_id.startswith(GROUP_PREFIX):
            group = self._groups.get((tenant_id, conversation_id[len(GROUP_PREFIX) :]))
            version = group.meta.membership_version if group and group.meta else 0
            if version == 0 or version != request.membership_version:
                return CommitOutcome(status=CommitStatus.STALE_VERSION, membership_version=version)
        if request.message_id <= state.hlc:
            return CommitOutcome(status=CommitStatus.ID_NOT_GREATER, message_id=state.hlc)
        head = self._heads.get((tenant_id, conversation_id))
        if head is not None and head.dek_id != request.dek_id:
            return CommitOutcome(status=CommitStatus.DEK_MISMATCH, dek_id=head.dek_id, wrapped_dek=head.wrapped_dek)
        after = request.after_client_message_id
        if after and (tenant_id, request.sender_id, after) not in state.dedup:
            return CommitOutcome(status=CommitStatus.OUT_OF_ORDER)
        return None

    def _accept(self, bucket: int, fencing_epoch: int, request: CommitRequest) -> CommitOutcome:
        state = self._buckets[bucket]
        name = (request.tenant_id, request.conversation_id)
        head = self._heads.get(name, ConversationHead(dek_id=request.dek_id, wrapped_dek=request.wrapped_dek))
        seq = head.latest_conversation_seq + 1
        self._heads[name] = replace(
            head,
            latest_conversation_seq=seq,
            last_message_id=request.message_id,
            last_sender_id=request.sender_id,
            preview_ciphertext=request.preview_ciphertext,
            fencing_epoch=fencing_epoch,
            head_version=seq,
            updated_at_ms=request.created_at_ms,
        )
        self._records[(*name, seq)] = request.record
        self._places[StoredName(bucket, *name)] = None
        state.hlc = request.message_id
        state.outbox.append(struct.pack("<BQ", 0x09, seq) + request.outbox)
        state.dedup[request.tenant_id, request.sender_id, request.client_message_id] = _Dedup(
            request.conversation_id, request.request_digest, request.message_id, seq
        )
        if request.membership is not None:
            self._rewrite(request, seq)
        return CommitOutcome(
            status=CommitStatus.COMMITTED,
            message_id=request.message_id,
            conversation_seq=seq,
            outbox_offset=len(state.outbox) - 1,
        )

    def _rewrite(self, request: CommitRequest, seq: int) -> None:
        rewrite = request.membership
        assert rewrite is not None
        group = self._groups[request.tenant_id, rewrite.group_id]
        assert group.meta is not None
        group.meta = replace(
            group.meta,
            membership_version=rewrite.new_version,
            member_count=rewrite.member_count,
            next_slot=rewrite.next_slot,
        )
        for user_id, slot in rewrite.joining.items():
            group.place(user_id, slot, rewrite.joining_shards[user_id])
            group.intervals[user_id] = (*group.intervals.get(user_id, ()), Interval(seq - 1))
        for user_id in rewrite.leaving:
            *earlier, last = group.intervals[user_id]
            group.intervals[user_id] = (*earlier, last._replace(left_at=seq))
        for mailbox_shard, snapshot in rewrite.snapshots.items():
            group.snapshots[mailbox_shard, rewrite.new_version] = snapshot
        group.index[rewrite.new_version] = dict(rewrite.index)

    # ---------------------------------------------------------------------------------------- GroupMembership

    async def meta(self, tenant_id: str, group_id: str) -> GroupMeta | None:
        group = self._groups.get((tenant_id, group_id))
        return group.meta if group else None

    async def stage_members(
        self,
        bucket: int,
        fencing_epoch: int,
        tenant_id: str,
        group_id: str,
        slots: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> None:
        self._check_fence(bucket, fencing_epoch)
        if (tenant_id, group_id) in self._groups:
            raise StoreError(f"group {group_id} is published")
        if 0 in slots.values():
            self._staged[tenant_id, group_id] = _Group()
        group = self._staged.setdefault((tenant_id, group_id), _Group())
        for user_id, slot in slots.items():
            group.place(user_id, slot, shards[user_id])
            group.intervals[user_id] = (Interval(0),)

    async def publish_group(
        self,
        bucket: int,
        fencing_epoch: int,
        tenant_id: str,
        group_id: str,
        meta: GroupMeta,
        snapshots: Mapping[int, ShardSnapshot],
        index: Mapping[int, SnapshotRef],
        message_id: bytes,
        outbox: bytes,
    ) -> int | None:
        self._check_fence(bucket, fencing_epoch)
        if (tenant_id, group_id) in self._groups:
            return None
        state = self._buckets[bucket]
        group = self._staged.get((tenant_id, group_id), _Group())
        if len(group.slots) != meta.member_count:
            raise StoreError(f"group {group_id}: {len(group.slots)} of {meta.member_count} members are staged")
        if message_id <= state.hlc:
            raise StoreError(f"bucket {bucket}: message_id is not above the stored one")
        state.hlc = message_id
        state.outbox.append(struct.pack("<BQ", 0x09, 0) + outbox)
        group.meta = meta
        group.snapshots = {(shard, meta.membership_version): snapshot for shard, snapshot in snapshots.items()}
        group.index[meta.membership_version] = dict(index)
        self._groups[tenant_id, group_id] = self._staged.pop((tenant_id, group_id))
        return len(state.outbox) - 1

    async def version_index(self, tenant_id: str, group_id: str, membership_version: int) -> Mapping[int, SnapshotRef]:
        group = self._groups.get((tenant_id, group_id), _Group())
        if membership_version not in group.index:
            raise StoreError(f"group {group_id}: membership version {membership_version} is unknown")
        return group.index[membership_version]

    async def shard_snapshot(
        self, tenant_id: str, group_id: str, mailbox_shard: int, snapshot_version: int
    ) -> ShardSnapshot:
        group = self._groups.get((tenant_id, group_id), _Group())
        if (mailbox_shard, snapshot_version) not in group.snapshots:
            raise StoreError(f"group {group_id}: shard {mailbox_shard} has no snapshot {snapshot_version}")
        return group.snapshots[mailbox_shard, snapshot_version]

    async def slot_users(self, tenant_id: str, group_id: str, mailbox_shard: int) -> Mapping[int, str]:
        return dict(self._groups.get((tenant_id, group_id), _Group()).users[mailbox_shard])

    async def slots_of(self, tenant_id: str, group_id: str, user_ids: Sequence[str]) -> list[int | None]:
        slots = self._groups.get((tenant_id, group_id), _Group()).slots
        return [slots.get(user_id) for user_id in user_ids]

    async def intervals(self, tenant_id: str, group_id: str, user_id: str) -> tuple[Interval, ...]:
        return self._groups.get((tenant_id, group_id), _Group()).intervals.get(user_id, ())

    async def intervals_of_many(
        self, tenant_id: str, group_id: str, user_ids: Sequence[str]
    ) -> list[tuple[Interval, ...]]:
        return [await self.intervals(tenant_id, group_id, user_id) for user_id in user_ids]

    async def member_ids(self, tenant_id: str, group_id: str) -> list[str]:
        return sorted(self._groups.get((tenant_id, group_id), _Group()).slots)

    async def forget_versions(
        self, bucket: int, fencing_epoch: int, tenant_id: str, group_id: str, now_ms: int, retention_ms: int
    ) -> int:
        self._check_fence(bucket, fencing_epoch)
        group = self._groups.get((tenant_id, group_id))
        if group is None or group.meta is None:
            return 0
        if group.mark is None:
            group.mark = (group.meta.membership_version, now_ms)
        marked, marked_at_ms = group.mark
        if now_ms - marked_at_ms < retention_ms:
            return 0
        dropped = sorted(version for version in group.index if version < marked)[:FORGET_VERSIONS_MAX]
        for version in dropped:
            del group.index[version]
        used = {(shard, ref.snapshot_version) for index in group.index.values() for shard, ref in index.items()}
        group.snapshots = {key: snapshot for key, snapshot in group.snapshots.items() if key in used}
        if min(group.index) >= marked:
            group.mark = (group.meta.membership_version, now_ms)
        return len(dropped)
