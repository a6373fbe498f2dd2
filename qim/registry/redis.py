"""ShardRegistry on the core instance."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from qim.errors import StoreError
from qim.registry.api import EPOCH_MAX, EpochBoundary, EpochExhausted, Grant, LeaseKind, Route, RouteMap, SessionGrant
from qim.stores.redis import keys
from qim.stores.redis.resp import Argument, RespClient, RespError
from qim.stores.redis.scripts import Script

_GRANT: Final = Script("registry_grant")
_ROUTES: Final = Script("registry_routes")
_OPEN_SESSION: Final = Script("registry_open_session")
_CLUSTER_MAP: Final = Script("registry_cluster_map")
_BOUNDARY: Final = struct.Struct(">QQ")
_KINDS: Final = tuple(LeaseKind)


class RedisShardRegistry:
    """See `qim.registry.api.ShardRegistry`."""

    def __init__(self, client: RespClient) -> None:
        self._client = client

    async def grant(self, kind: LeaseKind, shard_ids: Sequence[int], owner: str, grant_id: str) -> list[Grant]:
        names = (keys.registry_leases(kind), keys.REGISTRY_VERSION)
        try:
            epochs = await _GRANT(self._client, names, (owner, grant_id, EPOCH_MAX[kind], *shard_ids))
        except RespError as error:
            if error.code == "EXHAUSTED":
                raise EpochExhausted(f"{kind} {error}: no epoch above {EPOCH_MAX[kind]}") from None
            raise
        return [
            Grant(kind, shard_id, owner, epoch, grant_id) for shard_id, epoch in zip(shard_ids, epochs, strict=True)
        ]

    async def current(self, kind: LeaseKind, shard_id: int) -> Route | None:
        lease = await self._client.call("HGET", keys.registry_leases(kind), shard_id)
        return None if lease is None else _route(lease)

    async def routes(self) -> RouteMap:
        names = (keys.REGISTRY_VERSION, *map(keys.registry_leases, _KINDS))
        version, *leases = await _ROUTES(self._client, names, ())
        return RouteMap(
            version,
            {
                kind: {int(shard_id): _route(lease) for shard_id, lease in _pairs(flat)}
                for kind, flat in zip(_KINDS, leases, strict=True)
            },
        )

    async def routes_version(self) -> int:
        return int(await self._client.call("GET", keys.REGISTRY_VERSION) or 0)

    async def write_boundary(self, shard_id: int, boundary: EpochBoundary) -> None:
        name = keys.registry_boundaries(shard_id)
        packed = _BOUNDARY.pack(boundary.start_mailbox_seq, boundary.prev_epoch_end_mailbox_seq)
        if not await self._client.call("HSETNX", name, boundary.shard_epoch, packed):
            stored = await self._client.call("HGET", name, boundary.shard_epoch)
            if stored != packed:
                raise StoreError(
                    f"mailbox shard {shard_id}: boundary of epoch {boundary.shard_epoch} is {_BOUNDARY.unpack(stored)}"
                )

    async def boundaries(self, shard_id: int) -> list[EpochBoundary]:
        flat = await self._client.call("HGETALL", keys.registry_boundaries(shard_id))
        return sorted(EpochBoundary(int(epoch), *_BOUNDARY.unpack(packed)) for epoch, packed in _pairs(flat))

    async def open_session(
        self, tenant_id: str, user_id: str, device_id: str, *, max_devices: int, now_ms: int
    ) -> SessionGrant:
        epoch, evicted, evicted_epoch = await _OPEN_SESSION(
            self._client, (keys.session(tenant_id, user_id),), (device_id, max_devices, now_ms)
        )
        return SessionGrant(
            session_epoch=epoch, evicted_device_id=evicted.decode(), evicted_session_epoch=evicted_epoch
        )

    async def cluster_map(self, proposed: Mapping[str, str]) -> Mapping[str, str]:
        arguments: list[Argument] = [part for pair in proposed.items() for part in pair]
        flat = await _CLUSTER_MAP(self._client, (keys.REGISTRY_CLUSTER,), arguments)
        return {name.decode(): value.decode() for name, value in _pairs(flat)}


def _pairs(flat: list[Any]) -> zip[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _route(lease: bytes) -> Route:
    epoch, owner, _ = lease.decode().split(" ")
    return Route(owner, int(epoch))
