"""A peer in a process of its own, killed with -9 while it holds a request."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qim.backplane.api import PeerUnavailable
from qim.backplane.unix import UnixBackplane, socket_path
from qim.protocol.opcodes import InternalOpcode
from qim.runtime.clock import SystemClock
from tests.support.run_dir import short_run_dir
from tests.unit.backplane.test_unix import fail, until

PEER = """
import asyncio, sys
from pathlib import Path
from qim.backplane.unix import UnixBackplane
from qim.protocol.opcodes import InternalOpcode
from qim.runtime.clock import SystemClock

async def answer(peer, body):
    if body == b"hold":
        await asyncio.Event().wait()
    return body

async def main():
    plane = UnixBackplane("core-0", ("mailbox-0",), {}, run_dir=Path(sys.argv[1]), clock=SystemClock(),
                          on_failure=lambda task, error: sys.exit(1))
    plane.on_request(InternalOpcode.MAILBOX_PULL, answer)
    await plane.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def start_peer(run_dir: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PEER, str(run_dir)])


async def test_a_killed_peer_fails_its_requests_and_a_new_one_takes_over() -> None:
    with short_run_dir() as run_dir:
        peer = start_peer(run_dir)
        links: list[bool] = []
        plane = UnixBackplane(
            "gateway-0", ("gateway-0",), {"mailbox-0": socket_path(run_dir, "core-0")},
            run_dir=run_dir, clock=SystemClock(), on_failure=fail,
        )  # fmt: skip
        plane.on_link(lambda _, up: links.append(up))
        try:
            await plane.start()
            plane.connect("mailbox-0")
            await until(lambda: links == [True])
            held = asyncio.create_task(
                plane.request("mailbox-0", InternalOpcode.MAILBOX_PULL, b"hold", timeout_ms=30_000)
            )
            assert await plane.request("mailbox-0", InternalOpcode.MAILBOX_PULL, b"echo", timeout_ms=5_000) == b"echo"
            peer.send_signal(signal.SIGKILL)
            with pytest.raises(PeerUnavailable, match="link lost"):
                await held
            assert links == [True, False]
            peer.wait()
            peer = start_peer(run_dir)
            await until(lambda: links == [True, False, True])
            assert await plane.request("mailbox-0", InternalOpcode.MAILBOX_PULL, b"again", timeout_ms=5_000) == b"again"
        finally:
            await plane.close()
            peer.kill()
            peer.wait()
