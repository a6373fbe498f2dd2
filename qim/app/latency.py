"""Latency summaries of replay and bench, in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Latency(NamedTuple):
    """Percentiles of so many `samples`; all 0 without samples."""

    samples: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float

    def text(self) -> str:
        """P50/P99/P99.9/max with three figures."""
        return " / ".join(f"{value:.3g}" for value in (self.p50_ms, self.p99_ms, self.p999_ms, self.max_ms))


def summarize(samples_ms: Sequence[float]) -> Latency:
    """Nearest-rank percentiles: a value that was measured, never one between two."""
    if not samples_ms:
        return Latency(0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(samples_ms)

    def rank(share: float) -> float:
        return ordered[max(math.ceil(share * len(ordered)), 1) - 1]

    return Latency(len(ordered), rank(0.5), rank(0.99), rank(0.999), ordered[-1])
