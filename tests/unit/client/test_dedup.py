"""The window of applied events: two keys, eviction from the low end, never a recent key."""

from __future__ import annotations

from qim.client.dedup import DedupWindow


def message(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_either_key_refuses() -> None:
    window = DedupWindow()
    assert window.admit(10, 0, 1, message(1), 0)
    assert not window.admit(10, 0, 1, message(1), 0)
    assert not window.admit(99, 0, 2, message(1), 0)
    assert not window.admit(10, 0, 1, message(2), 0)


def test_two_events_of_one_message_differ_by_ordinal() -> None:
    window = DedupWindow()
    assert window.admit(10, 0, 1, message(1), 0)
    assert window.admit(10, 1, 2, message(1), 0)


def test_eviction_takes_the_lowest_seq_and_only_when_old() -> None:
    window = DedupWindow(items_max=3, recent_ms=1000)
    for seq in (30, 10, 20, 40):
        window.admit(seq, 0, seq, message(seq), 0)
    assert len(window) == 4, "recent keys stay beyond the bound"
    window.admit(50, 0, 50, message(50), 1000)
    assert window.floor_seq() == 20
    assert window.admit(10, 0, 10, message(10), 1000), "forgotten, the store still knows it"


def test_what_an_earlier_run_applied_is_known() -> None:
    window = DedupWindow()
    window.load([(5, 0, 1, message(1)), (6, 0, 2, message(2))], 0)
    assert not window.admit(6, 0, 2, message(2), 0)
    assert window.floor_seq() == 5
    assert DedupWindow().floor_seq() == 0
