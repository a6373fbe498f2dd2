"""`qim demo`: two people hold a conversation, one of them offline at first; every line is printed and checked."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from qim.app.connect import AdminClient, NodeAddress
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.client.aio import Client
from qim.client.store import LocalStore
from qim.core.ids import direct_conversation_id, group_conversation_id

TENANT: Final = "demo"
LINE_TIMEOUT_MS: Final = 30_000
"""A line takes milliseconds; a busy host may pause for seconds."""


class Line(NamedTuple):
    sender: str
    text: str


WHILE_BOB_IS_AWAY: Final = (
    Line("alice", "Bob, are you there?"),
    Line("alice", "I leave you a note: the meeting is at ten."),
)
TOGETHER: Final = (
    Line("bob", "Here I am, and I read both of your notes."),
    Line("alice", "Good. See you at ten then."),
    Line("bob", "See you!"),
)
IN_THE_GROUP: Final = (
    Line("alice", "And now the same in a group."),
    Line("bob", "It works here, too."),
)


def run_demo(data_dir: Path | None, *, commit_log: str = "") -> int:
    """Hold the conversation on the node of `data_dir`, or on one of its own with that log; 0 if every line arrived."""
    if data_dir is not None:
        return _converse(NodeAddress.read(data_dir))
    print("demo: starting a node in a temporary directory …", flush=True)
    with OwnNode(OwnNodeOptions(commit_log=commit_log)) as node:
        code = _converse(node.address())
        stopped = node.stop()
    print(f"demo: the node has stopped, exit code {stopped}")
    return code or min(stopped, 1)


def _converse(node: NodeAddress) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        missing = runner.run(_Demo(node).hold())
    for line in missing:
        print(f"demo: MISSING {line}")
    print("demo: every line arrived, once and in order" if not missing else "demo: FAILED")
    return 1 if missing else 0


class _Demo:
    """One conversation; the names are unique, so that it can be held again on the same node."""

    def __init__(self, node: NodeAddress) -> None:
        self._node = node
        run_name = secrets.token_hex(3)
        self._users = {name: f"{name}-{run_name}" for name in ("alice", "bob")}
        self._direct = direct_conversation_id(*self._users.values())
        self._group_id = f"demo-{run_name}"
        self._missing: list[str] = []

    async def hold(self) -> list[str]:
        """What did not arrive, one line each."""
        with tempfile.TemporaryDirectory(prefix="qim-demo-") as directory:
            async with AdminClient(self._node) as admin:
                alice, bob = [await self._client(admin, name, Path(directory)) for name in self._users]
            try:
                await self._talk(alice, bob)
            finally:
                await alice.close()
                await bob.close()
        return self._missing

    async def _talk(self, alice: Client, bob: Client) -> None:
        alice.start()
        await alice.wait_ready(LINE_TIMEOUT_MS)
        for line in WHILE_BOB_IS_AWAY:
            await self._say(alice, self._direct, line)
        print("demo: bob comes online and pulls what he missed")
        bob.start()
        await bob.wait_ready(LINE_TIMEOUT_MS)
        await self._expect(bob, "bob", self._direct, WHILE_BOB_IS_AWAY)
        clients = {"alice": alice, "bob": bob}
        for line in TOGETHER:
            await self._say(clients[line.sender], self._direct, line)
        everything = (*WHILE_BOB_IS_AWAY, *TOGETHER)
        for name, client in clients.items():
            await self._expect(client, name, self._direct, everything)
        await alice.create_group(self._group_id, [self._users["bob"]])
        group = group_conversation_id(self._group_id)
        for line in IN_THE_GROUP:
            await self._say(clients[line.sender], group, line)
        for name, client in clients.items():
            await self._expect(client, name, group, IN_THE_GROUP)

    async def _client(self, admin: AdminClient, name: str, directory: Path) -> Client:
        user = self._users[name]
        return Client(
            self._node.client_host,
            self._node.port,
            tenant_id=TENANT,
            user_id=user,
            device_id="demo",
            token=await admin.token(TENANT, user, "demo", 600),
            store=LocalStore(directory / f"{user}.db"),
            ssl_context=self._node.client_tls(),
        )

    async def _say(self, client: Client, conversation_id: str, line: Line) -> None:
        handle = await client.send(conversation_id, line.text)
        async with asyncio.timeout(LINE_TIMEOUT_MS / 1000):
            result = await handle
        print(f"  {line.sender:>5} #{result.conversation_seq}: {line.text}")

    async def _expect(self, client: Client, name: str, conversation_id: str, lines: Sequence[Line]) -> None:
        """Exactly these lines in this order within LINE_TIMEOUT_MS."""
        wanted = [(self._users[line.sender], line.text) for line in lines]
        deadline_s = asyncio.get_running_loop().time() + LINE_TIMEOUT_MS / 1000
        while True:
            rows = [row for row in client.store.messages(conversation_id) if row.conversation_seq and row.payload]
            shown = [(row.sender_id, row.payload.decode()) for row in rows]
            if shown == wanted:
                print(f"demo: {name} shows {len(shown)} lines")
                return
            if asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(0.02)
        self._missing.extend(f"on {name}'s device: {text}" for text in dict(wanted).values() if text not in str(shown))
        self._missing = self._missing or [f"{name} shows {len(shown)} lines in another order or too many"]
