"""Frames a gateway makes itself."""

from __future__ import annotations

import pytest

from qim.errors import Detail, ErrorCode
from qim.gateway.replies import code_of, error_body, forwarded_error_body, frame_bytes
from qim.protocol.header import HEADER_BYTES, decode_header
from qim.protocol.opcodes import STREAM_OF, Opcode
from qim.protocol.qim_pb2 import RATE_LIMITED, Error, MailboxCursorToken


@pytest.mark.parametrize("opcode", [Opcode(number) for number in STREAM_OF])
def test_frames_go_on_their_stream(opcode: Opcode) -> None:
    whole = frame_bytes(opcode, b"body", 7)
    header = decode_header(whole)
    assert (header.opcode, header.stream_id, header.request_id) == (opcode, STREAM_OF[opcode], 7)
    assert header.body_len == len(whole) - HEADER_BYTES == 4


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_reaches_the_wire(code: ErrorCode) -> None:
    error = Error.FromString(error_body(code, 9, 12.7, Detail.BAD_REQUEST, "m1"))
    assert code_of(error) is code
    assert (error.request_id, error.retry_after_ms, error.detail, error.client_message_id) == (
        9, 12, Detail.BAD_REQUEST, "m1",
    )  # fmt: skip


def test_forwarded_errors_keep_their_fields() -> None:
    cursor = MailboxCursorToken(token=b"new", last_applied_mailbox_seq=4)
    sent = Error(code=RATE_LIMITED, retry_after_ms=5, new_cursor=cursor, replay_from_seq=4, request_id=77)
    error = Error.FromString(forwarded_error_body(sent, 3))
    assert error.request_id == 3
    assert error.new_cursor == cursor
    assert error.client_message_id == ""
    assert Error.FromString(forwarded_error_body(sent, 3, "m1")).client_message_id == "m1"


def test_codes_of_newer_versions_are_not_known() -> None:
    error = Error()
    error.MergeFromString(b"\x08\x63")
    assert code_of(error) is None
