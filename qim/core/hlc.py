"""The hybrid logical clock behind `message_id` (§6.2), one per conversation bucket (DESIGN-data §2)."""

from __future__ import annotations

from qim.core.seq import MESSAGE_EPOCH_UNIX_MS, SEQ_IN_MS_MAX, compose_message_id, message_id_parts
from qim.errors import ClockUnsafe


class LatestWall:
    """The latest wall clock a process has issued ids by, in ms of the message epoch; shared by its buckets' clocks.

    A bucket in which nothing was committed lately would not notice by itself that the clock has gone back.
    """

    __slots__ = ("ms",)

    def __init__(self) -> None:
        self.ms = 0


class HybridClock:
    """Allocates strictly growing message ids; time is an argument.

    `observe` raises the clock to an id that the store already holds, so a successor never re-issues an id after a
    clock step. Smaller backward steps are absorbed, larger ones raise `ClockUnsafe` (§6.2), behind the ids of this
    clock as behind the wall clock of `latest`.
    """

    __slots__ = ("_hlc_ms", "_latest", "_region_id", "_regression_reject_ms", "_seq_in_ms", "_writer_id")

    def __init__(
        self, *, writer_id: int, regression_reject_ms: int, region_id: int = 0, latest: LatestWall | None = None
    ) -> None:
        self._writer_id = writer_id
        self._region_id = region_id
        self._regression_reject_ms = regression_reject_ms
        self._hlc_ms = 0
        self._seq_in_ms = 0
        self._latest = latest or LatestWall()

    def observe(self, message_id: bytes) -> None:
        """Never allocate at or below `message_id` (16 bytes) again."""
        hlc_ms, _, _, seq_in_ms = message_id_parts(message_id)
        if (hlc_ms, seq_in_ms) > (self._hlc_ms, self._seq_in_ms):
            self._hlc_ms, self._seq_in_ms = hlc_ms, seq_in_ms

    def allocate(self, unix_ms: int) -> bytes:
        """The next id, 16 bytes; ClockUnsafe when `unix_ms` is more than the bound behind what was issued."""
        wall_ms = unix_ms - MESSAGE_EPOCH_UNIX_MS
        latest = self._latest
        if wall_ms > latest.ms:
            latest.ms = wall_ms
        behind_ms = max(self._hlc_ms, latest.ms) - wall_ms
        if behind_ms > self._regression_reject_ms:
            raise ClockUnsafe(f"wall clock is {behind_ms} ms behind the newest message id")
        if wall_ms > self._hlc_ms:
            self._hlc_ms, self._seq_in_ms = wall_ms, 0
        else:
            self._seq_in_ms += 1
            if self._seq_in_ms > SEQ_IN_MS_MAX:
                self._hlc_ms, self._seq_in_ms = self._hlc_ms + 1, 0
        return compose_message_id(self._hlc_ms, self._region_id, self._writer_id, self._seq_in_ms)
