"""The error catalogue (A.6) and the exceptions that carry its entries.

A peer learns the code, `retry_after_ms` and a `detail` of the catalogue below, never the text of an exception.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ErrorCode(IntEnum):
    """A.6; wire values are ours, equal to `ErrorCode` of qim.proto, 0 = unspecified."""

    CURSOR_EXPIRED = 1
    CURSOR_REBASED = 2
    CURSOR_INVALID = 3
    MAILBOX_DIRTY = 4
    SYNC_INCOMPLETE = 5
    SHARD_MOVED = 6
    REGION_FAILOVER = 7
    RATE_LIMITED = 8
    FANOUT_QUOTA_EXCEEDED = 9
    TOKEN_EXPIRED = 10
    TOKEN_REVOKED = 11
    UPGRADE_REQUIRED = 12
    CLOCK_UNSAFE = 13
    PAYLOAD_TOO_LARGE = 14
    PERMISSION_DENIED = 15
    PREKEY_EXHAUSTED = 16


RETRYABLE_SEND_CODES: Final = frozenset(
    {
        ErrorCode.RATE_LIMITED,
        ErrorCode.FANOUT_QUOTA_EXCEEDED,
        ErrorCode.REGION_FAILOVER,
        ErrorCode.SHARD_MOVED,
        ErrorCode.CLOCK_UNSAFE,
        ErrorCode.TOKEN_EXPIRED,
    }
)
"""Answers to SEND_MESSAGE after which the same `client_message_id` is sent again (A.6, §8.2)."""


class Detail:
    """Every `detail` a peer can see; free text never leaves the process."""

    CONVERSATION_QUOTA_EXHAUSTED: Final = "conversation_quota_exhausted"
    E2EE_MEMBER_LIMIT: Final = "e2ee_member_limit"
    GROUP_MEMBER_LIMIT: Final = "group_member_limit"
    GROUP_EXISTS: Final = "group_exists"
    CLIENT_MESSAGE_ID_REUSED: Final = "client_message_id_reused"
    OUT_OF_ORDER: Final = "out_of_order"
    DELIVERY_LAG: Final = "delivery_lag"
    STORE_FULL: Final = "store_full"
    BAD_REQUEST: Final = "bad_request"
    NOT_AUTHENTICATED: Final = "not_authenticated"
    DEVICE_MISMATCH: Final = "device_mismatch"


class QimError(Exception):
    """Root of everything this project raises on purpose."""


class StartupError(QimError):
    """The process cannot start; the text is one line that says what is wrong and how to mend it. Exit code 2."""


class WireError(QimError):
    """A refusal a client may see. `reason` stays in the process; code, detail and retry_after_ms go to the peer."""

    code: ErrorCode = ErrorCode.PERMISSION_DENIED

    def __init__(
        self, reason: str, *, code: ErrorCode | None = None, detail: str = "", retry_after_ms: int = 0
    ) -> None:
        super().__init__(reason)
        if code is not None:
            self.code = code
        self.detail = detail
        self.retry_after_ms = retry_after_ms


class CursorInvalid(WireError):
    code = ErrorCode.CURSOR_INVALID


class ClockUnsafe(WireError):
    code = ErrorCode.CLOCK_UNSAFE


class FramingError(QimError):
    """The byte stream is not ours or is desynchronised: the connection must be closed (§15.4.1, §20.1)."""


class FrameTooLarge(FramingError):
    """`body_len` exceeds the limit of the connection's state: PAYLOAD_TOO_LARGE, then close (§20.1)."""

    def __init__(self, opcode: int, request_id: int, body_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"body of {body_bytes} bytes exceeds {limit_bytes}")
        self.opcode = opcode
        self.request_id = request_id


class StoreError(QimError):
    """A store did not do what was asked; nothing is known to have been written unless stated."""


class StoreUnavailable(StoreError):
    """The connection broke or timed out: the operation may or may not have happened."""


class Fenced(StoreError):
    """The store holds a greater epoch: this owner has been replaced and must stop (§19.2)."""


class StaleInstance(StoreUnavailable):
    """The instance lost its last second, or this connection has not loaded the shard yet: open or load it again."""
