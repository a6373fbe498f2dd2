"""Cut what one process has open to another one's unix socket, from outside and without either noticing who did it.

`pidfd_getfd` gives us a descriptor of the very socket the process holds; shutting that down is what both ends see. The
path is out of the way as long as the cut lasts, so that nobody connects anew; other connections to it live on.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from qim.app.own_node import OwnNode
from qim.backplane.unix import socket_path

_PIDFD_GETFD: Final = 438
"""Its number on every architecture."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


def open_sockets(pid: int, path: Path) -> list[socket.socket]:
    """Ours of the sockets that a process has connected to `path`; the caller closes them."""
    found: list[socket.socket] = []
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                copied = _libc.syscall(_PIDFD_GETFD, process, int(name), 0)
                if copied < 0:
                    continue
                one = socket.socket(fileno=copied)
                if one.family == socket.AF_UNIX and _peer(one) == str(path):
                    found.append(one)
                else:
                    one.close()
    finally:
        os.close(process)
    return found


def _peer(one: socket.socket) -> str:
    with suppress(OSError):
        return str(one.getpeername())
    return ""


def cut_now(pid: int, path: Path) -> int:
    """Shut down every connection of a process to `path`; how many there were. It may connect again at once."""
    found = open_sockets(pid, path)
    for one in found:
        with one, suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
    return len(found)


@contextmanager
def unreachable(path: Path) -> Iterator[None]:
    """Nobody connects to `path` for the time of the block; what is connected stays so."""
    away = path.with_suffix(".away")
    path.rename(away)
    try:
        yield
    finally:
        if path.exists():  # its owner has been replaced, and listens there already
            away.unlink()
        else:
            away.rename(path)


@contextmanager
def link_cut(node: OwnNode, one: str, other: str) -> Iterator[int]:
    """No link between two processes of a node for the time of the block, in either direction; how many were cut."""
    run_dir = Path(node.address().run_dir)
    paths = {name: socket_path(run_dir, name) for name in (one, other)}
    with ExitStack() as stack:
        for path in paths.values():
            stack.enter_context(unreachable(path))
        yield cut_now(node.pid(one), paths[other]) + cut_now(node.pid(other), paths[one])
