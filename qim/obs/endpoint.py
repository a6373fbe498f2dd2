"""`GET /metrics` and `GET /readyz` of one worker, on a unix socket or a loopback port of its own (DESIGN §7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
from aiohttp import web

from qim.errors import StartupError
from qim.obs import metrics


class MetricsEndpoint:
    """Serves this process's metrics at `unix:///path` or `http://127.0.0.1:port`.

    `problems` tells why the process is not ready, one line each; empty = it is.
    """

    __slots__ = ("_address", "_problems", "_runner")

    def __init__(self, address: str, problems: Callable[[], list[str]] = list) -> None:
        self._address = address
        self._problems = problems
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """StartupError when the address is in use or not understood."""
        app = web.Application()
        app.router.add_get("/metrics", _metrics)
        app.router.add_get("/readyz", self._readyz)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._runner = runner
        try:
            await _site(runner, self._address).start()
        except OSError as error:
            await self.stop()
            raise StartupError(f"metrics address {self._address}: {error.strerror}; choose another one") from None

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _readyz(self, _: web.Request) -> web.Response:
        problems = self._problems()
        body = orjson.dumps({"ready": not problems, "problems": problems})
        return web.Response(body=body, status=503 if problems else 200, content_type="application/json")


def _site(runner: web.AppRunner, address: str) -> web.BaseSite:
    if address.startswith("unix://"):
        path = Path(address.removeprefix("unix://"))
        # Left by a process that was killed; its successor is the only one that listens here.
        path.unlink(missing_ok=True)
        return web.UnixSite(runner, str(path))
    host, separator, port = address.removeprefix("http://").partition(":")
    if not separator or not port.isdigit():
        raise StartupError(f"metrics address {address}: give unix:///path or http://127.0.0.1:port")
    return web.TCPSite(runner, host, int(port))


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})
