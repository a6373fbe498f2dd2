"""Dev tokens carry who they are for and how long."""

from __future__ import annotations

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.admin.tokens import TTL_S_MAX, TokenIssuer

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NOW_MS = 1_800_000_000_000


def issue(**changes: object) -> str:
    fields: dict[str, object] = {"tenant_id": "t", "user_id": "u", "device_id": "d", "now_ms": NOW_MS, "ttl_s": 60}
    return TokenIssuer(KEY).issue(**(fields | changes))  # type: ignore[arg-type]


def test_claims_name_tenant_user_and_device() -> None:
    claims = jwt.decode(
        issue(), KEY.public_key(), algorithms=["EdDSA"], options={"verify_exp": False, "verify_iat": False}
    )
    assert (claims["tid"], claims["uid"], claims["did"]) == ("t", "u", "d")
    assert (claims["iat"], claims["exp"]) == (1_800_000_000, 1_800_000_060)
    assert claims["jti"]
    assert jwt.get_unverified_header(issue())["alg"] == "EdDSA"


def test_no_two_tokens_share_an_id() -> None:
    assert issue() != issue()


@pytest.mark.parametrize(
    "changes", [{"tenant_id": ""}, {"user_id": "a b"}, {"device_id": "x" * 65}, {"ttl_s": 0}, {"ttl_s": TTL_S_MAX + 1}]
)
def test_what_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        issue(**changes)


def test_the_key_is_not_printed() -> None:
    assert "redacted" in repr(TokenIssuer(KEY))
