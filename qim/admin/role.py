"""The role "admin-0": the HTTP plane on its TLS port."""

from __future__ import annotations

import ssl
from typing import Final

from aiohttp import web

from qim.admin.http import AdminPlane
from qim.errors import StartupError

_SHUTDOWN_TIMEOUT_S: Final = 5.0
"""Covers `submit_timeout` (2 s) of a membership change that was accepted."""


class AdminRole:
    """See `qim.runtime.role.Role`."""

    def __init__(self, plane: AdminPlane, *, host: str, port: int, tls_context: ssl.SSLContext) -> None:
        self._plane = plane
        self._host = host
        self._port = port
        self._tls_context = tls_context
        self._runner: web.AppRunner | None = None

    @property
    def name(self) -> str:
        return "admin-0"

    async def start(self) -> None:
        runner = web.AppRunner(self._plane.application(), access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, self._host, self._port, ssl_context=self._tls_context)
        try:
            await site.start()
        except OSError as error:
            raise StartupError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror}; choose another --admin-port"
            ) from None

    async def drain(self) -> None:
        """Answer what was accepted, accept nothing more."""
        await self.stop()

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def ready(self) -> bool:
        return self._runner is not None
