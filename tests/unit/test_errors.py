from __future__ import annotations

from qim.errors import (
    RETRYABLE_SEND_CODES,
    ClockUnsafe,
    CursorInvalid,
    Detail,
    ErrorCode,
    FrameTooLarge,
    FramingError,
    WireError,
)


def test_an_exception_knows_what_the_peer_may_learn() -> None:
    error = WireError("why", code=ErrorCode.RATE_LIMITED, detail=Detail.DELIVERY_LAG, retry_after_ms=250)
    assert (error.code, error.detail, error.retry_after_ms) == (ErrorCode.RATE_LIMITED, "delivery_lag", 250)
    assert WireError("why").code is ErrorCode.PERMISSION_DENIED
    assert CursorInvalid("why").code is ErrorCode.CURSOR_INVALID
    assert ClockUnsafe("why").code is ErrorCode.CLOCK_UNSAFE


def test_a_frame_that_is_too_large_can_be_answered() -> None:
    error = FrameTooLarge(0x0201, 7, 99, 10)
    assert isinstance(error, FramingError)
    assert (error.opcode, error.request_id) == (0x0201, 7)


def test_final_refusals_are_not_retried() -> None:
    assert ErrorCode.PERMISSION_DENIED not in RETRYABLE_SEND_CODES
    assert ErrorCode.PAYLOAD_TOO_LARGE not in RETRYABLE_SEND_CODES
