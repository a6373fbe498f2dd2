"""ShardRegistry on the core instance."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from qim.errors import StoreError
from qim.registry.api import (
    EPOCH_MAX,
    READABLE_KINDS,
    Answer,
    Beat,
    EpochBoundary,
    EpochExhausted,
    Grant,
    LeaseKind,
    LeaseRow,
    Route,
    RouteMap,
    SessionGrant,
)
from qim.stores.redis import keys
from qim.stores.redis.resp import Argument, RespClient, RespError
from qim.stores.redis.scripts import Script

_GRANT: Final = Script("registry_grant")
_ROUTES: Final = Script("registry_routes")
_BEAT: Final = Script("registry_beat")
_ACQUIRE: Final = Script("registry_acquire")
_RELEASE: Final = Script("registry_release")
_OPEN_SESSION: Final = Script("registry_open_session")
_CLUSTER_MAP: Final = Script("registry_cluster_map")
_WRITE_BOUNDARY: Final = Script("registry_boundary")
_BOUNDARY: Final = struct.Struct(">QQ")
_KINDS: Final = tuple(LeaseKind)
_NOBODY: Final = "-"
_FORGET_TTLS: Final = 10
"""A beat this many ttls old is dropped: every wait has passed by then."""


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

    async def beat(
        self, kind: LeaseKind, owner: str, process: str, grant_id: str, held: Sequence[int], *, ttl_ms: int
    ) -> Beat:
        names = (keys.registry_beats(kind), keys.registry_leases(kind), keys.registry_pins(kind), keys.REGISTRY_VERSION)
        owners, pins, lost, surplus = await _BEAT(
            self._client, names, (owner, process, grant_id, ttl_ms, ttl_ms * _FORGET_TTLS, *held)
        )
        return Beat(
            tuple(sorted(name.decode() for name in owners)),
            {int(shard_id): member.decode() for shard_id, member in _pairs(pins)},
            frozenset(map(int, lost)),
            frozenset(map(int, surplus)),
        )

    async def acquire(
        self, kind: LeaseKind, shard_ids: Sequence[int], owner: str, grant_id: str, *, wait_ms: int
    ) -> dict[int, Answer]:
        names = (keys.registry_leases(kind), keys.registry_beats(kind), keys.REGISTRY_VERSION)
        readable = int(kind in READABLE_KINDS)
        flat = await _ACQUIRE(self._client, names, (owner, grant_id, EPOCH_MAX[kind], wait_ms, readable, *shard_ids))
        return {shard_id: Answer(*pair) for shard_id, pair in zip(shard_ids, _pairs(flat), strict=True)}

    async def release(self, kind: LeaseKind, shard_ids: Sequence[int], grant_id: str) -> None:
        if shard_ids:
            names = (keys.registry_leases(kind), keys.REGISTRY_VERSION)
            await _RELEASE(self._client, names, (grant_id, *shard_ids))

    async def leave(self, kind: LeaseKind, grant_id: str) -> None:
        names = (keys.registry_leases(kind), keys.REGISTRY_VERSION, keys.registry_beats(kind))
        await _RELEASE(self._client, names, (grant_id,))

    async def pin(self, kind: LeaseKind, shard_id: int, owner: str) -> None:
        if owner:
            await self._client.call("HSET", keys.registry_pins(kind), shard_id, owner)
        else:
            await self._client.call("HDEL", keys.registry_pins(kind), shard_id)
        await self._client.call("INCR", keys.REGISTRY_VERSION)

    async def leases(self, kind: LeaseKind) -> list[LeaseRow]:
        client = self._client
        flat = await client.call("HGETALL", keys.registry_leases(kind))
        beats = {grant.decode(): int(beat.split()[0]) for grant, beat in _pairs(
            await client.call("HGETALL", keys.registry_beats(kind)))}  # fmt: skip
        seconds, micros = await client.call("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        rows = []
        for shard_id, lease in _pairs(flat):
            epoch, owner, grant = lease.decode().split(" ")
            age_ms = max(0, now_ms - beats[grant]) if grant in beats else -1
            rows.append(LeaseRow(int(shard_id), "" if owner == _NOBODY else owner, int(epoch), age_ms))
        return sorted(rows)

    async def current(self, kind: LeaseKind, shard_id: int) -> Route | None:
        lease = await self._client.call("HGET", keys.registry_leases(kind), shard_id)
        return None if lease is None else _route(lease)

    async def routes(self) -> RouteMap:
        names = [keys.REGISTRY_VERSION]
        for kind in _KINDS:
            names += (keys.registry_leases(kind), keys.registry_beats(kind))
        version, *flats = await _ROUTES(self._client, names, ())
        routes: dict[LeaseKind, dict[int, Route]] = {}
        processes: dict[str, str] = {}
        for kind, (leases, beats) in zip(_KINDS, _pairs(flats), strict=True):
            found = {int(shard_id): _route(lease) for shard_id, lease in _pairs(leases)}
            routes[kind] = {shard_id: route for shard_id, route in found.items() if route is not None}
            # the youngest beat of a member last
            found_beats = sorted(beat.decode().split(" ") for beat in beats[1::2])
            processes |= {owner: process for _, owner, process in found_beats}
        return RouteMap(version, routes, processes)

    async def routes_version(self) -> int:
        return int(await self._client.call("GET", keys.REGISTRY_VERSION) or 0)

    async def write_boundary(self, shard_id: int, boundary: EpochBoundary) -> None:
        names = (keys.registry_boundaries(shard_id), keys.registry_leases(LeaseKind.MAILBOX_SHARD))
        packed = _BOUNDARY.pack(boundary.start_mailbox_seq, boundary.prev_epoch_end_mailbox_seq)
        try:
            stored = await _WRITE_BOUNDARY(self._client, names, (shard_id, boundary.shard_epoch, packed))
        except RespError as error:
            raise error.refusal(f"mailbox shard {shard_id}, epoch {boundary.shard_epoch}") from None
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


def _route(lease: bytes) -> Route | None:
    epoch, owner, _ = lease.decode().split(" ")
    return None if owner == _NOBODY else Route(owner, int(epoch))
