"""Keys, wrapping and bodies at rest (§21.3)."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from qim.core.secret import Secret
from qim.errors import StartupError, StoreError
from qim.stores.crypto import KEY_BYTES, NONCE_BYTES, TAG_BYTES, KeyRing, _Expiring, open_key_file

MESSAGE_ID = bytes(range(16))


class FixedClock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def unix_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return self.now_ms


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(Secret(bytes(KEY_BYTES)))


def test_derived_keys_are_fixed_for_ever(ring: KeyRing) -> None:
    """Another value here makes stored data and issued tokens unreadable."""
    public = ring.token_signing_key().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert (ring.fingerprint(), ring.cursor_key.reveal().hex(), ring.admin_token.reveal(), public.hex()) == (
        "d668051ab90ace2a",
        "1aaffce9b915f12c829956c39a4e639b75a14b9f15f121bc019b047b083c11ac",
        "tyQbu6Ci7rbHzQUTqnI5TwkSlGzfjD83fHEcApAloHQ",
        "56f8331e8d445bb0382846aeaa24fa6f8b9e07acd2c860fce9e2e4dcba43bcd2",
    )


def test_a_dek_comes_back_from_what_is_stored(ring: KeyRing) -> None:
    dek_id, dek, wrapped = ring.new_dek("acme")
    assert dek_id.split(":")[0] == "c1" and len(dek) == KEY_BYTES
    assert dek not in wrapped
    assert KeyRing(Secret(bytes(KEY_BYTES))).unwrap(dek_id, wrapped) == dek


def test_two_deks_differ(ring: KeyRing) -> None:
    first, second = ring.new_dek("acme"), ring.new_dek("acme")
    assert first.dek != second.dek and first.dek_id != second.dek_id


@pytest.mark.parametrize("damage", ["other master", "other id", "flipped byte", "other tenant", "cut", "empty"])
def test_a_foreign_or_damaged_dek_is_refused(ring: KeyRing, damage: str) -> None:
    dek_id, _, wrapped = ring.new_dek("acme")
    if damage == "other master":
        ring = KeyRing(Secret(b"\x01" * KEY_BYTES))
    elif damage == "other id":
        dek_id = ring.new_dek("acme").dek_id
    elif damage == "flipped byte":
        wrapped = wrapped[:-1] + bytes((wrapped[-1] ^ 1,))
    elif damage == "other tenant":
        wrapped = b"\x04ACME" + wrapped[5:]
    else:
        wrapped = wrapped[:9] if damage == "cut" else b""
    with pytest.raises(StoreError):
        ring.unwrap(dek_id, wrapped)


def test_a_body_is_bound_to_its_coordinates(ring: KeyRing) -> None:
    dek = ring.new_dek("acme").dek
    sealed = ring.encrypt(dek, b"hello", "acme", "dm:ann:bob", MESSAGE_ID)
    assert len(sealed) == NONCE_BYTES + len(b"hello") + TAG_BYTES
    assert ring.decrypt(dek, sealed, "acme", "dm:ann:bob", MESSAGE_ID) == b"hello"
    for tenant_id, conversation_id, message_id in (
        ("other", "dm:ann:bob", MESSAGE_ID),
        ("acme", "dm:ann:cid", MESSAGE_ID),
        ("acme", "dm:ann:bob", bytes(16)),
    ):
        with pytest.raises(StoreError):
            ring.decrypt(dek, sealed, tenant_id, conversation_id, message_id)
    for cut in (b"", sealed[:8], sealed[:20], sealed[:-1]):
        with pytest.raises(StoreError):
            ring.decrypt(dek, cut, "acme", "dm:ann:bob", MESSAGE_ID)


def test_every_encryption_has_its_own_nonce(ring: KeyRing) -> None:
    dek = ring.new_dek("acme").dek
    sealed = {ring.encrypt(dek, b"hello", "acme", "dm:ann:bob", MESSAGE_ID)[:NONCE_BYTES] for _ in range(100)}
    assert len(sealed) == 100


def test_the_dek_cache_is_bounded_in_time_and_size() -> None:
    clock = FixedClock()
    cache = _Expiring[str, str](clock, 1000, 2)
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    assert [cache.get(key, make) for key in "abacab"] == list("ABACAB")
    assert made == ["a", "b", "c", "b"]
    clock.now_ms = 999.0
    cache.get("a", make)
    assert len(made) == 4
    clock.now_ms = 1000.0
    cache.get("a", make)
    assert made == ["a", "b", "c", "b", "a"] and len(cache) == 2


def test_nothing_prints_a_key(ring: KeyRing) -> None:
    texts = [repr(ring), repr(ring.cursor_key), str(ring.admin_token), repr(ring.new_dek("acme"))]
    assert all("<redacted>" in text for text in texts)


def test_a_new_cluster_gets_a_file_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    first = open_key_file(path, new_cluster=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["master.key"]
    again = open_key_file(path, new_cluster=True)
    assert open_key_file(path, new_cluster=False).fingerprint() == again.fingerprint() == first.fingerprint()


def test_two_clusters_have_different_keys(tmp_path: Path) -> None:
    first, second = (open_key_file(tmp_path / name, new_cluster=True) for name in ("a", "b"))
    assert first.fingerprint() != second.fingerprint()


def test_a_missing_file_is_never_made_again(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    with pytest.raises(StartupError, match="restore it from your backup"):
        open_key_file(path, new_cluster=False)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "qim-master-key-v1 00ff\n", "something else", "qim-master-key-v1 " + "zz" * 32])
def test_an_unfit_file_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "master.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(StartupError, match="not a key file"):
        open_key_file(path, new_cluster=True)
    assert path.read_text() == text


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    open_key_file(path, new_cluster=True)
    path.chmod(0o640)
    with pytest.raises(StartupError, match="chmod 600"):
        open_key_file(path, new_cluster=False)


def test_a_directory_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot create"):
        open_key_file(tmp_path / "missing" / "master.key", new_cluster=True)
