"""People of a load generator at a gateway with a fake node behind it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from qim.app.bench.child import ChildFailed
from qim.app.bench.people import MARK, PAYLOAD_BYTES_MIN, Person, Samples
from qim.protocol import qim_pb2 as pb
from qim.protocol.internal import PushRecipient, encode_push_batch, user_key
from qim.protocol.opcodes import InternalOpcode
from tests.support.gateway_fixture import TENANT, Gateway, running_gateway, token, until

PAYLOAD_BYTES = 300


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(settings={"lifted_tenants": frozenset((TENANT,))}) as running:
        yield running


async def online(gateway: Gateway, number: int, user_id: str, samples: Samples) -> Person:
    person = Person(number, user_id, samples)
    await person.log_in("127.0.0.1", gateway.role.port, TENANT, token(user_id, "bench"), gateway.client_context)
    return person


def push(gateway: Gateway, user_id: str, payload: bytes) -> None:
    device = next(opened.device for opened in gateway.node.opened if opened.device.user_id == user_id)
    recipient = PushRecipient(user_key(TENANT, user_id), device.connection_id, device.session_epoch, 1 << 48, b"")
    common = pb.Entry(payload_or_ciphertext=payload).SerializeToString()
    gateway.backplane.deliver(InternalOpcode.PUSH_BATCH, encode_push_batch(TENANT, common, [recipient]))


async def test_a_message_is_timed_from_when_it_was_due(gateway: Gateway) -> None:
    samples = Samples()
    ann, bob = [await online(gateway, number, user, samples) for number, user in enumerate(("ann", "bob"))]
    ann.conversation_id = "dm:ann:bob"
    ann.begin(samples, "run1", PAYLOAD_BYTES)
    ann.send(time.monotonic() - 1.0)
    await until(lambda: len(samples.ack_ms) == 1)
    sent = gateway.node.sent[0]
    assert sent.limits_lifted
    assert sent.message.conversation_id == "dm:ann:bob"
    assert sent.message.payload.startswith(MARK)
    assert len(sent.message.payload) == PAYLOAD_BYTES
    for user_id in ("ann", "bob"):
        push(gateway, user_id, sent.message.payload)
    await until(lambda: len(samples.delivery_ms) == 1)
    assert 1000 <= samples.ack_ms[0] < 3000
    assert 1000 <= samples.delivery_ms[0] < 3000
    assert samples.sent == 1
    assert not ann.waiting
    for person in (ann, bob):
        person.close()


async def test_the_sender_is_not_a_recipient_and_the_warm_up_does_not_count(gateway: Gateway) -> None:
    samples = Samples(from_s=time.monotonic() + 3600)
    ann = await online(gateway, 0, "ann", samples)
    ann.conversation_id = "dm:ann:bob"
    ann.begin(samples, "run1", PAYLOAD_BYTES_MIN)
    ann.send(time.monotonic())
    await until(lambda: not ann.waiting)
    push(gateway, "ann", gateway.node.sent[0].message.payload)
    ann.ping()
    assert (samples.sent, len(samples.ack_ms), len(samples.delivery_ms)) == (0, 0, 0)
    ann.close()
    await until(lambda: bool(ann.closed))


async def test_refusals_are_counted_by_their_code(gateway: Gateway) -> None:
    samples = Samples()
    ann = await online(gateway, 0, "ann", samples)
    ann.conversation_id = "dm:bob:carol"
    ann.begin(samples, "run1", PAYLOAD_BYTES)
    ann.send(time.monotonic())
    await until(lambda: samples.refused.total() == 1)
    assert dict(samples.refused) == {"PERMISSION_DENIED": 1}
    ann.close()


async def test_dirty_mailboxes_are_counted(gateway: Gateway) -> None:
    samples = Samples()
    ann = await online(gateway, 0, "ann", samples)
    device = gateway.node.opened[0].device
    gateway.backplane.deliver(InternalOpcode.MARK_DIRTY, pb.MarkDirty(devices=[device]).SerializeToString())
    await until(lambda: samples.dirty == 1)
    ann.close()


async def test_somebody_with_a_mailbox_is_not_new(gateway: Gateway) -> None:
    gateway.node.mailbox.append(gateway.node.watermark)
    with pytest.raises(ChildFailed, match="is not new"):
        await online(gateway, 0, "ann", Samples())


async def test_a_refused_group_says_why(gateway: Gateway) -> None:
    ann = await online(gateway, 0, "ann", Samples())
    await ann.create_group("friends", ["ann", "bob"])
    with pytest.raises(ChildFailed, match="CREATE_GROUP of ann: PERMISSION_DENIED"):
        await ann.create_group("not a name", ["ann"])
    ann.close()
