from __future__ import annotations

from typing import Any

import pytest

from qim.errors import FramingError
from qim.protocol.header import HEADER_BYTES, VERSION, decode_header, encode_frame, encode_header
from tests.support.golden import golden

FIELDS = ("flags", "opcode", "request_id", "stream_id", "body_len")


@pytest.mark.parametrize("vector", golden("header"))
def test_header_bytes(vector: dict[str, Any]) -> None:
    made = encode_header(
        vector["opcode"],
        vector["body_len"],
        request_id=vector["request_id"],
        stream_id=vector["stream_id"],
        flags=vector["flags"],
    )
    assert made.hex() == vector["header"]
    assert decode_header(b"--" + made, 2) == (VERSION, *(vector[name] for name in FIELDS))


def test_every_changed_byte_is_noticed() -> None:
    made = bytearray(encode_header(0x0201, 5, request_id=9))
    for at in range(HEADER_BYTES):
        made[at] ^= 0x10
        with pytest.raises(FramingError):
            decode_header(bytes(made))
        made[at] ^= 0x10


def test_a_frame_is_header_and_body() -> None:
    frame = encode_frame(0x0003, b"body", request_id=1)
    assert decode_header(frame)[-1] == 4
    assert frame[HEADER_BYTES:] == b"body"
