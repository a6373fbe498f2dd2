"""A scripted server per test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_server import FakeServer
from tests.unit.client.devices import Device, Make


@pytest.fixture(scope="session")
def tls_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One certificate for all servers of the session."""
    return tmp_path_factory.mktemp("fake-server")


@pytest.fixture
async def server(tls_dir: Path) -> AsyncIterator[FakeServer]:
    made = FakeServer(tls_dir)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def device(server: FakeServer) -> AsyncIterator[Make]:
    """Make devices; all are closed at the end."""
    made: list[Device] = []

    def make(**fields: Any) -> Device:
        made.append(Device(server, **fields))
        return made[-1]

    yield make
    for one in made:
        await one.client.close()
