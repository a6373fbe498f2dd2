"""MemoryCommitLog beside the contract suite: a log over somebody else's records."""

from __future__ import annotations

import pytest

from qim.commit_log.api import Fence, LogIdentity, LogRecord, Watermarks
from qim.commit_log.memory import MemoryCheckpointStore, MemoryCommitLog
from qim.errors import Fenced

IDENTITY = LogIdentity(cluster_id="c", topic_id="t", partition_count=2)


async def test_a_log_over_the_outbox_of_a_store_sees_what_the_store_appends() -> None:
    outboxes: list[list[bytes]] = [[], [b"first"]]
    log = MemoryCommitLog(IDENTITY, records_of=outboxes.__getitem__)
    assert await log.read(1, 0) == [LogRecord(0, b"first")]
    outboxes[1].append(b"second")
    assert await log.read(1, 1) == [LogRecord(1, b"second")]
    await log.trim(1, 1)
    assert await log.watermarks(1) == Watermarks(1, 2)
    assert outboxes[1] == [b"first", b"second"]


async def test_two_clients_of_one_checkpoint_store_fence_each_other() -> None:
    ours, theirs = MemoryCheckpointStore(IDENTITY), MemoryCheckpointStore(IDENTITY)
    theirs.adopt(ours)
    await ours.open_partition(0, 1, "g1")
    await theirs.open_partition(0, 2, "g2")
    with pytest.raises(Fenced):
        await ours.save(0, 1, 4)
    with pytest.raises(Fenced):
        await MemoryCommitLog(IDENTITY, checkpoints=ours).append([(0, b"late")], Fence(0, 1))
