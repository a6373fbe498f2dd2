"""Tallied metrics show what the library's own would show."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from qim.obs.tally import SEEN_MAX, TalliedCounter, TalliedGauge, TalliedHistogram

BUCKETS = (0.5, 1, 2, 5, 10)


def test_a_counter_shows_all_it_counted_each_time_it_is_read() -> None:
    registry = CollectorRegistry()
    counter = TalliedCounter("sends_total", "x", registry=registry)
    counter.inc()
    counter.inc(4)
    assert registry.get_sample_value("sends_total") == 5
    assert registry.get_sample_value("sends_total") == 5
    counter.inc()
    assert registry.get_sample_value("sends_total") == 6


def test_every_label_has_a_tally_of_its_own() -> None:
    registry = CollectorRegistry()
    counter = TalliedCounter("refused_total", "x", ("code",), registry=registry)
    counter.labels(code="a").inc()
    counter.labels(code="b").inc(2)
    counter.labels(code="a").inc()
    assert registry.get_sample_value("refused_total", {"code": "a"}) == 2
    assert registry.get_sample_value("refused_total", {"code": "b"}) == 2
    with pytest.raises(AttributeError):
        counter.inc()


def test_labels_are_texts_whatever_they_are_given_as() -> None:
    registry = CollectorRegistry()
    counter = TalliedCounter("moved_total", "x", ("kind", "shard"), registry=registry)
    child = counter.labels(kind="a", shard="3")
    for same in (counter.labels(kind="a", shard=3), counter.labels(shard="3", kind="a"), counter.labels("a", 3)):
        assert same is child
    assert counter.labels(kind="3", shard="a") is not child
    with pytest.raises(ValueError, match="label"):
        counter.labels(kind="a")
    child.inc()
    assert registry.get_sample_value("moved_total", {"kind": "a", "shard": "3"}) == 1


def test_a_gauge_goes_up_and_down_and_is_set() -> None:
    registry = CollectorRegistry()
    gauge = TalliedGauge("online", "x", registry=registry)
    gauge.inc()
    gauge.inc(4)
    gauge.dec()
    assert registry.get_sample_value("online") == 4
    gauge.set(7)
    assert registry.get_sample_value("online") == 7


def test_the_text_is_the_one_of_the_library() -> None:
    """On both sides of every bound, past the last one, and over the point where held values are sorted in."""
    chance = random.Random(7)
    values = [chance.choice((*BUCKETS, chance.uniform(0, 12))) for _ in range(3 * SEEN_MAX + 5)]
    texts = []
    for kind_of_counter, kind_of_gauge, kind_of_histogram in (
        (Counter, Gauge, Histogram), (TalliedCounter, TalliedGauge, TalliedHistogram),
    ):  # fmt: skip
        registry = CollectorRegistry()
        histogram = kind_of_histogram("wait_ms", "x", ("to",), registry=registry, buckets=BUCKETS)
        counter = kind_of_counter("waits_total", "x", registry=registry)
        kind_of_gauge("waiting", "x", registry=registry).set(3)
        for value in values:
            histogram.labels(to="a").observe(round(value, 1))
            counter.inc()
        texts.append([line for line in generate_latest(registry).decode().splitlines() if "_sum" not in line])
        total = registry.get_sample_value("wait_ms_sum", {"to": "a"})
        assert total == pytest.approx(sum(round(value, 1) for value in values))
    assert texts[0] == texts[1]


def test_observations_are_held_in_bounded_number() -> None:
    histogram = TalliedHistogram("size", "x", registry=CollectorRegistry(), buckets=BUCKETS)
    for number in range(10 * SEEN_MAX):
        histogram.observe(number)
        assert len(histogram._seen) < SEEN_MAX
