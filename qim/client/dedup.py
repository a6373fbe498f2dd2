"""The window of applied events (§9.4.4): two keys, so that neither a second route nor a renumbered mailbox shows twice.

The local store keeps every row under its own unique key as well; the window spares it most of the questions.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

EventKey = tuple[int, int, int]
"""Primary key `(mailbox_seq, event_ordinal, event_id)`."""
DedupRow = tuple[int, int, int, bytes]
"""Primary key and message_id: a row of `local_dedup`."""

DEDUP_ITEMS_MAX: Final = 2000
"""`client_dedup_window_items`, `pull_mailbox_max_items` x 4."""
DEDUP_RECENT_MS: Final = 600_000
"""Keys younger than this stay beyond the item bound."""
DEDUP_ITEMS_HARD_MAX: Final = 200_000
"""Bound of memory (about 60 MB); past it the lowest `mailbox_seq` goes however young, the store still knows it."""


class DedupWindow:
    """Evicts by ascending `mailbox_seq`, above DEDUP_ITEMS_MAX keys and beyond DEDUP_RECENT_MS."""

    __slots__ = ("_admitted_ms", "_messages", "_order", "_items_max", "_recent_ms")

    def __init__(self, *, items_max: int = DEDUP_ITEMS_MAX, recent_ms: int = DEDUP_RECENT_MS) -> None:
        self._admitted_ms: dict[EventKey, tuple[int, bytes]] = {}
        self._messages: set[tuple[bytes, int]] = set()
        self._order: list[EventKey] = []
        self._items_max = items_max
        self._recent_ms = recent_ms

    def __len__(self) -> int:
        return len(self._admitted_ms)

    def load(self, rows: Iterable[DedupRow], now_ms: int) -> None:
        """Take over what an earlier run applied."""
        for mailbox_seq, event_ordinal, event_id, message_id in rows:
            self.admit(mailbox_seq, event_ordinal, event_id, message_id, now_ms)

    def admit(self, mailbox_seq: int, event_ordinal: int, event_id: int, message_id: bytes, now_ms: int) -> bool:
        """True once per event; False when either key has been seen."""
        key = (mailbox_seq, event_ordinal, event_id)
        message = (message_id, event_ordinal)
        if key in self._admitted_ms or message in self._messages:
            return False
        self._admitted_ms[key] = (now_ms, message_id)
        self._messages.add(message)
        heappush(self._order, key)
        if len(self._order) > self._items_max:
            self._evict(now_ms)
        return True

    def floor_seq(self) -> int:
        """Lowest `mailbox_seq` still in the window, 0 when it is empty; rows below it may leave `local_dedup`."""
        return self._order[0][0] if self._order else 0

    def _evict(self, now_ms: int) -> None:
        lowest = self._order[0]
        admitted_ms, message_id = self._admitted_ms[lowest]
        if now_ms - admitted_ms < self._recent_ms and len(self._order) <= DEDUP_ITEMS_HARD_MAX:
            return
        heappop(self._order)
        del self._admitted_ms[lowest]
        self._messages.discard((message_id, lowest[1]))
