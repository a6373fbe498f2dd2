"""`qim shards`: who owns what, and moving single ids, on a running node (§5.3.7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from qim.app.connect import NodeAddress
from qim.errors import StartupError
from qim.registry.api import KIND_OF_POOL, LeaseKind
from qim.registry.redis import RedisShardRegistry
from qim.stores.redis.resp import RespClient

MOVE_TIMEOUT_S: Final = 30.0
"""Covers a member that has to end what is in flight and the wait for one that is dead."""
AUTOMATIC: Final = "auto"
_POLL_S: Final = 0.05


async def list_shards(address: NodeAddress, kinds: list[LeaseKind]) -> list[str]:
    """One line per lease: kind, id, owner, epoch, age of the last renewal."""
    lines = [f"{'KIND':8} {'ID':>4}  {'OWNER':16} {'EPOCH':>6}  RENEWED"]
    async with _registry(address) as registry:
        for kind in kinds:
            for row in await registry.leases(kind):
                age = f"{row.age_ms / 1000:.1f} s ago" if row.age_ms >= 0 else "never"
                lines.append(
                    f"{kind:8} {row.shard_id:4}  {row.owner or '-':16} {row.epoch:6}  {age if row.owner else '-'}"
                )
    return lines


async def move_shard(address: NodeAddress, kind: LeaseKind, shard_id: int, owner: str) -> str:
    """Have `owner` own the id from now on, "auto": whoever's share it is; returns a line when it does. StartupError for
    an id or owner there is not, and when it did not happen in time."""
    buckets, shards = address.conversation_bucket_count, address.mailbox_shard_count
    count = shards if kind is LeaseKind.MAILBOX_SHARD else buckets
    if not 0 <= shard_id < count:
        raise StartupError(f"there is no {kind} {shard_id}: ids are 0..{count - 1}")
    async with _registry(address) as registry:
        if owner == AUTOMATIC:
            await registry.pin(kind, shard_id, "")
            return f"{kind} {shard_id} goes where its share is"
        members = [
            name for name in (await registry.routes()).processes if KIND_OF_POOL[name.rpartition("-")[0]] is kind
        ]
        if owner not in members:
            raise StartupError(f"no member {owner} of that pool; there are: {', '.join(sorted(members)) or 'none'}")
        await registry.pin(kind, shard_id, owner)
        deadline = time.monotonic() + MOVE_TIMEOUT_S
        while True:
            route = await registry.current(kind, shard_id)
            if route is not None and route.owner == owner:
                return f"{kind} {shard_id} is at {owner}, epoch {route.epoch}"
            if time.monotonic() >= deadline:
                raise StartupError(f"{owner} did not take {kind} {shard_id} in {MOVE_TIMEOUT_S:.0f} s; does it run?")
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def _registry(address: NodeAddress) -> AsyncIterator[RedisShardRegistry]:
    client = RespClient(address.core_address, name="shards")
    await client.connect()
    try:
        yield RedisShardRegistry(client)
    finally:
        await client.close()
