"""RouteCache: every process's copy of who owns what (§5.3.7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from qim.errors import StoreError
from qim.obs.logs import get_logger
from qim.registry.api import LeaseKind, Route, RouteMap, ShardRegistry
from qim.runtime.tasks import TaskSet

POLL_INTERVAL_MS: Final = 500

log = get_logger(__name__)

Listener = Callable[[RouteMap], None]


class RouteCache:
    """Polls the map's version and reads the map when it rose; `refresh` does so at once.

    A registry that does not answer leaves the last map in force: routing never depends on it per message.
    """

    def __init__(self, registry: ShardRegistry, tasks: TaskSet, *, poll_interval_ms: int = POLL_INTERVAL_MS) -> None:
        self._registry = registry
        self._tasks = tasks
        self._poll_interval_ms = poll_interval_ms
        self._map = RouteMap(0, {})
        self._listeners: list[Listener] = []
        self._lock = asyncio.Lock()
        self._reads_started = 0
        self._newest_read = 0
        """Number of the last read that succeeded."""
        self._soon = False

    @property
    def map(self) -> RouteMap:
        return self._map

    def owner(self, kind: LeaseKind, shard_id: int) -> str | None:
        """Role instance that owns the id, None if nobody ever did."""
        return self._map.owner(kind, shard_id)

    def route(self, kind: LeaseKind, shard_id: int) -> Route | None:
        """Owner and epoch."""
        return self._map.routes.get(kind, {}).get(shard_id)

    def owners(self, kind: LeaseKind) -> list[str]:
        """Each once, in a stable order."""
        return owners_of(self._map, kind)

    def on_change(self, listener: Listener) -> None:
        """Call `listener` with every newer map, after it took effect; it must not raise."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Read the map once (StoreError if that fails), then keep it fresh until the tasks are closed."""
        await self.refresh()
        self._tasks.start("route-poll", self._poll())

    async def refresh(self) -> None:
        """Read the map now; StoreError if that fails. A burst of callers costs at most two reads."""
        asked = self._reads_started
        async with self._lock:
            if self._newest_read > asked:
                return
            self._reads_started += 1
            fresh = await self._registry.routes()
            self._newest_read = self._reads_started
            if fresh.version > self._map.version:
                self._map = fresh
                for listener in self._listeners:
                    listener(fresh)

    def refresh_soon(self) -> None:
        """An owner did not answer: look now instead of at the next poll."""
        if not self._soon:
            self._soon = True
            self._tasks.start("route-refresh", self._refresh_if_newer())

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_interval_ms / 1000)
            await self._refresh_if_newer()

    async def _refresh_if_newer(self) -> None:
        self._soon = False
        try:
            if await self._registry.routes_version() > self._map.version:
                await self.refresh()
        except StoreError as error:
            log.warning("routes_unavailable", error=error)


def owners_of(routes: RouteMap, kind: LeaseKind) -> list[str]:
    """Role instances that own an id of a kind: each once, in a stable order."""
    return sorted({route.owner for route in routes.routes.get(kind, {}).values()})
