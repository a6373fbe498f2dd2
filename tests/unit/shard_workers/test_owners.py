from __future__ import annotations

from qim.registry.api import LeaseKind
from qim.registry.memory import MemoryShardRegistry
from qim.shard_workers.owners import OwnerMap
from tests.unit.shard_workers.pipeline import Hub


async def test_owners_are_known_and_linked_once_the_version_rose() -> None:
    registry, backplane = MemoryShardRegistry(), Hub().backplane("fanout-0")
    owners = OwnerMap(registry, backplane)
    await owners.refresh()
    assert owners.owner(LeaseKind.MAILBOX_SHARD, 0) is None
    assert owners.owners(LeaseKind.MAILBOX_SHARD) == []
    await registry.grant(LeaseKind.MAILBOX_SHARD, [0, 2], "mailbox-0", "a")
    await registry.grant(LeaseKind.MAILBOX_SHARD, [1, 3], "mailbox-1", "b")
    await owners.refresh()
    assert owners.owner(LeaseKind.MAILBOX_SHARD, 3) == "mailbox-1"
    assert owners.owners(LeaseKind.MAILBOX_SHARD) == ["mailbox-0", "mailbox-1"]
    assert sorted(backplane.connected) == ["mailbox-0", "mailbox-1"]
