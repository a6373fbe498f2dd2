"""Fan-out by hand: GroupDispatch records at the log offsets a case names.

Messages are really sent and committed; the test reads them from the outbox and decides where their dispatch lies in the
log of a shard. What lies between is filler: dispatches of single chats of other users, never pulled, so nothing of them
is committed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from qim.core import ids
from qim.protocol.entry import FLAGS_ORDINARY
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import EVENT_MESSAGE, MESSAGE_TYPE_TEXT, DispatchEvent, GroupDispatch, OutboxRecord
from qim.shard_workers.fanout.dispatch import Source, direct_targets, dispatches
from qim.shard_workers.fanout.runner import contiguous_hints
from tests.acceptance.devices import Triple, direct
from tests.acceptance.harness import TENANT, Node, named_users

_APPEND_RECORDS = 512
_FILLER_BUCKET = 1 << 20
"""Beyond every real bucket: filler never makes a real record look like a duplicate."""


class DispatchLog:
    """The dispatch log of one shard, written by the test alone."""

    def __init__(self, node: Node, shard: int, filler_users: Sequence[str]) -> None:
        """`filler_users` have their mailbox in the shard; they take turns."""
        self._node = node
        self._shard = shard
        self._filler_users = filler_users
        self._foreign = _foreigner(node, shard)
        self.next_offset = 0

    async def write_to(self, end: int, placed: Mapping[int, bytes] | None = None) -> None:
        """Fill the log up to offset `end` - 1, with the given values at their offsets."""
        placed = placed or {}
        assert all(self.next_offset <= offset < end for offset in placed)
        values = [placed.get(offset) or self._filler(offset) for offset in range(self.next_offset, end)]
        for first in range(0, len(values), _APPEND_RECORDS):
            part = values[first : first + _APPEND_RECORDS]
            assert await append_dispatches(self._node, self._shard, part) == self.next_offset
            self.next_offset += len(part)

    def _filler(self, offset: int) -> bytes:
        user = self._filler_users[offset % len(self._filler_users)]
        message_id = struct.pack(">8xQ", offset)
        record = OutboxRecord(
            conversation_seq=offset + 1, tenant_id=TENANT, conversation_id=direct(user, self._foreign),
            message_id=message_id, sender_id=self._foreign, fencing_epoch=1,
            created_at=self._node.clock.unix_ms(), message_type=MESSAGE_TYPE_TEXT,
            events=[DispatchEvent(event_type=EVENT_MESSAGE, audience_all=True, flags=FLAGS_ORDINARY)],
        )  # fmt: skip
        return GroupDispatch(
            dispatch_id=ids.dispatch_id(message_id, self._shard), target_mailbox_shard=self._shard,
            source_offset=offset, source_bucket=_FILLER_BUCKET, lane_mask=1 << self._node.lane_of(user),
            member_count=1, record=record,
        ).SerializeToString()  # fmt: skip


async def append_dispatches(node: Node, shard: int, values: Sequence[bytes]) -> int:
    """Append and hint, as fan-out does; the offset of the first one."""
    offsets = await node.outside.dispatch_log.append([(shard, value) for value in values])
    for hint in contiguous_hints(shard, list(zip(offsets, values, strict=True))):
        node.backplane.notify("mailbox-0", InternalOpcode.DISPATCH_HINT, hint)
    return offsets[0]


async def committed(node: Node, conversation_id: str) -> list[Source]:
    """Everything of a conversation that is in the outbox, in order."""
    bucket = node.bucket_of(conversation_id)
    found: list[Source] = []
    high = (await node.outside.outbox.watermarks(bucket)).high
    offset = 0
    while offset < high:
        for record in await node.outside.outbox.read(bucket, offset):
            offset = record.offset + 1
            source = Source(bucket, record.offset, record.value)
            if source.record.conversation_id == conversation_id:
                found.append(source)
    return found


async def dispatch_to(
    node: Node, source: Source, shard: int, change: Callable[[OutboxRecord], None] | None = None
) -> bytes:
    """The GroupDispatch of a committed message to one shard, as fan-out makes it; `change` alters its record first."""
    if change is not None:
        record = OutboxRecord()
        record.CopyFrom(source.record)
        change(record)
        source = Source(source.bucket, source.offset, record.SerializeToString())
    shards, lanes = node.parameters.mailbox_shard_count, node.parameters.lane_count
    version = source.group_version()
    if version is None:
        targets = direct_targets(TENANT, source.record.conversation_id, shards, lanes)
    else:
        targets = await node.outside.membership.version_index(*version)
    return dict(dispatches(source, targets, {}, shards, lanes, {}))[shard]


def expected_triples(node: Node, user: str, placed: Mapping[int, bytes], ordinals: Sequence[int] = (0,)) -> set[Triple]:
    """What a user must get of dispatches at given log offsets, from the definition of `event_id` (§6.7)."""
    expected: set[Triple] = set()
    for offset, value in placed.items():
        prefix = ids.event_id_prefix(TENANT, GroupDispatch.FromString(value).dispatch_id)
        for ordinal in ordinals:
            event_id = int.from_bytes(ids.event_id(prefix, user, ordinal), "big")
            expected.add((node.seq(user, offset), ordinal, event_id))
    return expected


def _foreigner(node: Node, shard: int) -> str:
    """A user whose mailbox lies elsewhere."""
    other = (shard + 1) % node.parameters.mailbox_shard_count
    return named_users(1, shard=other, prefix="foreign", shards=node.parameters.mailbox_shard_count)[0]
