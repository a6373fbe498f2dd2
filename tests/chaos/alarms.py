"""Always-zero metrics of a node's processes: what they themselves know to be wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import aiohttp

from qim.app.own_node import OwnNode
from qim.app.status import metrics_socket
from qim.obs.metrics import always_zero_violations

EXPECTED: Final = frozenset({"timewheel_tick_overrun_total", "clock_unsafe_total"})
"""A stopped process is late, and a clock that was set back is unsafe: both are what was done to them."""
_ASK_TIMEOUT_S: Final = 10.0


async def alarms(node: OwnNode) -> list[str]:
    """`process: series = value` of everything that is not 0 since the process started."""
    workers = [name for name in node.processes() if not name.startswith("redis-")]
    answers = await asyncio.gather(*(_ask(Path(node.address().run_dir), worker) for worker in workers))
    return [
        f"{worker}: {series} = {value:.0f}"
        for worker, text in zip(workers, answers, strict=True)
        for series, value in always_zero_violations(text).items()
        if series not in EXPECTED
    ]


async def _ask(run_dir: Path, process: str) -> str:
    connector = aiohttp.UnixConnector(path=str(metrics_socket(run_dir, process)))
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)) as session,
        session.get("http://worker/metrics") as response,
    ):
        return await response.text()
