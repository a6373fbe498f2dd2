"""Frames a gateway makes itself."""

from __future__ import annotations

import pytest

from qim.errors import Detail, ErrorCode
from qim.gateway.replies import code_of, error_body, forwarded_error_body, frame_bytes, send_ack_body
from qim.protocol.header import HEADER_BYTES, decode_header
from qim.protocol.opcodes import STREAM_OF, Opcode
from qim.protocol.qim_pb2 import RATE_LIMITED, Error, MailboxCursorToken, SendAck, SubmitSendReply


@pytest.mark.parametrize("opcode", [Opcode(number) for number in STREAM_OF])
def test_frames_go_on_their_stream(opcode: Opcode) -> None:
    whole = frame_bytes(opcode, b"body", 7)
    _, _, *found = decode_header(whole)
    assert found == [opcode, 7, STREAM_OF[opcode], len(whole) - HEADER_BYTES]
    assert whole[HEADER_BYTES:] == b"body"


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


@pytest.mark.parametrize("id_bytes", [1, 64, 100, 400])
@pytest.mark.parametrize("own_request_id", [0, 5])
def test_an_ack_is_copied_and_names_the_request_of_the_frame(id_bytes: int, own_request_id: int) -> None:
    ack = SendAck(
        request_id=own_request_id, client_message_id="m" * id_bytes, message_id=bytes(16), conversation_seq=300
    )
    answer = SubmitSendReply(ack=ack).SerializeToString()
    for request_id in (0, 1, 300, 0xFFFFFFFF):
        body = send_ack_body(answer, request_id)
        assert body is not None
        ack.request_id = request_id
        assert SendAck.FromString(body) == ack


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x0a",
        b"\x0a\x05ab",
        b"\x0a\x80",
        SubmitSendReply(ack=SendAck(conversation_seq=1)).SerializeToString() + b"\x12\x00",
        SubmitSendReply(error=Error(code=RATE_LIMITED)).SerializeToString(),
    ],
)
def test_what_is_not_just_an_ack_is_none(answer: bytes) -> None:
    assert send_ack_body(answer, 7) is None
