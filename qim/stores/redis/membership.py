"""GroupMembership on Redis: members, slots, intervals, version snapshots beside the commit facts (DESIGN-data §8)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from qim.core.ids import group_conversation_id
from qim.core.visibility import Interval, unpack_intervals
from qim.errors import StoreError
from qim.stores.api import FORGET_VERSIONS_MAX, GroupMeta, ShardSnapshot, SnapshotRef
from qim.stores.redis import keys
from qim.stores.redis.message import (
    MessageInstances,
    pack_index,
    pack_snapshot,
    run_fenced,
    unpack_index,
    unpack_snapshot,
)
from qim.stores.redis.resp import Argument, RespClient
from qim.stores.redis.scripts import Script

STAGE_MEMBERS_MAX: Final = 1_000
STAGE_LIFETIME_S: Final = 86_400
"""Staged members of an abandoned creation disappear after this; publishing takes seconds."""
_READ_MEMBERS_MAX: Final = 1_000
"""Fields of one HMGET or HSCAN step: about 1 ms of the server."""

_STAGE: Final = Script("group_stage")
_PUBLISH: Final = Script("group_publish")
_FORGET: Final = Script("group_forget")


class RedisGroupMembership:
    """stores.api.GroupMembership."""

    def __init__(self, instances: MessageInstances) -> None:
        self._instances = instances

    async def meta(self, tenant_id: str, group_id: str) -> GroupMeta | None:
        bucket, client = self._place(tenant_id, group_id)
        name = keys.group(bucket, tenant_id, group_id)
        version, count, next_slot, creator, digest = await client.call(
            "HMGET", name, "version", "count", "next_slot", "creator", "digest"
        )
        if version is None:
            return None
        return GroupMeta(
            membership_version=int(version),
            member_count=int(count),
            next_slot=int(next_slot),
            creator_id=creator.decode(),
            create_digest=digest,
        )

    async def stage_members(
        self,
        bucket: int,
        fencing_epoch: int,
        tenant_id: str,
        group_id: str,
        slots: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> None:
        if not 0 < len(slots) <= STAGE_MEMBERS_MAX:
            raise ValueError(f"{len(slots)} members in one call")
        starts_creation = 0 in slots.values()
        args: list[Argument] = [
            f"{keys.bucket_tag(bucket)}{tenant_id}:{group_id}",
            fencing_epoch,
            int(starts_creation),
            STAGE_LIFETIME_S,
            len(slots),
        ]
        for user_id, slot in slots.items():
            args += (user_id, slot, shards[user_id])
        names = (keys.fence(bucket), keys.group(bucket, tenant_id, group_id))
        await run_fenced(_STAGE, self._instances.client(bucket), names, args)

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
        args: list[Argument] = [
            f"{keys.bucket_tag(bucket)}{tenant_id}:{group_id}",
            fencing_epoch,
            message_id,
            outbox,
            meta.membership_version,
            meta.member_count,
            meta.next_slot,
            meta.creator_id,
            meta.create_digest,
            pack_index(index),
            len(snapshots),
        ]
        for mailbox_shard, snapshot in snapshots.items():
            args += (mailbox_shard, pack_snapshot(snapshot))
        names = (
            keys.fence(bucket),
            keys.hlc(bucket),
            keys.outbox(bucket),
            keys.outbox_next(bucket),
            keys.group(bucket, tenant_id, group_id),
        )
        offset: int | None = await run_fenced(_PUBLISH, self._instances.client(bucket), names, args)
        return offset

    async def version_index(self, tenant_id: str, group_id: str, membership_version: int) -> Mapping[int, SnapshotRef]:
        bucket, client = self._place(tenant_id, group_id)
        packed = await client.call("HGET", keys.group_index(bucket, tenant_id, group_id), membership_version)
        if packed is None:
            raise StoreError(f"group {group_id}: membership version {membership_version} is unknown")
        return unpack_index(packed)

    async def shard_snapshot(
        self, tenant_id: str, group_id: str, mailbox_shard: int, snapshot_version: int
    ) -> ShardSnapshot:
        bucket, client = self._place(tenant_id, group_id)
        name = keys.group_snapshots(bucket, tenant_id, group_id, mailbox_shard)
        packed = await client.call("HGET", name, snapshot_version)
        if packed is None:
            raise StoreError(f"group {group_id}: shard {mailbox_shard} has no snapshot {snapshot_version}")
        return unpack_snapshot(packed)

    async def slot_users(self, tenant_id: str, group_id: str, mailbox_shard: int) -> Mapping[int, str]:
        bucket, client = self._place(tenant_id, group_id)
        rows = await _scan_hash(client, keys.group_users(bucket, tenant_id, group_id, mailbox_shard))
        return {int(slot): user_id.decode() for slot, user_id in rows.items()}

    async def slots_of(self, tenant_id: str, group_id: str, user_ids: Sequence[str]) -> list[int | None]:
        bucket, client = self._place(tenant_id, group_id)
        values = await _read_fields(client, keys.group_slots(bucket, tenant_id, group_id), user_ids)
        return [None if value is None else int(value) for value in values]

    async def intervals(self, tenant_id: str, group_id: str, user_id: str) -> tuple[Interval, ...]:
        bucket, client = self._place(tenant_id, group_id)
        packed = await client.call("HGET", keys.group_intervals(bucket, tenant_id, group_id), user_id)
        return unpack_intervals(packed or b"")

    async def intervals_of_many(
        self, tenant_id: str, group_id: str, user_ids: Sequence[str]
    ) -> list[tuple[Interval, ...]]:
        bucket, client = self._place(tenant_id, group_id)
        values = await _read_fields(client, keys.group_intervals(bucket, tenant_id, group_id), user_ids)
        return [unpack_intervals(packed or b"") for packed in values]

    async def member_ids(self, tenant_id: str, group_id: str) -> list[str]:
        bucket, client = self._place(tenant_id, group_id)
        rows = await _scan_hash(client, keys.group_slots(bucket, tenant_id, group_id))
        return sorted(user_id.decode() for user_id in rows)

    async def forget_versions(
        self, bucket: int, fencing_epoch: int, tenant_id: str, group_id: str, now_ms: int, retention_ms: int
    ) -> int:
        client = self._instances.client(bucket)
        name, index = keys.group(bucket, tenant_id, group_id), keys.group_index(bucket, tenant_id, group_id)
        row = await client.call("HMGET", name, "version", "low", "mark", "mark_at")
        if row[0] is None:
            return 0
        version, low, mark, mark_at_ms = int(row[0]), int(row[1] or 1), int(row[2] or 0), int(row[3] or 0)
        is_due = mark > 0 and now_ms - mark_at_ms >= retention_ms
        if (mark and not is_due) or (low == version and mark == version):
            return 0
        keep = min(mark, low + FORGET_VERSIONS_MAX) if is_due else low
        unused = await self._unreferenced(client, index, low, keep)
        marked = version if keep == max(mark, low) else ""
        args: list[Argument] = [fencing_epoch, low, keep, marked, now_ms]
        args.append(keys.group_snapshots_prefix(bucket, tenant_id, group_id))
        for pair in unused:
            args += pair
        return int(await run_fenced(_FORGET, client, (keys.fence(bucket), name, index), args))

    async def _unreferenced(self, client: RespClient, index: str, low: int, keep: int) -> list[tuple[int, int]]:
        """(shard, snapshot version) that versions below `keep` refer to and none from `keep` on: a snapshot serves an
        unbroken run of versions, for a shard whose members changed has a new one."""
        if keep == low:
            return []
        rows = await client.call("HMGET", index, *range(low, keep + 1))
        used = [
            {(shard, ref.snapshot_version) for shard, ref in unpack_index(packed or b"").items()} for packed in rows
        ]
        return sorted(set().union(*used[:-1]) - used[-1])

    def _place(self, tenant_id: str, group_id: str) -> tuple[int, RespClient]:
        bucket = self._instances.bucket(tenant_id, group_conversation_id(group_id))
        return bucket, self._instances.client(bucket)


async def _read_fields(client: RespClient, name: str, fields: Sequence[str]) -> list[bytes | None]:
    """HMGET in steps that do not block the server."""
    steps: Iterable[Sequence[str]] = (
        fields[at : at + _READ_MEMBERS_MAX] for at in range(0, len(fields), _READ_MEMBERS_MAX)
    )
    replies: list[list[bytes | None]] = await asyncio.gather(*(client.call("HMGET", name, *step) for step in steps))
    return [value for reply in replies for value in reply]


async def _scan_hash(client: RespClient, name: str) -> dict[bytes, bytes]:
    """A whole hash in steps. Fields written meanwhile may be missing; these hashes never change or drop a field."""
    rows: dict[bytes, bytes] = {}
    cursor: Any = b"0"
    while True:
        cursor, flat = await client.call("HSCAN", name, cursor, "COUNT", _READ_MEMBERS_MAX)
        rows.update(zip(flat[::2], flat[1::2], strict=True))
        if cursor == b"0":
            return rows
