"""MONITOR: every command a server executes, those of scripts included, as it saw them."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(rb"\+\d+\.\d+ \[\d+ ([^\]]*)\] (.*)\r\n")
_ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class Command(NamedTuple):
    name: str
    """Upper case."""
    arguments: tuple[str, ...]
    """As MONITOR prints them: bytes that are not printable are `\\xNN`."""
    by_script: bool


class Monitor:
    """What was seen so far; `settle` waits until everything sent before it is in."""

    def __init__(self, address: str, reader: asyncio.StreamReader) -> None:
        self.commands: list[Command] = []
        self._address = address
        self._reader = reader

    async def settle(self) -> list[Command]:
        """All commands executed so far."""
        marker = secrets.token_hex(8)
        reader, writer = await _open(self._address)
        writer.write(f"ECHO {marker}\r\n".encode())
        await reader.readline()
        writer.close()
        while True:
            match = _LINE.fullmatch(await self._reader.readline())
            assert match is not None, "MONITOR wrote something else"
            name, *arguments = (argument.decode() for argument in _ARGUMENT.findall(match[2]))
            if arguments == [marker]:
                return self.commands
            self.commands.append(Command(name.upper(), tuple(arguments), match[1] == b"lua"))


@asynccontextmanager
async def monitored(address: str) -> AsyncIterator[Monitor]:
    """Watch the server at `unix://<path>` for the time of the block."""
    reader, writer = await _open(address)
    writer.write(b"MONITOR\r\n")
    assert await reader.readline() == b"+OK\r\n"
    try:
        yield Monitor(address, reader)
    finally:
        writer.close()


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(Path(address.removeprefix("unix://")), limit=1 << 24)
