"""When a token wants to be replaced."""

from __future__ import annotations

import base64
import json

import pytest

from qim.client.renewal import renewal_delay_ms

NOW_MS = 1_790_000_000_000


def token(**claims: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{body}.c2ln"


@pytest.mark.parametrize(
    ("left_s", "delay_s"),
    [(3600, 3300), (600, 480), (60, 48), (0, 0), (-5, 0)],
    ids=["five minutes before the end", "short-lived", "very short", "now", "expired"],
)
def test_delay(left_s: int, delay_s: int) -> None:
    assert renewal_delay_ms(token(exp=NOW_MS // 1000 + left_s), NOW_MS) == delay_s * 1000


@pytest.mark.parametrize("text", ["", "opaque", "a.b.c", "a.!!!.c", token(), token(exp="soon"), token(exp=None)])
def test_a_token_that_names_no_expiry_is_left_alone(text: str) -> None:
    assert renewal_delay_ms(text, NOW_MS) is None
