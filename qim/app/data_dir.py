"""The data directory of a node: one node at a time, one cluster for ever, and its key file (DESIGN-data §1, §3.4)."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import orjson

from qim.app.settings import NodeSettings
from qim.errors import StartupError
from qim.stores.crypto import KeyRing, open_key_file

IDENTITY_FILE: Final = "node.json"
LOCK_FILE: Final = "node.lock"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Which cluster the data belongs to."""

    cluster_id: str
    key_fingerprint: str
    servers_claimed: bool = False
    """The private servers carry this cluster's stamp: from now on an empty one has lost its data."""
    format_version: int = FORMAT_VERSION


@contextmanager
def claimed(settings: NodeSettings) -> Iterator[None]:
    """Hold the directory; StartupError while another node runs in it. Workers inherit the lock and end it."""
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(settings.data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartupError(f"cannot use the data directory {settings.data_dir}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StartupError(
            f"another node runs in {settings.data_dir}: stop it, or choose another directory with --data"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def open_identity(settings: NodeSettings) -> tuple[NodeIdentity, KeyRing]:
    """Identity and keys of the node, made at its first start.

    The key file is durable before the identity that says it must be there: a crash in between repeats the first start.
    StartupError, one line, for a missing or foreign key file and for data of another format.
    """
    path = settings.data_dir / IDENTITY_FILE
    stored = _read(path)
    keys = open_key_file(settings.key_file, new_cluster=stored is None)
    if stored is None:
        stored = NodeIdentity(cluster_id=secrets.token_hex(8), key_fingerprint=keys.fingerprint())
        write_durably(path, orjson.dumps(asdict(stored)))
    if stored.key_fingerprint != keys.fingerprint():
        raise StartupError(f"{settings.key_file} is the key of another cluster: restore the one that was backed up")
    if stored.format_version != FORMAT_VERSION:
        raise StartupError(
            f"{settings.data_dir} has format {stored.format_version}, this program reads {FORMAT_VERSION}: "
            "use the version that wrote it"
        )
    return stored, keys


def mark_claimed(settings: NodeSettings) -> None:
    """Remember that the servers have been stamped."""
    path = settings.data_dir / IDENTITY_FILE
    stored = _read(path)
    if stored is None:
        raise StartupError(f"{path} has vanished: stop what else uses this directory")
    write_durably(path, orjson.dumps(asdict(replace(stored, servers_claimed=True))))


def write_durably(path: Path, content: bytes) -> None:
    """Whole or not at all, and still there after a power cut. Mode 0600."""
    staged = path.with_name(path.name + ".new")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    staged.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read(path: Path) -> NodeIdentity | None:
    try:
        return NodeIdentity(**orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise StartupError(f"{path} is damaged: restore the data directory from your backup") from None
