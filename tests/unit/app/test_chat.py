"""The terminal chat against a scripted server: what a person sees, and what survives a cut."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qim.app.chat import ChatOptions, Screen, TerminalLines, chat, printable, run_chat
from qim.client.events import MessageFailed, MessageReceived, StateChanged
from qim.client.link import ClientOptions
from qim.client.timeline import MessageRow, row_from_entry
from qim.errors import ErrorCode, StartupError
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.support.fake_server import FakeServer, Peer

DM = "dm:alice:bob"


class Terminal:
    """Lines to type and lines shown, without the time of day."""

    def __init__(self) -> None:
        self.typed: asyncio.Queue[str | None] = asyncio.Queue()
        self.shown: list[str] = []
        self.changed = asyncio.Event()

    def show(self, line: str) -> None:
        self.shown.append(re.sub(r"^\d\d:\d\d ", "", line))
        self.changed.set()

    async def lines(self) -> AsyncIterator[str]:
        while (line := await self.typed.get()) is not None:
            yield line

    async def until(self, line: str) -> None:
        async with asyncio.timeout(5):
            while line not in self.shown:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeServer]:
    made = FakeServer(tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def options(server: FakeServer, tmp_path: Path, **fields: Any) -> ChatOptions:
    made = ChatOptions(
        host="127.0.0.1", port=server.port, tls=server.client_context, token="token",
        store_path=tmp_path / "chat" / "alice.db", tenant_id="t", user_id="alice", device_id="terminal",
        client=ClientOptions(reconnect_scale=0.01),
    )  # fmt: skip
    return replace(made, **(fields or {"peer": "bob"}))


async def test_two_people_talk(server: FakeServer, terminal: Terminal, tmp_path: Path) -> None:
    server.entry(DM, "are you there?")
    running = asyncio.create_task(chat(options(server, tmp_path), terminal.lines(), terminal.show))
    await terminal.until("bob: are you there?")
    terminal.typed.put_nowait("yes")
    terminal.typed.put_nowait("   ")
    await terminal.until("✓ yes")
    server.push_new(DM, "good")
    await terminal.until("bob: good")
    terminal.typed.put_nowait(None)
    assert await asyncio.wait_for(running, 5) == 0
    assert terminal.shown == ["-- connected", "bob: are you there?", "✓ yes", "bob: good", "-- bye"]


async def test_the_next_start_shows_the_end_of_the_conversation(
    server: FakeServer, terminal: Terminal, tmp_path: Path
) -> None:
    for number in range(30):
        server.entry(DM, f"m{number}")
    for _ in range(2):
        terminal.shown.clear()
        terminal.typed.put_nowait(None)
        running = asyncio.create_task(chat(options(server, tmp_path), terminal.lines(), terminal.show))
        await asyncio.wait_for(running, 5)
    terminal.typed = asyncio.Queue()
    running = asyncio.create_task(chat(options(server, tmp_path), terminal.lines(), terminal.show))
    await terminal.until("bob: m29")
    running.cancel()
    assert await asyncio.wait_for(running, 5) == 0, "Ctrl-C is a clean end"
    assert [line for line in terminal.shown if line.startswith("bob")] == [
        f"bob: m{number}" for number in range(10, 30)
    ]


async def test_a_line_typed_during_an_outage_is_sent_afterwards(
    server: FakeServer, terminal: Terminal, tmp_path: Path
) -> None:
    running = asyncio.create_task(chat(options(server, tmp_path), terminal.lines(), terminal.show))
    await terminal.until("-- connected")
    server.peer.reset()
    terminal.typed.put_nowait("still here")
    await terminal.until("✓ still here")
    terminal.typed.put_nowait(None)
    assert await asyncio.wait_for(running, 5) == 0
    assert "-- connection lost (connection_lost)" in terminal.shown


async def test_kicked_ends_the_chat(server: FakeServer, terminal: Terminal, tmp_path: Path) -> None:
    running = asyncio.create_task(chat(options(server, tmp_path), terminal.lines(), terminal.show))
    await terminal.until("-- connected")
    server.peer.send(Opcode.KICKED, pb.Kicked(reason=pb.REPLACED))
    assert await asyncio.wait_for(running, 5) == 1
    assert terminal.shown[-1] == "-- bye (replaced)"


@pytest.mark.parametrize("exists", [False, True])
async def test_a_group_is_created_or_joined(
    server: FakeServer, terminal: Terminal, tmp_path: Path, exists: bool
) -> None:
    joined: list[bool] = []

    async def join() -> None:
        joined.append(True)

    def refuse(peer: Peer, request_id: int, _: Any) -> bool:
        peer.error(ErrorCode.PERMISSION_DENIED, request_id, detail="group_exists")
        return True

    if exists:
        server.script[Opcode.CREATE_GROUP].append(refuse)
    terminal.typed.put_nowait("hello all")
    running = asyncio.create_task(
        chat(options(server, tmp_path, group="team", join=join), terminal.lines(), terminal.show)
    )
    await terminal.until("✓ hello all")
    terminal.typed.put_nowait(None)
    await asyncio.wait_for(running, 5)
    assert joined == [True] * exists
    assert server.logs["g:team"][0].payload_or_ciphertext == b"hello all"


# ------------------------------------------------------------------ the screen


def row(number: int, text: str = "hi", **fields: Any) -> MessageRow:
    made = pb.Entry(
        mailbox_seq=number, event_id=number, event_ordinal=0, flags=7, conversation_id=DM, conversation_seq=number,
        message_id=bytes(16), sender_id="bob", body_included=True, payload_or_ciphertext=text.encode(),
    )  # fmt: skip
    for name, value in fields.items():
        setattr(made, name, value)
    return row_from_entry(made)


def screen(terminal: Terminal, history: list[MessageRow] | None = None) -> Screen:
    return Screen(DM, lambda: history or [], terminal.show)


def test_rows_of_a_login_appear_in_their_order(terminal: Terminal) -> None:
    made = screen(terminal, [row(1, "a"), row(2, "b")])
    made.show(MessageReceived(row=row(2, "b")))
    made.show(MessageReceived(row=row(9, "c", conversation_id="g:team")))
    made.show(MessageReceived(row=row(1, "a")))
    made.show(StateChanged(state="online"))
    assert [re.sub(r"\d\d:\d\d ", "", line) for line in terminal.shown] == [
        "-- connected", "bob: a", "bob: b", "(g:team) bob: c",
    ]  # fmt: skip


def test_a_row_that_belongs_above_says_so(terminal: Terminal) -> None:
    made = screen(terminal)
    made.show(StateChanged(state="online"))
    made.show(MessageReceived(row=row(5, "five")))
    made.show(MessageReceived(row=row(4, "four")))
    assert terminal.shown[1:] == ["bob: five", "bob: four  (earlier)"]


def test_a_hostile_line_commands_nothing(terminal: Terminal) -> None:
    assert printable("a\x1b[2Jb\x07\r") == "a�[2Jb��"
    made = screen(terminal)
    made.show(StateChanged(state="online"))
    made.show(MessageReceived(row=row(5, "x\x1b]0;title\x07")))
    assert "\x1b" not in terminal.shown[-1]


def test_control_and_missing_messages_have_words(terminal: Terminal) -> None:
    made = screen(terminal)
    made.show(StateChanged(state="online"))
    made.show(MessageReceived(row=row(5, message_type=pb.MESSAGE_TYPE_CONTROL)))
    made.show(MessageReceived(row=row(6, body_included=False)))
    assert terminal.shown[1:] == [f"-- the members of {DM} have changed", "bob: [not available]"]


def test_slow_and_failed_lines_are_marked(terminal: Terminal) -> None:
    made = screen(terminal)
    made.typed("id", "hello")
    made.still_waiting("id")
    made.show(MessageFailed(client_message_id="id", code=15, detail="", resendable=False))
    made.still_waiting("id")
    assert terminal.shown == ["… hello", "✗ hello (permission_denied)"]


# ------------------------------------------------------------------ input and options


async def test_lines_of_a_pipe_and_of_a_file(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\nwithout end")
    os.close(writer)
    assert [line async for line in TerminalLines(descriptor=reader).read()] == ["one", "two", "without end"]
    os.close(reader)
    path = tmp_path / "lines"
    path.write_text("a\nb\n")
    with path.open() as file:
        assert [line async for line in TerminalLines(descriptor=file.fileno()).read()] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "says"), [({"user": "a b"}, "'a b' is not a name"), ({"to": "alice"}, "nobody chats with themselves")]
)
def test_bad_options_are_one_line(tmp_path: Path, fields: dict[str, str], says: str) -> None:
    given = {"user": "alice", "to": "bob", "group": None, "device": "terminal", "tenant": "demo", "data": tmp_path}
    with pytest.raises(StartupError, match=says):
        run_chat(argparse.Namespace(**{**given, **fields}))


def test_no_node_is_one_line(tmp_path: Path) -> None:
    given = {"user": "alice", "to": "bob", "group": None, "device": "terminal", "tenant": "demo", "data": tmp_path}
    with pytest.raises(StartupError, match="no node runs in"):
        run_chat(argparse.Namespace(**given))
