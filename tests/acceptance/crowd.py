"""People on a node of processes who write to each other all the time, and what must have arrived in the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qim.client.aio import Client
from qim.client.events import SendHandle
from qim.core.ids import direct_conversation_id, group_conversation_id
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.acceptance.devices import Device, Triple, triples
from tests.support.node import TENANT, Devices

CONVERGE_S: Final = 90.0
"""A device that was told nothing finds a gap by its next PONG at the latest (§15.1); pings are 60 s apart at first."""
LOGIN_RETRIES_MAX: Final = 50


class Line(NamedTuple):
    """A message as its sender knows it."""

    conversation_id: str
    sender: str
    text: str
    handle: SendHandle


@dataclass(slots=True)
class Crowd:
    """`conversations`: id -> members. `Traffic` of `qim.app.replay.chaos`."""

    clients: Mapping[str, Client]
    conversations: Mapping[str, Sequence[str]]
    rng: random.Random
    lines: list[Line] = field(default_factory=list)
    _waiting: set[str] = field(default_factory=set)
    _ended: bool = False

    def unacknowledged(self) -> frozenset[str]:
        return frozenset(self._waiting)

    async def say(self, conversation_id: str | None = None) -> Line:
        """One line by somebody, in one of the conversations; not waited for."""
        chosen = conversation_id or self.rng.choice(list(self.conversations))
        sender = self.rng.choice(self.conversations[chosen])
        text = f"line {len(self.lines)}"
        handle = await self.clients[sender].send(chosen, text)
        line = Line(chosen, sender, text, handle)
        self.lines.append(line)
        self._waiting.add(handle.client_message_id)
        handle.future.add_done_callback(lambda _: self._waiting.discard(handle.client_message_id))
        return line

    async def talk(self, every_s: float) -> None:
        """At that pace until `end`."""
        while not self._ended:
            await self.say()
            await asyncio.sleep(every_s)

    def end(self) -> None:
        self._ended = True

    async def settled(self, timeout_s: float = CONVERGE_S) -> None:
        """Every line is acknowledged; none was refused for good."""
        async with asyncio.timeout(timeout_s):
            for line in self.lines:
                await line.handle

    # ------------------------------------------------------------------------------------------------------- judging

    def committed(self, conversation_id: str) -> dict[int, Line]:
        """conversation_seq -> line, of all lines acknowledged; a sequence given twice is an error by itself."""
        found: dict[int, Line] = {}
        for line in self.lines:
            if line.conversation_id == conversation_id:
                seq = line.handle.future.result().conversation_seq
                assert seq not in found, f"{conversation_id} #{seq} was given to {found[seq].text} and {line.text}"
                found[seq] = line
        return found

    def expected(self, conversation_id: str) -> list[tuple[int, str, str]]:
        """(conversation_seq, sender, text) of every line: dense from 1, one sender's lines in their order."""
        found = self.committed(conversation_id)
        assert sorted(found) == list(range(1, len(found) + 1)), f"{conversation_id} has holes"
        ordered = [found[seq] for seq in sorted(found)]
        for sender in self.conversations[conversation_id]:
            said = [
                line.text for line in self.lines if (line.conversation_id, line.sender) == (conversation_id, sender)
            ]
            assert [line.text for line in ordered if line.sender == sender] == said, f"order of {sender}"
        return [(seq, found[seq].sender, found[seq].text) for seq in sorted(found)]

    def message_ids(self) -> list[bytes]:
        return [line.handle.future.result().message_id for line in self.lines]

    async def check_screens(self, timeout_s: float = CONVERGE_S) -> None:
        """Every device of the crowd shows every line of its conversations once, in order."""
        for conversation_id, members in self.conversations.items():
            expected = self.expected(conversation_id)
            async with asyncio.timeout(timeout_s):
                while any(len(shown(self.clients[user], conversation_id)) < len(expected) for user in members):
                    await asyncio.sleep(0.05)
            for user in members:
                assert shown(self.clients[user], conversation_id) == expected, (user, conversation_id)

    async def check_mailboxes(self, devices: Devices) -> int:
        """Every mailbox, read by a new device on the bare wire, has exactly the lines of its user, each triple once:
        missing 0, duplicate 0. How many entries that were."""
        lines = {conversation_id: self.expected(conversation_id) for conversation_id in self.conversations}
        total = 0
        for user in self.clients:
            entries, found = await whole_mailbox(devices, user)
            assert max(Counter(found).values(), default=1) == 1, f"a triple of {user} comes twice"
            got = Counter(
                (entry.conversation_id, entry.conversation_seq) for entry in entries if entry.conversation_seq
            )
            wanted = Counter(
                (conversation_id, seq)
                for conversation_id, said in lines.items()
                if user in self.conversations[conversation_id]
                for seq, _, _ in said
            )
            assert wanted - got == Counter(), f"{user} misses entries"
            assert got - wanted == Counter(), f"{user} has entries too many"
            total += len(entries)
        return total


def shown(client: Client, conversation_id: str) -> list[tuple[int, str, str]]:
    """(conversation_seq, sender, text) of what a device shows in its order; announcements have no text."""
    return [
        (row.conversation_seq, row.sender_id, row.payload.decode())
        for row in client.store.messages(conversation_id)
        if row.conversation_seq and row.payload
    ]


async def crowd_of(devices: Devices, users: Sequence[str], groups: Mapping[str, Sequence[str]], seed: int) -> Crowd:
    """All users online with one device each, the groups made, and a single chat between neighbours."""
    clients = {user: await devices.add(user) for user in users}
    conversations: dict[str, Sequence[str]] = {}
    for group_id, members in groups.items():
        await clients[members[0]].create_group(group_id, members[1:])
        conversations[group_conversation_id(group_id)] = members
    for one, other in zip(users[::2], users[1::2], strict=False):
        conversations[direct_conversation_id(one, other)] = (one, other)
    return Crowd(clients, conversations, random.Random(seed))


async def bare_device(devices: Devices, user: str, device_id: str) -> Device:
    """A TLS connection that has sent nothing yet."""
    token = await devices.admin.token(TENANT, user, device_id, 3600)
    device = await Device.connect(
        devices.address.port, devices.address.client_tls(), device_id=device_id, access_token=token
    )
    devices.also_close(device)
    return device


async def whole_mailbox(devices: Devices, user: str) -> tuple[list[pb.Entry], list[Triple]]:
    """Everything a new device of the user pulls."""
    device = await bare_device(devices, user, "new")
    try:
        for _ in range(LOGIN_RETRIES_MAX):
            answer = await device.authenticate()
            if answer.opcode is Opcode.AUTH_OK:
                break
            assert answer.body.code in (ErrorCode.SHARD_MOVED, ErrorCode.REGION_FAILOVER), answer
            await asyncio.sleep(answer.body.retry_after_ms / 1000)
        device.welcome = answer.body
        batches = await device.pull_through(0, device.welcome.sync_to_seq)
        return [entry for batch in batches for entry in batch.entries], triples(batches)
    finally:
        await device.close()
