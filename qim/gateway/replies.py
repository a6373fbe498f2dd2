"""Frames a gateway makes itself; bodies from other parts are forwarded as they are."""

from __future__ import annotations

from typing import Final

from qim.errors import ErrorCode
from qim.protocol.entry import varint
from qim.protocol.header import encode_header
from qim.protocol.opcodes import STREAM_OF, Opcode
from qim.protocol.qim_pb2 import Error

_ACK_TAG: Final = b"\x0a"
"""Of `SubmitSendReply.ack`; a length of one or two bytes follows."""
_REQUEST_ID_TAG: Final = b"\x08"
"""Of `SendAck.request_id`."""


def frame_bytes(opcode: Opcode, body: bytes, request_id: int = 0) -> bytes:
    """A downstream frame on its stream (A.5)."""
    return encode_header(opcode, len(body), request_id=request_id, stream_id=STREAM_OF[opcode]) + body


def error_body(
    code: ErrorCode, request_id: int, retry_after_ms: float = 0, detail: str = "", client_message_id: str = ""
) -> bytes:
    """ERROR of an entry of the catalogue (A.6)."""
    error = Error(
        code=code.name,
        retry_after_ms=int(retry_after_ms),
        detail=detail,
        request_id=request_id,
        client_message_id=client_message_id,
    )
    return error.SerializeToString()


def send_ack_body(answer: bytes, request_id: int) -> bytes | None:
    """SEND_ACK out of a SubmitSendReply that is nothing but an ack, which is copied unread; None for any other.

    What follows in a message overrides what was there: the request_id of the frame has the last word.
    """
    if len(answer) < 3 or answer[:1] != _ACK_TAG:
        return None
    at = 2 if answer[1] < 0x80 else 3
    if answer[1:at] != varint(len(answer) - at):
        return None
    return answer[at:] + _REQUEST_ID_TAG + varint(request_id)


def forwarded_error_body(error: Error, request_id: int, client_message_id: str = "") -> bytes:
    """ERROR as another part decided it, with the coordinates of the request."""
    error.request_id = request_id
    if client_message_id:
        error.client_message_id = client_message_id
    return error.SerializeToString()


def code_of(error: Error) -> ErrorCode | None:
    """Entry of the catalogue; None for a code this version does not know."""
    try:
        return ErrorCode(error.code)
    except ValueError:
        return None
