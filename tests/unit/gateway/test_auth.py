"""Access tokens at the gateway."""

from __future__ import annotations

from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.admin.tokens import TokenIssuer
from qim.errors import Detail, ErrorCode, WireError
from qim.gateway.auth import TOKEN_BYTES_MAX, Identity, TokenVerifier

KEY = Ed25519PrivateKey.generate()
VERIFIER = TokenVerifier(KEY.public_key())
NOW_MS = 1_790_000_000_000
GOOD: dict[str, Any] = {"tid": "acme", "uid": "ann", "did": "phone", "exp": NOW_MS // 1000 + 60, "jti": "j1"}


def signed(**changes: Any) -> str:
    return jwt.encode({k: v for k, v in (GOOD | changes).items() if v is not None}, KEY, algorithm="EdDSA")


def refusal(token: str, device_id: str = "phone", now_ms: int = NOW_MS) -> WireError:
    with pytest.raises(WireError) as caught:
        VERIFIER.verify(token, device_id, now_ms)
    return caught.value


def test_good_token() -> None:
    assert VERIFIER.verify(signed(), "phone", NOW_MS) == Identity(
        "acme", "ann", "phone", token_id="j1", expires_unix_ms=NOW_MS + 60_000
    )


def test_tokens_of_the_issuer_are_accepted() -> None:
    token = TokenIssuer(KEY).issue(tenant_id="acme", user_id="ann", device_id="phone", now_ms=NOW_MS, ttl_s=3600)
    assert VERIFIER.verify(token, "phone", NOW_MS).user_id == "ann"
    assert len(token) < TOKEN_BYTES_MAX


def test_expiry_is_exact_and_has_no_grace() -> None:
    assert VERIFIER.verify(signed(), "phone", NOW_MS + 59_999)
    assert refusal(signed(), now_ms=NOW_MS + 60_000).code is ErrorCode.TOKEN_EXPIRED


def test_token_of_another_device() -> None:
    error = refusal(signed(), "tablet")
    assert error.code is ErrorCode.PERMISSION_DENIED
    assert error.detail == Detail.DEVICE_MISMATCH


@pytest.mark.parametrize(
    "changes",
    [
        {"tid": None}, {"uid": None}, {"did": None}, {"exp": None}, {"jti": None},
        {"tid": "a:b"}, {"uid": ""}, {"uid": 7}, {"uid": "x" * 65}, {"jti": 5}, {"exp": "soon"}, {"exp": 1 << 60},
        {"exp": -1},
    ],
)  # fmt: skip
def test_claims_that_make_no_sense(changes: dict[str, Any]) -> None:
    error = refusal(signed(**changes))
    assert error.code is ErrorCode.PERMISSION_DENIED
    assert error.detail == Detail.NOT_AUTHENTICATED


def test_forgeries() -> None:
    good = signed()
    head, body, signature = good.split(".")
    other = jwt.encode(GOOD, Ed25519PrivateKey.generate(), algorithm="EdDSA")
    elliptic = jwt.encode(GOOD, generate_private_key(SECP256R1()), algorithm="ES256")
    unsigned = jwt.encode(GOOD, "", algorithm="none")
    cases = [other, elliptic, unsigned, f"{head}.{body}.", f"{head}.{body}", f"{head}.{body[:-2]}.{signature}", "x"]
    for forged in [*cases, "", "é" * 10, "a" * (TOKEN_BYTES_MAX + 1)]:
        error = refusal(forged)
        assert error.code is ErrorCode.PERMISSION_DENIED
        assert error.detail == Detail.NOT_AUTHENTICATED
