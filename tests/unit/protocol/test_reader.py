from __future__ import annotations

import pytest

from qim.errors import FrameTooLarge, FramingError
from qim.protocol.header import HEADER_BYTES, encode_frame, encode_header
from qim.protocol.opcodes import Opcode
from qim.protocol.reader import (
    UNAUTHENTICATED,
    UNAUTHENTICATED_FRAME_BYTES,
    FrameLimits,
    FrameReader,
    authenticated_limits,
)

PING = encode_frame(Opcode.PING, b"ping", request_id=3)
SEND = encode_frame(Opcode.SEND_MESSAGE, b"m" * 100, request_id=4)


def test_whole_frames() -> None:
    ping, send = FrameReader().feed(PING + SEND)
    assert (ping.opcode, ping.request_id, ping.body) == (Opcode.PING, 3, b"ping")
    assert (send.opcode, send.request_id, send.body) == (Opcode.SEND_MESSAGE, 4, b"m" * 100)


def test_a_frame_in_single_bytes() -> None:
    reader = FrameReader()
    frames = [frame for byte in PING for frame in reader.feed(bytes((byte,)))]
    assert [frame.body for frame in frames] == [b"ping"]
    assert reader.held_bytes == 0


def test_an_empty_body() -> None:
    (frame,) = FrameReader().feed(encode_frame(Opcode.PING, b""))
    assert frame.body == b""


def test_the_length_is_judged_before_the_body_arrives() -> None:
    reader = FrameReader()
    with pytest.raises(FrameTooLarge) as refused:
        list(reader.feed(encode_header(Opcode.AUTH, UNAUTHENTICATED_FRAME_BYTES + 1, request_id=1)))
    assert (refused.value.opcode, refused.value.request_id) == (Opcode.AUTH, 1)
    assert reader.held_bytes == 0


def test_frames_before_a_bad_one_are_delivered() -> None:
    frames = FrameReader().feed(PING + b"\xff" * HEADER_BYTES)
    assert next(frames).body == b"ping"
    with pytest.raises(FramingError):
        next(frames)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00", b"Qx", b"\x16\x03\x01"])
def test_what_cannot_be_ours_is_refused_at_the_first_bytes(garbage: bytes) -> None:
    with pytest.raises(FramingError):
        list(FrameReader().feed(garbage))


def test_foreign_bytes_are_refused_in_any_split() -> None:
    reader = FrameReader()
    assert list(reader.feed(b"Q")) == []
    with pytest.raises(FramingError):
        list(reader.feed(b"x"))


def test_a_wrong_crc_is_refused() -> None:
    frame = bytearray(PING)
    frame[19] ^= 1
    with pytest.raises(FramingError, match="CRC"):
        list(FrameReader().feed(bytes(frame)))


def test_a_wrong_version_is_the_callers_to_answer() -> None:
    frame = bytearray(encode_header(Opcode.PING, 0, request_id=5))
    frame[2] = 9
    from google_crc32c import value as crc32c

    frame[16:20] = crc32c(bytes(frame[:16])).to_bytes(4, "big")
    (read,) = FrameReader().feed(bytes(frame))
    assert (read.version, read.request_id) == (9, 5)


def test_limits_rise_with_authentication_in_the_middle_of_a_read() -> None:
    reader = FrameReader(UNAUTHENTICATED)
    large = encode_frame(Opcode.CREATE_GROUP, b"x" * (UNAUTHENTICATED_FRAME_BYTES + 1))
    frames = reader.feed(PING + large)
    next(frames)
    reader.limits = authenticated_limits(max_custom_payload_bytes=32768, media_thumbnail_max_bytes=32768)
    assert len(next(frames).body) == UNAUTHENTICATED_FRAME_BYTES + 1


def test_a_payload_slightly_too_large_still_fits_its_frame() -> None:
    limits = authenticated_limits(max_custom_payload_bytes=32768, media_thumbnail_max_bytes=32768)
    assert limits.by_opcode[Opcode.SEND_MESSAGE] >= 33 * 1024 + 1024
    assert limits.by_opcode[Opcode.SEND_MESSAGE] < limits.default_bytes


def test_limits_are_per_opcode() -> None:
    reader = FrameReader(FrameLimits(default_bytes=10, by_opcode={Opcode.SEND_MESSAGE: 100}))
    assert len(list(reader.feed(SEND))) == 1
    with pytest.raises(FrameTooLarge):
        list(reader.feed(encode_frame(Opcode.PING, b"x" * 11)))
