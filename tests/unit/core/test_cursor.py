from __future__ import annotations

from typing import Any

import pytest

from qim.core.cursor import TOKEN_BYTES_MAX, CursorScope, sign_cursor, verify_cursor
from qim.errors import CursorInvalid, ErrorCode
from tests.support.golden import golden

KEY = bytes(range(32))


def _scope(vector: dict[str, Any]) -> CursorScope:
    return CursorScope(**{name: value for name, value in vector.items() if name not in ("key", "token")})


@pytest.mark.parametrize("vector", golden("cursor"))
def test_token_bytes(vector: dict[str, Any]) -> None:
    key = bytes.fromhex(vector["key"])
    token = sign_cursor(_scope(vector), key)
    assert token.hex() == vector["token"]
    assert len(token) <= TOKEN_BYTES_MAX
    assert verify_cursor(token, key) == _scope(vector)


def test_every_changed_byte_is_refused() -> None:
    token = bytes.fromhex(golden("cursor")[0]["token"])
    for at in range(len(token)):
        forged = bytearray(token)
        forged[at] ^= 1
        with pytest.raises(CursorInvalid):
            verify_cursor(bytes(forged), KEY)


def test_every_cut_is_refused() -> None:
    token = bytes.fromhex(golden("cursor")[0]["token"])
    for length in range(len(token)):
        with pytest.raises(CursorInvalid) as refused:
            verify_cursor(token[:length], KEY)
        assert refused.value.code is ErrorCode.CURSOR_INVALID


def test_too_long_and_foreign_keys_are_refused() -> None:
    token = bytes.fromhex(golden("cursor")[0]["token"])
    with pytest.raises(CursorInvalid):
        verify_cursor(token + bytes(TOKEN_BYTES_MAX), KEY)
    with pytest.raises(CursorInvalid):
        verify_cursor(token, bytes(32))
