"""What the parts `direct` and `group` make of their points."""

from __future__ import annotations

from dataclasses import replace

from qim.app.bench.node import Point
from qim.app.bench.rates import Measured, direct_figures, failures_of, group_figures, overload_figures
from qim.app.latency import Latency

FAST = Latency(1000, 2.0, 9.0, 12.0, 15.0)
POINT = Point(
    offered_per_s=1000.0,
    seconds=10.0,
    sent=10_000,
    acked=10_000,
    refused={},
    unanswered=0,
    deliveries=10_000,
    missing_deliveries=0,
    dirty=0,
    closed=0,
    ack=FAST,
    delivery=FAST,
    late=FAST,
    cpu_us={"gateway": 60.0, "core": 90.0, "redis-core": 50.0, "redis-mailbox": 30.0, "admin": 1.0},
    generator_us=40.0,
)
OVERLOAD = replace(POINT, offered_per_s=2000.0, sent=20_000, refused={"RATE_LIMITED delivery_lag": 10_000})
FOUND = Measured(light=POINT, best=POINT, overload=OVERLOAD)


def test_a_point_is_sustained_when_everything_was_taken_and_arrived_in_time() -> None:
    assert POINT.sustained
    assert replace(POINT, refused={"RATE_LIMITED": 10}).sustained, "one in a thousand is no overload"
    slow = Latency(1000, 2.0, 301.0, 301.0, 301.0)
    for change in (
        {"refused": {"RATE_LIMITED": 11}},
        {"unanswered": 1},
        {"missing_deliveries": 1},
        {"dirty": 1},
        {"closed": 1},
        {"ack": slow},
        {"delivery": slow},
        {"acked": 0},
    ):
        assert not replace(POINT, **change).sustained, change


def test_the_whole_node_is_the_sum_of_its_pools() -> None:
    assert POINT.server_us == 231.0
    assert POINT.json()["server_us"] == 231.0
    assert POINT.json()["ack"]["p99_ms"] == 9.0
    assert "sustained" in POINT.line()


def test_direct_figures_stand_beside_rival_and_prototype() -> None:
    figures = {figure.name.strip(): figure for figure in direct_figures(FOUND)}
    assert figures["highest sustained rate"].value == 1000.0
    assert figures["highest sustained rate"].met is False
    assert figures["CPU of the node"].met is True
    assert figures["CPU of the node"].ratio == 0.231
    assert figures["gateways"].value == 60.0
    assert figures["CPU of the generator, apart"].value == 40.0


def test_group_figures_are_per_delivery() -> None:
    point = replace(POINT, deliveries=990_000)
    figures = {figure.name.strip(): figure for figure in group_figures(replace(FOUND, best=point))}
    assert figures["highest sustained deliveries"].value == 99_000.0
    assert figures["highest sustained deliveries"].met is True
    assert figures["CPU of the node"].value == 231.0 / 99


def test_overload_shows_what_was_refused_and_that_the_rest_arrives() -> None:
    figures = [figure.value for figure in overload_figures(FOUND)]
    assert figures == [50.0, 1000.0, 9.0]
    assert overload_figures(replace(FOUND, overload=None)) == []


def test_lost_messages_are_failures_and_missed_aims_are_not() -> None:
    assert failures_of(FOUND) == []
    assert failures_of(replace(FOUND, best=None, overload=None)) == ["no rate was sustained"]
    lossy = replace(OVERLOAD, unanswered=2, missing_deliveries=3, closed=4)
    assert failures_of(replace(FOUND, overload=lossy)) == [
        "overload: 2 messages got no answer",
        "overload: 3 deliveries are missing",
        "overload: 4 connections ended",
    ]


def test_only_the_light_point_is_shown_when_nothing_was_sustained() -> None:
    assert [figure.name for figure in direct_figures(replace(FOUND, best=None))] == ["delivery P99 at 1000 msg/s"]
