"""A supervisor in a process of its own, as a test's victim."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from qim.errors import StartupError
from qim.obs.logs import configure_logs
from qim.runtime.parent_death import die_with_parent
from qim.runtime.prefork import EXIT_CANNOT_START, Supervisor
from tests.support.waiting import wait_for


class SupervisedNode:
    """Reads the state file of a supervisor that runs as a child of the test."""

    def __init__(self, pid: int, state_file: Path) -> None:
        self.pid = pid
        self.state_file = state_file

    def state(self) -> dict[str, Any]:
        if not self.state_file.exists():
            return {"ready": False, "processes": {}}
        state: dict[str, Any] = orjson.loads(self.state_file.read_bytes())
        return state

    def process(self, name: str) -> dict[str, Any]:
        process: dict[str, Any] = self.state()["processes"].get(name, {"pid": 0, "restarts": 0, "ready": False})
        return process

    def wait_ready(self) -> None:
        wait_for(lambda: self.state()["ready"])

    def kill(self, name: str) -> int:
        """SIGKILL one process; its pid. Returns when the supervisor has replaced it."""
        pid: int = self.process(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.process(name)["pid"] not in (0, pid))
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the supervisor and return its exit code."""
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code


def is_alive(pid: int) -> bool:
    """True while a process with this pid runs (zombies do not count)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def supervised(build: Callable[[], Supervisor], state_file: Path) -> Iterator[SupervisedNode]:
    """Run `build().run()` in a forked child; what still runs at the end is killed with it."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(parent_pid)
            configure_logs(level="error")
            code = build().run()
        except StartupError as error:
            print(error, file=sys.stderr)
            code = EXIT_CANNOT_START
        finally:
            os._exit(code)
    node = SupervisedNode(pid, state_file)
    try:
        yield node
    finally:
        if node.pid:
            node.stop(signal.SIGKILL)


def wait_until_gone(pids: Sequence[int]) -> None:
    """Return when none of the processes is alive."""
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
