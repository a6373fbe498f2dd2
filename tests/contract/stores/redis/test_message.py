"""MessageStore on a real server: the contract, and what only a server can do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis

from qim.errors import StoreUnavailable
from qim.stores.api import BucketCommit, CommitStatus
from qim.stores.redis import keys
from qim.stores.redis.membership import RedisGroupMembership
from qim.stores.redis.message import CLIENT_DEDUP_TTL_S, RedisMessageStore
from qim.stores.redis.resp import RespClient, RespError
from tests.contract.commit_requests import BUCKET, GRANT, TENANT, message_id, request
from tests.contract.message_contract import DM, EPOCH, MessageStoreContract, OneBucket, connected_client
from tests.support.redis_server import PrivateServer


class TestMessageStore(MessageStoreContract):
    client: RespClient

    @pytest.fixture(autouse=True)
    async def _open(self, message_redis: str) -> AsyncIterator[None]:
        self.client = await connected_client(message_redis)
        # every conversation of the suite lives in one bucket, whatever its hash says
        instances = OneBucket({"m": self.client}, ["m"] * (BUCKET + 1))
        self.store, self.groups = RedisMessageStore(instances), RedisGroupMembership(instances)
        await self.store.open_bucket(BUCKET, EPOCH, GRANT)
        yield
        await self.client.close()

    async def test_dedup_expires_after_two_hours(self) -> None:
        await self.commit(request(1))
        ttl_s = await self.client.call("TTL", keys.dedup(BUCKET, TENANT, "ann", "c1"))
        assert CLIENT_DEDUP_TTL_S - 5 < ttl_s <= CLIENT_DEDUP_TTL_S

    async def test_a_restarted_server_learns_the_script_again(self) -> None:
        await self.commit(request(1))
        await self.client.call("SCRIPT", "FLUSH")
        (outcome,) = await self.commit(request(2))
        assert outcome.conversation_seq == 2

    async def test_out_of_memory_leaves_nothing_half_written(self, message_redis: str) -> None:
        await self.commit(request(1))
        with redis.Redis.from_url(message_redis) as admin:
            before = {name: admin.dump(name) for name in admin.scan_iter()}
            limit = admin.config_get("maxmemory")["maxmemory"]
            admin.config_set("maxmemory", 1)
            try:
                with pytest.raises(RespError, match="OOM"):
                    await self.commit(request(2), request(3, "dm:cid:dan"))
            finally:
                admin.config_set("maxmemory", limit)
            assert {name: admin.dump(name) for name in admin.scan_iter()} == before
        outcomes = await self.commit(request(2), request(3, "dm:cid:dan"))
        assert [(o.conversation_seq, o.outbox_offset) for o in outcomes] == [(2, 1), (1, 2)]

    async def test_a_stream_ahead_of_its_counter_refuses_and_writes_nothing(self) -> None:
        """Whatever came apart outside our scripts fails closed at the first write."""
        await self.commit(request(1))
        await self.client.call("SET", keys.outbox_next(BUCKET), 0)
        with pytest.raises(RespError, match="equal or smaller"):
            await self.commit(request(2))
        assert (await self.store.head(TENANT, DM)).latest_conversation_seq == 1

    async def test_a_bucket_whose_first_write_fails_holds_up_no_other(self) -> None:
        await self.store.open_bucket(0, EPOCH, GRANT)
        await self.commit(request(1))
        await self.client.call("SET", keys.outbox_next(BUCKET), 0)
        broken, fine = await self.store.commit_each(
            [BucketCommit(BUCKET, EPOCH, [request(2), request(3)]), BucketCommit(0, EPOCH, [request(4, "dm:cid:dan")])]
        )
        assert isinstance(broken, RespError) and "equal or smaller" in str(broken)
        assert isinstance(fine, list)
        assert fine[0].conversation_seq == 1
        assert await self.client.call("EXISTS", keys.dedup(BUCKET, TENANT, "ann", "c2")) == 0

    async def test_a_killed_server_keeps_what_it_acknowledged(
        self, message_server: PrivateServer, message_redis: str
    ) -> None:
        (first,) = await self.commit(request(1))
        message_server.restart()
        with pytest.raises(StoreUnavailable):
            await self.commit(request(1, message_id=message_id(2)))
        client = await connected_client(message_redis)
        store = RedisMessageStore(OneBucket({"m": client}, ["m"] * (BUCKET + 1)))
        (again,) = await store.commit(BUCKET, EPOCH, [request(1, message_id=message_id(2))])
        assert (again.status, again.conversation_seq) == (CommitStatus.DUPLICATE, first.conversation_seq)
        await client.close()
