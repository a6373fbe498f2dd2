"""Asking other parts, and retry times."""

from __future__ import annotations

from collections.abc import Callable

from qim.config.parameters import default_parameters
from qim.gateway.routing import Routing
from qim.gateway.surroundings import Surroundings
from qim.protocol.opcodes import InternalOpcode
from qim.runtime.clock import SystemClock
from qim.runtime.tasks import TaskSet
from tests.support.fake_backplane import FakeBackplane, FakeRoutes


def surroundings(
    backplane: FakeBackplane, routes: FakeRoutes, random_unit: Callable[[], float] = lambda: 0.5
) -> Surroundings:
    return Surroundings(
        backplane=backplane,
        routing=Routing(routes, conversation_bucket_count=64, mailbox_shard_count=16),
        parameters=default_parameters(),
        work=TaskSet(lambda task, error: None),
        clock=SystemClock(),
        random_unit=random_unit,
    )


async def test_an_answer_comes_back_as_it_is() -> None:
    backplane, routes = FakeBackplane(), FakeRoutes()

    async def answer(peer: str, body: bytes) -> bytes:
        return peer.encode() + body

    backplane.on_request(InternalOpcode.SUBMIT_SEND, answer)
    around = surroundings(backplane, routes)
    assert await around.ask("writer-0", InternalOpcode.SUBMIT_SEND, b"!") == b"writer-0!"
    assert routes.refreshes == 0


async def test_silence_and_missing_owners_look_at_the_routes() -> None:
    backplane, routes = FakeBackplane(), FakeRoutes()
    backplane.down.add("writer-0")
    around = surroundings(backplane, routes)
    assert await around.ask("writer-0", InternalOpcode.SUBMIT_SEND, b"") is None
    assert await around.ask(None, InternalOpcode.SUBMIT_SEND, b"") is None
    assert routes.refreshes == 2


def test_retry_times_are_spread_by_thirty_percent() -> None:
    backplane, routes = FakeBackplane(), FakeRoutes()
    assert surroundings(backplane, routes, lambda: 0.0).jittered_ms(1000) == 700
    assert surroundings(backplane, routes, lambda: 0.5).jittered_ms(1000) == 1000
    assert surroundings(backplane, routes, lambda: 1.0).jittered_ms(1000) == 1300
    assert surroundings(backplane, routes).jittered_ms(0) == 1
