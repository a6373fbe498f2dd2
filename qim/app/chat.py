"""`qim chat`: a terminal chat on the SDK. It survives reconnects and restarts; what was typed is sent in order."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import ssl
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from qim.app.connect import AdminClient, AdminRefusal, NodeAddress
from qim.client.aio import Client
from qim.client.events import (
    ClientClosed,
    ClientEvent,
    MessageFailed,
    MessageReceived,
    MessageSent,
    RequestFailed,
    StateChanged,
)
from qim.client.link import ClientOptions, TokenProvider
from qim.client.store import LocalStore
from qim.client.timeline import MessageRow, TimelineKey, timeline_key
from qim.core.ids import direct_conversation_id, group_conversation_id, is_name
from qim.errors import Detail, ErrorCode, StartupError
from qim.protocol import qim_pb2 as pb

HISTORY_LINES: Final = 20
SLOW_SEND_S: Final = 1.0
"""A message that is not sent after this time is shown as waiting."""
FAREWELL_MS: Final = 3_000
"""After the last line of input: how long to wait for what is not sent yet."""
_TOKEN_TTL_S: Final = 24 * 3600
_READ_BYTES: Final = 1 << 16
_STATE_LINES: Final = {"online": "-- connected", "offline": "-- connection lost", "closed": "-- bye"}
_ERASE_TYPED_LINE: Final = "\x1b[1A\x1b[2K"

Print = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Who talks to whom, over which node. Exactly one of `peer` and `group` is set.

    `join` makes the user a member of a group that somebody else has created.
    """

    host: str
    port: int
    tls: ssl.SSLContext
    token: str | TokenProvider
    store_path: Path
    tenant_id: str
    user_id: str
    device_id: str
    peer: str = ""
    group: str = ""
    join: Callable[[], Awaitable[None]] | None = None
    client: ClientOptions | None = None

    @property
    def conversation_id(self) -> str:
        if self.group:
            return group_conversation_id(self.group)
        return direct_conversation_id(self.user_id, self.peer)


class Screen:
    """Turns events into lines. Until the first login is through, rows are held back: they appear in their order then.

    `history` gives the end of the conversation from the local store.
    """

    def __init__(self, conversation_id: str, history: Callable[[], list[MessageRow]], print_line: Print) -> None:
        self._conversation_id = conversation_id
        self._history = history
        self._print = print_line
        self._early: list[MessageRow] | None = []
        self._last_key: TimelineKey = (0, 0, b"")
        self._typed: dict[str, str] = {}

    def typed(self, client_message_id: str, text: str) -> None:
        """A line of this terminal is on its way."""
        self._typed[client_message_id] = text

    def still_waiting(self, client_message_id: str) -> None:
        """It takes long: say so once."""
        text = self._typed.get(client_message_id)
        if text is not None:
            self._print(f"{_clock()} … {printable(text)}")

    def show(self, event: ClientEvent) -> None:
        """One event of the SDK."""
        if isinstance(event, MessageReceived):
            if self._early is not None:
                self._early.append(event.row)
            else:
                self._row(event.row)
        elif isinstance(event, MessageSent):
            text = self._typed.pop(event.client_message_id, None)
            if text is not None:
                self._print(f"{_clock()} ✓ {printable(text)}")
        elif isinstance(event, MessageFailed):
            text = self._typed.pop(event.client_message_id, "")
            self._print(f"{_clock()} ✗ {printable(text)} ({_refusal(event)})")
        elif isinstance(event, StateChanged):
            self._state(event)

    def _state(self, event: StateChanged) -> None:
        note = f" ({event.reason})" if event.reason not in ("", "closed") else ""
        if event.state in _STATE_LINES:
            self._print(_STATE_LINES[event.state] + note)
        if event.state == "online" and self._early is not None:
            early, self._early = self._early, None
            for row in self._history():
                self._row(row)
            for row in early:
                if row.conversation_id != self._conversation_id:
                    self._row(row)

    def _row(self, row: MessageRow) -> None:
        text = printable(row.payload.decode(errors="replace"))
        if row.message_type == pb.MESSAGE_TYPE_CONTROL:
            line = f"-- the members of {row.conversation_id} have changed"
        elif not row.body_included:
            line = f"{_clock(row.created_at_ms)} {row.sender_id}: [not available]"
        else:
            line = f"{_clock(row.created_at_ms)} {row.sender_id}: {text}"
        if row.conversation_id != self._conversation_id:
            self._print(f"({row.conversation_id}) {line}")
            return
        key = timeline_key(row)
        self._print(line if key > self._last_key else f"{line}  (earlier)")
        self._last_key = max(self._last_key, key)


def printable(text: str) -> str:
    """The text without anything a terminal would obey."""
    return "".join(c if c.isprintable() else "�" for c in text)


async def chat(options: ChatOptions, lines: AsyncIterator[str], print_line: Print) -> int:
    """Talk until `lines` ends or the task is cancelled; 0, or 1 when the server has closed the door."""
    options.store_path.parent.mkdir(parents=True, exist_ok=True)
    store = LocalStore(options.store_path)
    screen = Screen(
        options.conversation_id, lambda: store.messages(options.conversation_id, newest=HISTORY_LINES), print_line
    )
    client = Client(
        options.host,
        options.port,
        tenant_id=options.tenant_id,
        user_id=options.user_id,
        device_id=options.device_id,
        token=options.token,
        store=store,
        ssl_context=options.tls,
        options=options.client,
        on_event=screen.show,
    )
    client.start()
    try:
        if options.group:
            await _enter_group(client, options)
        await _talk(client, options.conversation_id, lines, screen)
        await client.wait_sent(FAREWELL_MS)
    except ClientClosed:
        return 1
    except TimeoutError:
        print_line("-- some lines are not sent yet; they leave when you come back")
    except asyncio.CancelledError:
        print_line("")
    finally:
        await client.close()
    return 0


async def _enter_group(client: Client, options: ChatOptions) -> None:
    """Be a member: create the group, or, when somebody else has, join it."""
    try:
        await client.create_group(options.group)
    except RequestFailed as refused:
        if refused.detail != Detail.GROUP_EXISTS or options.join is None:
            raise
        await options.join()


async def _talk(client: Client, conversation_id: str, lines: AsyncIterator[str], screen: Screen) -> None:
    """Send line after line; ends with the lines or with the client."""
    loop = asyncio.get_running_loop()
    closed = loop.create_task(client.wait_closed())
    line: asyncio.Future[str | None] | None = None
    try:
        while not closed.done():
            line = loop.create_task(_next_line(lines))
            await asyncio.wait((line, closed), return_when=asyncio.FIRST_COMPLETED)
            text = line.result() if line.done() else None
            if text is None:
                return
            if text.strip():
                handle = await client.send(conversation_id, text)
                screen.typed(handle.client_message_id, text)
                loop.call_later(SLOW_SEND_S, screen.still_waiting, handle.client_message_id)
    finally:
        closed.cancel()
        if line is not None:
            line.cancel()
            await asyncio.wait((line,))
        await asyncio.wait((closed,))


async def _next_line(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)


def run_chat(options: argparse.Namespace) -> int:
    """`qim chat USER (--to PEER | --group GROUP)` on the node of `options.data`; the exit code."""
    for name in filter(None, (options.user, options.to, options.group, options.device, options.tenant)):
        if not is_name(name):
            raise StartupError(f"{name!r} is not a name: use 1 to 64 of A-Z a-z 0-9 . _ @ -")
    if options.to == options.user:
        raise StartupError("nobody chats with themselves; name somebody else with --to")
    return _loop_runner()(_run(options, NodeAddress.read(options.data)))


def _loop_runner() -> Callable[..., int]:
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


async def _run(namespace: argparse.Namespace, node: NodeAddress) -> int:
    tenant, user, device = namespace.tenant, namespace.user, namespace.device
    async with AdminClient(node) as admin:

        async def token() -> str:
            try:
                return await admin.token(tenant, user, device, _TOKEN_TTL_S)
            except AdminRefusal as refusal:
                raise ConnectionError(str(refusal)) from refusal

        async def join() -> None:
            await admin.add_members(tenant, namespace.group, [user])

        options = ChatOptions(
            host=node.client_host,
            port=node.port,
            tls=node.client_tls(),
            token=token,
            store_path=Path(namespace.data) / "chat" / f"{tenant}-{user}-{device}.db",
            tenant_id=tenant,
            user_id=user,
            device_id=device,
            peer=namespace.to or "",
            group=namespace.group or "",
            join=join,
        )
        lines = TerminalLines(erase=sys.stdin.isatty() and sys.stdout.isatty())
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            return await chat(options, lines.read(), _print_now)
        finally:
            loop.remove_signal_handler(signal.SIGINT)


class TerminalLines:
    """Lines of standard input without a thread; a file or a closed input works as well."""

    def __init__(self, *, erase: bool = False, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._erase = erase
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._rest = b""

    async def read(self) -> AsyncIterator[str]:
        """Until the input ends."""
        loop = asyncio.get_running_loop()
        pollable = not stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        if pollable:
            loop.add_reader(self._descriptor, self._readable)
        else:
            while self._readable():
                pass
        try:
            while (line := await self._lines.get()) is not None:
                if self._erase:
                    sys.stdout.write(_ERASE_TYPED_LINE)
                yield line
        finally:
            if pollable:
                loop.remove_reader(self._descriptor)

    def _readable(self) -> bool:
        data = os.read(self._descriptor, _READ_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            self._lines.put_nowait(line.decode(errors="replace"))
        if not data:
            self._lines.put_nowait(None)
            asyncio.get_running_loop().remove_reader(self._descriptor)
        return bool(data)


def _print_now(line: str) -> None:
    print(line, flush=True)


def _clock(unix_ms: int | None = None) -> str:
    moment = datetime.now().astimezone() if unix_ms is None else datetime.fromtimestamp(unix_ms / 1000).astimezone()
    return moment.strftime("%H:%M")


def _refusal(event: MessageFailed) -> str:
    code = ErrorCode(event.code).name.lower() if event.code in ErrorCode.__members__.values() else ""
    return " ".join(filter(None, (code, event.detail))) or "not sent"
