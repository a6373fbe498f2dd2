"""The ShardRegistry contract (§5.3.7, §7.11, §19.2, DESIGN-data §6).

Ownership is static here: worker i of a pool of n owns every id with id mod n = i, and each start of a worker is a
grant. Grants are compare-and-set; an epoch rises by one on every grant and never comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from qim.core.seq import SHARD_EPOCH_MAX
from qim.errors import StoreError


class LeaseKind(StrEnum):
    MAILBOX_SHARD = "mailbox"
    CONVERSATION_BUCKET = "bucket"
    OUTBOX_PARTITION = "outbox"


EPOCH_MAX: Final[Mapping[LeaseKind, int]] = {
    LeaseKind.MAILBOX_SHARD: SHARD_EPOCH_MAX,
    LeaseKind.CONVERSATION_BUCKET: 0xFFFFFFFF,
    LeaseKind.OUTBOX_PARTITION: 0xFFFFFFFF,
}
"""`shard_epoch` has 15 bits of `mailbox_seq` (§6.5); `fencing_epoch` and `fanout_epoch` are u32."""


class EpochExhausted(StoreError):
    """The next epoch would be 0x8000: refused, the shard stays read-only, never wraps (§6.5). P1 alert."""


class Grant(NamedTuple):
    kind: LeaseKind
    shard_id: int
    owner: str
    """Role instance, e.g. "writer-0"."""
    epoch: int
    grant_id: str
    """Random identity of this grant: repeating it is recognised and accepted."""


class EpochBoundary(NamedTuple):
    """§7.11: where an epoch of a MailboxShard begins in the log."""

    shard_epoch: int
    start_mailbox_seq: int
    prev_epoch_end_mailbox_seq: int

    @property
    def start_offset(self) -> int:
        return self.start_mailbox_seq & ((1 << 48) - 1)


def epoch_owning(boundaries: Sequence[EpochBoundary], log_offset: int) -> int:
    """The largest epoch whose start <= offset (an epoch may own none). StoreError if no boundary covers it."""
    best = 0
    for boundary in boundaries:
        if boundary.start_offset <= log_offset and boundary.shard_epoch > best:
            best = boundary.shard_epoch
    if best == 0:
        raise StoreError(f"no epoch boundary covers log offset {log_offset}")
    return best


class Route(NamedTuple):
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RouteMap:
    """Versioned snapshot of all owners; greater version wins."""

    version: int
    routes: Mapping[LeaseKind, Mapping[int, Route]]

    def owner(self, kind: LeaseKind, shard_id: int) -> str | None:
        route = self.routes.get(kind, {}).get(shard_id)
        return route.owner if route else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionGrant:
    """Answer to a login: the epoch, and the least recently active device, which had to go if the user had too many."""

    session_epoch: int
    evicted_device_id: str = ""
    evicted_session_epoch: int = 0


class ShardRegistry(Protocol):
    async def grant(self, kind: LeaseKind, shard_ids: Sequence[int], owner: str, grant_id: str) -> list[Grant]:
        """Grant all ids to `owner`, each with its epoch + 1, and raise the map version; atomic per call."""
        ...

    async def current(self, kind: LeaseKind, shard_id: int) -> Route | None: ...

    async def routes(self) -> RouteMap: ...

    async def routes_version(self) -> int: ...

    async def write_boundary(self, shard_id: int, boundary: EpochBoundary) -> None:
        """Set once per (shard, epoch); the same value again is accepted, another raises StoreError."""
        ...

    async def boundaries(self, shard_id: int) -> list[EpochBoundary]:
        """Ascending by epoch."""
        ...

    async def open_session(
        self, tenant_id: str, user_id: str, device_id: str, *, max_devices: int, now_ms: int
    ) -> SessionGrant:
        """Next `session_epoch` of (tenant, user, device): greater than every earlier one of the user (§5.4.4)."""
        ...

    async def cluster_map(self, proposed: Mapping[str, str]) -> Mapping[str, str]:
        """Store immutable cluster facts at first use (counts, instance map, ids); afterwards return what is stored."""
        ...
