"""Outages of a real Kafka: it is away, one partition is, or brokers are lost of three."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from confluent_kafka import KafkaException

from qim.commit_log.kafka import KafkaCommitLog, KafkaConnection
from qim.commit_log.kafka_address import KafkaAddress
from qim.commit_log.kafka_topics import prepare_topics
from qim.errors import StoreUnavailable
from tests.support.faults.broker import (
    broker_silent,
    broker_stopped,
    running_replicated_cluster,
    running_split_cluster,
)
from tests.support.kafka_server import running_kafka

pytestmark = pytest.mark.kafka


def test_a_stopped_broker_is_away_and_comes_back() -> None:
    with running_kafka() as server:
        with broker_stopped(server), pytest.raises(KafkaException):
            server.admin().list_topics(timeout=2)
        assert server.admin().list_topics(timeout=5).brokers


def test_a_silent_broker_answers_nothing_and_goes_on() -> None:
    with running_kafka() as server:
        with broker_silent(server), pytest.raises(KafkaException):
            server.admin().list_topics(timeout=2)
        assert server.admin().list_topics(timeout=5).brokers


async def test_a_partition_without_a_leader_stops_nobody_else() -> None:
    with running_split_cluster() as cluster:
        url = cluster.make_topics("s", {"dispatch": 4}, {"dispatch": {2}})
        connection = KafkaConnection(KafkaAddress.parse(url))
        log = KafkaCommitLog(connection, "dispatch", 4)
        assert await log.append([(2, b"before")]) == [0]
        with cluster.partitions_down():
            assert cluster.unled("s.dispatch") == {2}
            assert await log.append([(1, b"served")]) == [0]
            waiting = asyncio.create_task(log.append([(2, b"waits")]))
            await asyncio.sleep(1.0)
            assert not waiting.done()
        async with asyncio.timeout(60):
            assert await waiting == [1]
        with cluster.partitions_silent():
            waiting = asyncio.create_task(log.append([(2, b"waits again")]))
            assert await log.append([(0, b"served")]) == [0]
            assert not waiting.done()
        async with asyncio.timeout(60):
            assert await waiting == [2]
        assert [record.value for record in await log.read(2, 0)] == [b"before", b"waits", b"waits again"]
        await connection.close()


async def test_reads_wait_for_one_partition_of_a_silent_broker_only() -> None:
    with running_split_cluster() as cluster:
        url = cluster.make_topics("s", {"dispatch": 3}, {"dispatch": {1, 2}})
        connection = KafkaConnection(KafkaAddress.parse(url))
        log = KafkaCommitLog(connection, "dispatch", 3)
        for partition in range(3):
            await log.watermarks(partition)
        with cluster.partitions_silent():
            with pytest.raises(StoreUnavailable):
                await log.watermarks(1)
            # the other one it leads has not been asked for yet, and is in nobody's way
            silent = asyncio.create_task(log.watermarks(2))
            served = asyncio.create_task(log.watermarks(0))
            done, _ = await asyncio.wait((silent, served), return_when=asyncio.FIRST_COMPLETED)
            assert done == {served}
            with pytest.raises(StoreUnavailable):
                await silent
        async with asyncio.timeout(60):
            while connection._away:
                with contextlib.suppress(StoreUnavailable):
                    await asyncio.gather(*map(log.watermarks, (1, 2)))
        await connection.close()


async def test_of_three_brokers_one_is_missed_by_nobody_and_two_are_waited_for() -> None:
    with running_replicated_cluster() as cluster:
        url = cluster.url("r")
        prepare_topics(url, {"dispatch": 3}, first_start=True, retention_ms=86_400_000)
        assert not cluster.out_of_sync()
        connection = KafkaConnection(KafkaAddress.parse(url))
        log = KafkaCommitLog(connection, "dispatch", 3)
        assert await log.append([(partition, b"before") for partition in range(3)]) == [0, 0, 0]
        with cluster.lost(0):
            async with asyncio.timeout(60):
                assert await log.append([(partition, b"of two") for partition in range(3)]) == [1, 1, 1]
        with cluster.lost(1, 2):
            waiting = asyncio.create_task(log.append([(partition, b"waits") for partition in range(3)]))
            await asyncio.sleep(3.0)
            assert not waiting.done()
        async with asyncio.timeout(60):
            await waiting
        for partition in range(3):
            values = [record.value for record in await log.read(partition, 0)]
            # what was written while too few were in sync is written again
            assert values[:3] == [b"before", b"of two", b"waits"]
            assert set(values[3:]) <= {b"waits"}
        await connection.close()
