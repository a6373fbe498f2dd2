"""What every MailboxStore agrees on: days, progress blocks, members, and which append calls are well formed."""

from __future__ import annotations

import struct
from typing import Final

from qim.core.seq import log_offset_of
from qim.stores.api import AppendCall, StoredRow

DAY_MS: Final = 86_400_000
DAYS_KEPT: Final = 8
"""`mailbox_retention_days` + 1: UTC day D expires at day D + 8, so an entry lives at least 7 full days (ADR-0023)."""
DAYS_AHEAD: Final = 1
"""A writer's clock may be ahead over midnight; what lies further ahead is put into this day."""
DAY_PROBES: Final = DAYS_KEPT + DAYS_AHEAD + 1
PROGRESS_BLOCK_OFFSETS: Final = 1024
"""Log offsets of one block of DispatchProgress, the unit in which it is dropped below the fold."""
DROPPED_BLOCKS_PER_CALL_MAX: Final = 64
EVENT_GROUP_ITEMS_MAX: Final = 8
"""`mailbox_event_group_max_items` (§6.7): so many rows above `max_items` complete the last group of a page."""
ENTRIES_PER_CALL_MAX: Final = 16_384
"""Guard, not the batch size (a call blocks the server for about 5 µs per entry): the contract's largest chunk, 2,000
members, of the largest event group, as a replay may have to repeat it."""
ITEMS_PER_CALL_MAX: Final = 1024
"""Guard of the script's argument lists."""
LANES_MAX: Final = 64
"""Lanes of a shard that a mask of u64 can name."""
SEQ_MAX: Final = (1 << 63) - 1

_MEMBER: Final = struct.Struct(">QB8s")
PREFIX_BYTES: Final = _MEMBER.size
"""mailbox_seq, ordinal and event_id: at most one member stands under them."""


def split_member(member: bytes) -> StoredRow:
    """A stored member taken apart."""
    seq, ordinal, event_id = _MEMBER.unpack_from(member)
    return StoredRow(seq, ordinal, event_id, member[PREFIX_BYTES:])


def check_append(call: AppendCall) -> None:
    """ValueError if the call breaks a rule its maker must keep (DESIGN-data §5); the stores check what is stored."""
    entries = sum(len(item.recipients) for item in call.tenant_items)
    if entries > ENTRIES_PER_CALL_MAX or len(call.tenant_items) > ITEMS_PER_CALL_MAX:
        raise ValueError(f"append of {len(call.tenant_items)} items with {entries} entries is too large")
    for item in call.tenant_items:
        if not 0 <= item.chunk_index < item.chunk_count:
            raise ValueError(f"chunk {item.chunk_index} of {item.chunk_count}")
        if len(item.lanes) > 1 and item.chunk_count > 1:
            raise ValueError(f"chunk {item.chunk_index} of {item.chunk_count} on {len(item.lanes)} lanes")
    moves = call.watermarks
    if moves is None:
        if call.fold is not None:
            raise ValueError("the fold is saved by the call that moves W")
        return
    if any(map(int.__lt__, moves.new.values, moves.previous.values)):
        raise ValueError(f"W of shard {call.shard} would go back")
    if call.fold is not None:
        lowest = moves.new.minimum()
        if call.fold_offset > (log_offset_of(lowest) if lowest else -1):
            raise ValueError(f"fold offset {call.fold_offset} is above the least W")
