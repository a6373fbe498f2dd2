"""Fixtures of the whole test tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import redis

from qim.runtime.redis_server import Fsync
from tests.support.redis_server import PrivateServer, running_server, server_variants

_VARIANTS = server_variants()


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
