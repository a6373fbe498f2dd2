"""`MailboxCursor`: the signed position of one device (§6.8).

The token covers where the device belongs (tenant, user, device, shard, lane, epoch, issue time). The position
`last_applied_mailbox_seq` travels beside it in plaintext and is only bounded by W: raising it skips the device's own
unread.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

from qim.errors import CursorInvalid

_HEAD: Final = struct.Struct(">BIBHQ")
_VERSION: Final = 1
_MAC_BYTES: Final = 16
TOKEN_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorScope:
    """The signed part of a cursor."""

    tenant_id: str
    user_id: str
    device_id: str
    mailbox_shard_id: int
    lane_id: int
    shard_epoch: int
    issued_at_ms: int


def sign_cursor(scope: CursorScope, key: bytes) -> bytes:
    """Opaque token: head ‖ three length-prefixed names ‖ 16-byte HMAC-SHA256."""
    body = _HEAD.pack(_VERSION, scope.mailbox_shard_id, scope.lane_id, scope.shard_epoch, scope.issued_at_ms)
    for name in (scope.tenant_id, scope.user_id, scope.device_id):
        encoded = name.encode()
        body += bytes((len(encoded),)) + encoded
    return body + _mac(body, key)


def verify_cursor(token: bytes, key: bytes) -> CursorScope:
    """The scope a token was signed for; CursorInvalid when it was not signed with `key`."""
    if not _HEAD.size + _MAC_BYTES < len(token) <= TOKEN_BYTES_MAX:
        raise CursorInvalid("token length")
    body, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(body, key)):
        raise CursorInvalid("signature")
    version, shard, lane, epoch, issued_at_ms = _HEAD.unpack_from(body)
    if version != _VERSION:
        raise CursorInvalid("token version")
    names: list[str] = []
    at = _HEAD.size
    for _ in range(3):
        length = body[at]
        names.append(body[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return CursorScope(
        tenant_id=names[0],
        user_id=names[1],
        device_id=names[2],
        mailbox_shard_id=shard,
        lane_id=lane,
        shard_epoch=epoch,
        issued_at_ms=issued_at_ms,
    )


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()[:_MAC_BYTES]
