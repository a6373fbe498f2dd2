from __future__ import annotations

import pickle

import pytest

from qim.core.secret import REDACTED, Secret


def test_a_secret_is_never_shown() -> None:
    secret = Secret("hunter2")
    assert [str(secret), repr(secret), f"{secret}", f"{secret:>3}", "%s" % secret] == [REDACTED] * 5  # noqa: UP031
    assert "hunter2" not in repr({"key": secret})
    assert secret.reveal() == "hunter2"


def test_a_secret_is_not_serialised() -> None:
    with pytest.raises(TypeError, match="not serialised"):
        pickle.dumps(Secret(b"key"))


def test_secrets_compare_by_value() -> None:
    assert Secret(b"a") == Secret(b"a")
    assert Secret(b"a") != Secret(b"b")
    assert Secret(b"a") != b"a"
    assert hash(Secret(b"a")) == hash(Secret(b"a"))
    assert Secret("x")
    assert not Secret("")
