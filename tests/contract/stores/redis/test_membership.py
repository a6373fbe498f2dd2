"""GroupMembership on a real server: the contract, expiry of abandoned creations, and 100,000 members."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis

from qim.stores.redis.membership import STAGE_MEMBERS_MAX, RedisGroupMembership
from qim.stores.redis.message import RedisMessageStore
from qim.stores.redis.resp import RespClient
from tests.contract.commit_requests import BUCKET, GRANT, TENANT, GroupPlan
from tests.contract.membership_contract import EPOCH, GROUP, MembershipContract
from tests.contract.message_contract import OneBucket, connected_client


class TestMembership(MembershipContract):
    client: RespClient

    @pytest.fixture(autouse=True)
    async def _open(self, message_redis: str) -> AsyncIterator[None]:
        self.client = await connected_client(message_redis)
        instances = OneBucket({"m": self.client}, ["m"] * (BUCKET + 1))
        self.store, self.groups = RedisMessageStore(instances), RedisGroupMembership(instances)
        await self.store.open_bucket(BUCKET, EPOCH, GRANT)
        yield
        await self.client.close()

    async def test_a_call_stages_at_most_1000_members(self) -> None:
        slots = {f"user{n}": n for n in range(STAGE_MEMBERS_MAX + 1)}
        with pytest.raises(ValueError, match="1001"):
            await self.groups.stage_members(BUCKET, EPOCH, TENANT, GROUP, slots, dict.fromkeys(slots, 0))

    async def test_staged_keys_expire_and_published_ones_do_not(self, message_redis: str) -> None:
        abandoned = GroupPlan("abandoned")
        abandoned.create(["ann", "bob"])
        await self.stage(abandoned, ["ann", "bob"])
        await self.create(["ann", "bob"])
        with redis.Redis.from_url(message_redis) as admin:
            names = {name: admin.ttl(name) for name in admin.scan_iter()}
        staged = {name for name in names if name.startswith(b"stage:")}
        assert staged == {name for name in names if b"abandoned" in name} != set()
        assert {name for name, ttl_s in names.items() if ttl_s != -1} == staged

    async def test_100_000_members_in_scripts_of_a_bounded_size(self, message_redis: str) -> None:
        """One script for all of them would block the server a third of a second."""
        user_ids = [f"user{n:06d}" for n in range(100_000)]
        plan = GroupPlan(GROUP)
        plan.create(user_ids)
        for at in range(0, len(user_ids), STAGE_MEMBERS_MAX):
            await self.stage(plan, user_ids[at : at + STAGE_MEMBERS_MAX])
        with redis.Redis.from_url(message_redis) as admin:
            staged = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert staged >= len(user_ids) // STAGE_MEMBERS_MAX
        assert await self.publish(plan, 1) == 0
        assert len(await self.groups.member_ids(TENANT, GROUP)) == len(user_ids)
        await self.check_version(plan, 1, set(user_ids))
