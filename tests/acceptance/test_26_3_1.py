"""26.3.1 Cost bounds of one message in a 100 000-member group: all criteria, counted in the stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from qim.protocol import qim_pb2 as pb
from qim.stores.mailbox_layout import split_member
from qim.stores.redis import keys
from tests.acceptance.harness import TENANT, Node, named_users, running_node
from tests.support.redis_monitor import Command, Monitor, monitored

MEMBERS = named_users(100_000, prefix="m")
SENDER = MEMBERS[0]
BODY = b"one message for everybody"
BODY_FIELDS = {"payload_or_ciphertext", "media_metadata", "inline_ciphertext", "dek_id", "body_included"}
"""What an entry at rest would have of a body: in plain, or encrypted as in small conversations (ADR-0005)."""
WRITES = {"HSET", "HMSET", "HSETNX", "HINCRBY", "HDEL", "SET", "DEL", "UNLINK", "EXPIRE", "RENAME", "RESTORE"}
"""Commands by which a hash can change."""
KEYS_READ = 2000


def connected(address: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=address.removeprefix("unix://"))


def entries_by_user(node: Node) -> Iterator[tuple[str, bytes]]:
    """(user, stored entry) of every entry in every mailbox of the store."""
    prefix = keys.mailbox_prefix("*", "*")
    with connected(node.mailbox_address) as store:
        names = list(store.scan_iter(match=f"{prefix}*", count=10_000))
        assert len(names) == len(set(names))
        for first in range(0, len(names), KEYS_READ):
            part = names[first : first + KEYS_READ]
            with store.pipeline(transaction=False) as reads:
                for name in part:
                    reads.zrange(name, 0, -1)
                for name, members in zip(part, reads.execute(), strict=True):
                    _, tenant, user, _ = name.decode().split(":")
                    assert tenant == TENANT
                    for member in members:
                        yield user, split_member(member).entry


def records_of(node: Node, conversation_id: str) -> list[tuple[bytes, bytes]]:
    """(conversation_seq, record) of every row the MessageStore holds for a conversation."""
    found: list[tuple[bytes, bytes]] = []
    with connected(node.core_address) as store:
        for name in store.scan_iter(match="rec:*", count=10_000):
            if f":{TENANT}:{conversation_id}:" in name.decode():
                found += store.hgetall(name).items()
    return found


def head_writes(node: Node, commands: list[Command], conversation_id: str) -> list[Command]:
    """Commands that changed the head of a conversation."""
    head = keys.conversation(node.bucket_of(conversation_id), TENANT, conversation_id)
    return [
        command
        for command in commands
        if command.arguments and command.arguments[0] == head and command.name in WRITES
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
        before = Counter(user for user, _ in entries_by_user(node))
        assert before == Counter(MEMBERS), "the announcement of the group, once for each"

        async with monitored(node.core_address) as monitor:
            ack, commands = await send_one(node, group, monitor)
        assert [int(seq) for seq, _ in records_of(node, group)] == [ack.conversation_seq]  # criterion 1
        assert len(head_writes(node, commands, group)) == 1  # criterion 2

        new: Counter[str] = Counter()
        total = body_fields = foreign = largest = 0
        for user, stored in entries_by_user(node):
            total += 1
            entry = pb.Entry.FromString(stored)
            body_fields += sum(field.name in BODY_FIELDS for field, _ in entry.ListFields())
            body_fields += BODY in stored
            largest = max(largest, len(stored))
            if entry.event_type == pb.EVENT_MEMBERSHIP:
                continue
            new[user] += 1
            foreign += (entry.event_type, entry.event_ordinal, entry.message_id) != (pb.EVENT_MESSAGE, 0, ack.message_id)
        assert total - before.total() == 100_000  # criterion 3
        assert foreign == 0
        assert body_fields == 0  # criterion 4
        assert largest <= node.parameters.mailbox_event_group_max_bytes // 8 == 1024  # criterion 5
        assert new == Counter(MEMBERS)  # criterion 6
