"""26.2.1 Many offline messages raise `has_offline` exactly once: all criteria, on frames as captured."""

from __future__ import annotations

from qim.protocol.opcodes import Opcode
from tests.acceptance.devices import direct
from tests.acceptance.harness import running_node

BACKLOG = 100
PENDING_HINT_ERROR_RATIO = 0.2
"""`pending_hint_error_ratio` (B.3)."""
SYNC_FRAMES = {Opcode.AUTH_OK, Opcode.MAILBOX_BATCH, Opcode.ONLINE_READY}
"""What a v2 login may be answered with; v1's two separate sync signals have no opcode among them."""


async def test_a_backlog_is_announced_once() -> None:
    async with running_node() as node:
        sender = await node.online("ann")
        chat = direct("ann", "bob")
        acks = await sender.say_all(chat, [f"line {n}".encode() for n in range(BACKLOG)])
        assert len({ack.conversation_seq for ack in acks}) == BACKLOG
        await node.delivered()
        assert len(await node.stored_rows("bob")) == BACKLOG

        receiver = await node.device("bob")
        welcome = await receiver.log_in()
        assert welcome.has_offline is True  # criterion 1
        hint = welcome.pending_entry_count_hint
        assert abs(hint - BACKLOG) / BACKLOG <= PENDING_HINT_ERROR_RATIO  # criterion 2

        # Messages go on while the device syncs: their pushes must wait, and none may repeat what is pulled.
        half = await receiver.pull_batch(0, welcome.sync_to_seq, max_items=BACKLOG // 2)
        await sender.say_all(chat, [b"meanwhile"] * 10)
        await node.delivered()
        rest = await receiver.pull_through(half.covered_through_seq, welcome.sync_to_seq)
        assert len(half.entries) + sum(len(batch.entries) for batch in rest) == BACKLOG
        await receiver.complete()
        opcodes = [frame.opcode for frame in receiver.received]
        login = opcodes[: opcodes.index(Opcode.ONLINE_READY) + 1]
        assert login.count(Opcode.AUTH_OK) == 1  # criterion 1
        assert set(login) - SYNC_FRAMES - {Opcode.PUSH_EVENTS} == set()  # criterion 3
        before_ready = receiver.received[: len(login)]
        repeated = [
            entry.mailbox_seq
            for frame in before_ready
            if frame.opcode is Opcode.PUSH_EVENTS
            for entry in frame.body.events
            if entry.mailbox_seq <= welcome.sync_to_seq
        ]
        assert len(repeated) == 0  # criterion 4

        await receiver.until(lambda: len(receiver.pushed()) == 10)
        assert all(entry.mailbox_seq > welcome.sync_to_seq for entry in receiver.pushed())
        assert receiver.bodies(Opcode.AUTH_OK) == [welcome]  # criterion 1
        assert receiver.bodies(Opcode.ERROR) == []
