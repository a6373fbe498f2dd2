"""Any split of a byte stream gives the same frames; garbage is refused, never a crash."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.errors import FramingError
from qim.protocol.header import encode_frame
from qim.protocol.reader import Frame, FrameLimits, FrameReader

LIMITS = FrameLimits(default_bytes=300)

frames = st.builds(
    encode_frame,
    st.integers(0, 0xFFFF),
    st.binary(max_size=300),
    request_id=st.integers(0, 0xFFFFFFFF),
    stream_id=st.integers(0, 0xFFFF),
    flags=st.integers(0, 15),
)


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[low:high] for low, high in pairwise(bounds)]


def _read(pieces: list[bytes]) -> tuple[list[Frame], type[Exception] | None]:
    reader = FrameReader(LIMITS)
    read: list[Frame] = []
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                read.append(frame)  # noqa: PERF402  (frames before an error count)
    except FramingError as error:
        return read, type(error)
    return read, None


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_any_split_gives_the_same_frames(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(sent)
    read, error = _read(_split(stream, cuts))
    assert error is None
    assert [
        encode_frame(f.opcode, f.body, request_id=f.request_id, stream_id=f.stream_id, flags=f.flags) for f in read
    ] == sent


@given(st.lists(frames, max_size=3), st.binary(min_size=1, max_size=80), st.lists(st.integers(0, 1 << 20), max_size=8))
def test_garbage_is_refused_the_same_way_however_it_is_split(
    sent: list[bytes], garbage: bytes, cuts: list[int]
) -> None:
    stream = b"".join(sent) + garbage
    assert _read(_split(stream, cuts)) == _read([stream])


@given(st.lists(frames, min_size=1, max_size=3), st.integers(0, 1 << 20), st.integers(1, 255))
def test_a_flipped_header_bit_never_passes(sent: list[bytes], at: int, mask: int) -> None:
    damaged = bytearray(sent[0])
    damaged[at % 16] ^= mask
    with pytest.raises(FramingError):
        list(FrameReader(LIMITS).feed(bytes(damaged) + b"".join(sent[1:])))


@given(st.binary(max_size=400))
def test_an_unfinished_frame_never_holds_more_than_its_limit(data: bytes) -> None:
    reader = FrameReader(LIMITS)
    try:
        list(reader.feed(data))
    except FramingError:
        pass
    assert reader.held_bytes <= 320
