"""Model of the ShardRegistry, for property tests and the simulation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from qim.errors import Fenced, StoreError
from qim.registry.api import (
    EPOCH_MAX,
    KIND_OF_POOL,
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


class _Beat(NamedTuple):
    at_ms: float
    owner: str
    process: str


class MemoryShardRegistry:
    """See `qim.registry.api.ShardRegistry`. `now_ms` is the registry's own clock."""

    def __init__(self, now_ms: Callable[[], float] = lambda: 0.0) -> None:
        self._now_ms = now_ms
        self._beats: dict[LeaseKind, dict[str, _Beat]] = {kind: {} for kind in LeaseKind}
        self._pins: dict[LeaseKind, dict[int, str]] = {kind: {} for kind in LeaseKind}
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
        return Route(held.owner, held.epoch) if held and held.owner else None

    async def routes(self) -> RouteMap:
        return RouteMap(
            self._version,
            {
                kind: {shard_id: Route(held.owner, held.epoch) for shard_id, held in leases.items() if held.owner}
                for kind, leases in self._leases.items()
            },
            {beat.owner: beat.process for beats in self._beats.values() for beat in sorted(beats.values())},
        )

    async def beat(
        self, kind: LeaseKind, owner: str, process: str, grant_id: str, held: Sequence[int], *, ttl_ms: int
    ) -> Beat:
        now_ms, beats = self._now_ms(), self._beats[kind]
        if grant_id not in beats:
            self._version += 1
        beats[grant_id] = _Beat(now_ms, owner, process)
        owners = {beat.owner for beat in beats.values() if now_ms - beat.at_ms < ttl_ms}
        lost = frozenset(shard_id for shard_id in held if not self._has(kind, shard_id, grant_id))
        mine = {shard_id for shard_id in self._leases[kind] if self._has(kind, shard_id, grant_id)}
        return Beat(tuple(sorted(owners)), dict(self._pins[kind]), lost, frozenset(mine.difference(held)))

    async def acquire(
        self, kind: LeaseKind, shard_ids: Sequence[int], owner: str, grant_id: str, *, wait_ms: int
    ) -> dict[int, Answer]:
        answers = {}
        granted = False
        for shard_id in shard_ids:
            held = self._leases[kind].get(shard_id)
            if held is not None and held.grant_id == grant_id:
                answers[shard_id] = Answer(held.epoch)
                continue
            left_ms = 0
            if held is not None and held.owner not in ("", owner):
                beat = self._beats[kind].get(held.grant_id)
                left_ms = int(max(0.0, beat.at_ms + wait_ms - self._now_ms())) if beat else 0
            epoch = held.epoch + 1 if held else 1
            if left_ms:
                answers[shard_id] = Answer(0, left_ms)
                continue
            used_up = epoch > EPOCH_MAX[kind]
            answers[shard_id] = Answer(0, -1) if used_up else Answer(epoch)
            if not used_up or kind in READABLE_KINDS:
                self._leases[kind][shard_id] = Grant(kind, shard_id, owner, min(epoch, EPOCH_MAX[kind]), grant_id)
                granted = True
        self._version += granted
        return answers

    async def release(self, kind: LeaseKind, shard_ids: Sequence[int], grant_id: str) -> None:
        mine = [shard_id for shard_id in shard_ids if self._has(kind, shard_id, grant_id)]
        for shard_id in mine:
            held = self._leases[kind][shard_id]
            self._leases[kind][shard_id] = held._replace(owner="", grant_id="")
        self._version += bool(mine)

    async def leave(self, kind: LeaseKind, grant_id: str) -> None:
        mine = [shard_id for shard_id in self._leases[kind] if self._has(kind, shard_id, grant_id)]
        left = self._beats[kind].pop(grant_id, None)
        before = self._version
        await self.release(kind, mine, grant_id)
        if left is not None and self._version == before:
            self._version += 1

    def release_reaped(self, owners: Collection[str], process: str = "") -> None:
        """As `qim.registry.reaped.release_reaped`."""
        for pool, kind in KIND_OF_POOL.items():
            dead = {owner for owner in owners if owner.rpartition("-")[0] == pool}
            if not dead:
                continue
            self._version += 1
            for shard_id, held in self._leases[kind].items():
                if held.owner in dead:
                    self._leases[kind][shard_id] = held._replace(owner="", grant_id="")
            kept = {grant_id: beat for grant_id, beat in self._beats[kind].items() if beat.owner not in dead}
            if process:
                expected = {f"expected-{owner}": _Beat(self._now_ms(), owner, process) for owner in sorted(dead)}
                kept |= expected
            self._beats[kind] = kept

    async def pin(self, kind: LeaseKind, shard_id: int, owner: str) -> None:
        self._pins[kind].pop(shard_id, None)
        if owner:
            self._pins[kind][shard_id] = owner
        self._version += 1

    async def leases(self, kind: LeaseKind) -> list[LeaseRow]:
        rows = []
        for shard_id, held in sorted(self._leases[kind].items()):
            beat = self._beats[kind].get(held.grant_id)
            age_ms = int(self._now_ms() - beat.at_ms) if beat else -1
            rows.append(LeaseRow(shard_id, held.owner, held.epoch, age_ms))
        return rows

    def _has(self, kind: LeaseKind, shard_id: int, grant_id: str) -> bool:
        held = self._leases[kind].get(shard_id)
        return held is not None and held.owner != "" and held.grant_id == grant_id

    async def routes_version(self) -> int:
        return self._version

    async def write_boundary(self, shard_id: int, boundary: EpochBoundary) -> None:
        held = self._leases[LeaseKind.MAILBOX_SHARD].get(shard_id)
        if held is None or held.epoch != boundary.shard_epoch:
            raise Fenced(f"mailbox shard {shard_id}, epoch {boundary.shard_epoch}: the registry has {held}")
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
