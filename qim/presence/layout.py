"""Words of a presence table (DESIGN §4, "Presence in shared memory"); pure, no mapping here.

A table is aligned 64-bit words: a header, one bit per slot that says whether it is in use, then `capacity` slots of
`SLOT_WORDS`. A scan reads the bits and the slots in use, so it never touches the holes of the sparse file.

The first word of a slot is its seqlock: odd while the only writer changes the slot. The head word says in one read
whether a slot holds a connection and of which user; the other words are read under the seqlock. Words are written one
by one through `memoryview.cast("Q")`, which never tears on x86-64 (measured); `struct.pack_into` does.

A user's connections sit on the linear probe chain that starts at `home_slot(user_hash)`; a chain ends at the first slot
that is EMPTY. A slot that loses its connection becomes REMOVED, or EMPTY again when the chain ends right behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from qim.errors import StartupError

WORD_BYTES: Final = 8
MAGIC: Final = int.from_bytes(b"QIMPRES1", "little")
HEADER_WORDS: Final = 64
SLOT_WORDS: Final = 32
"""8 words of numbers and three names of up to 64 bytes."""
BITS_PER_WORD: Final = 64
CAPACITY_MIN: Final = BITS_PER_WORD
LOAD_PERCENT_MAX: Final = 75
"""Linear probing examines 8.5 slots for a missing user at 75 % and 50 at 90 %."""

HEADER_MAGIC: Final = 0
HEADER_CAPACITY: Final = 1
HEADER_PID: Final = 2
HEADER_STARTED_UNIX_MS: Final = 3
HEADER_BEAT_UNIX_MS: Final = 4
"""Renewed every `presence_lease_renew`: one lease for all connections of the table (§5.4.2)."""

SLOT_SEQUENCE: Final = 0
SLOT_HEAD: Final = 1
_NAME_WORDS: Final = 8
_NAMES: Final = struct.Struct("<24Q")
_TAG_MASK: Final = 0xFFFFFFFF

HOST_MACHINES: Final = frozenset({"x86_64", "AMD64"})


class SlotState(IntEnum):
    """Lowest two bits of the head word; a new file is all EMPTY."""

    EMPTY = 0
    LIVE = 1
    REMOVED = 2


class PresenceEntry(NamedTuple):
    """One live connection (§7.10)."""

    tenant_id: str
    user_id: str
    device_id: str
    connection_id: int
    session_epoch: int
    user_hash: int
    """`hash_of_key` of the user's key."""
    capabilities: int = 0
    opened_unix_ms: int = 0


def require_store_order(machine: str) -> None:
    """Refuse hosts whose stores may become visible in another order: the seqlock relies on x86-64's."""
    if machine not in HOST_MACHINES:
        raise StartupError(f"presence tables need an x86-64 host, this one is {machine or 'unknown'}")


def bitmap_words(capacity: int) -> int:
    """Words of the in-use bits, behind the header."""
    return capacity // BITS_PER_WORD


def table_bytes(capacity: int) -> int:
    """Size of the file of a table."""
    return slot_base(capacity, capacity) * WORD_BYTES


def slot_base(slot: int, capacity: int) -> int:
    """Index of the first word of a slot."""
    return HEADER_WORDS + bitmap_words(capacity) + slot * SLOT_WORDS


def slots_in_use(bitmap: Sequence[int]) -> Iterator[int]:
    """Slots whose bit is set, ascending."""
    for index, word in enumerate(bitmap):
        while word:
            lowest = word & -word
            yield index * BITS_PER_WORD + lowest.bit_length() - 1
            word ^= lowest


def hash_of_key(user_key: bytes) -> int:
    """64 bits of a user key (protocol.internal.user_key), which is a uniform hash already."""
    return int.from_bytes(user_key[:8], "big")


def home_slot(user_hash: int, capacity: int) -> int:
    """Where the probe chain of a user starts; `capacity` is a power of two."""
    return user_hash & (capacity - 1)


def probe_chain(user_hash: int, capacity: int) -> Iterator[int]:
    """Every slot once, in probe order."""
    home = home_slot(user_hash, capacity)
    for step in range(capacity):
        yield (home + step) & (capacity - 1)


def head_word(state: SlotState, user_hash: int = 0, name_bytes: Sequence[int] = (0, 0, 0)) -> int:
    """Tag (high half of the hash) | lengths of tenant, user, device | state."""
    tag = user_hash >> 32 & _TAG_MASK
    lengths = name_bytes[0] << 16 | name_bytes[1] << 9 | name_bytes[2] << 2
    return tag << 32 | lengths | state


def state_of(head: int) -> SlotState:
    return SlotState(head & 3)


def head_may_be_user(head: int, user_hash: int) -> bool:
    """True if the slot is LIVE and its tag is that of `user_hash`; the full hash must still be compared."""
    return head & 3 == SlotState.LIVE and head >> 32 == user_hash >> 32 & _TAG_MASK


def encode_slot(entry: PresenceEntry) -> tuple[int, ...]:
    """The words behind the seqlock, head first; ValueError when a name exceeds 64 bytes."""
    names = [name.encode() for name in (entry.tenant_id, entry.user_id, entry.device_id)]
    limit = _NAME_WORDS * WORD_BYTES
    if any(not 0 < len(name) <= limit for name in names):
        raise ValueError(f"a name must have 1 to {limit} bytes")
    head = head_word(SlotState.LIVE, entry.user_hash, [len(name) for name in names])
    numbers = (
        entry.connection_id,
        entry.session_epoch,
        entry.user_hash,
        entry.capabilities,
        entry.opened_unix_ms,
        0,
    )
    return (head, *numbers, *_NAMES.unpack(b"".join(name.ljust(limit, b"\x00") for name in names)))


def decode_slot(words: Sequence[int]) -> PresenceEntry | None:
    """The entry in the words behind the seqlock, None when the slot is not LIVE."""
    head = words[0]
    if state_of(head) is not SlotState.LIVE:
        return None
    packed = _NAMES.pack(*words[7:])
    lengths = (head >> 16 & 0x7F, head >> 9 & 0x7F, head >> 2 & 0x7F)
    limit = _NAME_WORDS * WORD_BYTES
    names = [packed[at * limit : at * limit + length].decode() for at, length in enumerate(lengths)]
    return PresenceEntry(
        tenant_id=names[0],
        user_id=names[1],
        device_id=names[2],
        connection_id=words[1],
        session_epoch=words[2],
        user_hash=words[3],
        capabilities=words[4],
        opened_unix_ms=words[5],
    )
