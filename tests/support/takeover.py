"""Traffic between people while leases move, and what the registry says about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import redis

from qim.app.own_node import OwnNode
from qim.client.aio import Client
from qim.core import ids
from qim.registry.api import LeaseKind
from qim.stores.redis import keys
from tests.support.node import Devices
from tests.support.waiting import wait_for

TENTH: Final = {
    "shard_lease_ttl": "1500",
    "writer_lease_ttl": "1500",
    "writer_lease_renew_interval": "500",
    "writer_self_fence_deadline": "1200",
    "writer_failover_wait": "2500",
    "region_failover_retry_after_ms": "200",
}
"""The contract's lease times divided by ten, all relations kept."""
PEERS: Final = [f"peer{i}" for i in range(8)]
"""Enough for conversations and mailboxes of every worker."""
CONVERGE_S: Final = 40
POOLS: Final = ("writer", "fanout", "mailbox")


def conversation_with(peer: str) -> str:
    """Of ann and a peer."""
    return ids.direct_conversation_id("ann", peer)


class Talk:
    """ann writes to every peer, who all look."""

    def __init__(self, ann: Client, peers: dict[str, Client]) -> None:
        self.ann = ann
        self.peers = peers
        self.texts: list[str] = []
        self._ended = False

    async def say(self, text: str) -> None:
        """One line to everybody, acknowledged."""
        self.texts.append(text)
        for handle in [await self.ann.send(conversation_with(peer), text) for peer in self.peers]:
            await handle

    async def go_on(self, every_s: float = 0.05) -> None:
        """A line to everybody again and again, without waiting for an answer, until `end`."""
        handles = []
        while not self._ended:
            text = f"line {len(self.texts)}"
            self.texts.append(text)
            handles += [await self.ann.send(conversation_with(peer), text) for peer in self.peers]
            await asyncio.sleep(every_s)
        for handle in handles:
            await handle

    def end(self) -> None:
        self._ended = True

    def shown(self, client: Client, peer: str) -> list[str]:
        return [row.payload.decode() for row in client.store.messages(conversation_with(peer))]

    def converged(self) -> bool:
        return all(
            len(self.shown(client, peer)) >= len(self.texts)
            for peer, own in self.peers.items()
            for client in (own, self.ann)
        )

    async def check(self) -> None:
        """Everybody has every line, once, in order."""
        async with asyncio.timeout(CONVERGE_S):
            while not self.converged():
                await asyncio.sleep(0.02)
        for peer, own in self.peers.items():
            assert self.shown(own, peer) == self.texts
            assert self.shown(self.ann, peer) == self.texts

    async def served_in_s(self, text: str) -> float:
        """Time until a line to everybody is acknowledged and on every screen."""
        started = time.monotonic()
        await self.say(text)
        while not self.converged():
            await asyncio.sleep(0.005)
        return time.monotonic() - started


@asynccontextmanager
async def talk_on(devices: Devices) -> AsyncIterator[Talk]:
    peers = {peer: await devices.add(peer) for peer in PEERS}
    yield Talk(await devices.add("ann"), peers)


class Leases:
    """What the registry of a node says."""

    def __init__(self, node: OwnNode) -> None:
        self._client = redis.Redis.from_url(node.address().core_address)

    def owners(self, kind: LeaseKind) -> dict[str, int]:
        """owner -> how many ids, "-" for nobody."""
        counts: dict[str, int] = {}
        rows = self._client.hvals(keys.registry_leases(kind))
        assert isinstance(rows, list)
        for row in rows:
            assert isinstance(row, bytes)
            owner = row.decode().split()[1]
            counts[owner] = counts.get(owner, 0) + 1
        return counts

    def wait_for_owners(self, kind: LeaseKind, owners: set[str], timeout_s: float = 20.0) -> float:
        """Until exactly these own all ids; how long that took."""
        started = time.monotonic()
        wait_for(lambda: set(self.owners(kind)) == owners, timeout_s=timeout_s)
        return time.monotonic() - started
