"""Commit calls that carry many buckets, through the writer role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qim.core.ids import conversation_bucket
from qim.errors import ErrorCode, Fenced
from tests.unit.shard_workers.conversation.test_runner import BUCKETS, DM, ModelBench, until


@pytest.fixture
async def bench() -> AsyncIterator[ModelBench]:
    made = ModelBench()
    await made.start()
    yield made
    await made.close()
    assert made.failures == []


async def test_buckets_share_a_call_and_what_comes_meanwhile_waits_for_the_next(bench: ModelBench) -> None:
    pairs = [f"dm:ann:b{index}" for index in range(12)]
    assert len({conversation_bucket("t", pair, BUCKETS) for pair in pairs}) == BUCKETS
    asked = [asyncio.create_task(bench.acked("early", to=pair)) for pair in pairs]
    await until(lambda: bench.model.calls)
    asked += [asyncio.create_task(bench.acked("late", to=pair)) for pair in pairs]
    await asyncio.gather(*asked)
    assert len(bench.model.calls) <= 3
    assert sum(bench.model.calls) == 24


async def test_a_call_is_bounded_and_leaves_the_rest_to_the_next(
    bench: ModelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qim.shard_workers.conversation.commits.CALL_MESSAGES_MAX", 4)
    await asyncio.gather(*(bench.acked("line", to=f"dm:ann:b{index}") for index in range(40)))
    assert sum(bench.model.calls) == 40
    assert max(bench.model.calls) <= 3 + 16, "less than the bound, and one bucket"


async def test_a_bucket_that_is_refused_takes_no_other_with_it(bench: ModelBench) -> None:
    bucket = conversation_bucket("t", DM, BUCKETS)
    other = next(pair for n in range(99) if conversation_bucket("t", pair := f"dm:ann:b{n}", BUCKETS) != bucket)
    await bench.model.open_bucket(bucket, 99, "another writer")
    fenced, fine = await asyncio.gather(bench.send("hello"), bench.send("hello", to=other))
    assert int(fenced.error.code) == ErrorCode.REGION_FAILOVER
    assert fine.ack.conversation_seq == 1
    assert isinstance(bench.failures.pop(), Fenced)
