"""Any sequence of calls leaves the model and the scripts in the same state with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qim.core.visibility import is_active
from qim.errors import Fenced, StoreError
from qim.stores.api import (
    CommitOutcome,
    CommitRequest,
    GroupMeta,
    MembershipRewrite,
    ShardSnapshot,
    SnapshotRef,
)
from qim.stores.memory_message import MemoryMessageStore
from qim.stores.redis.membership import RedisGroupMembership
from qim.stores.redis.message import RedisMessageStore
from qim.stores.redis.resp import RespClient
from tests.contract.commit_requests import BUCKET, TENANT, message_id, request
from tests.contract.message_contract import OneBucket, connected_client, outbox_of

CONVERSATIONS = ("g:team", "dm:ann:bob", "dm:ann:cid")
PEOPLE = ("ann", "bob", "cid", "dan")
CMIDS = tuple(f"c{n}" for n in range(6))

messages = st.fixed_dictionaries(
    {
        "conversation_id": st.sampled_from(CONVERSATIONS),
        "sender_id": st.sampled_from(PEOPLE[:2]),
        "client_message_id": st.sampled_from(CMIDS),
        "after_client_message_id": st.sampled_from(("", "", "", *CMIDS)),
        "request_digest": st.sampled_from((b"a" * 16, b"a" * 16, b"b" * 16)),
        "dek_id": st.sampled_from(("k1", "k1", "k1", "k2")),
        "id_step": st.sampled_from((1, 1, 1, 1, 2, 0, -1)),
        "version_step": st.sampled_from((0, 0, 0, -1, 1)),
        "change": st.sets(st.sampled_from(PEOPLE), max_size=2),
    }
)
operations = st.one_of(
    st.tuples(st.just("commit"), st.lists(messages, min_size=1, max_size=6), st.sampled_from((0, 0, 0, 0, 1, -1))),
    st.tuples(st.just("open"), st.sampled_from((0, 1)), st.sampled_from(("g1", "g1", "g2"))),
    st.tuples(st.just("stage"), st.lists(st.sampled_from(PEOPLE), min_size=1, max_size=4, unique=True), st.booleans()),
    st.tuples(st.just("publish"), st.integers(1, 4), st.just(0)),
)


class Pair:
    """Both implementations, driven with the same calls."""

    def __init__(self, client: RespClient) -> None:
        self.client = client
        self.model = MemoryMessageStore()
        instances = OneBucket({"m": client}, ["m"] * (BUCKET + 1))
        self.real = RedisMessageStore(instances)
        self.real_groups = RedisGroupMembership(instances)
        self.epoch = 1
        self.number = 0
        self.clock = 0

    async def both(self, on_model: Callable[[], Awaitable[Any]], on_real: Callable[[], Awaitable[Any]]) -> Any:
        expected, found = await self.answer(on_model), await self.answer(on_real)
        assert found == expected
        return expected

    @staticmethod
    async def answer(call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except Fenced:
            return "fenced"
        except StoreError:
            return "error"

    async def open(self, step: int, grant_id: str) -> None:
        self.epoch += step
        await self.both(
            lambda: self.model.open_bucket(BUCKET, self.epoch, grant_id),
            lambda: self.real.open_bucket(BUCKET, self.epoch, grant_id),
        )

    async def commit(self, drafts: list[dict[str, Any]], epoch_step: int) -> list[CommitOutcome] | str:
        meta = await self.model.meta(TENANT, "team")
        version = meta.membership_version if meta else 0
        requests = [await self.request(draft, version) for draft in drafts]
        return await self.both(  # type: ignore[no-any-return]
            lambda: self.model.commit(BUCKET, self.epoch + epoch_step, requests),
            lambda: self.real.commit(BUCKET, self.epoch + epoch_step, requests),
        )

    async def request(self, draft: dict[str, Any], version: int) -> CommitRequest:
        self.number += 1
        self.clock = max(1, self.clock + draft["id_step"])
        is_group = draft["conversation_id"] == "g:team"
        frozen = max(0, version + draft["version_step"]) if is_group else 0
        rewrite = await self.rewrite(frozen, draft["change"]) if is_group and draft["change"] else None
        names = ("conversation_id", "sender_id", "client_message_id", "after_client_message_id", "request_digest")
        return request(
            self.number,
            **{name: draft[name] for name in names},
            dek_id=draft["dek_id"],
            wrapped_dek=b"wrapped " + draft["dek_id"].encode(),
            message_id=message_id(self.clock),
            membership_version=frozen,
            membership=rewrite,
        )

    async def rewrite(self, frozen: int, people: set[str]) -> MembershipRewrite:
        intervals = {user: await self.model.intervals(TENANT, "team", user) for user in sorted(people)}
        joining = [user for user, rows in intervals.items() if not is_active(rows)]
        return MembershipRewrite(
            group_id="team",
            new_version=frozen + 1,
            member_count=self.number,
            joining={user: PEOPLE.index(user) for user in joining},
            joining_shards={user: len(user) % 3 for user in joining},
            leaving=tuple(user for user in intervals if user not in joining),
            next_slot=len(PEOPLE),
            snapshots={1: ShardSnapshot(b"bitmap %d" % self.number, self.number, 1 << 63)},
            index={1: SnapshotRef(frozen + 1, self.number, 1 << 63)},
        )

    async def stage(self, people: list[str], first: bool) -> None:
        slots = {user: slot + (0 if first else 5) for slot, user in enumerate(people)}
        shards = {user: len(user) % 3 for user in people}
        args = (BUCKET, self.epoch, TENANT, "team", slots, shards)
        await self.both(lambda: self.model.stage_members(*args), lambda: self.real_groups.stage_members(*args))

    async def publish(self, member_count: int, _: int) -> None:
        self.clock += 1
        self.number += 1
        meta = GroupMeta(
            membership_version=1, member_count=member_count, next_slot=9, creator_id="ann", create_digest=b"d" * 16
        )
        snapshots = {1: ShardSnapshot(b"bitmap", member_count, 1)}
        index = {1: SnapshotRef(1, member_count, 1)}
        id_ = message_id(self.clock)
        args = (BUCKET, self.epoch, TENANT, "team", meta, snapshots, index, id_, b"announcement")
        await self.both(lambda: self.model.publish_group(*args), lambda: self.real_groups.publish_group(*args))

    async def check_state(self) -> None:
        model, real, groups = self.model, self.real, self.real_groups
        assert await outbox_of(real, self.client) == model.outbox(BUCKET)
        for name in CONVERSATIONS:
            head = await model.head(TENANT, name)
            assert await real.head(TENANT, name) == head
            seqs = list(range(1, head.latest_conversation_seq + 2))
            assert await real.records(TENANT, name, 0, seqs) == await model.records(TENANT, name, 0, seqs)
        assert await groups.meta(TENANT, "team") == await model.meta(TENANT, "team")
        assert await groups.member_ids(TENANT, "team") == await model.member_ids(TENANT, "team")
        assert await groups.slots_of(TENANT, "team", PEOPLE) == await model.slots_of(TENANT, "team", PEOPLE)
        found = await groups.intervals_of_many(TENANT, "team", PEOPLE)
        assert found == await model.intervals_of_many(TENANT, "team", PEOPLE)
        for shard in range(4):
            users = await model.slot_users(TENANT, "team", shard)
            assert await groups.slot_users(TENANT, "team", shard) == users
        for version in range(8):
            await self.both(
                lambda version=version: model.version_index(TENANT, "team", version),  # type: ignore[misc]
                lambda version=version: groups.version_index(TENANT, "team", version),  # type: ignore[misc]
            )
            await self.both(
                lambda version=version: model.shard_snapshot(TENANT, "team", 1, version),  # type: ignore[misc]
                lambda version=version: groups.shard_snapshot(TENANT, "team", 1, version),  # type: ignore[misc]
            )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(with_group=st.booleans(), calls=st.lists(operations, max_size=14))
def test_model_and_scripts_agree(message_redis: str, with_group: bool, calls: list[tuple[str, Any, Any]]) -> None:
    async def run() -> None:
        client = await connected_client(message_redis)
        try:
            await client.call("FLUSHALL")
            pair = Pair(client)
            await pair.open(0, "g1")
            if with_group:
                await pair.stage(["ann", "bob"], True)
                await pair.publish(2, 0)
            for name, first, second in calls:
                await getattr(pair, name)(first, second)
            await pair.check_state()
        finally:
            await client.close()

    asyncio.run(run())
