"""Addresses of a broker's commit log."""

from __future__ import annotations

from pathlib import Path

import pytest

from qim.commit_log.kafka_address import KafkaAddress
from qim.errors import StartupError


def test_an_address_names_servers_topics_and_replicas() -> None:
    address = KafkaAddress.parse("kafka://k1:9092,k2:9092")
    assert (address.servers, address.replicas, address.topic("outbox")) == ("k1:9092,k2:9092", 3, "qim.outbox")
    one_box = KafkaAddress.parse("kafka://127.0.0.1:9092/chat.eu?replicas=1")
    assert (one_box.replicas, one_box.topic("dispatch")) == (1, "chat.eu.dispatch")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://k1:9092",
        "kafka://",
        "kafka://k1",
        "kafka://k1:0",
        "kafka://k1:9092,",
        "kafka://k1:9092?acks=1",
        "kafka://k1:9092#x",
        "kafka://k1:9092/a/b",
        "kafka://k1:9092/a@b",
        "kafka://k1:9092?replicas=2",
        "kafka://k1:9092?replicas=x",
    ],
)
def test_what_is_no_address_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(StartupError) as refused:
        KafkaAddress.parse(url)
    assert url in str(refused.value)
    assert "\n" not in str(refused.value)


def test_properties_of_the_operator_never_replace_what_order_and_durability_need(tmp_path: Path) -> None:
    properties = tmp_path / "client.properties"
    properties.write_text("# of the Kafka team\nsecurity.protocol = SASL_SSL\n\nbootstrap.servers=elsewhere:1\n")
    settings = KafkaAddress.parse(f"kafka://k1:9092?client={properties}").client_settings()
    assert (settings["security.protocol"], settings["bootstrap.servers"]) == ("SASL_SSL", "k1:9092")
    with pytest.raises(StartupError, match="cannot read"):
        KafkaAddress.parse("kafka://k1:9092?client=/nowhere").client_settings()
