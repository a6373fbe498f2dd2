"""A bench node, its generators and a measured point: everything `direct` and `group` are made of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qim.app.bench.child import ChildFailed
from qim.app.bench.large import MaterializationProbe
from qim.app.bench.load import SendOne
from qim.app.bench.node import PAYLOAD_BYTES, BenchNode
from qim.core.ids import direct_conversation_id, group_conversation_id

PAIR = ["ann", "bob"]
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def node() -> Iterator[BenchNode]:
    with BenchNode() as running:
        yield running


def test_a_point_of_direct_messages(node: BenchNode) -> None:
    generator = node.log_in(PAIR)
    point = node.measure(generator, [direct_conversation_id(*PAIR)] * 2, 50.0, 1.0, others=1)
    refused = sum(point.refused.values())  # a busy machine delivers late, and the node says so
    assert point.sent > 20
    assert point.acked == point.sent - refused > 0
    assert point.deliveries == point.acked
    assert not (point.missing_deliveries or point.unanswered or point.closed or point.dirty)
    assert point.ack.p50_ms > 0
    assert point.delivery.p50_ms > point.ack.p50_ms / 2
    assert {"gateway", "core", "redis-core", "redis-mailbox", "admin", "supervisor"} <= point.cpu_us.keys()
    assert point.cpu_us["core"] > 0
    assert point.generator_us > 0


def test_a_group_message_is_seen_when_every_shard_has_it(node: BenchNode) -> None:
    members = [f"m{number:03d}" for number in range(200)]  # somebody in every shard
    generator = node.log_in(members[:2], first_number=10)
    conversation_id = group_conversation_id("bench-test")
    probe = MaterializationProbe(node.address, conversation_id)
    try:
        before = probe.log_ends()
        node.make_group(generator, "bench-test", members)
        probe.wait_for(before)
        before = probe.log_ends()
        command = SendOne(conversation_id=conversation_id, payload_bytes=PAYLOAD_BYTES, run_id="one")
        sent_s = generator.call(command, TIMEOUT_S)
        assert probe.wait_for(before) > sent_s
        assert probe.entry_bytes("m199") > 100
        with pytest.raises(ChildFailed, match="has no mailbox"):
            probe.entry_bytes("stranger")
    finally:
        probe.close()


def test_a_refused_message_is_an_error(node: BenchNode) -> None:
    generator = node.log_in(["carol"], first_number=20)
    command = SendOne(conversation_id=group_conversation_id("nobody"), payload_bytes=PAYLOAD_BYTES, run_id="one")
    with pytest.raises(ChildFailed, match="PERMISSION_DENIED"):
        generator.call(command, TIMEOUT_S)
