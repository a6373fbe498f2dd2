"""Model of the ShardRegistry, for property tests and the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qim.errors import StoreError
from qim.registry.api import EPOCH_MAX, EpochBoundary, EpochExhausted, Grant, LeaseKind, Route, RouteMap, SessionGrant


class MemoryShardRegistry:
    """See `qim.registry.api.ShardRegistry`."""

    def __init__(self) -> None:
        self._leases: dict[LeaseKind, dict[int, Grant]] = {kind: {} for kind in LeaseKind}
        self._version = 0
        self._boundaries: dict[int, dict[int, EpochBoundary]] = {}
        self._session_epochs: dict[tuple[str, str], int] = {}
        self._devices: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
        """user -> device -> (last login in unix ms, session epoch)."""
        self._cluster_map: dict[str, str] = {}

    async def grant(self, kind: LeaseKind, shard_ids: Sequence[int], owner: str, grant_id: str) -> list[Grant]:
        grants = []
        for shard_id in shard_ids:
            held = self._leases[kind].get(shard_id)
            if held is not None and held.grant_id == grant_id:
                grants.append(held)
                continue
            epoch = held.epoch + 1 if held else 1
            if epoch > EPOCH_MAX[kind]:
                raise EpochExhausted(f"{kind} {shard_id}: no epoch above {EPOCH_MAX[kind]}")
            grants.append(Grant(kind, shard_id, owner, epoch, grant_id))
        if any(self._leases[kind].get(grant.shard_id) is not grant for grant in grants):
            self._version += 1
        self._leases[kind].update((grant.shard_id, grant) for grant in grants)
        return grants

    async def current(self, kind: LeaseKind, shard_id: int) -> Route | None:
        held = self._leases[kind].get(shard_id)
        return Route(held.owner, held.epoch) if held else None

    async def routes(self) -> RouteMap:
        return RouteMap(
            self._version,
            {
                kind: {shard_id: Route(held.owner, held.epoch) for shard_id, held in leases.items()}
                for kind, leases in self._leases.items()
            },
        )

    async def routes_version(self) -> int:
        return self._version

    async def write_boundary(self, shard_id: int, boundary: EpochBoundary) -> None:
        stored = self._boundaries.setdefault(shard_id, {}).setdefault(boundary.shard_epoch, boundary)
        if stored != boundary:
            raise StoreError(f"mailbox shard {shard_id}: boundary of epoch {boundary.shard_epoch} is {stored}")

    async def boundaries(self, shard_id: int) -> list[EpochBoundary]:
        return sorted(self._boundaries.get(shard_id, {}).values())

    async def open_session(
        self, tenant_id: str, user_id: str, device_id: str, *, max_devices: int, now_ms: int
    ) -> SessionGrant:
        user = (tenant_id, user_id)
        epoch = self._session_epochs[user] = self._session_epochs.get(user, 0) + 1
        devices = self._devices.setdefault(user, {})
        devices.pop(device_id, None)
        evicted, evicted_epoch = "", 0
        if len(devices) >= max_devices:
            evicted = min(devices, key=lambda device: devices[device])
            _, evicted_epoch = devices.pop(evicted)
        devices[device_id] = (now_ms, epoch)
        return SessionGrant(session_epoch=epoch, evicted_device_id=evicted, evicted_session_epoch=evicted_epoch)

    async def cluster_map(self, proposed: Mapping[str, str]) -> Mapping[str, str]:
        if not self._cluster_map:
            self._cluster_map = dict(proposed)
        return dict(self._cluster_map)
