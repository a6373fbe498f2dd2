"""The hand-made fragments equal protobuf's own bytes."""

from __future__ import annotations

from typing import Any

import pytest

from qim.protocol import qim_pb2
from qim.protocol.entry import REF_BYTES, encode_own_ref, encode_ref, push_frame_parts, varint
from qim.protocol.header import HEADER_BYTES, decode_header
from qim.protocol.opcodes import STREAM_REALTIME, Opcode
from tests.support.golden import golden

VECTORS = golden("entry")


def _ref(vector: dict[str, Any]) -> bytes:
    return encode_ref(
        vector["mailbox_seq"],
        bytes.fromhex(vector["event_id"]),
        vector["event_ordinal"],
        vector["flags"],
        vector["mention_type"],
        vector["visibility_floor"],
        vector["target_mention_type"],
    )


def _entry(vector: dict[str, Any], **more: Any) -> qim_pb2.Entry:
    return qim_pb2.Entry(
        mailbox_seq=vector["mailbox_seq"],
        event_id=int(vector["event_id"], 16),
        event_ordinal=vector["event_ordinal"],
        flags=vector["flags"],
        mention_type=vector["mention_type"],
        visibility_floor_conversation_seq=vector["visibility_floor"],
        target_mention_type=vector["target_mention_type"],
        **more,
    )


@pytest.mark.parametrize("vector", VECTORS)
def test_ref_bytes(vector: dict[str, Any]) -> None:
    ref = _ref(vector)
    assert ref.hex() == vector["ref"]
    assert len(ref) == REF_BYTES
    assert ref == _entry(vector).SerializeToString()


@pytest.mark.parametrize("vector", VECTORS)
def test_own_ref_bytes(vector: dict[str, Any]) -> None:
    own = encode_own_ref(_ref(vector), vector["client_message_id"])
    assert own.hex() == vector["own_ref"]
    assert own == _entry(vector, client_message_id=vector["client_message_id"]).SerializeToString()


def test_an_entry_is_its_two_fragments_in_a_row() -> None:
    common = qim_pb2.Entry(conversation_id="g:team", conversation_seq=7, payload_or_ciphertext=b"hello")
    parsed = qim_pb2.Entry.FromString(_ref(VECTORS[0]) + common.SerializeToString())
    assert parsed == _entry(VECTORS[0], conversation_id="g:team", conversation_seq=7, payload_or_ciphertext=b"hello")


@pytest.mark.parametrize("payload_bytes", [0, 80, 200, 20_000])
def test_a_push_frame_equals_the_serialised_one(payload_bytes: int) -> None:
    common = qim_pb2.Entry(conversation_id="g:team", payload_or_ciphertext=b"x" * payload_bytes).SerializeToString()
    ref = _ref(VECTORS[0])
    frame = b"".join(push_frame_parts(99, ref, common))
    _, _, opcode, _, stream_id, body_bytes = decode_header(frame)
    assert (opcode, stream_id) == (Opcode.PUSH_EVENTS, STREAM_REALTIME)
    assert body_bytes == len(frame) - HEADER_BYTES
    push = qim_pb2.PushEvents(last_pushed_user_seq=99, events=[qim_pb2.Entry.FromString(ref + common)])
    assert frame[HEADER_BYTES:] == push.SerializeToString()


@pytest.mark.parametrize(("value", "encoded"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02")])
def test_varint(value: int, encoded: str) -> None:
    assert varint(value).hex() == encoded
