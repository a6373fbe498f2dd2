"""What the store really holds: a read of the keys themselves, past every service that could hide something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import redis

from qim.app.connect import NodeAddress
from qim.app.replay.checker import CommittedRecord
from qim.core.ids import conversation_bucket, group_conversation_id
from qim.core.visibility import Interval, unpack_intervals
from qim.protocol.qim_pb2 import MESSAGE_TYPE_CONTROL, MessageRecord
from qim.stores.redis import keys

_ANY: int = 0


class StoredGroup(NamedTuple):
    """A group conversation as it is stored."""

    records: list[CommittedRecord]
    """Ascending by conversation_seq."""
    intervals: dict[str, tuple[Interval, ...]]


def scan_group(node: NodeAddress, tenant_id: str, group_id: str) -> StoredGroup:
    """Every record and membership interval of a group."""
    conversation_id = group_conversation_id(group_id)
    bucket = conversation_bucket(tenant_id, conversation_id, node.conversation_bucket_count)
    with _connection(node.core_address) as core:
        members = cast(dict[bytes, bytes], core.hgetall(keys.group_intervals(bucket, tenant_id, group_id)))
    intervals = {user.decode(): unpack_intervals(packed) for user, packed in members.items()}
    return StoredGroup(scan_records(node, tenant_id, conversation_id), intervals)


def scan_records(node: NodeAddress, tenant_id: str, conversation_id: str) -> list[CommittedRecord]:
    """Every record of a conversation, ascending by conversation_seq."""
    bucket = conversation_bucket(tenant_id, conversation_id, node.conversation_bucket_count)
    found: list[CommittedRecord] = []
    with _connection(node.core_address) as core:
        first_key = keys.records(bucket, tenant_id, conversation_id, _ANY)
        for name in core.scan_iter(match=first_key.removesuffix(str(_ANY)) + "*", count=1000):
            rows = cast(dict[bytes, bytes], core.hgetall(name))
            found.extend(_record(int(seq), MessageRecord.FromString(raw)) for seq, raw in rows.items())
    found.sort(key=lambda record: record.conversation_seq)
    return found


def _record(conversation_seq: int, record: MessageRecord) -> CommittedRecord:
    return CommittedRecord(
        conversation_seq=conversation_seq,
        message_id=record.message_id.hex(),
        sender=record.sender_id,
        client_message_id=record.client_message_id,
        control=record.message_type == MESSAGE_TYPE_CONTROL,
    )


@contextmanager
def _connection(address: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(address)
    try:
        yield client
    finally:
        client.close()
