"""`Entry` fragments (A.4.1) and push frames, made by concatenation (DESIGN §4, "Push encoding").

An entry on the wire is `ref ‖ common`. Every ref of a length class has one length, so a whole batch shares one frame
header. `qim.proto` fixes the tags; `tests/unit/protocol/test_entry.py` proves the bytes equal protobuf's own.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from qim.protocol.header import encode_header
from qim.protocol.opcodes import STREAM_REALTIME, Opcode

FLAG_COUNTS_UNREAD: Final = 1
FLAG_AFFECTS_SESSION_ORDER: Final = 2
FLAG_TIMELINE_VISIBLE: Final = 4
FLAGS_ORDINARY: Final = FLAG_COUNTS_UNREAD | FLAG_AFFECTS_SESSION_ORDER | FLAG_TIMELINE_VISIBLE

MENTION_NONE: Final = 0
AT_ME: Final = 1
AT_ALL: Final = 2
REPLY_ME: Final = 3

ORDINAL_MESSAGE: Final = 0
ORDINAL_MENTION: Final = 1
ORDINAL_MEMBERSHIP: Final = 2
ORDINAL_CONTROL: Final = 3

_REF: Final = struct.Struct("<BQBQBIBIBIBQBI")
"""Tags 1..7 of Entry: fixed64 = wire type 1, fixed32 = wire type 5, little-endian values."""
REF_BYTES: Final = _REF.size
_EVENT_ID_AT: Final = 10
_PUSH_HEAD: Final = struct.Struct("<BQB")


def encode_ref(
    mailbox_seq: int,
    event_id: bytes,
    event_ordinal: int,
    flags: int,
    mention_type: int,
    visibility_floor: int = 0,
    target_mention_type: int = 0,
) -> bytes:
    """A recipient's fragment, REF_BYTES long; `event_id` is 8 bytes big-endian (§6.1)."""
    return _REF.pack(
        0x09, mailbox_seq, 0x11, int.from_bytes(event_id, "big"), 0x1D, event_ordinal, 0x25, flags, 0x2D, mention_type,
        0x31, visibility_floor, 0x3D, target_mention_type,
    )  # fmt: skip


def split_ref(ref: bytes) -> tuple[bytes, bytes]:
    """(head, tail) around the event_id of a ref: refs of one event differ by it alone, so that
    `head + event_id[::-1] + tail` is the ref of another recipient at a quarter of the cost."""
    return ref[:_EVENT_ID_AT], ref[_EVENT_ID_AT + 8 :]


def encode_own_ref(ref: bytes, client_message_id: str) -> bytes:
    """The sender's own fragment: `ref` with `client_message_id` (tag 8)."""
    encoded = client_message_id.encode()
    return ref + b"\x42" + varint(len(encoded)) + encoded


@lru_cache(maxsize=4096)
def varint(value: int) -> bytes:
    """Protobuf base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(maxsize=4096)
def _push_header(entry_bytes: int) -> tuple[bytes, bytes]:
    length = varint(entry_bytes)
    body_bytes = _PUSH_HEAD.size + len(length) + entry_bytes
    return encode_header(Opcode.PUSH_EVENTS, body_bytes, stream_id=STREAM_REALTIME), length


def push_frame_parts(last_pushed_user_seq: int, ref: bytes, common: bytes) -> tuple[bytes, bytes, bytes]:
    """PUSH_EVENTS frame of one entry as (head, ref, common); the header is cached per entry length."""
    header, length = _push_header(len(ref) + len(common))
    return header + _PUSH_HEAD.pack(0x09, last_pushed_user_seq, 0x12) + length, ref, common
