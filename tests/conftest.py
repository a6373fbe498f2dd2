"""Fixtures of the whole test tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import redis

from qim.runtime.redis_server import Fsync
from tests.support.kafka_server import KafkaServer, is_required, running_kafka, what_is_missing
from tests.support.redis_server import PrivateServer, running_server, server_variants

_VARIANTS = server_variants()
_LEFT_OUT = pytest.StashKey[str]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on a real Kafka need programs that not every machine has: they are left out in the open, never skipped."""
    missing = what_is_missing()
    needing = [item for item in items if item.get_closest_marker("kafka")]
    if not missing or not needing:
        return
    if is_required():
        raise pytest.UsageError(f"QIM_TEST_KAFKA=required, but there is no {missing}: install Java 17 and Maven")
    items[:] = [item for item in items if item not in needing]
    config.hook.pytest_deselected(items=needing)
    config.stash[_LEFT_OUT] = f"left out: {len(needing)} tests on a real Kafka, as there is no {missing} here"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if text := config.stash.get(_LEFT_OUT, ""):
        terminalreporter.write_line(text, yellow=True)


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """One broker for the whole session; tests name topics of their own."""
    with running_kafka() as server:
        yield server


def _variant_server(variant: str, fsync: Fsync, name: str) -> AbstractContextManager[PrivateServer]:
    binary, locale = _VARIANTS[variant]
    return running_server(fsync, binary=binary, locale=locale, name=name)


def _flush(server: PrivateServer) -> str:
    with redis.Redis.from_url(server.address) as client:
        client.flushall()
        client.script_flush()
    return server.address


@pytest.fixture(scope="session", params=sorted(_VARIANTS))
def message_server(request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    """One server with fsync always for the whole session, per variant."""
    with _variant_server(request.param, "always", "m") as server:
        yield server


@pytest.fixture(scope="session", params=sorted(_VARIANTS))
def mailbox_server(request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    """One server with fsync everysec for the whole session, per variant."""
    with _variant_server(request.param, "everysec", "b") as server:
        yield server


@pytest.fixture
def message_redis(message_server: PrivateServer) -> str:
    """Address of an empty fsync-always server."""
    return _flush(message_server)


@pytest.fixture
def mailbox_redis(mailbox_server: PrivateServer) -> str:
    """Address of an empty fsync-everysec server."""
    return _flush(mailbox_server)
