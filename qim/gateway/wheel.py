"""The heartbeat time wheel (§15.1.5); pure.

A frame only updates its connection's `last_active_ms`; the wheel looks at a connection when its slot comes round and
the owner hangs it in again for what is left. No timer is made or cancelled per frame.
"""

from __future__ import annotations

from typing import Final

SLOTS: Final = 512
"""`heartbeat_wheel_slots`: deadlines further away than 511 ticks are looked at, and hung in again, on the way."""


class HeartbeatWheel:
    """Ids of connections by the tick at which they are next looked at."""

    __slots__ = ("_slots", "_tick_ms", "_tick")

    def __init__(self, *, now_ms: float, tick_ms: int) -> None:
        self._slots: list[list[int]] = [[] for _ in range(SLOTS)]
        self._tick_ms = tick_ms
        self._tick = int(now_ms // tick_ms)

    def hang(self, connection_id: int, check_ms: float) -> None:
        """Look at the connection at the first tick at or after `check_ms`."""
        ahead = -int(-check_ms // self._tick_ms) - self._tick
        self._slots[(self._tick + max(1, min(ahead, SLOTS - 1))) % SLOTS].append(connection_id)

    def turn(self, now_ms: float) -> tuple[list[int], int]:
        """(ids to look at, ticks missed because the loop was late); each id must be hung in again or dropped."""
        target = int(now_ms // self._tick_ms)
        passed = target - self._tick
        if passed <= 0:
            return [], 0
        reached: list[int] = []
        for tick in range(self._tick + 1, self._tick + min(passed, SLOTS) + 1):
            slot = tick % SLOTS
            if self._slots[slot]:
                reached += self._slots[slot]
                self._slots[slot] = []
        self._tick = target
        return reached, passed - 1
