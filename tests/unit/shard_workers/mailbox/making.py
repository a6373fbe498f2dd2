"""Dispatches and shards for tests of the pure mailbox modules."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from qim.core import ids
from qim.core.hlc import HybridClock
from qim.protocol.entry import FLAGS_ORDINARY
from qim.protocol.qim_pb2 import DispatchEvent, GroupDispatch, MentionRule, OutboxRecord
from qim.registry.api import EpochBoundary
from qim.shard_workers.mailbox.expand import Dispatch, subjects_by_lane
from qim.shard_workers.mailbox.machine import ShardMachine

T = TypeVar("T")

TENANT = "t"
CREATED_AT_MS = 1_800_000_000_000
_ids = HybridClock(writer_id=0, regression_reject_ms=1 << 40)


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as those of the stores' models."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the coroutine waited")


def packed_dispatch(
    users: Sequence[str],
    *,
    source: tuple[int, int] = (0, 0),
    bucket: int = 0,
    epoch: int = 1,
    lane_count: int = 4,
    shard: int = 0,
    sender: str = "sender",
    event_types: Sequence[int] = (1,),
    conversation_id: str = "g:g",
    conversation_seq: int = 1,
    mention: MentionRule | None = None,
    message_id: bytes = b"",
) -> bytes:
    """A GroupDispatch for named users, slot = position; `message_id` follows the source unless given."""
    message_id = message_id or ids.dispatch_id(b"source%d/%d/%d" % (bucket, *source), 0)
    mask = 0
    for user in users:
        mask |= 1 << ids.lane_id(TENANT, user, lane_count)
    record = OutboxRecord(
        tenant_id=TENANT, conversation_id=conversation_id, conversation_seq=conversation_seq, message_id=message_id,
        sender_id=sender, sender_device_id="device", client_message_id="cmid", fencing_epoch=epoch,
        created_at=CREATED_AT_MS,
        events=[
            DispatchEvent(
                event_type=kind, user_ids=users, slots=range(len(users)), flags=FLAGS_ORDINARY, mention=mention  # type: ignore[arg-type]
            )
            for kind in event_types
        ],
    )  # fmt: skip
    return GroupDispatch(
        dispatch_id=ids.dispatch_id(message_id, shard), target_mailbox_shard=shard, source_offset=source[0],
        source_part=source[1], source_bucket=bucket, lane_mask=mask, member_count=len(users), record=record,
    ).SerializeToString()  # fmt: skip


def admit(machine: ShardMachine, packed: bytes, *, members: bool = True, now_ms: float = 0) -> Dispatch:
    """Admit the next record of a shard; its members are known at once unless told otherwise."""
    dispatch = Dispatch(machine.next_offset, packed)
    _, work = machine.admit(dispatch)
    if work is not None and members:
        know(machine, dispatch, now_ms=now_ms)
    return dispatch


def know(machine: ShardMachine, dispatch: Dispatch, *, now_ms: float = 0) -> None:
    machine.members_known(dispatch, subjects_by_lane(dispatch, machine.lane_count), machine.incarnation, now_ms)


def boundary(epoch: int, start: int, previous: int = 0) -> EpochBoundary:
    return EpochBoundary(epoch, epoch << 48 | start, previous)
