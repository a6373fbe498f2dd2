"""The 20-byte frame header (A.1), big-endian; CRC32C of the first 16 bytes.

`header_crc` detects framing desync, it is no tamper protection: TLS is (§15.4.1).
"""

from __future__ import annotations

import struct
from typing import Final

from google_crc32c import value as crc32c

from qim.errors import FramingError

MAGIC: Final = 0x514D
VERSION: Final = 1
HEADER_BYTES: Final = 20
MAX_FRAME_BYTES: Final = 4 << 20
"""`max_frame_bytes` (B.5)."""

FLAG_COMPRESSED: Final = 1
FLAG_FRAGMENT: Final = 2
FLAG_ENCRYPTED: Final = 4
FLAG_ACK_REQUIRED: Final = 8

_PREFIX: Final = struct.Struct(">HBBHIHI")
_WHOLE: Final = struct.Struct(">HBBHIHII")
_CRC: Final = struct.Struct(">I")


def encode_header(opcode: int, body_len: int, *, request_id: int = 0, stream_id: int = 0, flags: int = 0) -> bytes:
    """20 bytes."""
    prefix = _PREFIX.pack(MAGIC, VERSION, flags, opcode, request_id, stream_id, body_len)
    return prefix + _CRC.pack(crc32c(prefix))


def encode_frame(opcode: int, body: bytes, *, request_id: int = 0, stream_id: int = 0, flags: int = 0) -> bytes:
    """Header and body."""
    return encode_header(opcode, len(body), request_id=request_id, stream_id=stream_id, flags=flags) + body


def decode_header(buffer: bytes, offset: int = 0) -> tuple[int, int, int, int, int, int]:
    """(version, flags, opcode, request_id, stream_id, body_len) at `offset`; FramingError on wrong magic or CRC."""
    magic, version, flags, opcode, request_id, stream_id, body_len, header_crc = _WHOLE.unpack_from(buffer, offset)
    if magic != MAGIC:
        raise FramingError("wrong magic")
    if crc32c(buffer[offset : offset + 16]) != header_crc:
        raise FramingError("wrong header CRC")
    return version, flags, opcode, request_id, stream_id, body_len
