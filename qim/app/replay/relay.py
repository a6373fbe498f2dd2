"""A TCP relay that can lose a connection the way a dead network path does: the server never sees a FIN.

A device that is to be cut off connects through it. `cut` closes the device's side and leaves the server's side open and
silent, so the server goes on believing in the connection while the device connects anew.
"""

from __future__ import annotations

import asyncio
from typing import Final

_CHUNK_BYTES: Final = 64 << 10


class CuttingRelay:
    """Listens on a loopback port and forwards every connection to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter, list[asyncio.Task[None]]]] = []
        self._abandoned: list[asyncio.StreamWriter] = []
        """Server sides of cut connections: kept so that nothing closes them before the run ends."""
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Cut every live connection; how many there were."""
        live, self._live = self._live, []
        for device, server, pumps in live:
            for pump in pumps:
                pump.cancel()
            self._abandoned.append(server)
            device.transport.abort()
        return len(live)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for device, server, _ in self._live:
            device.close()
            server.close()
        for server in self._abandoned:
            server.close()

    async def _accept(self, reader: asyncio.StreamReader, device: asyncio.StreamWriter) -> None:
        try:
            server_reader, server = await asyncio.open_connection(self._host, self._port)
        except OSError:
            device.transport.abort()
            return
        pumps: list[asyncio.Task[None]] = []
        link = (device, server, pumps)
        self._live.append(link)
        for source, target in ((reader, server), (server_reader, device)):
            task = asyncio.create_task(self._pump(source, target, link))
            pumps.append(task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        link: tuple[asyncio.StreamWriter, asyncio.StreamWriter, list[asyncio.Task[None]]],
    ) -> None:
        try:
            while (chunk := await source.read(_CHUNK_BYTES)) and not target.is_closing():
                target.write(chunk)
                await target.drain()
        except OSError:
            pass
        if link in self._live:
            self._live.remove(link)
            link[0].close()
            link[1].close()
