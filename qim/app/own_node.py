"""A node of one's own for a demo, a replay, a bench or a test: `qim up` as a child process in a temporary directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import orjson

from qim.app.cli import POOL_OPTIONS
from qim.app.connect import CONNECT_FILE, NodeAddress, wait_until_ready
from qim.app.settings import PoolSizes
from qim.errors import StartupError
from qim.runtime.parent_death import die_with_parent

START_TIMEOUT_S: Final = 60.0
"""Two servers and up to ten processes on two busy cores take about 3 s."""
STOP_TIMEOUT_S: Final = 45.0
"""`drain_timeout_ms` and what an everysec server still has to write."""
_POLL_S: Final = 0.05
STATE_FILE: Final = "supervisor.json"
LOG_FILE: Final = "node.log"

TEST_PARAMETERS: Final[Mapping[str, str]] = {
    # a crowd on one address, and no spreading of logins: what is measured is the node, not its politeness
    "QIM_PER_IP_CONNECT_RATE": "100000",
    "QIM_PER_IP_MAX_CONNECTIONS": "100000",
    "QIM_SYNC_DELAY_HINT_MS": "{ min_ms = 0, max_ms = 0 }",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNodeOptions:
    pools: PoolSizes | None = None
    """None: what `qim up` chooses for this host."""
    apart: bool = False
    unlimited_tenant: str = ""
    redis_server: Path | None = None
    commit_log: str = ""
    """As `qim up --commit-log`."""
    parameters: Mapping[str, str] = field(default_factory=lambda: TEST_PARAMETERS)
    """`QIM_<NAME>` variables of the node's environment."""


class OwnNode:
    """Start, find, kill and stop a node. `directory` None: a temporary one, removed by `close`."""

    def __init__(self, options: OwnNodeOptions, directory: Path | None = None) -> None:
        self._options = options
        self._temporary = directory is None
        # Under /tmp whatever TMPDIR says: a unix socket path has 107 bytes.
        self.directory = directory or Path(tempfile.mkdtemp(prefix="qim", dir="/tmp"))
        self.data_dir = self.directory / "data"
        self.port = free_port()
        self.admin_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def argv(self) -> list[str]:
        options = self._options
        argv = [sys.executable, "-m", "qim", "up", "--data", str(self.data_dir), "--port", str(self.port)]
        argv += ["--admin-port", str(self.admin_port)]
        if options.pools is not None:
            for pool, size in options.pools._asdict().items():
                argv += [f"--{POOL_OPTIONS[pool]}", str(size)]
        if options.apart:
            argv.append("--apart")
        if options.unlimited_tenant:
            argv += ["--unlimited-tenant", options.unlimited_tenant]
        if options.commit_log:
            argv += ["--commit-log", options.commit_log]
        if options.redis_server is not None:
            argv += ["--redis-server", str(options.redis_server)]
        return argv

    def start(self) -> NodeAddress:
        """Start and wait until ready; StartupError with the node's own line when it does not start."""
        (self.data_dir / CONNECT_FILE).unlink(missing_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("QIM_")}
        with (self.directory / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                self.argv(),
                stdout=log,
                stderr=log,
                env=inherited | dict(self._options.parameters),
                start_new_session=True,
                # Told to stop when whoever wanted it is gone, however it went. The kernel watches the starting thread.
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self.data_dir / CONNECT_FILE).exists():
            if self._process.poll() is not None:
                raise StartupError(f"the node did not start: {self.last_line()}")
            if time.monotonic() >= deadline:
                self.kill_all()
                raise StartupError(f"the node did not start in {START_TIMEOUT_S:.0f} s: {self.last_line()}")
            time.sleep(_POLL_S)
        address = self.address()
        asyncio.run(wait_until_ready(address, START_TIMEOUT_S))
        return address

    def address(self) -> NodeAddress:
        return NodeAddress.read(self.data_dir)

    def stop(self) -> int:
        """What Ctrl-C does; the exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        """Until the node has ended; its exit code. It is killed after STOP_TIMEOUT_S."""
        if self._process is None:
            return 0
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill_all()
            code = -int(signal.SIGKILL)
        self._process = None
        return code

    def kill_all(self) -> None:
        """kill -9 of the supervisor, every worker and every private server, at once."""
        pids = [pid for pid in self.processes().values() if pid]
        self.kill_supervisor()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def kill_supervisor(self) -> None:
        """kill -9 of the supervisor alone; everything it started dies with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def kill(self, process: str) -> int:
        """kill -9 of one worker or server; the pid it had."""
        pid = self.pid(process)
        os.kill(pid, signal.SIGKILL)
        return pid

    def pid(self, process: str) -> int:
        """StartupError while it does not run."""
        return pid_of(self.address().run_dir, process)

    def processes(self) -> dict[str, int]:
        """Name -> pid of all workers and servers, 0 for one that does not run; empty before the first start."""
        try:
            return pids_of(self.address().run_dir)
        except StartupError:
            return {}

    def last_line(self) -> str:
        """The last line the node wrote."""
        lines = (self.directory / LOG_FILE).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def close(self) -> None:
        """Stop if it runs and remove what was temporary."""
        if self._process is not None:
            self.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pids_of(run_dir: str | Path) -> dict[str, int]:
    """Name -> pid of the workers and servers of a node on this host, from its supervisor's state file; 0 for one that
    does not run. StartupError when no node ever ran there."""
    try:
        state = orjson.loads((Path(run_dir) / STATE_FILE).read_bytes())
    except (OSError, ValueError):
        raise StartupError(f"no node runs with the run directory {run_dir}") from None
    return {name: int(process["pid"]) for name, process in state["processes"].items()}


def pid_of(run_dir: str | Path, process: str) -> int:
    """Pid of a worker or server of a node on this host; StartupError while it does not run."""
    pid = pids_of(run_dir).get(process, 0)
    if pid == 0:
        raise StartupError(f"no process {process} runs in {run_dir}")
    return pid


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
