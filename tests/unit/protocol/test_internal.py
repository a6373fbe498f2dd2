from __future__ import annotations

import struct

import pytest

from qim.errors import FramingError
from qim.protocol.internal import (
    USER_KEY_BYTES,
    PushBatch,
    PushRecipient,
    decode_push_batches,
    decode_push_rows,
    encode_push_batch,
    user_key,
)
from tests.support.golden import golden

VECTOR = golden("push_batch")
RECIPIENTS = [
    PushRecipient(
        bytes.fromhex(one["user_key"]),
        one["connection_id"],
        one["session_epoch"],
        one["mailbox_seq"],
        bytes.fromhex(one["ref"]),
    )
    for one in VECTOR["recipients"]
]
COMMON = bytes.fromhex(VECTOR["common"])


def test_push_batch_bytes() -> None:
    encoded = encode_push_batch(VECTOR["tenant_id"], COMMON, RECIPIENTS)
    assert encoded.hex() == VECTOR["encoded"]
    assert list(decode_push_batches(encoded)) == [PushBatch(VECTOR["tenant_id"], COMMON, RECIPIENTS)]


def test_batches_may_be_concatenated() -> None:
    one = encode_push_batch("t1", b"first", RECIPIENTS[:1])
    two = encode_push_batch("t2", b"", [])
    assert list(decode_push_batches(one + two)) == [PushBatch("t1", b"first", RECIPIENTS[:1]), PushBatch("t2", b"", [])]


@pytest.mark.parametrize("ref_bytes", [[], [57], [57, 57, 57], [57, 70, 57], [70, 57], [300, 300], [300, 44]])
def test_rows_are_the_recipients_whatever_the_length_of_their_refs(ref_bytes: list[int]) -> None:
    """300 and 44 differ in one byte of the length only."""
    recipients = [
        PushRecipient(bytes((number,)) * USER_KEY_BYTES, number, number + 1, number + 2, bytes((number,)) * size)
        for number, size in enumerate(ref_bytes, 1)
    ]
    encoded = encode_push_batch("t", b"body", recipients)
    for tenant, common, rows in decode_push_rows(encoded + encoded):
        assert (tenant, common) == (b"t", b"body")
        assert rows == recipients


def test_an_unknown_format_is_refused() -> None:
    encoded = bytearray(encode_push_batch("t", b"", []))
    encoded[0] = 9
    with pytest.raises(FramingError, match="format 9"):
        list(decode_push_batches(bytes(encoded)))


def test_a_cut_batch_is_noticed() -> None:
    encoded = encode_push_batch("t", b"body", RECIPIENTS)
    with pytest.raises(struct.error):
        list(decode_push_batches(encoded[: len(encoded) // 2]))


@pytest.mark.parametrize("vector", golden("ids")["user_keys"])
def test_user_key(vector: dict[str, str]) -> None:
    key = user_key(vector["tenant_id"], vector["user_id"])
    assert len(key) == USER_KEY_BYTES
    assert key.hex() == vector["user_key"]
