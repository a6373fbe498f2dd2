"""Frames a gateway makes itself; bodies from other parts are forwarded as they are."""

from __future__ import annotations

from qim.errors import ErrorCode
from qim.protocol.header import encode_frame
from qim.protocol.opcodes import STREAM_OF, Opcode
from qim.protocol.qim_pb2 import Error


def frame_bytes(opcode: Opcode, body: bytes, request_id: int = 0) -> bytes:
    """A downstream frame on its stream (A.5)."""
    return encode_frame(opcode, body, request_id=request_id, stream_id=STREAM_OF[opcode])


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
