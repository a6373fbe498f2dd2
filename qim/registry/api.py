"""The ShardRegistry contract (§5.3.7, §7.11, §19.2, DESIGN-data §6).

A lease says who owns a shard, bucket or partition and under which epoch. Grants are compare-and-set; an epoch rises by
one on every grant, never on a renewal, and never comes back. A member of a pool renews all its leases at once with one
beat; how old a beat is, the registry's own clock decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    LeaseKind.CONVERSATION_BUCKET: SHARD_EPOCH_MAX,
    LeaseKind.OUTBOX_PARTITION: 0xFFFFFFFF,
}
"""`shard_epoch` has 15 bits of `mailbox_seq` (§6.5); `fencing_epoch`, which every dispatch carries, keeps to the same
bound (ADR-0011); `fanout_epoch` is u32."""

READABLE_KINDS: Final = frozenset((LeaseKind.MAILBOX_SHARD,))
"""What is read while nobody may write it: once its epochs are used up an owner serves it read-only (26.6.6)."""


KIND_OF_POOL: Final[Mapping[str, LeaseKind]] = {
    "writer": LeaseKind.CONVERSATION_BUCKET,
    "fanout": LeaseKind.OUTBOX_PARTITION,
    "mailbox": LeaseKind.MAILBOX_SHARD,
}
"""What the members of a pool lease; a member is called "<pool>-<number>"."""


class EpochExhausted(StoreError):
    """The next epoch would be 0x8000: refused, never wraps (§6.5). P1 alert."""


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


def owners_of_any(boundaries: Iterable[EpochBoundary]) -> list[EpochBoundary]:
    """Those, of boundaries ascending by epoch, whose epoch owns any offset; `epoch_owning` says the same with them
    alone. A shard that is taken over again and again without a record has many that own none."""
    kept: list[EpochBoundary] = []
    for boundary in boundaries:
        while kept and kept[-1].start_offset >= boundary.start_offset:
            kept.pop()
        kept.append(boundary)
    return kept


class Route(NamedTuple):
    owner: str
    epoch: int


class Beat(NamedTuple):
    """Answer to a beat."""

    owners: tuple[str, ...]
    """Members of the pool whose last beat is not older than the ttl, sorted; the asker is among them."""
    pins: Mapping[int, str]
    """id -> the member an operator wants it at."""
    lost: frozenset[int]
    """Ids the asker believed to hold and does not."""
    surplus: frozenset[int] = frozenset()
    """Ids it holds and did not name: one of its questions was executed after its connection had broken."""


class Answer(NamedTuple):
    """What became of one id of `acquire`."""

    epoch: int
    """0: not granted."""
    wait_ms: int = 0
    """Time until the present lease ends if it is not renewed; -1: the epochs are used up, it will never be granted. Of
    `READABLE_KINDS` the asker is the owner from now on all the same, under the last epoch, to read and never to write.
    """


class LeaseRow(NamedTuple):
    """One lease as stored."""

    shard_id: int
    owner: str
    """"" when nobody has it."""
    epoch: int
    age_ms: int
    """Since its owner's last beat, -1 when there is none."""


@dataclass(frozen=True, slots=True)
class RouteMap:
    """Versioned snapshot of all owners; greater version wins."""

    version: int
    routes: Mapping[LeaseKind, Mapping[int, Route]]
    """Of leases that somebody holds."""
    processes: Mapping[str, str] = field(default_factory=dict)
    """Member of any pool -> name of the process that hosts it."""

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
        """Grant all ids to `owner`, whoever has them, each with its epoch + 1, and raise the map version; atomic per
        call. For takeovers somebody else decided; members of a pool use `acquire`."""
        ...

    async def beat(
        self, kind: LeaseKind, owner: str, process: str, grant_id: str, held: Sequence[int], *, ttl_ms: int
    ) -> Beat:
        """Be a member of the pool and renew every lease of `grant_id`. The first beat raises the map version."""
        ...

    async def acquire(
        self, kind: LeaseKind, shard_ids: Sequence[int], owner: str, grant_id: str, *, wait_ms: int
    ) -> dict[int, Answer]:
        """Grant those ids that nobody has, that `owner` had before, or whose owner's last beat is at least `wait_ms`
        old, each with its epoch + 1; ids that `grant_id` has already keep theirs, so a lost answer is asked again.
        Grants raise the map version. Atomic per call."""
        ...

    async def release(self, kind: LeaseKind, shard_ids: Sequence[int], grant_id: str) -> None:
        """Give back those of the ids that `grant_id` has: the next `acquire` of anybody gets them at once."""
        ...

    async def leave(self, kind: LeaseKind, grant_id: str) -> None:
        """Give back everything and be no member any more."""
        ...

    async def pin(self, kind: LeaseKind, shard_id: int, owner: str) -> None:
        """Have an id owned by this member as long as it lives; "" lets the balance decide again."""
        ...

    async def leases(self, kind: LeaseKind) -> list[LeaseRow]:
        """Ascending by id."""
        ...

    async def current(self, kind: LeaseKind, shard_id: int) -> Route | None: ...

    async def routes(self) -> RouteMap: ...

    async def routes_version(self) -> int: ...

    async def write_boundary(self, shard_id: int, boundary: EpochBoundary) -> None:
        """Set once per (shard, epoch); the same value again is accepted, another raises StoreError. Fenced when this
        is not the epoch of the lease: a later owner has counted the offsets without it."""
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
