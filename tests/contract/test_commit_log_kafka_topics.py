"""What a node asks of a broker's topics before it uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from qim.commit_log import kafka_topics
from qim.commit_log.api import LogIdentity
from qim.commit_log.kafka_address import KafkaAddress
from qim.commit_log.kafka_topics import prepare_topics
from qim.errors import StartupError
from tests.contract.kafka_fixtures import delete_topic, new_prefix
from tests.support.kafka_server import KafkaServer
from tests.support.ports import free_port
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

PARTITIONS = {"outbox": 4, "dispatch": 2}
DAY_MS = 86_400_000

Prepare = Callable[..., dict[str, LogIdentity]]


@pytest.fixture
def address(kafka_server: KafkaServer) -> KafkaAddress:
    return KafkaAddress.parse(kafka_server.url(new_prefix()))


@pytest.fixture
def prepare(address: KafkaAddress) -> Prepare:
    """In this process, where it takes no time to start."""

    def run(*, first_start: bool, **changed: Any) -> dict[str, LogIdentity]:
        partitions = changed.get("partitions", PARTITIONS)
        retention_ms = changed.get("retention_ms", DAY_MS)
        where = changed.get("address", address)
        return kafka_topics._Probe(where, partitions, retention_ms).run(first_start=first_start)

    return run


def test_a_first_start_makes_them_and_later_ones_find_the_same(kafka_server: KafkaServer) -> None:
    url = kafka_server.url(new_prefix())
    made = prepare_topics(url, PARTITIONS, first_start=True, retention_ms=DAY_MS)
    assert {name: identity.partition_count for name, identity in made.items()} == PARTITIONS
    assert prepare_topics(url, PARTITIONS, first_start=True, retention_ms=DAY_MS) == made
    assert prepare_topics(url, PARTITIONS, first_start=False, retention_ms=DAY_MS) == made
    with pytest.raises(StartupError, match="has 4 partitions, the node needs exactly 8") as refused:
        prepare_topics(url, {"outbox": 8, "dispatch": 2}, first_start=False, retention_ms=DAY_MS)
    assert "\n" not in str(refused.value)


def test_a_topic_that_is_gone_is_not_made_again(
    kafka_server: KafkaServer, address: KafkaAddress, prepare: Prepare
) -> None:
    prepare(first_start=True)
    delete_topic(kafka_server, address.topic("dispatch"))
    with pytest.raises(StartupError, match="bring its topics back"):
        prepare(first_start=False)


def test_a_new_node_never_takes_the_records_of_another(
    kafka_server: KafkaServer, address: KafkaAddress, prepare: Prepare
) -> None:
    from confluent_kafka import Producer

    prepare(first_start=True)
    producer = Producer({"bootstrap.servers": kafka_server.servers})
    producer.produce(address.topic("outbox"), b"x", partition=3)
    assert producer.flush(30) == 0
    with pytest.raises(StartupError, match="holds records of another node"):
        prepare(first_start=True)
    prepare(first_start=False)


def test_one_replica_has_to_be_asked_for(kafka_server: KafkaServer, address: KafkaAddress, prepare: Prepare) -> None:
    prepare(first_start=True)
    production = KafkaAddress.parse(f"kafka://{kafka_server.servers}/{address.prefix}")
    with pytest.raises(StartupError, match="has 1 replicas, 3 are needed"):
        prepare(first_start=False, address=production)
    elsewhere = KafkaAddress.parse(f"kafka://{kafka_server.servers}/{new_prefix()}")
    with pytest.raises(StartupError, match="cannot make the topic"):
        prepare(first_start=True, address=elsewhere)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cleanup.policy", "compact"),
        ("flush.messages", "100"),
        ("max.message.bytes", "100000"),
        ("retention.ms", "3600000"),
    ],
)
def test_a_setting_that_loses_records_is_refused(
    kafka_server: KafkaServer, address: KafkaAddress, prepare: Prepare, name: str, value: str
) -> None:
    prepare(first_start=True)
    change = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, address.topic("outbox"), incremental_configs=[change])
    admin = kafka_server.admin()
    admin.incremental_alter_configs([resource])[resource].result(30)
    wait_for(lambda: admin.describe_configs([resource])[resource].result(30)[name].value == value)
    with pytest.raises(StartupError, match=rf"{name} {value}: set it to"):
        prepare(first_start=False)


@pytest.mark.parametrize(("name", "value"), [("min.insync.replicas", "1"), ("unclean.leader.election.enable", "true")])
def test_more_replicas_need_settings_that_use_them(
    kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    address = KafkaAddress.parse(f"kafka://{kafka_server.servers}/{new_prefix()}")
    probe = kafka_topics._Probe(address, {"outbox": 1}, DAY_MS)
    config = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false", name: value}
    admin = kafka_server.admin()
    admin.create_topics([NewTopic(address.topic("outbox"), 1, 1, config=config)])
    monkeypatch.setattr(kafka_topics._Probe, "_check_replicas", lambda self, name: None)
    probe._wait_until_known()
    with pytest.raises(StartupError, match=rf"{name} {value}: set it to"):
        probe.run(first_start=False)


def test_a_broker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, prepare: Prepare) -> None:
    monkeypatch.setattr(kafka_topics, "REACH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(kafka_topics, "CALL_TIMEOUT_S", 0.5)
    nobody = KafkaAddress.parse(f"kafka://127.0.0.1:{free_port()}")
    with pytest.raises(StartupError, match="no Kafka answers at 127.0.0.1"):
        prepare(first_start=True, address=nobody)
