"""A scripted server per test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fake_server import FakeServer


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
