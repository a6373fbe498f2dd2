"""The audit on the servers of a real node, in this process and by the command line."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
import redis
from confluent_kafka import Producer

from qim.app.audit.command import audit_dispatch
from qim.app.demo import run_demo
from qim.app.own_node import OwnNode
from qim.commit_log.kafka_address import KafkaAddress
from qim.protocol.qim_pb2 import GroupDispatch
from tests.contract.kafka_fixtures import new_prefix
from tests.support.kafka_server import KafkaServer
from tests.support.node import MERGED, running_node


def check_no_orphans_until_something_is_taken_away(node: OwnNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(node.data_dir) == 0
    capsys.readouterr()
    assert audit_dispatch(node.data_dir, as_json=True) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["passed"]
    assert report["examined"]["commits"] > 0
    assert report["examined"]["dispatches"] >= report["examined"]["commits"]
    assert report["examined"]["entries"] >= report["examined"]["commits"]

    with redis.Redis.from_url(node.address().mailbox_address) as mailbox:
        name = next(mailbox.scan_iter(match="mailbox:*"))
        (first, *_) = mailbox.zrange(name, 0, 0)
        mailbox.zrem(name, first)
    with redis.Redis.from_url(node.address().core_address) as core:
        name = next(core.scan_iter(match="rec:*"))
        core.delete(name)
    assert audit_dispatch(node.data_dir, as_json=True) == 1
    found = orjson.loads(capsys.readouterr().out)["found"]
    assert found["mailbox entry missing"] == 1
    assert found["committed without record"] > 0
    assert found["committed without dispatch"] == found["dispatch without commit"] == 0
    assert audit_dispatch(node.data_dir) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_a_node_that_talked_has_no_orphans_until_something_is_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    with running_node(MERGED) as node:
        check_no_orphans_until_something_is_taken_away(node, capsys)


@pytest.mark.kafka
@pytest.mark.timeout(180)
def test_a_node_on_a_broker_is_audited_as_one_with_its_own_log(
    kafka_server: KafkaServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what somebody else wrote into its topic is found."""
    url = kafka_server.url(new_prefix())
    with running_node(replace(MERGED, commit_log=url)) as node:
        check_no_orphans_until_something_is_taken_away(node, capsys)
        foreign = GroupDispatch(target_mailbox_shard=3, source_offset=1 << 40, member_count=1)
        foreign.record.tenant_id, foreign.record.conversation_id = "demo", "dm:alice:bob"
        producer = Producer({"bootstrap.servers": kafka_server.servers})
        producer.produce(KafkaAddress.parse(url).topic("dispatch"), foreign.SerializeToString(), partition=3)
        assert producer.flush(30) == 0
        assert audit_dispatch(node.data_dir, as_json=True) == 1
        assert orjson.loads(capsys.readouterr().out)["found"]["dispatch without commit"] == 1
