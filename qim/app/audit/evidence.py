"""Where an audit reads: the servers of a node themselves, beside its processes, which may be running."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from qim.app.commit_logs import LogPartitions, commit_logs
from qim.app.connect import NodeAddress
from qim.commit_log.api import LogReader, Watermarks
from qim.core.ids import mailbox_shard_id
from qim.core.seq import LaneVector
from qim.errors import StoreError
from qim.registry.api import EpochBoundary
from qim.registry.redis import RedisShardRegistry
from qim.stores.api import GroupMembership, MessageStore, StoredRow
from qim.stores.mailbox_layout import DAY_MS, split_member
from qim.stores.redis import keys
from qim.stores.redis.membership import RedisGroupMembership
from qim.stores.redis.message import MessageInstances, RedisMessageStore
from qim.stores.redis.resp import RespClient

_SCAN_KEYS: Final = 1_000
_ROWS_PER_READ: Final = 1_000
_TIMEOUT_MS: Final = 30_000
"""An audit is patient: the node it looks at may be under load."""
_ANY_MAILBOX: Final = "mailbox:*"

User = tuple[str, str]
"""(tenant, user)."""


class AuditedLog(LogReader, Protocol):
    """A log with its bounds."""

    async def watermarks(self, partition: int) -> Watermarks: ...


class AuditedMailboxes(Protocol):
    """What the mailbox instances hold."""

    async def watermarks(self, shard: int) -> LaneVector | None:
        """W as it is stored, None before the shard's first start."""
        ...

    async def users(self) -> Mapping[int, Sequence[User]]:
        """Shard -> users that have entries."""
        ...

    async def rows(self, user: User) -> list[StoredRow]:
        """All entries of a user."""
        ...

    async def trim(self, shard: int, user: User) -> int:
        """user_trim_seq, 0 when there is none."""
        ...

    async def today(self) -> int:
        """UTC day of the server's clock."""
        ...


class FanoutPositions(Protocol):
    """Stored positions of fan-out."""

    async def position(self, partition: int) -> int: ...


class Boundaries(Protocol):
    """Which epoch owned which offsets."""

    async def boundaries(self, shard_id: int) -> Sequence[EpochBoundary]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The stores of a node, read only."""

    outbox: AuditedLog
    dispatch: AuditedLog
    positions: FanoutPositions
    messages: MessageStore
    membership: GroupMembership
    mailboxes: AuditedMailboxes
    registry: Boundaries
    bucket_count: int
    shard_count: int
    lane_count: int


class RedisMailboxes:
    """Mailboxes of one instance, by their keys."""

    def __init__(self, client: RespClient, shard_count: int) -> None:
        self._client = client
        self._shard_count = shard_count
        self._days: dict[User, list[str]] = {}

    async def watermarks(self, shard: int) -> LaneVector | None:
        packed = await self._client.call("HGET", keys.shard(shard), keys.WATERMARKS_FIELD)
        return None if packed is None else LaneVector.unpack(packed)

    async def users(self) -> Mapping[int, Sequence[User]]:
        self._days.clear()
        cursor = b"0"
        while True:
            cursor, names = await self._client.call("SCAN", cursor, "MATCH", _ANY_MAILBOX, "COUNT", _SCAN_KEYS)
            for name in names:
                _, tenant_id, user_id, _ = name.decode().split(":")
                days = self._days.setdefault((tenant_id, user_id), [])
                if name.decode() not in days:
                    days.append(name.decode())
            if cursor == b"0":
                break
        found: dict[int, list[User]] = {}
        for user in self._days:
            found.setdefault(mailbox_shard_id(*user, self._shard_count), []).append(user)
        return found

    async def rows(self, user: User) -> list[StoredRow]:
        found: list[StoredRow] = []
        for name in self._days.get(user, ()):
            at = b"-"
            while True:
                members = await self._client.call("ZRANGEBYLEX", name, at, "+", "LIMIT", 0, _ROWS_PER_READ)
                found += map(split_member, members)
                if len(members) < _ROWS_PER_READ:
                    break
                at = b"(" + members[-1]
        return found

    async def trim(self, shard: int, user: User) -> int:
        packed = await self._client.call("HGET", keys.user_trim(shard), ":".join(user))
        return int.from_bytes(packed or b"", "big")

    async def today(self) -> int:
        seconds, _ = await self._client.call("TIME")
        return int(seconds) * 1000 // DAY_MS


class RedisPositions:
    """Fan-out checkpoints, whatever topic they count in."""

    def __init__(self, client: RespClient) -> None:
        self._client = client

    async def position(self, partition: int) -> int:
        return int(await self._client.call("HGET", keys.fanout_checkpoint(partition), "next") or 0)


@asynccontextmanager
async def evidence_of(node: NodeAddress) -> AsyncIterator[Evidence]:
    """Connections to the servers of a node of this host. StoreError when one does not answer."""
    async with AsyncExitStack() as stack:
        core, mailbox = (
            RespClient(address, name=f"audit-{name}", timeout_ms=_TIMEOUT_MS)
            for name, address in (("core", node.core_address), ("mailbox", node.mailbox_address))
        )
        for client in (core, mailbox):
            await client.connect()
            stack.push_async_callback(client.close)
        registry = RedisShardRegistry(core)
        facts = await registry.cluster_map({})
        if not facts:
            raise StoreError("the registry of this node is empty")
        partitions = LogPartitions(
            cluster_id=facts["cluster_id"],
            outbox=node.conversation_bucket_count,
            dispatch=node.mailbox_shard_count,
            outbox_client=core,
            dispatch_client=core,
        )
        logs = commit_logs(node.commit_log, partitions)
        stack.push_async_callback(logs.close)
        instances = MessageInstances({"core": core}, ["core"] * node.conversation_bucket_count)
        yield Evidence(
            outbox=partitions.stream(),
            dispatch=logs.dispatch,
            positions=RedisPositions(core),
            messages=RedisMessageStore(instances),
            membership=RedisGroupMembership(instances),
            mailboxes=RedisMailboxes(mailbox, node.mailbox_shard_count),
            registry=registry,
            bucket_count=node.conversation_bucket_count,
            shard_count=node.mailbox_shard_count,
            lane_count=int(facts["lane_count"]),
        )
