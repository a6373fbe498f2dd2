"""Presence tables in files of the run directory: one writer each, any number of read-only readers.

A writer always starts with a new file that replaces the old one by name, so a table never holds connections of an
earlier process and a half-written slot of a killed one is never repaired, only left behind.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from qim.errors import QimError, StartupError
from qim.presence.layout import (
    BITS_PER_WORD,
    CAPACITY_MIN,
    HEADER_BEAT_UNIX_MS,
    HEADER_CAPACITY,
    HEADER_MAGIC,
    HEADER_PID,
    HEADER_STARTED_UNIX_MS,
    HEADER_WORDS,
    LOAD_PERCENT_MAX,
    MAGIC,
    SLOT_HEAD,
    SLOT_SEQUENCE,
    SLOT_WORDS,
    PresenceEntry,
    SlotState,
    bitmap_words,
    decode_slot,
    encode_slot,
    head_may_be_user,
    head_word,
    probe_chain,
    require_store_order,
    slot_base,
    slots_in_use,
    state_of,
    table_bytes,
)

READ_ATTEMPTS_MAX: Final = 1000
"""A write takes about 4 µs, a read 1: only a writer that died inside a slot is met this often."""
_PREFIX: Final = "presence-"
_SUFFIX: Final = ".tbl"


class PresenceFull(QimError):
    """The table has no room for another connection."""


def table_path(run_dir: Path, gateway: str) -> Path:
    """File of a gateway worker's table."""
    return run_dir / f"{_PREFIX}{gateway}{_SUFFIX}"


class PresenceTable:
    """The writer's side; only the gateway worker that owns the connections holds one."""

    __slots__ = ("_capacity", "_count", "_map", "_path", "_words")

    def __init__(self, run_dir: Path, gateway: str, *, now_unix_ms: int, capacity: int) -> None:
        """Make the file and publish it under its name. StartupError when it cannot, and on another machine."""
        require_store_order(platform.machine())
        if capacity & (capacity - 1) or capacity < CAPACITY_MIN:
            raise StartupError(f"presence capacity must be a power of two from {CAPACITY_MIN} on, not {capacity}")
        self._capacity = capacity
        self._count = 0
        self._path = table_path(run_dir, gateway)
        fresh = self._path.with_suffix(".new")
        try:
            self._map = _mapped(fresh, table_bytes(capacity))
        except OSError as error:
            raise StartupError(f"cannot make the presence table {self._path}: {error.strerror}") from error
        self._words = memoryview(self._map).cast("Q")
        self._words[HEADER_CAPACITY] = capacity
        self._words[HEADER_PID] = os.getpid()
        self._words[HEADER_STARTED_UNIX_MS] = now_unix_ms
        self._words[HEADER_BEAT_UNIX_MS] = now_unix_ms
        self._words[HEADER_MAGIC] = MAGIC
        os.replace(fresh, self._path)

    def __len__(self) -> int:
        return self._count

    def insert(self, entry: PresenceEntry) -> int:
        """Publish a connection; returns its slot. PresenceFull above LOAD_PERCENT_MAX of the capacity."""
        if (self._count + 1) * 100 > self._capacity * LOAD_PERCENT_MAX:
            raise PresenceFull(f"presence table of {self._capacity} slots is full")
        encoded = encode_slot(entry)
        for slot in probe_chain(entry.user_hash, self._capacity):
            if self._state(slot) is not SlotState.LIVE:
                self._write(slot, encoded)
                self._words[HEADER_WORDS + slot // BITS_PER_WORD] |= 1 << slot % BITS_PER_WORD
                self._count += 1
                return slot
        raise PresenceFull("presence table has no free slot")

    def remove(self, slot: int) -> None:
        """Withdraw the connection of a slot that `insert` returned."""
        self._count -= 1
        self._words[HEADER_WORDS + slot // BITS_PER_WORD] &= ~(1 << slot % BITS_PER_WORD)
        if self._state((slot + 1) & (self._capacity - 1)) is not SlotState.EMPTY:
            self._write(slot, (head_word(SlotState.REMOVED),))
            return
        self._write(slot, (head_word(SlotState.EMPTY),))
        before = (slot - 1) & (self._capacity - 1)
        while self._state(before) is SlotState.REMOVED:
            self._write(before, (head_word(SlotState.EMPTY),))
            before = (before - 1) & (self._capacity - 1)

    def beat(self, now_unix_ms: int) -> None:
        """Renew the lease of all connections (`presence_lease_renew`)."""
        self._words[HEADER_BEAT_UNIX_MS] = now_unix_ms

    def close(self) -> None:
        """Withdraw the table: readers that still map it see a lease that has ended."""
        self._words[HEADER_BEAT_UNIX_MS] = 0
        self._path.unlink(missing_ok=True)
        self._words.release()
        self._map.close()

    def _state(self, slot: int) -> SlotState:
        return state_of(self._words[slot_base(slot, self._capacity) + SLOT_HEAD])

    def _write(self, slot: int, encoded: tuple[int, ...]) -> None:
        words = self._words
        base = slot_base(slot, self._capacity)
        sequence = words[base + SLOT_SEQUENCE]
        words[base + SLOT_SEQUENCE] = sequence + 1
        at = base + SLOT_HEAD
        for word in encoded:
            words[at] = word
            at += 1
        words[base + SLOT_SEQUENCE] = sequence + 2


def _mapped(path: Path, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


class PresenceView:
    """A reader's side: one mapping of one table as it is now; the next process of that gateway has another file."""

    __slots__ = ("_capacity", "_map", "_words")

    def __init__(self, path: Path) -> None:
        """FileNotFoundError when there is no such table, StartupError when the file is none of ours."""
        require_store_order(platform.machine())
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes < table_bytes(0):
                raise StartupError(f"{path} is not a presence table")
            self._map = mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")
        self._capacity = self._words[HEADER_CAPACITY]
        if self._words[HEADER_MAGIC] != MAGIC or table_bytes(self._capacity) != size_bytes:
            self.close()
            raise StartupError(f"{path} is not a presence table")

    def beat_unix_ms(self) -> int:
        """When the writer last renewed its lease; 0 once it has closed the table."""
        return self._words[HEADER_BEAT_UNIX_MS]

    def entries(self) -> Iterator[PresenceEntry]:
        """Every live connection; each entry is consistent, the whole is no snapshot."""
        bitmap = self._words[HEADER_WORDS : HEADER_WORDS + bitmap_words(self._capacity)].tolist()
        for slot in slots_in_use(bitmap):
            entry = self._read(slot)
            if entry is not None:
                yield entry

    def find(self, user_hash: int) -> list[PresenceEntry]:
        """The live connections whose user has this hash; compare the names, a hash is not an identity."""
        found: list[PresenceEntry] = []
        for slot in probe_chain(user_hash, self._capacity):
            head = self._words[slot_base(slot, self._capacity) + SLOT_HEAD]
            if state_of(head) is SlotState.EMPTY:
                break
            if head_may_be_user(head, user_hash):
                entry = self._read(slot)
                if entry is not None and entry.user_hash == user_hash:
                    found.append(entry)
        return found

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, slot: int) -> PresenceEntry | None:
        base = slot_base(slot, self._capacity)
        for _ in range(READ_ATTEMPTS_MAX):
            before = self._words[base + SLOT_SEQUENCE]
            if before & 1:
                continue
            words = self._words[base + SLOT_HEAD : base + SLOT_WORDS].tolist()
            if self._words[base + SLOT_SEQUENCE] == before:
                return decode_slot(words)
        return None


def live_connections(run_dir: Path, *, now_unix_ms: int, lease_ttl_ms: int) -> Iterator[tuple[str, PresenceEntry]]:
    """(gateway, entry) of every connection in all tables of the host whose lease has not ended (§5.4.2).

    This is what a MailboxNode rebuilds its online index from; what has died in between answers PRESENCE_STALE.
    """
    for path in sorted(run_dir.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            view = PresenceView(path)
        except FileNotFoundError:
            continue
        with view:
            if now_unix_ms - view.beat_unix_ms() < lease_ttl_ms:
                gateway = path.name[len(_PREFIX) : -len(_SUFFIX)]
                for entry in view.entries():
                    yield gateway, entry
