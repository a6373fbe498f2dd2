"""Counters, gauges and histograms that cost next to nothing per event: they tally, and sort when somebody looks.

`prometheus_client` takes a lock and runs four Python functions per event; a message passes a dozen of them. Events are
tallied on one thread, the loop's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, Final, Self, cast

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

SEEN_MAX: Final = 1024
"""Observations held before they are sorted into their buckets: 0.1 ms a time."""


class PlainValue:
    """What a metric keeps its number in; the library's takes a lock."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.0

    def inc(self, amount: float) -> None:
        self.number += amount

    def set(self, number: float, timestamp: float | None = None) -> None:
        self.number = number

    def get(self) -> float:
        return self.number

    def get_exemplar(self) -> None:
        """There are none."""


class _Labelled(MetricWrapperBase):
    """Finds a child that exists by one look-up: for texts by name, in the order they were declared."""

    def labels(self, *labelvalues: object, **labelkwargs: object) -> Self:
        if tuple(labelkwargs) == self._labelnames:
            found: Any = self._metrics.get(tuple(labelkwargs.values()))  # type: ignore[arg-type]
            if found is not None:
                return cast(Self, found)
        return super().labels(*labelvalues, **labelkwargs)


class TalliedCounter(_Labelled, Counter):
    """`Counter` on a plain number. AttributeError for an event of a labelled counter without its labels."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._value = PlainValue()

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Count; there are no exemplars here."""
        self._value.number += amount


class TalliedGauge(_Labelled, Gauge):
    """`Gauge` on a plain number. AttributeError for a labelled gauge without its labels."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._value = PlainValue()

    def inc(self, amount: float = 1) -> None:
        """Count up."""
        self._value.number += amount

    def dec(self, amount: float = 1) -> None:
        """Count down."""
        self._value.number -= amount

    def set(self, value: float) -> None:
        """What it shows from now on."""
        self._value.number = float(value)


class TalliedHistogram(_Labelled, Histogram):
    """`Histogram` with a list in front. AttributeError for an event of a labelled one without its labels."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._seen: list[float] = []

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Note an observation; there are no exemplars here."""
        seen = self._seen
        seen.append(amount)
        if len(seen) >= SEEN_MAX:
            self._sort_in()

    def _child_samples(self) -> Iterable[Sample]:
        self._sort_in()
        return super()._child_samples()

    def _sort_in(self) -> None:
        seen, self._seen = self._seen, []
        seen.sort()
        self._sum.inc(sum(seen))
        below = 0
        for bucket, bound in zip(self._buckets, self._upper_bounds, strict=True):
            up_to = bisect_right(seen, bound, below)
            bucket.inc(up_to - below)
            below = up_to
