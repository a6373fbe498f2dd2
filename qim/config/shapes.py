"""Parameters that are more than one number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeMs:
    min_ms: int
    max_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimeout:
    """`next_ping_interval` × multiplier + plus_ms (§15.1.3)."""

    next_ping_interval_multiplier: int
    plus_ms: int

    def timeout_ms(self, next_ping_interval_ms: int) -> int:
        return next_ping_interval_ms * self.next_ping_interval_multiplier + self.plus_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpKeepalive:
    idle_ms: int
    interval_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectBackoff:
    initial_ms: int
    factor: float
    max_ms: int
    jitter_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Whichever is reached first."""

    bytes: int
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferBudget:
    """The smaller of a share of the available memory and a fixed size."""

    available_memory_ratio: float
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTier:
    """Rate of conversations with at most `max_members` members; None = any size."""

    msgs_per_second: int
    max_members: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    messages: int
    per_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    times: int
    per_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadQuota:
    count_per_day: int
    bytes_per_day: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationThreshold:
    active_member_ratio: float
    sustained_days: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnRate:
    rate: float
    long_window_ms: int
    short_window_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionWindow:
    ms: int
    events: int
