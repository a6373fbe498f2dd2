"""`mailbox_seq`, `message_id` and their bit layouts (§6.2, §6.5), and the lane vector (§9.2)."""

from __future__ import annotations

import struct
from typing import Final, NewType

MailboxSeq = NewType("MailboxSeq", int)
"""bit 63 = 0, bits 62..48 `shard_epoch`, bits 47..0 `log_offset`; ordered as one unsigned u64."""
ConversationSeq = NewType("ConversationSeq", int)

LOG_OFFSET_BITS: Final = 48
LOG_OFFSET_MAX: Final = (1 << LOG_OFFSET_BITS) - 1
SHARD_EPOCH_MAX: Final = 0x7FFF
"""Above it bit 63 would be set and signed stores would order wrongly; ShardRegistry refuses 0x8000 (§6.5)."""
SHARD_EPOCH_FIRST: Final = 1
"""0 would make `mailbox_seq` 0 possible, which an exclusive `after_seq` of 0 can never return."""

MESSAGE_EPOCH_UNIX_MS: Final = 1_577_836_800_000
"""2020-01-01T00:00:00Z: zero of `hlc_ms` (§6.2)."""
SEQ_IN_MS_MAX: Final = (1 << 24) - 1


def mailbox_seq(shard_epoch: int, log_offset: int) -> MailboxSeq:
    """Compose a `mailbox_seq`; ValueError outside the layout."""
    if not SHARD_EPOCH_FIRST <= shard_epoch <= SHARD_EPOCH_MAX:
        raise ValueError(f"shard_epoch {shard_epoch} outside 1..0x7FFF")
    if not 0 <= log_offset <= LOG_OFFSET_MAX:
        raise ValueError(f"log_offset {log_offset} outside 48 bits")
    return MailboxSeq(shard_epoch << LOG_OFFSET_BITS | log_offset)


def shard_epoch_of(seq: int) -> int:
    """`shard_epoch` of a `mailbox_seq`."""
    return seq >> LOG_OFFSET_BITS


def log_offset_of(seq: int) -> int:
    """`log_offset` of a `mailbox_seq`."""
    return seq & LOG_OFFSET_MAX


def compose_message_id(hlc_ms: int, region_id: int, writer_id: int, seq_in_ms: int) -> bytes:
    """16 bytes big-endian of a `message_id` (§6.2); the low 24 bits are reserved and 0."""
    value = hlc_ms << 80 | region_id << 68 | writer_id << 48 | seq_in_ms << 24
    return value.to_bytes(16, "big")


def message_id_parts(message_id: bytes) -> tuple[int, int, int, int]:
    """(hlc_ms, region_id, writer_id, seq_in_ms)."""
    value = int.from_bytes(message_id, "big")
    return value >> 80, value >> 68 & 0xFFF, value >> 48 & 0xFFFFF, value >> 24 & 0xFFFFFF


def lanes_of(mask: int) -> list[int]:
    """Set bits, ascending."""
    if mask & (mask - 1) == 0:
        return [mask.bit_length() - 1] if mask else []
    lanes = []
    while mask:
        low = mask & -mask
        lanes.append(low.bit_length() - 1)
        mask ^= low
    return lanes


class LaneVector:
    """`W[lane_count]` of one MailboxShard: the packed form is `lane_count` big-endian u64.

    Law: a lane only moves forward; `advanced` raises ValueError otherwise (§9.2.3). `minimum` serves checkpoints and
    takeover only and never reaches a client (§9.2.2).
    """

    __slots__ = ("_packed", "values")

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values
        self._packed: bytes | None = None

    @classmethod
    def zero(cls, lane_count: int) -> LaneVector:
        return cls((0,) * lane_count)

    @classmethod
    def unpack(cls, packed: bytes) -> LaneVector:
        return cls(struct.unpack(f">{len(packed) // 8}Q", packed))

    @classmethod
    def level(cls, value: int, lane_count: int) -> LaneVector:
        """The same value on every lane: what a shard without a backlog has."""
        vector = cls((value,) * lane_count)
        vector._packed = value.to_bytes(8, "big") * lane_count
        return vector

    def pack(self) -> bytes:
        packed = self._packed
        if packed is None:
            packed = self._packed = struct.pack(f">{len(self.values)}Q", *self.values)
        return packed

    def advanced(self, moves: dict[int, int]) -> LaneVector:
        """The vector with the lanes of `moves` at their new values."""
        values = list(self.values)
        for lane, value in moves.items():
            if value < values[lane]:
                raise ValueError(f"lane {lane} would go back from {values[lane]} to {value}")
            values[lane] = value
        return LaneVector(tuple(values))

    def minimum(self) -> int:
        return min(self.values)

    def __getitem__(self, lane: int) -> int:
        return self.values[lane]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LaneVector) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"LaneVector(min={self.minimum()}, max={max(self.values)}, lanes={len(self.values)})"
