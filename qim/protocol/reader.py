"""Incremental frame reader: bytes in any split in, whole frames out (A.1, §20.1).

`body_len` is judged against the limit of the connection's state as soon as the header is there, before a byte of the
body is kept; a peer that is not authenticated can make the server hold at most 8 KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from google_crc32c import value as crc32c

from qim.errors import FrameTooLarge, FramingError
from qim.protocol.header import HEADER_BYTES, MAGIC, MAX_FRAME_BYTES
from qim.protocol.opcodes import Opcode

UNAUTHENTICATED_FRAME_BYTES: Final = 8 << 10
SEND_OVERHEAD_BYTES: Final = 8 << 10
"""What a SEND_MESSAGE may hold beside its payload: ids, mentions, media metadata, custom type."""

_HEADER: Final = struct.Struct(">HBBHIHII")
_MAGIC_BYTES: Final = MAGIC.to_bytes(2, "big")


class Frame(NamedTuple):
    version: int
    flags: int
    opcode: int
    request_id: int
    stream_id: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Greatest `body_len` accepted, by opcode."""

    default_bytes: int
    by_opcode: Mapping[int, int] = field(default_factory=dict)


UNAUTHENTICATED: Final = FrameLimits(default_bytes=UNAUTHENTICATED_FRAME_BYTES)


def authenticated_limits(
    *, max_custom_payload_bytes: int, media_thumbnail_max_bytes: int, max_frame_bytes: int = MAX_FRAME_BYTES
) -> FrameLimits:
    """Limits after AUTH. A payload that is too large for its message still fits the frame, so that the refusal is an
    ERROR of that request and not the end of the connection; twice too large is not read."""
    message_bytes = 2 * max(max_custom_payload_bytes, media_thumbnail_max_bytes) + SEND_OVERHEAD_BYTES
    limits = {Opcode.SEND_MESSAGE: message_bytes, Opcode.EDIT: message_bytes}
    return FrameLimits(default_bytes=max_frame_bytes, by_opcode={int(op): size for op, size in limits.items()})


class FrameReader:
    """One per connection. `limits` may be replaced between frames."""

    __slots__ = ("_held", "_needed", "limits")

    def __init__(self, limits: FrameLimits = UNAUTHENTICATED) -> None:
        self.limits = limits
        self._held = bytearray()
        self._needed = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._held)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes; iterate to the end or close the connection.

        FramingError on wrong magic or CRC, FrameTooLarge on `body_len`: raised after the frames before it. The reader
        is of no use afterwards.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                self._refuse_foreign(self._held)
                return
            data = bytes(self._held)
            self._held.clear()
        at = 0
        size = len(data)
        limits = self.limits
        while size - at >= HEADER_BYTES:
            magic, version, flags, opcode, request_id, stream_id, body_len, crc = _HEADER.unpack_from(data, at)
            if magic != MAGIC:
                raise FramingError("wrong magic")
            if crc32c(data[at : at + 16]) != crc:
                raise FramingError("wrong header CRC")
            if limits is not self.limits:
                limits = self.limits
            limit = limits.by_opcode.get(opcode, limits.default_bytes)
            if body_len > limit:
                raise FrameTooLarge(opcode, request_id, body_len, limit)
            body_at = at + HEADER_BYTES
            end = body_at + body_len
            if end > size:
                self._hold(data, at, end - at)
                return
            at = end
            # a third of what calling the class costs
            yield tuple.__new__(Frame, (version, flags, opcode, request_id, stream_id, data[body_at:end]))
        if at < size:
            self._hold(data, at, HEADER_BYTES)

    def _hold(self, data: bytes, at: int, needed: int) -> None:
        """Keep an unfinished frame of `needed` bytes."""
        self._held += data[at:]
        self._needed = needed
        self._refuse_foreign(self._held)

    @staticmethod
    def _refuse_foreign(held: bytearray) -> None:
        """What cannot be ours is refused without waiting for a whole header."""
        if not _MAGIC_BYTES.startswith(held[:2]):
            raise FramingError("wrong magic")
