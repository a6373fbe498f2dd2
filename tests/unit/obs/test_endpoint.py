from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from qim.errors import StartupError
from qim.obs.endpoint import MetricsEndpoint
from tests.support.ports import free_port
from tests.support.run_dir import short_run_dir


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with short_run_dir() as path:
        yield path


async def _scrape(connector: aiohttp.BaseConnector, url: str) -> str:
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


async def test_metrics_on_a_unix_socket(run_dir: Path) -> None:
    path = run_dir / "metrics.sock"
    path.touch()
    endpoint = MetricsEndpoint(f"unix://{path}")
    await endpoint.start()
    try:
        assert "connections_online" in await _scrape(aiohttp.UnixConnector(str(path)), "http://worker/metrics")
    finally:
        await endpoint.stop()


async def test_metrics_on_a_port_and_a_port_in_use() -> None:
    port = free_port()
    endpoint = MetricsEndpoint(f"http://127.0.0.1:{port}")
    await endpoint.start()
    try:
        text = await _scrape(aiohttp.TCPConnector(), f"http://127.0.0.1:{port}/metrics")
        assert "connections_online" in text
        with pytest.raises(StartupError, match=f"metrics address http://127.0.0.1:{port}: .*choose another one"):
            await MetricsEndpoint(f"http://127.0.0.1:{port}").start()
    finally:
        await endpoint.stop()


async def test_an_address_that_is_not_understood() -> None:
    with pytest.raises(StartupError, match="give unix:///path or"):
        await MetricsEndpoint("nowhere").start()
