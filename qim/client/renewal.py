"""When an access token wants to be replaced, read from the token without judging it: only the server can (§15.3.1)."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Final

TOKEN_REFRESH_LEAD_MS: Final = 300_000
"""`token_refresh_lead`; a token that lives shorter is renewed at four fifths of what is left."""


def renewal_delay_ms(access_token: str, now_ms: int) -> int | None:
    """How long to wait before a silent renewal; None for a token that names no expiry."""
    parts = access_token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        left_ms = int(claims["exp"]) * 1000 - now_ms
    except (binascii.Error, ValueError, KeyError, TypeError):
        return None
    return max(left_ms - TOKEN_REFRESH_LEAD_MS, left_ms * 4 // 5, 0) if left_ms > 0 else 0
