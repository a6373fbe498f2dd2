"""Private Redis-compatible servers for tests, on unix sockets in short temporary directories."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from qim.runtime.redis_server import MAILBOX_OPTIONS, Fsync, RedisServer, default_binary, start_server, wait_until_ready
from tests.support.run_dir import short_run_dir

REDIS_SERVER_VARIABLE = "QIM_TEST_REDIS_SERVER"
"""Path of a second engine's binary; the store suites then run on both."""
LOCALE_VARIABLE = "QIM_TEST_LOCALE"
"""An installed locale other than C; the store suites then also run on a server that compares strings by it."""
TEST_MEMORY_BYTES = 1 << 30


class Variant(NamedTuple):
    """A kind of server the store suites run on."""

    binary: Path
    locale: str = "C"


def server_variants() -> dict[str, Variant]:
    """What to test on, by name."""
    variants = {"valkey": Variant(default_binary())}
    if other := os.environ.get(REDIS_SERVER_VARIABLE):
        variants["redis"] = Variant(Path(other))
    if locale := os.environ.get(LOCALE_VARIABLE):
        variants["locale"] = Variant(default_binary(), locale)
    return variants


class PrivateServer:
    """A running server that a test may kill and start again on the same data."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.address = server.address
        self.pid = 0

    def start(self) -> None:
        self.pid = start_server(self.server)
        wait_until_ready(self.server, self.pid)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the process and reap it."""
        if self.pid:
            os.kill(self.pid, number)
            os.waitpid(self.pid, 0)
            self.pid = 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for the time of the block: connected, but silent."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """kill -9, then start on what the disk holds."""
        self.kill()
        self.start()


@contextmanager
def running_server(
    fsync: Fsync = "always", *, binary: Path | None = None, locale: str = "C", name: str = "m", port: int = 0
) -> Iterator[PrivateServer]:
    """A started server in a directory of its own."""
    with short_run_dir() as directory:
        server = PrivateServer(
            RedisServer(
                name=name,
                binary=binary or default_binary(),
                data_dir=directory / "data",
                socket_path=directory / f"{name}.sock",
                fsync=fsync,
                maxmemory_bytes=TEST_MEMORY_BYTES,
                port=port,
                locale=locale,
                options=MAILBOX_OPTIONS if fsync == "everysec" else {},
            )
        )
        server.start()
        try:
            yield server
        finally:
            server.kill(signal.SIGTERM)


@contextmanager
def private_server(fsync: Fsync = "always") -> Iterator[str]:
    """Address of a started server, e.g. unix:///tmp/qimab12cd34/m.sock."""
    with running_server(fsync) as server:
        yield server.address
