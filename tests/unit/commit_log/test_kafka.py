"""What needs no broker; everything else is in the contract suites."""

from __future__ import annotations

import asyncio
import threading

import pytest

from qim.commit_log.kafka import KafkaConnection
from qim.commit_log.kafka_address import KafkaAddress
from qim.errors import StoreUnavailable


async def test_reads_do_not_wait_behind_a_partition_that_does_not_answer() -> None:
    connection = KafkaConnection(KafkaAddress.parse("kafka://127.0.0.1:1/t?replicas=1"))
    answer = threading.Event()

    def unanswered(_: object) -> str:
        if not answer.wait(20):
            raise AssertionError("the other read waited")
        return "led again"

    def unavailable(_: object) -> str:
        raise StoreUnavailable("no leader")

    with pytest.raises(StoreUnavailable):
        await connection.reading("dispatch", 2, unavailable)
    waiting = asyncio.create_task(connection.reading("dispatch", 2, unanswered))
    assert await connection.reading("dispatch", 1, lambda _: "read") == "read"
    assert await connection.reading("outbox", 2, lambda _: "read") == "read"
    assert not waiting.done()
    answer.set()
    assert await waiting == "led again"
    assert await connection.reading("dispatch", 2, lambda _: threading.current_thread().name) == "kafka-reader_0"
    await connection.close()
