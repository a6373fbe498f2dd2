"""MemoryShardRegistry beside the contract suite: what it hands out does not change afterwards."""

from __future__ import annotations

from qim.registry.api import LeaseKind, Route
from qim.registry.memory import MemoryShardRegistry

SHARD = LeaseKind.MAILBOX_SHARD


async def test_a_map_is_a_snapshot() -> None:
    registry = MemoryShardRegistry()
    await registry.grant(SHARD, [0], "mailbox-0", "g1")
    before = await registry.routes()
    await registry.grant(SHARD, [0, 1], "mailbox-1", "g2")
    assert before.routes[SHARD] == {0: Route("mailbox-0", 1)}


async def test_cluster_facts_handed_out_are_copies() -> None:
    registry = MemoryShardRegistry()
    facts = {"cluster_id": "c1"}
    stored = await registry.cluster_map(facts)
    facts["cluster_id"] = "c2"
    assert await registry.cluster_map({}) == stored == {"cluster_id": "c1"}
