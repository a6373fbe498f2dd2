"""A server that comes back as it was some seconds ago: what a host leaves behind that died before its fsync."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Final

from qim.app.own_node import OwnNode
from tests.support.faults.pause import paused
from tests.support.supervised import is_alive
from tests.support.waiting import wait_for

AOF_DIRECTORY: Final = "appendonlydir"


class OlderAof:
    """One private server of a node, e.g. "redis-mailbox"."""

    def __init__(self, node: OwnNode, server: str = "redis-mailbox") -> None:
        self._node = node
        self._server = server
        self._live = node.data_dir / server / AOF_DIRECTORY
        self._copy = node.directory / f"{server}-older"

    def copy(self) -> Path:
        """Remember the files as they are now; a write that is under way is cut, as by a crash."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._live, self._copy)
        return self._copy

    def restart(self) -> None:
        """kill -9, the remembered files in the place of today's, and a start. The supervisor is held meanwhile, so that
        it does not start the server on the newer ones. Returns when the server is started; it may be loading."""
        pid = self._node.pid(self._server)
        with paused(self._node.address().pid):
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not is_alive(pid), every_s=0.001)
            shutil.rmtree(self._live)
            self._copy.rename(self._live)
        wait_for(lambda: self._node.processes()[self._server] not in (0, pid))
