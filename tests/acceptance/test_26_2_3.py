"""26.2.3 Login latency with a backlog of 10 000: criteria 2 to 5, with 100 devices at once.

13 users with up to 8 devices; one device of each user is the SDK, the others are bare connections that pull as §9.3.2
tells a client to. Half of the bodies lie in the entries, half are joined on the read path. Not here yet: 1 (the
latencies, with as many devices as the machine sustains).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from qim.core import ids
from qim.core.coverage import split_range
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.acceptance.devices import Device, RecordedClient, Triple, triples
from tests.acceptance.harness import TENANT, Node, named_users, running_node

BACKLOG = 10_000
USERS = named_users(13, prefix="user")
DEVICES_PER_USER = 8
BARE_DEVICES = 100 - len(USERS)
PULLS_MAX = 25
INLINE, JOINED = b"i" * 100, b"j" * 600
"""With 14 members, `inline_body_budget_bytes` 8 KiB lies between them."""
SENT_AT_ONCE = 1000


async def make_backlog(node: Node) -> str:
    """The announcement of the group and 9,999 messages to it: 10,000 entries for each member."""
    group = await node.create_group("crowd", "sender", USERS)
    sender = await node.online("sender")
    bodies = [JOINED if number % 2 else INLINE for number in range(BACKLOG - 1)]
    for first in range(0, len(bodies), SENT_AT_ONCE):
        await sender.say_all(group, bodies[first : first + SENT_AT_ONCE], ahead=48)
        sender.received.clear()
    await node.delivered()
    return group


async def expected_triples(node: Node, group: str) -> dict[str, set[Triple]]:
    """user -> what must arrive, from the dispatch logs and the definition of `event_id` (§6.7)."""
    expected: dict[str, set[Triple]] = {user: set() for user in USERS}
    for shard in {node.shard_of(user) for user in USERS}:
        members = [user for user in USERS if node.shard_of(user) == shard]
        offset, high = 0, (await node.outside.dispatch_log.watermarks(shard)).high
        while offset < high:
            for record in await node.outside.dispatch_log.read(shard, offset):
                offset = record.offset + 1
                dispatch = pb.GroupDispatch.FromString(record.value)
                assert dispatch.record.conversation_id == group
                prefix = ids.event_id_prefix(TENANT, dispatch.dispatch_id)
                ordinals = [event.event_type - 1 for event in dispatch.record.events]
                for user in members:
                    expected[user] |= {
                        (node.seq(user, record.offset), ordinal,
                         int.from_bytes(ids.event_id(prefix, user, ordinal), "big"))
                        for ordinal in ordinals
                    }  # fmt: skip
    return expected


class Login:
    """What one device sent and got between AUTH and ONLINE_READY."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.pulls = 0
        self.triples: list[Triple] = []
        self.without_body = 0
        self.errors = 0

    def take(self, batch: pb.MailboxBatch) -> None:
        self.triples += triples([batch])
        self.without_body += sum(not entry.body_included for entry in batch.entries)


async def sync_bare(node: Node, device: Device, user: str) -> Login:
    """AUTH, four pulls at a time over disjoint ranges, SYNC_COMPLETE."""
    login = Login(user)
    welcome = await device.log_in()

    async def pull_range(after_seq: int, up_to_seq: int) -> None:
        while True:
            login.pulls += 1
            batch = await device.pull_batch(after_seq, up_to_seq)
            login.take(batch)
            if not batch.has_more:
                return
            after_seq = batch.covered_through_seq
            forget(device, login)

    ranges = split_range(0, welcome.sync_to_seq, node.parameters.pull_mailbox_window)
    await asyncio.gather(*(pull_range(*span) for span in ranges))
    await device.complete()
    forget(device, login)
    return login


def forget(device: Device, login: Login) -> None:
    """Batches that were looked at are dropped: a million entries would be held otherwise."""
    login.errors += len(device.bodies(Opcode.ERROR))
    device.received.clear()


async def sync_client(client: RecordedClient, user: str) -> Login:
    """The same by the SDK."""
    await client.wait_ready(120_000)
    login = Login(user)
    login.pulls = len(client.requests(Opcode.PULL_MAILBOX))
    login.errors = len(client.bodies(Opcode.ERROR))
    for batch in client.bodies(Opcode.MAILBOX_BATCH):
        login.take(batch)
    return login


async def log_in_all(node: Node) -> Sequence[Login]:
    slots = [(user, f"d{number}") for number in range(DEVICES_PER_USER - 1) for user in USERS][:BARE_DEVICES]
    bare = [(await node.device(user, name), user) for user, name in slots]
    clients = [(node.client(user, "sdk"), user) for user in USERS]
    assert len(bare) + len(clients) == 100
    return await asyncio.gather(
        *(sync_bare(node, device, user) for device, user in bare),
        *(sync_client(client, user) for client, user in clients),
    )


async def check_tampering(node: Node, group: str) -> None:
    """A wrong SYNC_COMPLETE opens nothing: no ONLINE_READY, no push, until the right one comes."""
    user = USERS[0]
    sender, device = await node.online("sender", "laptop"), await node.device(user, "tampered")
    welcome = await device.log_in()
    await device.pull_through(0, welcome.sync_to_seq)
    for wrong in (welcome.sync_to_seq + 1, welcome.sync_to_seq - 1, 0, (1 << 63) - 1):
        answer = await device.ask(Opcode.SYNC_COMPLETE, pb.SyncComplete(sync_to_seq=wrong))
        assert (answer.opcode, answer.body.code) == (Opcode.ERROR, ErrorCode.SYNC_INCOMPLETE)  # criterion 5
    await sender.say_all(group, [b"held back"])
    await node.delivered()
    await device.ask(Opcode.PING, pb.Ping(ping_id=1))
    assert device.bodies(Opcode.ONLINE_READY) == []  # criterion 5
    assert device.pushed() == []  # criterion 5
    await device.complete()
    await device.until(lambda: [entry.payload_or_ciphertext for entry in device.pushed()] == [b"held back"])


@pytest.mark.timeout(240)
async def test_a_hundred_devices_log_in_with_a_backlog() -> None:
    # The limits are not the matter here: they would only make the backlog slower to write.
    async with running_node(delivery_lag_group_ms=600_000, delivery_lag_ms=600_000) as node:
        group = await make_backlog(node)
        expected = await expected_triples(node, group)
        assert {len(found) for found in expected.values()} == {BACKLOG}

        logins = await log_in_all(node)
        assert max(login.pulls for login in logins) <= PULLS_MAX  # criterion 2
        assert sum(login.errors for login in logins) == 0  # criterion 3
        for login in logins:
            assert len(login.triples) == len(set(login.triples))  # criterion 4
            assert set(login.triples) == expected[login.user]  # criterion 4
            assert login.without_body <= 1, "only the announcement of the group has none"
        await check_tampering(node, group)
