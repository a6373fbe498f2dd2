"""26.3.1 Cost bounds of one message in a 100 000-member group: all criteria, counted in the stores."""

from __future__ import annotations

from collections import Counter

import pytest

from qim.protocol import qim_pb2 as pb
from qim.stores.redis import keys
from tests.acceptance.devices import direct
from tests.acceptance.harness import TENANT, Node, named_users, running_node
from tests.acceptance.stored import all_entries, all_records
from tests.support.redis_monitor import Command, Monitor, monitored

MEMBERS = named_users(100_000, prefix="m")
SENDER = MEMBERS[0]
BODY = b"one message for everybody"
BODY_FIELDS = {"payload_or_ciphertext", "media_metadata", "inline_ciphertext", "dek_id", "body_included"}
"""What an entry at rest would have of a body: in plain, or encrypted as in small conversations (ADR-0005)."""
WRITES = {"HSET", "HMSET", "HSETNX", "HINCRBY", "HDEL", "SET", "DEL", "UNLINK", "EXPIRE", "RENAME", "RESTORE"}
"""Commands by which a hash can change."""


def body_fields_of(stored: bytes) -> list[str]:
    """What of a body lies in an entry at rest."""
    found = [field.name for field, _ in pb.Entry.FromString(stored).ListFields() if field.name in BODY_FIELDS]
    return [*found, "body"] if BODY in stored else found


def head_writes(node: Node, commands: list[Command], conversation_id: str) -> list[Command]:
    """Commands that changed the head of a conversation."""
    head = keys.conversation(node.bucket_of(conversation_id), TENANT, conversation_id)
    return [
        command for command in commands if command.arguments and command.arguments[0] == head and command.name in WRITES
    ]


async def send_one(node: Node, group: str, monitor: Monitor) -> tuple[pb.SendAck, list[Command]]:
    """The operation: the ACK, and all commands of the message and core server until everything was dispatched."""
    sender = await node.online(SENDER)
    (ack,) = await sender.say_all(group, [BODY])
    await node.delivered()
    return ack, await monitor.settle()


@pytest.mark.timeout(180)
async def test_one_message_costs_one_record_and_one_reference_per_member() -> None:
    async with running_node() as node:
        group = await node.create_group("everybody", SENDER, MEMBERS[1:])
        await node.delivered()
        before = Counter(user for user, _ in all_entries(node))
        assert before == Counter(MEMBERS), "the announcement of the group, once for each"

        async with monitored(node.core_address) as monitor:
            ack, commands = await send_one(node, group, monitor)
        assert [seq for seq, _ in all_records(node, group)] == [ack.conversation_seq]  # criterion 1
        assert len(head_writes(node, commands, group)) == 1  # criterion 2

        new: Counter[str] = Counter()
        total = body_fields = foreign = largest = 0
        for user, row in all_entries(node):
            total += 1
            entry = pb.Entry.FromString(row.entry)
            body_fields += len(body_fields_of(row.entry))
            largest = max(largest, len(row.entry))
            if entry.event_type == pb.EVENT_MEMBERSHIP:
                continue
            new[user] += 1
            what = (entry.event_type, entry.event_ordinal, entry.message_id)
            foreign += what != (pb.EVENT_MESSAGE, 0, ack.message_id)
        assert total - before.total() == 100_000  # criterion 3
        assert foreign == 0
        assert body_fields == 0  # criterion 4
        assert largest <= node.parameters.mailbox_event_group_max_bytes // 8 == 1024  # criterion 5
        assert new == Counter(MEMBERS)  # criterion 6

        sender = await node.online(SENDER, "laptop")
        await sender.say_all(direct(*sorted((SENDER, MEMBERS[1]))), [BODY])
        await node.delivered()
        small = [body_fields_of(row.entry) for row in await node.stored_rows(MEMBERS[1])]
        assert sorted(small) == [[], [], ["inline_ciphertext", "dek_id"]], "a body at rest would have been seen"
