"""26.6.4 Convergence of idempotency keys: all criteria.

The three duplicates at once. The client: four of its five SEND_ACKs are lost, two on a living link and two with it. The
FanoutCoordinator: three times it does not hear that its append of the message's dispatches was done. The dispatch log:
consumed as it grows, then by a successor whose store went back to before the message, then by one that finds every
entry there but not what was done about them - more than a store that keeps its order can lose.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from qim.client.link import ClientOptions
from qim.client.pending import SendOptions
from qim.commit_log.api import AppendRun
from qim.errors import StoreError, StoreUnavailable
from qim.obs import metrics
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.protocol.reader import Frame
from tests.acceptance.devices import RecordedClient, decode, triple
from tests.acceptance.harness import Node, named_users, reading, running_node, until
from tests.acceptance.stored import all_entries, all_records, connected, go_back_to, snapshot

MEMBERS = named_users(40, prefix="member")
SENDER, READER = MEMBERS[:2]
SENDS = 5
LOST_ON_A_LIVING_LINK = 2
RETRIES = 3
CLIENT_MESSAGE_ID = "once"
IMPATIENT = ClientOptions(
    reconnect_scale=0.05, send=SendOptions(send_ack_timeout_ms=150, unanswered_max_ms=300), resync_min_interval_ms=0
)


class Hold:
    """Chunk gate: while it is closed no member's entry is written, so only a SEND_ACK can tell the sender."""

    def __init__(self) -> None:
        self.closed = False

    def __call__(self, shard: int, lane: int, offset: int) -> bool:
        return self.closed


def lose_acks(client: RecordedClient) -> None:
    """All SEND_ACKs but the last one arrive at the device and are lost on the way up."""
    hear = client._on_frame

    def on_frame(frame: Frame) -> None:
        acks = len(client.bodies(Opcode.SEND_ACK)) + 1
        if frame.opcode != Opcode.SEND_ACK or acks == SENDS:
            hear(frame)
            return
        client.received.append(decode(frame))
        if acks > LOST_ON_A_LIVING_LINK:
            client.cut()

    client._on_frame = on_frame  # type: ignore[method-assign]


def lose_append_answers(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next appends to the dispatch logs are done, but fan-out hears of a failure; their sizes."""
    append = node.outside.dispatch_log.append_each
    lost: list[int] = []

    async def done_unheard(runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        offsets = await append(runs)
        if len(lost) < RETRIES:
            lost.append(sum(len(run.records) for run in runs))
            raise StoreUnavailable("the answer was lost")
        return offsets

    monkeypatch.setattr(node.outside.dispatch_log, "append_each", done_unheard)
    return lost


async def send_five_times(node: Node, client: RecordedClient, group: str) -> pb.SendAck:
    """The client's part; its bubble while it retries and after."""
    handle = await client.send(group, b"exactly once", client_message_id=CLIENT_MESSAGE_ID)
    await until(lambda: len(client.bodies(Opcode.SEND_ACK)) == SENDS - 1)
    assert [pending.request.client_message_id for pending in client.store.pending()] == [CLIENT_MESSAGE_ID]
    assert bubbles(client, group) == []
    await asyncio.wait_for(handle.future, 10)
    sends = client.requests(Opcode.SEND_MESSAGE)
    assert [send.body.client_message_id for send in sends] == [CLIENT_MESSAGE_ID] * SENDS
    acks: list[pb.SendAck] = client.bodies(Opcode.SEND_ACK)
    assert len(acks) == SENDS
    assert {ack.client_message_id for ack in acks} == {CLIENT_MESSAGE_ID}  # criterion 5
    assert len({ack.message_id for ack in acks}) == 1  # criterion 5
    assert len({(ack.conversation_seq, ack.last_activity_id) for ack in acks}) == 1
    return acks[0]


def bubbles(client: RecordedClient, group: str) -> list[bytes]:
    """message_ids of what the device shows of the group's messages."""
    return [row.message_id for row in client.store.messages(group) if row.payload]


def check_entries(node: Node, message_id: bytes) -> set[tuple[str, int, int, int]]:
    """(user, triple) of the message's entries in the store."""
    found = [
        (user, *triple(entry))
        for user, row in all_entries(node)
        if (entry := pb.Entry.FromString(row.entry)).message_id == message_id
    ]
    assert len(found) == len(set(found))  # criterion 3
    assert Counter(user for user, *_ in found) == Counter(MEMBERS)  # criterion 3
    return set(found)


async def log_in_again(client: RecordedClient) -> None:
    """Lose the link and come back."""
    connects = client.connects
    client.cut()
    await until(lambda: client.connects > connects and client.live)


async def check_devices(node: Node, clients: Sequence[RecordedClient], group: str, ack: pb.SendAck) -> None:
    """Devices that were there all the time, after another login, and one that starts from nothing."""
    for client in clients:
        await log_in_again(client)
        assert bubbles(client, group) == [ack.message_id]  # criterion 4
        assert client.store.pending() == client.store.pending(failed=True) == []  # criterion 4
    fresh = await node.online(READER, "fresh")
    entries = [entry for batch in fresh.bodies(Opcode.MAILBOX_BATCH) for entry in batch.entries]
    assert [entry.message_id for entry in entries].count(ack.message_id) == 1
    await fresh.close()


async def consume_again(node: Node, before: dict[bytes, tuple[bytes, int]] | None) -> None:
    """Take the shards over with their store as it was, or without what tells which work is done."""
    await node.stop_mailbox()
    if before is not None:
        go_back_to(node.mailbox_address, before)
    else:
        with connected(node.mailbox_address) as store:
            store.delete(*store.scan_iter(match="shard:*"), *store.scan_iter(match="prog:*"))
    await node.start_mailbox()
    await node.delivered()


async def test_three_kinds_of_duplicates_leave_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Hold()
    async with running_node(chunk_gate=gate) as node:
        group = await node.create_group("team", SENDER, MEMBERS[1:])
        await node.delivered()
        sender, reader = (node.client(user, options=IMPATIENT) for user in (SENDER, READER))
        lose_acks(sender)
        for client in (sender, reader):
            await client.wait_ready(10_000)
        hits, duplicates = reading(metrics.DEDUP_HIT_TOTAL), reading(metrics.DISPATCH_DUPLICATE_SUPPRESSED_TOTAL)
        before = snapshot(node.mailbox_address)

        gate.closed = True
        unheard = lose_append_answers(node, monkeypatch)
        ack = await send_five_times(node, sender, group)
        await until(lambda: len(unheard) == RETRIES)
        gate.closed = False
        await node.delivered()
        assert [seq for seq, _ in all_records(node, group)] == [ack.conversation_seq]  # criterion 1
        assert reading(metrics.DEDUP_HIT_TOTAL) - hits == SENDS - 1  # criterion 2
        entries = check_entries(node, ack.message_id)

        for consumption in (1, 2, 3):
            if consumption > 1:
                await consume_again(node, before if consumption == 2 else None)
            suppressed = reading(metrics.DISPATCH_DUPLICATE_SUPPRESSED_TOTAL) - duplicates
            assert suppressed == sum(unheard) * consumption, "each one was met, and took no effect"
            assert check_entries(node, ack.message_id) == entries  # criterion 3
            await check_devices(node, (sender, reader), group, ack)
        assert [seq for seq, _ in all_records(node, group)] == [ack.conversation_seq]  # criterion 1
