"""Words of a presence table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.errors import StartupError
from qim.presence.layout import (
    HEADER_WORDS,
    SLOT_WORDS,
    WORD_BYTES,
    PresenceEntry,
    SlotState,
    decode_slot,
    encode_slot,
    hash_of_key,
    head_may_be_user,
    head_word,
    home_slot,
    probe_chain,
    require_store_order,
    slot_base,
    slots_in_use,
    state_of,
    table_bytes,
)
from qim.protocol.internal import user_key

NAMES = st.text(alphabet="abcXYZ019._@-", min_size=1, max_size=64)
WORDS = st.integers(min_value=0, max_value=(1 << 64) - 1)


@given(NAMES, NAMES, NAMES, WORDS, WORDS, WORDS, WORDS, WORDS)
def test_slot_round_trip(
    tenant: str, user: str, device: str, connection: int, epoch: int, user_hash: int, capabilities: int, opened: int
) -> None:
    entry = PresenceEntry(tenant, user, device, connection, epoch, user_hash, capabilities, opened)
    words = encode_slot(entry)
    assert len(words) == SLOT_WORDS - 1
    assert all(0 <= word < 1 << 64 for word in words)
    assert decode_slot(words) == entry


def test_names_longer_than_their_words_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        encode_slot(PresenceEntry("t", "u" * 65, "d", 1, 1, 1))
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        encode_slot(PresenceEntry("t", "u", "", 1, 1, 1))


def test_only_live_slots_decode() -> None:
    words = list(encode_slot(PresenceEntry("t", "u", "d", 1, 2, 3)))
    for state in (SlotState.EMPTY, SlotState.REMOVED):
        words[0] = head_word(state)
        assert state_of(words[0]) is state
        assert decode_slot(words) is None


def test_head_tells_the_user_by_the_high_half_of_the_hash() -> None:
    low_differs = 0xAAAA_BBBB_0000_0001
    head = head_word(SlotState.LIVE, 0xAAAA_BBBB_0000_0002, (1, 2, 3))
    assert head_may_be_user(head, low_differs)
    assert not head_may_be_user(head, 0xAAAA_BBBC_0000_0002)
    assert not head_may_be_user(head_word(SlotState.REMOVED, low_differs), low_differs)


def test_probe_chain_visits_every_slot_once_from_home() -> None:
    chain = list(probe_chain(0xFF06, 8))
    assert chain[0] == home_slot(0xFF06, 8) == 6
    assert chain == [6, 7, 0, 1, 2, 3, 4, 5]


def test_slots_are_aligned_words_behind_the_header() -> None:
    assert slot_base(0, 128) == HEADER_WORDS + 2
    assert slot_base(3, 128) - slot_base(2, 128) == SLOT_WORDS
    assert table_bytes(128) == (HEADER_WORDS + 2 + 128 * SLOT_WORDS) * WORD_BYTES


def test_scan_follows_the_bits() -> None:
    assert list(slots_in_use([1 << 63 | 1, 0, 0b110])) == [0, 63, 129, 130]
    assert list(slots_in_use([0, 0])) == []


def test_hash_comes_from_the_user_key() -> None:
    key = user_key("acme", "ann")
    assert hash_of_key(key) == int.from_bytes(key[:8], "big")


def test_other_machines_are_refused() -> None:
    require_store_order("x86_64")
    with pytest.raises(StartupError, match="aarch64"):
        require_store_order("aarch64")
