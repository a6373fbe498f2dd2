"""Readiness is asked of every worker and every server at the moment of the question."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from qim.app.status import HostStatus, metrics_socket
from qim.obs.endpoint import MetricsEndpoint
from qim.stores.redis.instance import RoomWatch
from tests.support.run_dir import short_run_dir


class Room:
    name = "core"

    def __init__(self) -> None:
        self.full = False
        self.asked = 0

    async def refresh(self) -> bool:
        self.asked += 1
        return self.full


async def test_workers_and_servers_are_asked() -> None:
    room = Room()
    reported: list[str] = []
    with short_run_dir() as run_dir:
        status = HostStatus(run_dir, ["core-0", "gateway-0"], [cast(RoomWatch, room)])
        endpoint = MetricsEndpoint(f"unix://{metrics_socket(run_dir, 'core-0')}", lambda: reported)
        await endpoint.start()
        assert await status.problems() == ["gateway-0 does not answer"]
        reported.append("mailbox-0 is not ready")
        room.full = True
        assert await status.problems() == [
            "mailbox-0 is not ready",
            "gateway-0 does not answer",
            "the server core has less than 5 % of its memory or disk left",
        ]
        await endpoint.stop()
    assert room.asked == 2


def test_every_worker_is_listed() -> None:
    endpoints = HostStatus(Path("/run/qim"), ["core-0"], []).metrics_endpoints()
    assert endpoints == [{"process": "core-0", "address": "unix:///run/qim/core-0.metrics", "path": "/metrics"}]
