"""CommitLog and CheckpointStore: the models and Redis streams (DESIGN-data §4)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from qim.commit_log.api import LogIdentity
from qim.commit_log.embedded import EmbeddedCommitLog, Partition, RedisCheckpointStore
from qim.commit_log.memory import MemoryCheckpointStore, MemoryCommitLog
from qim.stores.redis import keys
from qim.stores.redis.resp import RespClient
from tests.contract.log_contract import CLUSTER, PARTITIONS, FencedLogContract


class TestMemory(FencedLogContract):
    @pytest.fixture(autouse=True)
    def _make(self) -> None:
        identity = LogIdentity(cluster_id=CLUSTER, topic_id="topic-1", partition_count=PARTITIONS)
        checkpoints = MemoryCheckpointStore(identity)
        foreign = MemoryCheckpointStore(LogIdentity(cluster_id=CLUSTER, topic_id="topic-2", partition_count=PARTITIONS))
        foreign.adopt(checkpoints)
        self.log = MemoryCommitLog(identity, checkpoints=checkpoints)
        self.checkpoints, self.foreign_checkpoints = checkpoints, foreign


class TestRedis(FencedLogContract):
    @pytest.fixture(autouse=True)
    async def _make(self, message_redis: str) -> AsyncIterator[None]:
        client = RespClient(message_redis, name="core")
        await client.connect()
        self.log = EmbeddedCommitLog(
            "dispatch", CLUSTER, PARTITIONS, lambda p: Partition(client, keys.dispatch(p), keys.dispatch_next(p))
        )
        identity = await self.log.identity()
        self.checkpoints = RedisCheckpointStore(client, identity)
        self.foreign_checkpoints = RedisCheckpointStore(
            client, LogIdentity(cluster_id=CLUSTER, topic_id="other", partition_count=PARTITIONS)
        )
        yield
        await client.close()
