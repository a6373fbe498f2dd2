"""Whole nodes whose log is a Kafka: everything a node survives on the embedded log, and what a broker adds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qim.app.cli import main
from qim.app.own_node import OwnNode
from qim.commit_log.kafka_address import KafkaAddress
from qim.config.parameters import default_parameters
from qim.errors import StartupError
from tests.contract.kafka_fixtures import delete_topic, make_topics, new_prefix
from tests.integration.app.test_own_node import converge, everything_is_there, say, talk, texts_of
from tests.support.kafka_server import KafkaServer, running_kafka
from tests.support.node import APART, MERGED, devices_of, running_node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]
DAY = Path(__file__).parents[2] / "data/irc/2008-04-27.jsonl"


@pytest.fixture
def url(kafka_server: KafkaServer) -> str:
    return kafka_server.url(new_prefix())


@pytest.fixture(scope="module")
def own_kafka() -> Iterator[KafkaServer]:
    """A broker these tests may kill."""
    with running_kafka() as server:
        yield server


@pytest.mark.parametrize("options", [pytest.param(MERGED, id="merged"), pytest.param(APART, id="apart")])
def test_after_ctrl_c_and_after_kill_9_of_everything_the_same_data(url: str, options: object) -> None:
    assert options in (MERGED, APART)
    base = MERGED if options is MERGED else APART
    with running_node(replace(base, commit_log=url)) as node:
        asyncio.run(talk(node, "before"))
        assert node.stop() == 0
        node.start()
        asyncio.run(talk(node, "between"))
        node.kill_all()
        node.start()
        asyncio.run(everything_is_there(node, texts_of("before") + texts_of("between")))


def test_the_broker_dies_under_traffic_and_nothing_is_lost(own_kafka: KafkaServer) -> None:
    async def traffic(node: OwnNode) -> None:
        async with devices_of(node) as devices:
            ann, bob = await devices.add("ann"), await devices.add("bob")
            await say(ann, texts_of("before"))
            own_kafka.kill()
            sending = asyncio.get_running_loop().create_task(say(ann, texts_of("while")))
            own_kafka.launch()
            await asyncio.to_thread(own_kafka.wait_until_ready)
            await sending
            for client in (ann, bob):
                await converge(client, texts_of("before") + texts_of("while"))

    with running_node(replace(MERGED, commit_log=own_kafka.url(new_prefix()))) as node:
        asyncio.run(traffic(node))
        asyncio.run(everything_is_there(node, texts_of("before") + texts_of("while")))


def test_a_topic_made_anew_under_a_node_is_refused(kafka_server: KafkaServer, url: str) -> None:
    address = KafkaAddress.parse(url)
    with running_node(replace(MERGED, commit_log=url)) as node:
        asyncio.run(talk(node, "before"))
        first = node.pid("core-0")
        delete_topic(kafka_server, address.topic("dispatch"))
        make_topics(kafka_server, address, {"dispatch": default_parameters().single_host_mailbox_shard_count})
        wait_for(lambda: node.processes().get("core-0") != first, timeout_s=30)
        node.stop()
        with pytest.raises(StartupError, match=r"qim: the positions of this cluster belong to .* made anew"):
            node.start()


def test_a_node_keeps_the_kind_of_log_it_began_with(url: str) -> None:
    with running_node(MERGED) as node:
        node.stop()
        other = OwnNode(replace(MERGED, commit_log=url), node.directory)
        with pytest.raises(StartupError, match="finds its log or does not start"):
            other.start()


def test_the_demo_and_a_part_of_a_day(url: str, kafka_server: KafkaServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--own-node", "--commit-log", url]) == 0
    day = ["replay", str(DAY), "--limit", "150", "--commit-log", kafka_server.url(new_prefix())]
    assert main(day) == 0
    assert main([*day[:-1], kafka_server.url(new_prefix()), "--chaos", "--kills", "1"]) == 0
    assert "every line arrived" in capsys.readouterr().out
