"""Admission: a fold over the dispatch log of one mailbox shard (DESIGN-data §5), pure.

Per conversation bucket a row {source_high, max epoch, offset where that epoch was first seen}. The verdict on a record
depends on nothing but the records before it, so every owner of the shard reaches the same one.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Final

from qim.errors import StoreError

_FORMAT: Final = 1
_HEAD: Final = struct.Struct(">BQI")
_ROW: Final = struct.Struct(">IQBIQ")


class Verdict(Enum):
    ADMITTED = "admitted"
    DUPLICATE = "duplicate"
    """A fan-out that restarted produced it again; the log has the first one and all its predecessors."""
    STALE = "stale"
    """Check point 2 (26.6.1): a writer with a greater epoch was seen at a smaller offset."""
    ORPHANED = "orphaned"
    """The broker refused the record before it in its append call: fan-out appends both again (ADR 0013)."""


class AdmissionFold:
    """State of the prefix below `next_offset`. `rows`: bucket -> (source offset, part, max epoch, its first offset)."""

    __slots__ = ("next_offset", "_rows", "_whole")

    def __init__(self, next_offset: int = 0) -> None:
        """Behind a trimmed prefix (an audit's) the first record of a bucket is taken as it comes."""
        self.next_offset = next_offset
        self._whole = next_offset == 0
        self._rows: dict[int, tuple[int, int, int, int]] = {}

    def admit(
        self,
        log_offset: int,
        bucket: int,
        source: tuple[int, int],
        fencing_epoch: int,
        follows: tuple[int, int] | None = None,
    ) -> Verdict:
        """Judge the record at `next_offset`; only an admitted one changes a row.

        `source` = (outbox offset, part), `follows` = that of the record before it in its append call. ValueError when
        `log_offset` is not the next one: a fold skips nothing.
        """
        if log_offset != self.next_offset:
            raise ValueError(f"record {log_offset} folded where {self.next_offset} is due")
        self.next_offset = log_offset + 1
        row = self._rows.get(bucket)
        if row is None:
            if follows is not None and self._whole:
                return Verdict.ORPHANED
            self._rows[bucket] = (source[0], source[1], fencing_epoch, log_offset)
            return Verdict.ADMITTED
        source_offset, part, max_epoch, first_offset = row
        if source <= (source_offset, part):
            return Verdict.DUPLICATE
        if follows is not None and follows > (source_offset, part):
            return Verdict.ORPHANED
        if fencing_epoch < max_epoch and log_offset > first_offset:
            return Verdict.STALE
        if fencing_epoch > max_epoch:
            max_epoch, first_offset = fencing_epoch, log_offset
        self._rows[bucket] = (source[0], source[1], max_epoch, first_offset)
        return Verdict.ADMITTED

    def encode(self) -> bytes:
        """{C, rows}: head ‖ rows by ascending bucket, big-endian; equal states have equal bytes."""
        rows = sorted(self._rows.items())
        return _HEAD.pack(_FORMAT, self.next_offset, len(rows)) + b"".join(
            _ROW.pack(bucket, *row) for bucket, row in rows
        )

    @classmethod
    def decode(cls, packed: bytes) -> AdmissionFold:
        """The state `encode` wrote; the state of the empty prefix for b"". StoreError on anything else."""
        fold = cls()
        if not packed:
            return fold
        if len(packed) < _HEAD.size:
            raise StoreError("saved fold is shorter than its head")
        version, next_offset, count = _HEAD.unpack_from(packed)
        if version != _FORMAT or len(packed) != _HEAD.size + count * _ROW.size:
            raise StoreError(f"saved fold has format {version} and {len(packed)} bytes for {count} rows")
        fold.next_offset = next_offset
        for bucket, *row in _ROW.iter_unpack(packed[_HEAD.size :]):
            fold._rows[bucket] = (row[0], row[1], row[2], row[3])
        return fold

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdmissionFold) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())
