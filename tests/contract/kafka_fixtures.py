"""Topics on the broker of a test session."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from qim.commit_log.kafka import KafkaCommitLog, KafkaConnection, describe
from qim.commit_log.kafka_address import KafkaAddress
from qim.errors import StoreError
from tests.support.kafka_server import KafkaServer


def new_prefix() -> str:
    """Topics of a test are its own."""
    return f"t{secrets.token_hex(4)}"


def make_topics(server: KafkaServer, address: KafkaAddress, partitions: Mapping[str, int]) -> None:
    """Return when the broker tells of them."""
    admin = server.admin()
    topics = [
        NewTopic(address.topic(name), count, 1, config={"flush.messages": "1"}) for name, count in partitions.items()
    ]
    for made in admin.create_topics(topics).values():
        made.result(30)
    deadline_s = time.monotonic() + 30
    while True:
        try:
            describe(admin, address, list(partitions))
        except StoreError:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
            continue
        return


def change_topic(server: KafkaServer, topic: str, settings: Mapping[str, str]) -> None:
    """Return when the broker goes by them."""
    admin = server.admin()
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    admin.incremental_alter_configs([resource])[resource].result(30)
    deadline_s = time.monotonic() + 30
    while True:
        asked = ConfigResource(ConfigResource.Type.TOPIC, topic)
        found = admin.describe_configs([asked])[asked].result(30)
        if all(found[name].value == value for name, value in settings.items()):
            return
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def delete_topic(server: KafkaServer, topic: str) -> None:
    """Return when nobody knows it any more."""
    admin = server.admin()
    admin.delete_topics([topic])[topic].result(30)
    deadline_s = time.monotonic() + 30
    while topic in admin.list_topics(timeout=5).topics:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class TrimmableKafkaLog(KafkaCommitLog):
    """With what the broker's retention does, on demand."""

    def __init__(self, server: KafkaServer, connection: KafkaConnection, name: str, partition_count: int) -> None:
        super().__init__(connection, name, partition_count)
        self._server = server
        self._full_name = connection.address.topic(name)

    async def trim(self, partition: int, safe_offset: int) -> int:
        low, high = await self.watermarks(partition)
        if safe_offset > high:
            raise StoreError(f"{safe_offset} is above {high}")
        if safe_offset <= low:
            return 0
        wanted = TopicPartition(self._full_name, partition, safe_offset)
        admin = self._server.admin()  # its answers come only while it is referenced
        try:
            (answer,) = admin.delete_records([wanted]).values()
            return int(answer.result(30).low_watermark) - low
        except KafkaException as error:
            raise StoreError(str(error)) from None
