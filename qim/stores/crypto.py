"""Keys and encryption at rest (§21.3): master key file, tenant keys, one DEK per conversation, AES-256-GCM bodies.

The key file is the port to a KMS that a single installation has. Everything else is derived from it by HKDF or wrapped
under it, so the file and the data directory together are what an operator backs up; without it the bodies are lost.
"""

from __future__ import annotations

import base64
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from qim.core.secret import Secret
from qim.errors import StartupError, StoreError
from qim.runtime.clock import Clock, SystemClock

K = TypeVar("K")
V = TypeVar("V")

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
DEK_CACHE_TTL_MS: Final = 300_000
DEK_CACHE_BYTES: Final = 8 << 20
_DEK_ENTRY_BYTES: Final = 1_800
"""A cached DEK: its wrapped and plain form (600, measured) and its cipher context."""
_TENANT_KEYS_MAX: Final = 1_024
_FILE_HEAD: Final = "qim-master-key-v1 "
_DEK_VERSION: Final = 1


class NewDek(NamedTuple):
    """A fresh data encryption key: its id, the key itself, and the form that is stored."""

    dek_id: str
    dek: bytes
    wrapped: bytes

    def __repr__(self) -> str:
        return f"NewDek({self.dek_id}, <redacted>)"


class _Expiring(Generic[K, V]):
    """Least recently used values, each for at most `ttl_ms`: a destroyed key is forgotten within that time."""

    __slots__ = ("_clock", "_entries_max", "_rows", "_ttl_ms")

    def __init__(self, clock: Clock, ttl_ms: int, entries_max: int) -> None:
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._entries_max = entries_max
        self._rows: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: K, make: Callable[[K], V]) -> V:
        now_ms = self._clock.monotonic_ms()
        row = self._rows.get(key)
        if row is not None and row[1] > now_ms:
            self._rows.move_to_end(key)
            return row[0]
        value = make(key)
        self._rows[key] = (value, now_ms + self._ttl_ms)
        self._rows.move_to_end(key)
        if len(self._rows) > self._entries_max:
            self._rows.popitem(last=False)
        return value


class KeyRing:
    """Keys derived from one master key, and what is done with them. Holds no connection and no file handle.

    `wrapped` = u8 length of the tenant ‖ tenant ‖ nonce[12] ‖ DEK ciphertext ‖ tag, so a DEK can be unwrapped from what
    is stored beside the conversation alone. A ciphertext = nonce[12] ‖ ciphertext ‖ tag[16], bound by its additional
    data to tenant ‖ 00 ‖ conversation ‖ 00 ‖ message_id.
    """

    def __init__(
        self,
        master_key: Secret[bytes],
        *,
        clock: Clock | None = None,
        dek_cache_ttl_ms: int = DEK_CACHE_TTL_MS,
        dek_cache_bytes: int = DEK_CACHE_BYTES,
    ) -> None:
        self._master_key = master_key
        entries_max = max(dek_cache_bytes // _DEK_ENTRY_BYTES, 1)
        clock = clock or SystemClock()
        self._deks: _Expiring[tuple[str, bytes], bytes] = _Expiring(clock, dek_cache_ttl_ms, entries_max)
        self._ciphers: _Expiring[bytes, AESGCM] = _Expiring(clock, dek_cache_ttl_ms, entries_max)
        self._tenants: _Expiring[str, AESGCM] = _Expiring(clock, dek_cache_ttl_ms, _TENANT_KEYS_MAX)

    def __repr__(self) -> str:
        return "KeyRing(<redacted>)"

    @property
    def cursor_key(self) -> Secret[bytes]:
        """Signs MailboxCursor tokens (§6.8)."""
        return Secret(self._derive(b"qim.cursor.v1"))

    @property
    def admin_token(self) -> Secret[str]:
        """Bearer token of the trusted management plane."""
        return Secret(base64.urlsafe_b64encode(self._derive(b"qim.admin-token.v1")).decode().rstrip("="))

    def token_signing_key(self) -> Ed25519PrivateKey:
        """Signs access tokens; gateways get its public half only."""
        return Ed25519PrivateKey.from_private_bytes(self._derive(b"qim.token.v1"))

    def fingerprint(self) -> str:
        """16 hex digits that tell two master keys apart and say nothing about them."""
        return self._derive(b"qim.fingerprint.v1")[:8].hex()

    def new_dek(self, tenant_id: str) -> NewDek:
        """A key for one conversation of the tenant; `dek_id` = key_scope:key_id:key_version (§21.3)."""
        dek_id = f"c1:{secrets.token_hex(8)}:{_DEK_VERSION}"
        dek = secrets.token_bytes(KEY_BYTES)
        tenant = tenant_id.encode()
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._tenant_cipher(tenant_id).encrypt(nonce, dek, _wrap_binding(dek_id, tenant))
        return NewDek(dek_id, dek, bytes((len(tenant),)) + tenant + nonce + sealed)

    def unwrap(self, dek_id: str, wrapped: bytes) -> bytes:
        """The DEK; StoreError if it was not wrapped under this master key and id. Cached for `dek_cache_ttl`."""
        return self._deks.get((dek_id, wrapped), self._unwrap)

    def encrypt(self, dek: bytes, plaintext: bytes, tenant_id: str, conversation_id: str, message_id: bytes) -> bytes:
        """Seal a body under a fresh random nonce: every retry under a new message_id must call this again."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._ciphers.get(dek, AESGCM).encrypt(
            nonce, plaintext, _binding(tenant_id, conversation_id, message_id)
        )

    def decrypt(self, dek: bytes, ciphertext: bytes, tenant_id: str, conversation_id: str, message_id: bytes) -> bytes:
        """StoreError when the ciphertext does not belong to this key and these coordinates."""
        nonce, sealed = ciphertext[:NONCE_BYTES], ciphertext[NONCE_BYTES:]
        try:
            binding = _binding(tenant_id, conversation_id, message_id)
            return self._ciphers.get(dek, AESGCM).decrypt(nonce, sealed, binding)
        except (InvalidTag, ValueError) as error:
            raise StoreError(f"a body of {conversation_id} does not decrypt") from error

    def _unwrap(self, stored: tuple[str, bytes]) -> bytes:
        dek_id, wrapped = stored
        nonce_at = 1 + wrapped[0] if wrapped else 0
        tenant = wrapped[1:nonce_at]
        nonce, sealed = wrapped[nonce_at : nonce_at + NONCE_BYTES], wrapped[nonce_at + NONCE_BYTES :]
        try:
            return self._tenant_cipher(tenant.decode()).decrypt(nonce, sealed, _wrap_binding(dek_id, tenant))
        except (InvalidTag, ValueError) as error:
            raise StoreError(f"DEK {dek_id} was not wrapped under this master key") from error

    def _tenant_cipher(self, tenant_id: str) -> AESGCM:
        return self._tenants.get(tenant_id, self._make_tenant_cipher)

    def _make_tenant_cipher(self, tenant_id: str) -> AESGCM:
        return AESGCM(self._derive(b"qim.tenant.v1\x00" + tenant_id.encode()))

    def _derive(self, purpose: bytes) -> bytes:
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(self._master_key.reveal())


def open_key_file(path: Path, *, new_cluster: bool) -> KeyRing:
    """The key ring of a cluster; StartupError, one line, if its file is missing or unfit.

    Only for a `new_cluster`, one that nothing is stored of yet, a missing file is made (0600, never overwritten).
    """
    try:
        return KeyRing(_read_key(path))
    except FileNotFoundError:
        if not new_cluster:
            raise StartupError(
                f"the key file {path} is missing and stored bodies need it: restore it from your backup"
            ) from None
    except OSError as error:
        raise StartupError(f"cannot read the key file {path}: {error.strerror}") from None
    try:
        _create_key(path)
    except OSError as error:
        raise StartupError(f"cannot create the key file {path}: {error.strerror}") from None
    return KeyRing(_read_key(path))


def _read_key(path: Path) -> Secret[bytes]:
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise StartupError(f"the key file {path} can be read by others: chmod 600 {path}")
    text = path.read_text(errors="replace")
    try:
        key = bytes.fromhex(text.removeprefix(_FILE_HEAD))
    except ValueError:
        key = b""
    if not text.startswith(_FILE_HEAD) or len(key) != KEY_BYTES:
        raise StartupError(f"{path} is not a key file of this program: restore it from your backup")
    return Secret(key)


def _create_key(path: Path) -> None:
    """Durable before anything is encrypted under it; appears whole or not at all."""
    staged = path.with_name(path.name + ".new")
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, f"{_FILE_HEAD}{secrets.token_hex(KEY_BYTES)}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.link(staged, path)
    staged.unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _binding(tenant_id: str, conversation_id: str, message_id: bytes) -> bytes:
    return b"%b\x00%b\x00%b" % (tenant_id.encode(), conversation_id.encode(), message_id)


def _wrap_binding(dek_id: str, tenant: bytes) -> bytes:
    return b"qim.dek.v1\x00" + dek_id.encode() + b"\x00" + tenant
