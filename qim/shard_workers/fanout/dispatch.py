"""An outbox record becomes one GroupDispatch per target mailbox shard and part (§7.8, §10.1 steps 4 and 5), pure.

The record itself travels as the bytes the writer made, unless its audience must be made shard-local: fan-out never
reads a body and never asks about single users. The cost is O(shards).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final

from qim.core import ids
from qim.protocol.entry import REF_BYTES, varint
from qim.protocol.qim_pb2 import DispatchEvent, GroupDispatch, OutboxRecord
from qim.stores.api import SnapshotRef

EVENT_GROUP_ITEMS_MAX: Final = 8
"""`mailbox_event_group_max_items` (§6.7)."""
EVENT_GROUP_BYTES_MAX: Final = 8 << 10
"""`mailbox_event_group_max_bytes` (§6.7)."""
_DIRECT_CACHE_ENTRIES: Final = 1 << 15
_RECORD_TAG: Final = b"\x4a"
_ENTRY_OVERHEAD_BYTES: Final = REF_BYTES + ids.CLIENT_MESSAGE_ID_BYTES_MAX + 80
"""Ref, client_message_id and target fields: what an entry has beyond its record."""

ShardTargets = Mapping[int, SnapshotRef]
"""mailbox shard -> its members of the frozen version."""


class Source:
    """An outbox record with its place in the log."""

    __slots__ = ("bucket", "offset", "packed", "record")

    def __init__(self, bucket: int, offset: int, packed: bytes) -> None:
        self.bucket = bucket
        self.offset = offset
        self.packed = packed
        self.record = OutboxRecord.FromString(packed)

    def group_version(self) -> tuple[str, str, int] | None:
        """(tenant, group, frozen membership_version) whose index is needed, None for a single chat."""
        record = self.record
        if record.conversation_id.startswith(ids.DIRECT_PREFIX):
            return None
        return record.tenant_id, ids.group_id_of(record.conversation_id), record.membership_version

    def is_for_all(self) -> bool:
        return any(event.audience_all for event in self.record.events)

    def subjects(self) -> list[str]:
        """Users named by its events, each once."""
        return list(dict.fromkeys(user_id for event in self.record.events for user_id in event.user_ids))


@lru_cache(maxsize=_DIRECT_CACHE_ENTRIES)
def direct_targets(
    tenant_id: str, conversation_id: str, mailbox_shard_count: int, lane_count: int
) -> Mapping[int, SnapshotRef]:
    """Shards of the two users of a single chat."""
    targets: dict[int, SnapshotRef] = {}
    for user_id in ids.direct_members(conversation_id):
        shard = ids.mailbox_shard_id(tenant_id, user_id, mailbox_shard_count)
        lane_bit = 1 << ids.lane_id(tenant_id, user_id, lane_count)
        known = targets.get(shard)
        targets[shard] = SnapshotRef(0, 1, lane_bit) if known is None else SnapshotRef(0, 2, known.lane_mask | lane_bit)
    return targets


def direct_slots(source: Source) -> dict[str, int]:
    """Slots of a single chat: 0 and 1 in the order of its id."""
    return {user_id: slot for slot, user_id in enumerate(ids.direct_members(source.record.conversation_id))}


Chain = dict[int, int]
"""mailbox shard -> the newest dispatch for it in one append call, as `follows` names it."""


def dispatches(
    source: Source,
    targets: ShardTargets,
    slots: Mapping[str, int],
    mailbox_shard_count: int,
    lane_count: int,
    chain: Chain,
) -> list[tuple[int, bytes]]:
    """(mailbox shard, encoded GroupDispatch), part by part. `targets` are the shards of everybody meant by ALL; `slots`
    those of the subjects. A subject without a slot never was a member and gets nothing. `chain` is that of the append
    call they will be in: each names the one before it, because a broker may take it and refuse that one (ADR 0013)."""
    events = source.record.events
    if len(events) == 1 and events[0].audience_all:
        return [_encode(source, shard, 0, ref, source.packed, chain) for shard, ref in targets.items()]
    made: list[tuple[int, bytes]] = []
    for part, group in enumerate(split_events(source)):
        if group[0].audience_all:
            packed = _with_events(source, group)
            made += [_encode(source, shard, part, ref, packed, chain) for shard, ref in targets.items()]
        else:
            made += _named_dispatches(source, part, group, slots, mailbox_shard_count, lane_count, chain)
    return made


def split_events(source: Source) -> list[list[DispatchEvent]]:
    """Events in parts that are event groups of legal size, in order, everybody's apart from those of named users.

    Two events of one type are never in one part: they would get one `event_id` (§6.7).
    """
    entry_bytes = len(source.packed) + _ENTRY_OVERHEAD_BYTES
    fitting = max(1, min(EVENT_GROUP_ITEMS_MAX, EVENT_GROUP_BYTES_MAX // entry_bytes))
    parts: list[list[DispatchEvent]] = []
    for event in source.record.events:
        part = parts[-1] if parts else None
        if (
            part is None
            or len(part) >= fitting
            or part[0].audience_all != event.audience_all
            or any(event.event_type == other.event_type for other in part)
        ):
            part = []
            parts.append(part)
        part.append(event)
    return parts


def _named_dispatches(
    source: Source,
    part: int,
    events: Sequence[DispatchEvent],
    slots: Mapping[str, int],
    mailbox_shard_count: int,
    lane_count: int,
    chain: Chain,
) -> list[tuple[int, bytes]]:
    """Dispatches of events for named users: each shard gets the names and slots of its own."""
    tenant_id = source.record.tenant_id
    users: dict[int, set[str]] = {}
    for event in events:
        for user_id in event.user_ids:
            if user_id in slots:
                shard = ids.mailbox_shard_id(tenant_id, user_id, mailbox_shard_count)
                users.setdefault(shard, set()).add(user_id)
    made = []
    for shard, named in users.items():
        local = [found for event in events if (found := _local_event(event, named, slots)) is not None]
        lane_mask = 0
        for user_id in named:
            lane_mask |= 1 << ids.lane_id(tenant_id, user_id, lane_count)
        ref = SnapshotRef(0, len(named), lane_mask)
        made.append(_encode(source, shard, part, ref, _with_events(source, local), chain))
    return made


def _local_event(event: DispatchEvent, named: Collection[str], slots: Mapping[str, int]) -> DispatchEvent | None:
    """The event with those of its users that are `named`, None when it has none of them."""
    floors = event.joined_at or [0] * len(event.user_ids)
    kept = [(user_id, floor) for user_id, floor in zip(event.user_ids, floors, strict=True) if user_id in named]
    if not kept:
        return None
    local = DispatchEvent()
    local.CopyFrom(event)
    local.user_ids[:] = [user_id for user_id, _ in kept]
    local.slots[:] = [slots[user_id] for user_id, _ in kept]
    local.joined_at[:] = [floor for _, floor in kept]
    return local


def _with_events(source: Source, events: Sequence[DispatchEvent]) -> bytes:
    """The record with other events, everything else kept, unknown fields too."""
    record = OutboxRecord()
    record.CopyFrom(source.record)
    del record.events[:]
    record.events.extend(events)
    return record.SerializeToString()


def _encode(source: Source, shard: int, part: int, ref: SnapshotRef, record: bytes, chain: Chain) -> tuple[int, bytes]:
    """The record is appended as it is."""
    head = GroupDispatch(
        dispatch_id=ids.dispatch_id(source.record.message_id, shard),
        target_mailbox_shard=shard,
        source_offset=source.offset,
        source_part=part,
        source_bucket=source.bucket,
        lane_mask=ref.lane_mask,
        snapshot_version=ref.snapshot_version,
        member_count=ref.member_count,
        follows=chain.get(shard),
    ).SerializeToString()
    chain[shard] = source.offset << 8 | part
    return shard, head + _RECORD_TAG + varint(len(record)) + record
