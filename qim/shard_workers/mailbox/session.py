"""What a login is told about its cursor (§6.8, §9.3.1), pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qim.core.cursor import CursorScope, sign_cursor, verify_cursor
from qim.errors import CursorInvalid
from qim.protocol.qim_pb2 import (
    CURSOR_EXPIRED,
    CURSOR_INVALID,
    CURSOR_REBASED,
    SHARD_MOVED,
    Error,
    MailboxCursorToken,
)
from qim.registry.api import EpochBoundary


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a device belongs and what its lane holds."""

    scope: CursorScope
    """What a cursor issued now would sign."""
    lane_watermark: int
    effective_trim: int


def judge_cursor(
    cursor: MailboxCursorToken, position: Position, boundaries: Sequence[EpochBoundary], key: bytes
) -> Error | None:
    """The refusal of AUTH, or None. Checks in the contract's order: INVALID, EXPIRED, REBASED.

    A zero cursor is never expired (ADR-0023). A token of an epoch above ours proves that the shard has another owner.
    """
    last_applied = cursor.last_applied_mailbox_seq
    try:
        epoch = _check_scope(cursor, position.scope, key)
    except CursorInvalid:
        return Error(code=CURSOR_INVALID)
    if epoch > position.scope.shard_epoch:
        return Error(code=SHARD_MOVED)
    if last_applied > position.lane_watermark:
        return Error(code=CURSOR_INVALID)
    if last_applied and last_applied < position.effective_trim:
        return expired(position.effective_trim)
    if epoch < position.scope.shard_epoch:
        if all(boundary.shard_epoch != epoch for boundary in boundaries):
            return expired(position.effective_trim)
        return Error(
            code=CURSOR_REBASED,
            new_cursor=issue_cursor(position.scope, last_applied, key),
            replay_from_seq=last_applied,
        )
    return None


def expired(effective_trim: int) -> Error:
    """CURSOR_EXPIRED: entries below the trim watermark are gone, the device rebuilds (§9.6)."""
    return Error(code=CURSOR_EXPIRED, trim_watermark=effective_trim, rebuild_required=True)


def issue_cursor(scope: CursorScope, last_applied: int, key: bytes) -> MailboxCursorToken:
    return MailboxCursorToken(token=sign_cursor(scope, key), last_applied_mailbox_seq=last_applied)


def _check_scope(cursor: MailboxCursorToken, scope: CursorScope, key: bytes) -> int:
    """Epoch the token was issued under; an empty token is a new device's and counts as the current epoch."""
    if not cursor.token:
        if cursor.last_applied_mailbox_seq:
            raise CursorInvalid("a position without a token")
        return scope.shard_epoch
    signed = verify_cursor(cursor.token, key)
    if (
        signed.tenant_id != scope.tenant_id
        or signed.user_id != scope.user_id
        or signed.device_id != scope.device_id
        or signed.mailbox_shard_id != scope.mailbox_shard_id
        or signed.lane_id != scope.lane_id
    ):
        raise CursorInvalid("token of another device or place")
    return signed.shard_epoch
