"""Parts `direct` and `group`: the highest sustained rate, what a message costs there, and overload at twice of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from qim.app.bench.child import Child
from qim.app.bench.figures import Figure, PartReport
from qim.app.bench.ladder import BACK_OFF, RateLadder
from qim.app.bench.node import (
    ACK_P99_MAX_MS,
    DELIVERY_P99_MAX_MS,
    PAYLOAD_BYTES,
    TENANT,
    BenchNode,
    Point,
)
from qim.core.ids import direct_conversation_id, group_conversation_id

PROBE_SECONDS_MAX: Final = 8.0
"""Of a step of the search; what it finds is confirmed by a point of full length."""
CONFIRMATIONS_MAX: Final = 6
OVERLOAD_DELIVERY_P99_MAX_MS: Final = 1000.0
PEOPLE: Final = 500
GROUP_MEMBERS: Final = 100
GROUP_ID: Final = "bench-100"
_POOLS: Final[Mapping[str, str]] = {
    "gateway": "gateways",
    "core": "writer + fan-out + mailbox",
    "writer": "writers",
    "fanout": "fan-out",
    "mailbox": "mailbox",
    "redis-core": "commit and log server",
    "redis-mailbox": "mailbox server",
}
_RIVAL: Final = "WuKongIM, P99 583 ms"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Who sends where: `targets` by person, each message pushed to `others` people beside its sender."""

    generator: Child
    targets: Sequence[str]
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Points of a part: with little load, at the highest sustained rate (None: nothing was), at twice of it."""

    light: Point
    best: Point | None
    overload: Point | None


def run_direct(seconds: float, progress: Progress) -> PartReport:
    """1:1 messages between `PEOPLE` people in pairs."""
    users = [f"user{number:04d}" for number in range(PEOPLE)]
    with BenchNode() as node:
        crowd = Crowd(
            generator=node.log_in(users),
            targets=[direct_conversation_id(user, users[number ^ 1]) for number, user in enumerate(users)],
            others=1,
        )
        found = _measure(node, crowd, seconds, progress, light=500.0, first=1000.0)
    conditions = [f"{PEOPLE} people in pairs, {PAYLOAD_BYTES} byte texts, everybody online", *_conditions(seconds)]
    return PartReport(
        part="direct",
        conditions=conditions,
        figures=[*direct_figures(found), *overload_figures(found)],
        details=_details(found),
        failures=failures_of(found),
    )


def run_group(seconds: float, progress: Progress) -> PartReport:
    """Messages of one group of `GROUP_MEMBERS` people, all online, all sending."""
    users = [f"member{number:03d}" for number in range(GROUP_MEMBERS)]
    with BenchNode() as node:
        generator = node.log_in(users)
        node.make_group(generator, GROUP_ID, users)
        targets = [group_conversation_id(GROUP_ID)] * GROUP_MEMBERS
        crowd = Crowd(generator=generator, targets=targets, others=GROUP_MEMBERS - 1)
        found = _measure(node, crowd, seconds, progress, light=20.0, first=100.0)
    conditions = [f"one group of {GROUP_MEMBERS}, {PAYLOAD_BYTES} byte texts, everybody online", *_conditions(seconds)]
    return PartReport(
        part="group",
        conditions=conditions,
        figures=[*group_figures(found), *overload_figures(found)],
        details=_details(found),
        failures=failures_of(found),
    )


def _measure(
    node: BenchNode, crowd: Crowd, seconds: float, progress: Progress, *, light: float, first: float
) -> Measured:
    def point(rate_per_s: float, length_s: float, what: str) -> Point:
        measured = node.measure(crowd.generator, crowd.targets, rate_per_s, length_s, others=crowd.others)
        progress(f"{what} {measured.line()}")
        return measured

    light_point = point(light, seconds, "light")
    ladder = RateLadder(first, most=first * 100)
    while (rate := ladder.next_rate()) is not None:
        ladder.judged(rate, sustained=point(rate, min(seconds, PROBE_SECONDS_MAX), "probe").sustained)
    rate = ladder.best
    best = None
    for _ in range(CONFIRMATIONS_MAX if rate else 0):
        confirmed = point(rate, seconds, "sustained?")
        if confirmed.sustained:
            best = confirmed
            break
        rate *= BACK_OFF
    overload = point(2 * best.offered_per_s, seconds, "overload") if best is not None else None
    return Measured(light=light_point, best=best, overload=overload)


def direct_figures(found: Measured) -> list[Figure]:
    """Beside WuKongIM, which has no rate without a P99 of half a second, and the prototype of the same hops."""
    best = found.best
    figures = [_light_figure(found.light)]
    if best is None:
        return figures
    rate = best.acked / best.seconds
    return [
        *figures,
        Figure(name="highest sustained rate", value=rate, unit="msg/s", beside=_RIVAL, beside_value=880, at_least=5000),
        Figure(name="  the same", value=rate, unit="msg/s", beside="bare prototype of the hops", beside_value=13_000),
        *_latency_figures(best),
        Figure(
            name="  CPU of the node", value=best.server_us, unit="µs/msg", beside="WuKongIM", beside_value=1000,
            at_most=250,
        ),
        Figure(
            name="  the same", value=best.server_us, unit="µs/msg", beside="bare prototype of the hops",
            beside_value=110,
        ),
        *_pool_figures(best, 1, "µs/msg"),
    ]  # fmt: skip


def group_figures(found: Measured) -> list[Figure]:
    """The same per delivery to somebody else than the sender."""
    best = found.best
    figures = [_light_figure(found.light)]
    if best is None:
        return figures
    others = GROUP_MEMBERS - 1
    deliveries = best.deliveries / best.seconds
    prototype = "bare prototype of the hops"
    return [
        *figures,
        Figure(
            name="highest sustained deliveries", value=deliveries, unit="/s", beside=prototype, beside_value=91_100,
            at_least=50_000,
        ),
        Figure(name="  messages", value=best.acked / best.seconds, unit="msg/s"),
        *_latency_figures(best),
        Figure(
            name="  CPU of the node", value=best.server_us / others, unit="µs/delivery", beside=prototype,
            beside_value=13.7,
        ),
        *_pool_figures(best, others, "µs/delivery"),
    ]  # fmt: skip


def _light_figure(point: Point) -> Figure:
    return Figure(
        name=f"delivery P99 at {point.offered_per_s:.0f} msg/s", value=point.delivery.p99_ms, unit="ms",
        at_most=DELIVERY_P99_MAX_MS,
    )  # fmt: skip


def _latency_figures(point: Point) -> list[Figure]:
    return [
        Figure(name="  ACK P99", value=point.ack.p99_ms, unit="ms", at_most=ACK_P99_MAX_MS),
        Figure(name="  delivery P99", value=point.delivery.p99_ms, unit="ms", at_most=DELIVERY_P99_MAX_MS),
    ]


def _pool_figures(point: Point, per: int, unit: str) -> list[Figure]:
    figures = [
        Figure(name=f"    {label}", value=point.cpu_us[pool] / per, unit=unit)
        for pool, label in _POOLS.items()
        if pool in point.cpu_us
    ]
    return [*figures, Figure(name="  CPU of the generator, apart", value=point.generator_us / per, unit=unit)]


def overload_figures(found: Measured) -> list[Figure]:
    """Delivery must keep up with what is admitted; the rest is refused."""
    point = found.overload
    if point is None:
        return []
    return [
        Figure(name="at twice that rate: refused", value=point.refused_share * 100, unit="%"),
        Figure(name="  admitted", value=point.acked / point.seconds, unit="msg/s"),
        Figure(
            name="  delivery P99 of the admitted", value=point.delivery.p99_ms, unit="ms",
            at_most=OVERLOAD_DELIVERY_P99_MAX_MS,
        ),
    ]  # fmt: skip


def _conditions(seconds: float) -> list[str]:
    return [
        f"open loop, {seconds:.0f} s a point, latency from the time a message was due; the generator is on this box",
        f"the rate limits of the tenant {TENANT} are lifted; the bound by delivery lag is not",
    ]


def _details(found: Measured) -> dict[str, object]:
    points = {"light": found.light, "best": found.best, "overload": found.overload}
    return {name: point.json() for name, point in points.items() if point is not None}


def failures_of(found: Measured) -> list[str]:
    """What no load may cause: a message that is acknowledged and never arrives, or is never answered."""
    failures = []
    for name, point in (("light", found.light), ("best", found.best), ("overload", found.overload)):
        if point is None:
            continue
        if point.unanswered:
            failures.append(f"{name}: {point.unanswered} messages got no answer")
        if point.missing_deliveries and not point.dirty:
            failures.append(f"{name}: {point.missing_deliveries} deliveries are missing")
        if point.closed:
            failures.append(f"{name}: {point.closed} connections ended")
    if found.best is None:
        failures.append("no rate was sustained")
    return failures
