"""Who owns what now: a copy of the registry's RouteMap, refreshed by version (§5.3.7)."""

from __future__ import annotations

import asyncio
from typing import Final

from qim.backplane.api import Backplane
from qim.errors import StoreError
from qim.obs.logs import get_logger
from qim.registry.api import LeaseKind, RouteMap, ShardRegistry

log = get_logger(__name__)

REFRESH_INTERVAL_MS: Final = 500


class OwnerMap:
    """The latest RouteMap and a link to every owner in it."""

    def __init__(self, registry: ShardRegistry, backplane: Backplane) -> None:
        self._registry = registry
        self._backplane = backplane
        self._map = RouteMap(version=-1, routes={})

    def owner(self, kind: LeaseKind, shard_id: int) -> str | None:
        return self._map.owner(kind, shard_id)

    def owners(self, kind: LeaseKind) -> list[str]:
        """Each once, in a stable order."""
        return sorted({route.owner for route in self._map.routes.get(kind, {}).values()})

    async def refresh(self) -> None:
        """Fetch the map if its version rose."""
        if await self._registry.routes_version() <= self._map.version:
            return
        self._map = await self._registry.routes()
        for routes in self._map.routes.values():
            for owner in {route.owner for route in routes.values()}:
                self._backplane.connect(owner)

    async def keep_fresh(self) -> None:
        """Refresh for ever; what is known stays usable while the registry cannot be reached."""
        while True:
            try:
                await self.refresh()
            except StoreError as error:
                log.warning("routes_unreadable", error=error)
            await asyncio.sleep(REFRESH_INTERVAL_MS / 1000)
