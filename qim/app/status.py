"""What the admin plane tells about the other processes of the host: who is ready, what is full, where metrics are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import orjson

from qim.stores.redis.instance import RoomWatch

_ASK_TIMEOUT_S: Final = 1.0


def metrics_socket(run_dir: Path, process: str) -> Path:
    """Where a worker serves `/metrics` and `/readyz`."""
    return run_dir / f"{process}.metrics"


class HostStatus:
    """See `qim.admin.http.NodeStatus`."""

    def __init__(self, run_dir: Path, processes: Sequence[str], rooms: Sequence[RoomWatch]) -> None:
        self._run_dir = run_dir
        self._processes = tuple(processes)
        self._rooms = tuple(rooms)

    async def problems(self) -> list[str]:
        """Asks every worker and every server now."""
        answers = await asyncio.gather(*(self._ask(process) for process in self._processes))
        found = [problem for problems in answers for problem in problems]
        for room in self._rooms:
            await room.refresh()
            if room.full:
                found.append(f"the server {room.name} has less than 5 % of its memory or disk left")
        return found

    def metrics_endpoints(self) -> list[dict[str, str]]:
        return [
            {"process": process, "address": f"unix://{metrics_socket(self._run_dir, process)}", "path": "/metrics"}
            for process in self._processes
        ]

    async def _ask(self, process: str) -> list[str]:
        connector = aiohttp.UnixConnector(path=str(metrics_socket(self._run_dir, process)))
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get("http://worker/readyz") as response,
            ):
                return [str(problem) for problem in orjson.loads(await response.read())["problems"]]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
            return [f"{process} does not answer"]
