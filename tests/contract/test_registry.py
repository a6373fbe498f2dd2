"""ShardRegistry: one suite for the model and for Redis (DESIGN-data §6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from qim.core.seq import SHARD_EPOCH_MAX, mailbox_seq
from qim.errors import Fenced, StoreError
from qim.registry.api import (
    Answer,
    Beat,
    EpochBoundary,
    EpochExhausted,
    Grant,
    LeaseKind,
    LeaseRow,
    Route,
    ShardRegistry,
    epoch_owning,
    owners_of_any,
)
from qim.registry.memory import MemoryShardRegistry
from qim.registry.redis import RedisShardRegistry
from qim.stores.redis import keys
from qim.stores.redis.resp import RespClient

MAILBOX, BUCKET, OUTBOX = LeaseKind.MAILBOX_SHARD, LeaseKind.CONVERSATION_BUCKET, LeaseKind.OUTBOX_PARTITION
USER = ("t1", "ann")


class ShardRegistryContract:
    registry: ShardRegistry

    async def test_the_first_epoch_is_one_and_every_grant_is_one_more(self) -> None:
        grants = await self.registry.grant(MAILBOX, [0, 2], "mailbox-0", "g1")
        assert [(grant.shard_id, grant.epoch, grant.owner, grant.grant_id) for grant in grants] == [
            (0, 1, "mailbox-0", "g1"),
            (2, 1, "mailbox-0", "g1"),
        ]
        (again,) = await self.registry.grant(MAILBOX, [2], "mailbox-1", "g2")
        assert again.epoch == 2
        assert await self.registry.current(MAILBOX, 2) == Route("mailbox-1", 2)
        assert await self.registry.current(MAILBOX, 0) == Route("mailbox-0", 1)
        assert await self.registry.current(MAILBOX, 1) is None
        assert await self.registry.current(BUCKET, 0) is None

    async def test_a_grant_whose_answer_was_lost_may_be_repeated(self) -> None:
        first = await self.registry.grant(BUCKET, [0, 1], "writer-0", "g1")
        version = await self.registry.routes_version()
        assert await self.registry.grant(BUCKET, [0, 1], "writer-0", "g1") == first
        assert await self.registry.routes_version() == version

    async def test_the_map_is_versioned_and_whole(self) -> None:
        assert (await self.registry.routes()).version == await self.registry.routes_version() == 0
        await self.registry.grant(BUCKET, [0], "writer-0", "g1")
        await self.registry.grant(OUTBOX, [0], "fanout-0", "g2")
        before = await self.registry.routes()
        await self.registry.grant(BUCKET, [0, 1], "writer-1", "g3")
        after = await self.registry.routes()
        assert before.owner(BUCKET, 0) == "writer-0"
        assert before.owner(OUTBOX, 0) == "fanout-0"
        assert before.owner(BUCKET, 1) is None
        assert after.version == await self.registry.routes_version() > before.version
        assert after.routes[BUCKET] == {0: Route("writer-1", 2), 1: Route("writer-1", 1)}

    async def test_an_epoch_of_a_mailbox_shard_never_passes_0x7fff(self) -> None:
        """26.6.6 (b): refused whole, nothing granted, never wraps."""
        await self.raise_epoch(MAILBOX, 3, SHARD_EPOCH_MAX)
        version = await self.registry.routes_version()
        for _ in range(3):
            with pytest.raises(EpochExhausted):
                await self.registry.grant(MAILBOX, [2, 3, 4], "mailbox-0", "g9")
        assert await self.registry.current(MAILBOX, 2) is None
        assert await self.registry.current(MAILBOX, 3) == Route("mailbox-0", SHARD_EPOCH_MAX)
        assert await self.registry.routes_version() == version

    async def raise_epoch(self, kind: LeaseKind, shard_id: int, epoch: int) -> None:
        """Store the epoch as if it had been granted so often."""
        raise NotImplementedError

    async def pass_ms(self, ms: int) -> None:
        """Time of the registry's clock."""
        raise NotImplementedError

    @pytest.mark.parametrize(("kind", "last"), [(MAILBOX, 0x7FFF), (BUCKET, 0x7FFF), (OUTBOX, 0xFFFFFFFF)])
    async def test_the_last_epoch_is_granted_and_none_above_it(self, kind: LeaseKind, last: int) -> None:
        await self.raise_epoch(kind, 0, last - 1)
        (grant,) = await self.registry.grant(kind, [0], "writer-0", "g9")
        assert grant.epoch == last
        with pytest.raises(EpochExhausted):
            await self.registry.grant(kind, [0], "writer-0", "g10")

    # -------------------------------------------------------------------------------------------------------- leases

    async def beat(self, owner: str, grant_id: str, held: Sequence[int] = (), ttl_ms: int = 60_000) -> Beat:
        return await self.registry.beat(BUCKET, owner, f"core-of-{owner}", grant_id, held, ttl_ms=ttl_ms)

    async def acquire(self, owner: str, grant_id: str, ids: Sequence[int], wait_ms: int = 60_000) -> list[int]:
        """Epochs, 0 for what was not granted."""
        answers = await self.registry.acquire(BUCKET, ids, owner, grant_id, wait_ms=wait_ms)
        return [answers[shard_id].epoch for shard_id in ids]

    async def test_a_beat_tells_what_is_held_and_what_is_not(self) -> None:
        await self.acquire("writer-0", "g0", [0, 1, 2])
        await self.acquire("writer-1", "g1", [3])
        beat = await self.beat("writer-0", "g0", held=[1, 3, 4])
        assert (set(beat.lost), set(beat.surplus)) == ({3, 4}, {0, 2})
        await self.registry.release(BUCKET, [0, 1, 2], "g0")
        beat = await self.beat("writer-0", "g0", held=[1])
        assert (set(beat.lost), sorted(beat.surplus)) == ({1}, [])

    async def test_a_lease_is_granted_to_one_until_it_is_given_back(self) -> None:
        await self.beat("writer-0", "g0")
        assert await self.acquire("writer-0", "g0", [0, 1]) == [1, 1]
        assert await self.acquire("writer-1", "g1", [0, 1, 2]) == [0, 0, 1]
        answers = await self.registry.acquire(BUCKET, [0], "writer-1", "g1", wait_ms=60_000)
        assert 0 < answers[0].wait_ms <= 60_000
        await self.registry.release(BUCKET, [0, 2], "g0")
        assert await self.registry.current(BUCKET, 0) is None
        assert await self.registry.current(BUCKET, 2) == Route("writer-1", 1)
        assert await self.acquire("writer-1", "g1", [0, 1]) == [2, 0]

    async def test_an_acquire_whose_answer_was_lost_may_be_repeated(self) -> None:
        await self.beat("writer-0", "g0")
        assert await self.acquire("writer-0", "g0", [0]) == [1]
        version = await self.registry.routes_version()
        assert await self.acquire("writer-0", "g0", [0]) == [1]
        assert await self.registry.routes_version() == version

    async def test_a_restarted_owner_gets_its_own_back_under_the_next_epoch(self) -> None:
        await self.beat("writer-0", "g0")
        await self.acquire("writer-0", "g0", [0])
        assert await self.acquire("writer-0", "g1", [0]) == [2]
        assert (await self.beat("writer-0", "g0", [0])).lost == {0}

    async def test_a_lease_without_a_beat_for_the_wait_may_be_taken(self) -> None:
        await self.beat("writer-0", "g0")
        await self.acquire("writer-0", "g0", [0, 1])
        await self.pass_ms(30)
        assert await self.acquire("writer-1", "g1", [0], wait_ms=20) == [2]
        assert (await self.beat("writer-0", "g0", [0, 1])).lost == {0}
        assert await self.acquire("writer-1", "g1", [1], wait_ms=20_000) == [0], "the beat renewed what was left"

    async def test_members_are_those_with_a_beat_within_the_ttl(self) -> None:
        assert (await self.beat("writer-1", "g1")).owners == ("writer-1",)
        assert (await self.beat("writer-0", "g0")).owners == ("writer-0", "writer-1")
        assert (await self.beat("writer-0", "g0b")).owners == ("writer-0", "writer-1"), "two lives are one member"
        await self.pass_ms(30)
        assert (await self.beat("writer-0", "g0", ttl_ms=20)).owners == ("writer-0",)
        assert (await self.registry.routes()).processes["writer-1"] == "core-of-writer-1"

    async def test_pins_come_with_the_beat(self) -> None:
        await self.registry.pin(BUCKET, 3, "writer-1")
        await self.registry.pin(BUCKET, 4, "writer-1")
        await self.registry.pin(BUCKET, 4, "")
        assert (await self.beat("writer-0", "g0")).pins == {3: "writer-1"}

    async def test_whatever_changes_owners_members_or_pins_raises_the_version(self) -> None:
        versions = [await self.registry.routes_version()]

        async def rose() -> None:
            versions.append(await self.registry.routes_version())
            assert versions[-1] > versions[-2]

        await self.beat("writer-0", "g0")
        await rose()
        await self.acquire("writer-0", "g0", [0, 1])
        await rose()
        await self.registry.release(BUCKET, [0], "g0")
        await rose()
        await self.registry.pin(BUCKET, 0, "writer-0")
        await rose()
        await self.registry.leave(BUCKET, "g0")
        await rose()
        await self.registry.leave(BUCKET, "g0")
        await self.registry.release(BUCKET, [0, 1], "g0")
        await self.beat("writer-0", "g1")
        await self.beat("writer-0", "g1")
        assert await self.registry.routes_version() == versions[-1] + 1, "and nothing else does"

    async def test_who_leaves_leaves_nothing_behind(self) -> None:
        await self.beat("writer-0", "g0")
        await self.acquire("writer-0", "g0", [0, 1])
        await self.registry.leave(BUCKET, "g0")
        assert (await self.registry.routes()).routes[BUCKET] == {}
        assert (await self.beat("writer-1", "g1")).owners == ("writer-1",)
        assert await self.acquire("writer-1", "g1", [0, 1]) == [2, 2]

    async def test_used_up_epochs_are_never_granted(self) -> None:
        await self.raise_epoch(MAILBOX, 3, SHARD_EPOCH_MAX)
        answers = await self.registry.acquire(MAILBOX, [2, 3], "mailbox-1", "g9", wait_ms=0)
        assert answers == {2: Answer(1), 3: Answer(0, -1)}
        assert await self.registry.current(MAILBOX, 3) == Route("mailbox-1", SHARD_EPOCH_MAX), "it reads from now on"

    async def test_a_shard_of_the_last_epoch_has_no_reader_while_its_owner_lives(self) -> None:
        await self.raise_epoch(MAILBOX, 3, SHARD_EPOCH_MAX)
        await self.registry.beat(MAILBOX, "mailbox-0", "core-0", "g0", [3], ttl_ms=60_000)
        (answer,) = (await self.registry.acquire(MAILBOX, [3], "mailbox-1", "g9", wait_ms=60_000)).values()
        assert answer.epoch == 0
        assert answer.wait_ms > 0
        assert await self.registry.current(MAILBOX, 3) == Route("mailbox-0", SHARD_EPOCH_MAX)

    async def test_a_bucket_whose_epochs_are_used_up_has_no_owner_any_more(self) -> None:
        await self.raise_epoch(BUCKET, 0, SHARD_EPOCH_MAX)
        await self.registry.release(BUCKET, [0], "g0")
        assert await self.registry.acquire(BUCKET, [0], "writer-1", "g9", wait_ms=0) == {0: Answer(0, -1)}
        assert await self.registry.current(BUCKET, 0) is None

    async def test_leases_are_listed_with_the_age_of_their_last_renewal(self) -> None:
        await self.beat("writer-0", "g0")
        await self.acquire("writer-0", "g0", [1, 0])
        await self.registry.release(BUCKET, [1], "g0")
        held, free = await self.registry.leases(BUCKET)
        assert (held.shard_id, held.owner, held.epoch) == (0, "writer-0", 1)
        assert 0 <= held.age_ms < 10_000
        assert free == LeaseRow(1, "", 1, -1)

    # ---------------------------------------------------------------------------------------------------- boundaries

    async def test_a_boundary_is_set_once(self) -> None:
        boundary = EpochBoundary(1, mailbox_seq(1, 0), 0)
        await self.registry.grant(MAILBOX, [0], "mailbox-0", "g1")
        await self.registry.write_boundary(0, boundary)
        await self.registry.write_boundary(0, boundary)
        assert await self.registry.boundaries(0) == [boundary]
        assert await self.registry.boundaries(1) == []
        with pytest.raises(StoreError, match="boundary"):
            await self.registry.write_boundary(0, EpochBoundary(1, mailbox_seq(1, 8), 0))
        assert await self.registry.boundaries(0) == [boundary]

    async def test_a_late_boundary_of_a_former_owner_is_fenced(self) -> None:
        """Its successor has read who owned which offset: none may change hands afterwards."""
        late = EpochBoundary(1, mailbox_seq(1, 0), 0)
        with pytest.raises(Fenced):
            await self.registry.write_boundary(0, late)
        await self.registry.grant(MAILBOX, [0], "mailbox-0", "g1")
        await self.registry.grant(MAILBOX, [0], "mailbox-1", "g2")
        with pytest.raises(Fenced):
            await self.registry.write_boundary(0, late)
        assert await self.registry.boundaries(0) == []
        second = EpochBoundary(2, mailbox_seq(2, 7), 0)
        await self.registry.write_boundary(0, second)
        assert await self.registry.boundaries(0) == [second]

    async def test_three_grants_without_a_record(self) -> None:
        """Each start writes (epoch, H=0) before any record: the last epoch owns offset 0, the others own nothing."""
        for epoch in (1, 2, 3):
            (grant,) = await self.registry.grant(MAILBOX, [0], "mailbox-0", f"g{epoch}")
            await self.registry.write_boundary(0, EpochBoundary(grant.epoch, mailbox_seq(grant.epoch, 0), 0))
        boundaries = await self.registry.boundaries(0)
        assert [boundary.shard_epoch for boundary in boundaries] == [1, 2, 3]
        assert epoch_owning(boundaries, 0) == 3
        await self.registry.grant(MAILBOX, [0], "mailbox-0", "g4")
        await self.registry.write_boundary(0, EpochBoundary(4, mailbox_seq(4, 10), mailbox_seq(3, 9)))
        boundaries = await self.registry.boundaries(0)
        assert [epoch_owning(boundaries, offset) for offset in (0, 9, 10, 1 << 47)] == [3, 3, 4, 4]
        assert [boundary.shard_epoch for boundary in owners_of_any(boundaries)] == [3, 4]
        assert [epoch_owning(owners_of_any(boundaries), offset) for offset in (0, 9, 10, 1 << 47)] == [3, 3, 4, 4]

    async def test_an_offset_without_a_boundary_has_no_epoch(self) -> None:
        with pytest.raises(StoreError, match="no epoch boundary"):
            epoch_owning(await self.registry.boundaries(0), 0)

    # ------------------------------------------------------------------------------------------------------ sessions

    async def test_every_login_of_a_user_gets_a_greater_epoch(self) -> None:
        epochs = [
            (await self.registry.open_session(*USER, device, max_devices=8, now_ms=1000 + i)).session_epoch
            for i, device in enumerate(["phone", "laptop", "phone", "phone"])
        ]
        assert epochs == [1, 2, 3, 4]
        other = await self.registry.open_session("t1", "bob", "phone", max_devices=8, now_ms=5)
        assert other.session_epoch == 1

    async def test_above_the_device_limit_the_least_recently_active_device_goes(self) -> None:
        for i in range(8):
            await self.registry.open_session(*USER, f"d{i}", max_devices=8, now_ms=1000 + i)
        again = await self.registry.open_session(*USER, "d0", max_devices=8, now_ms=2000)
        assert (again.evicted_device_id, again.evicted_session_epoch) == ("", 0)
        ninth = await self.registry.open_session(*USER, "d8", max_devices=8, now_ms=2001)
        assert (ninth.session_epoch, ninth.evicted_device_id, ninth.evicted_session_epoch) == (10, "d1", 2)
        back = await self.registry.open_session(*USER, "d1", max_devices=8, now_ms=2002)
        assert (back.session_epoch, back.evicted_device_id) == (11, "d2")

    async def test_of_devices_active_at_the_same_time_the_older_login_goes(self) -> None:
        for device in ("b", "a", "c"):
            await self.registry.open_session(*USER, device, max_devices=3, now_ms=7)
        assert (await self.registry.open_session(*USER, "d", max_devices=3, now_ms=7)).evicted_device_id == "b"

    async def test_cluster_facts_are_those_of_the_first_caller(self) -> None:
        facts = {"cluster_id": "c1", "mailbox_shard_count": "16"}
        assert await self.registry.cluster_map(facts) == facts
        assert await self.registry.cluster_map({"cluster_id": "c2", "lane_count": "64"}) == facts


class TestMemory(ShardRegistryContract):
    @pytest.fixture(autouse=True)
    def _make(self) -> None:
        self.now_ms = 0
        self.model = self.registry = MemoryShardRegistry(lambda: self.now_ms)

    async def pass_ms(self, ms: int) -> None:
        self.now_ms += ms

    async def raise_epoch(self, kind: LeaseKind, shard_id: int, epoch: int) -> None:
        self.model._leases[kind][shard_id] = Grant(kind, shard_id, "mailbox-0", epoch, "g0")


class TestRedis(ShardRegistryContract):
    @pytest.fixture(autouse=True)
    async def _make(self, message_redis: str) -> AsyncIterator[None]:
        client = RespClient(message_redis, name="core")
        await client.connect()
        self.registry = RedisShardRegistry(client)
        self.client = client
        yield
        await client.close()

    async def pass_ms(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    async def raise_epoch(self, kind: LeaseKind, shard_id: int, epoch: int) -> None:
        await self.client.call("HSET", keys.registry_leases(kind), shard_id, f"{epoch} mailbox-0 g0")
