"""kill -9 of a process of a node, of its supervisor, or at a named point of its work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.errors import StartupError
from qim.runtime.crash_point import CRASH_POINTS, DIRECTORY_VARIABLE
from tests.support.node import options_with
from tests.support.waiting import wait_for

REPLACED_TIMEOUT_S: Final = 30.0


def kill(node: OwnNode, process: str) -> float:
    """kill -9 of a worker or server; seconds until the supervisor has started another one."""
    started = time.monotonic()
    pid = node.kill(process)
    wait_for(lambda: node.processes()[process] not in (0, pid), timeout_s=REPLACED_TIMEOUT_S)
    return time.monotonic() - started


def kill_node(node: OwnNode) -> float:
    """kill -9 of the supervisor, with which everything dies, and a new start; seconds until that is ready."""
    started = time.monotonic()
    node.kill_supervisor()
    # Its servers end by SIGTERM: the new ones wait for the lock of their directories.
    node.start()
    return time.monotonic() - started


class CrashPoints:
    """Armed points of a node that was started with `options`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def options(self, base: OwnNodeOptions) -> OwnNodeOptions:
        """`base` with the points built in."""
        return options_with(base, **{DIRECTORY_VARIABLE.removeprefix("QIM_").lower(): str(self._directory)})

    def arm(self, point: str) -> None:
        """The next process that passes the point dies there."""
        if point not in CRASH_POINTS:
            raise ValueError(f"no crash point {point}")
        (self._directory / point).touch()

    def is_armed(self, point: str) -> bool:
        """False once a process has died there."""
        return (self._directory / point).exists()

    def disarm(self, point: str) -> None:
        """Nobody dies there any more."""
        (self._directory / point).unlink(missing_ok=True)


def is_running(node: OwnNode, process: str) -> bool:
    """False while the supervisor has not replaced it, or while there is no node."""
    try:
        return node.pid(process) > 0
    except StartupError:
        return False
