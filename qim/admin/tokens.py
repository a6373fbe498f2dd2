"""Access tokens: Ed25519-signed JWTs bound to (tenant, user, device) (§15.3, §20.2.1).

Claims: `tid`, `uid`, `did`, `iat`, `exp` (seconds), `jti`; header `alg` EdDSA. `gateway/auth.py` verifies them with the
public half. Who holds the private half decides who everybody is: it never leaves the admin process.
"""

from __future__ import annotations

import secrets
from typing import Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.core.ids import is_name

ALGORITHM: Final = "EdDSA"
TTL_S_MAX: Final = 24 * 3600
"""A day: dev tokens are for tests and demos, revocation records live 2 h longer than a token (§15.3.2)."""


class TokenIssuer:
    """Signs access tokens."""

    __slots__ = ("_key",)

    def __init__(self, signing_key: Ed25519PrivateKey) -> None:
        self._key = signing_key

    def issue(self, *, tenant_id: str, user_id: str, device_id: str, now_ms: int, ttl_s: int) -> str:
        """A token valid from `now_ms` for `ttl_s` seconds; ValueError, one line, for a name or ttl that cannot be."""
        for label, name in (("tenant", tenant_id), ("user", user_id), ("device", device_id)):
            if not is_name(name):
                raise ValueError(f"{label} must match [A-Za-z0-9._@-]{{1,64}}")
        if not 1 <= ttl_s <= TTL_S_MAX:
            raise ValueError(f"ttl_s must be 1 to {TTL_S_MAX}")
        issued_at_s = now_ms // 1000
        claims = {
            "tid": tenant_id,
            "uid": user_id,
            "did": device_id,
            "iat": issued_at_s,
            "exp": issued_at_s + ttl_s,
            "jti": secrets.token_urlsafe(12),
        }
        return jwt.encode(claims, self._key, algorithm=ALGORITHM)

    def __repr__(self) -> str:
        return "TokenIssuer(<redacted>)"
