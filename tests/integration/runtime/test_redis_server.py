"""Private servers: what they are started with, whose directory they take, what they refuse."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import redis

from qim.errors import StartupError
from qim.runtime.redis_server import (
    Engine,
    RedisServer,
    answers_ping,
    claim_data_dir,
    default_binary,
    engine_of,
    start_server,
    wait_until_ready,
)
from tests.support.redis_server import Variant, running_server, server_variants
from tests.support.run_dir import short_run_dir

VARIANTS = server_variants()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with short_run_dir() as path:
        yield path


@pytest.fixture(params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


def _server(run_dir: Path, **changes: object) -> RedisServer:
    server = RedisServer(
        name="message",
        binary=default_binary(),
        data_dir=run_dir / "data",
        socket_path=run_dir / "m.sock",
        fsync="always",
        maxmemory_bytes=1 << 28,
    )
    return dataclasses.replace(server, **changes)  # type: ignore[arg-type]


def test_it_keeps_every_acknowledged_write(variant: Variant) -> None:
    with running_server("always", binary=variant.binary, locale=variant.locale) as server:
        with redis.Redis.from_url(server.address) as client:
            for number in range(100):
                client.rpush("list", number)
        server.restart()
        with redis.Redis.from_url(server.address) as client:
            assert client.llen("list") == 100


def test_its_policies(variant: Variant) -> None:
    with running_server("everysec", binary=variant.binary, locale=variant.locale) as server:
        with redis.Redis.from_url(server.address) as client:
            found = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "save", "port")}
            assert found == {"appendonly": "yes", "appendfsync": "everysec", "save": "", "port": "0"}
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
            assert client.config_get("no-appendfsync-on-rewrite")["no-appendfsync-on-rewrite"] == "no"
        mode = stat.S_IMODE(server.server.socket_path.stat().st_mode)
        assert mode == 0o700


def test_the_directory_remembers_engine_and_version(run_dir: Path) -> None:
    claim_data_dir(run_dir / "data", Engine("valkey", (9, 1, 2)))
    claim_data_dir(run_dir / "data", Engine("valkey", (9, 2, 0)))
    assert orjson.loads((run_dir / "data/engine.json").read_bytes()) == {"engine": "valkey", "version": [9, 2, 0]}
    with pytest.raises(StartupError, match="was written by valkey 9.2.0, which valkey 9.1.2 cannot read"):
        claim_data_dir(run_dir / "data", Engine("valkey", (9, 1, 2)))
    with pytest.raises(StartupError, match="which redis 99.0.0 cannot read"):
        claim_data_dir(run_dir / "data", Engine("redis", (99, 0, 0)))


def test_engines_are_recognised(variant: Variant) -> None:
    assert engine_of(variant.binary).name in ("valkey", "redis")
    assert engine_of(variant.binary).version >= (7, 0, 0)


@pytest.mark.parametrize(
    ("binary", "told"), [("/nowhere/redis-server", "cannot run"), ("/bin/true", "is not a Redis-compatible server")]
)
def test_other_programs_are_refused(binary: str, told: str) -> None:
    with pytest.raises(StartupError, match=told):
        engine_of(Path(binary))


def test_a_directory_in_use_is_refused(run_dir: Path) -> None:
    with running_server("always") as server:
        second = dataclasses.replace(server.server, socket_path=run_dir / "second.sock")
        with pytest.raises(StartupError, match="is in use by another server"):
            start_server(second, lock_timeout_s=0.0)
        assert answers_ping(server.server.socket_path)


def test_a_path_that_is_too_long_is_refused(run_dir: Path) -> None:
    with pytest.raises(StartupError, match="at most 107 work"):
        start_server(_server(run_dir, socket_path=run_dir / ("x" * 100)))


def test_a_server_that_ends_at_once_says_why(run_dir: Path) -> None:
    server = _server(run_dir, options={"maxclients": "nonsense"})
    pid = start_server(server)
    with pytest.raises(StartupError, match="server message did not start"):
        wait_until_ready(server, pid, timeout_s=10)
    os.waitpid(pid, 0)


def test_waiting_can_be_called_off(run_dir: Path) -> None:
    server = _server(run_dir)
    wait_until_ready(server, os.getpid(), timeout_s=10, cancelled=lambda: True)
    assert not answers_ping(server.socket_path)


def test_it_ends_on_sigterm(run_dir: Path) -> None:
    server = _server(run_dir)
    pid = start_server(server)
    wait_until_ready(server, pid, timeout_s=10)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
