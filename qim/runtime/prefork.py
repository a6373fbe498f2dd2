"""The supervisor: forks worker processes, starts private servers before them, restarts what dies, stops all in order.

It creates no loop, thread or client, because none survives fork: one blocking `select` over its signals and the
readiness pipes of its workers. Everything it starts dies with it (DESIGN-data §10).
"""

from __future__ import annotations

import gc
import os
import random
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import orjson

from qim.errors import StartupError
from qim.obs.logs import get_logger
from qim.runtime.affinity import pin_to_cpu, run_in_batches
from qim.runtime.backoff import Backoff
from qim.runtime.clock import Clock, SystemClock
from qim.runtime.collector import settle
from qim.runtime.parent_death import die_with_parent
from qim.runtime.redis_server import RedisServer, start_server, wait_until_ready
from qim.runtime.sd_notify import READY, STOPPING, sd_notify

log = get_logger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_CANNOT_START: Final = 2
"""StartupError: until the node has been ready once, it stops with this code, as nothing it was given will change. Later
on the cause may pass, a store that is down for example, and the process is tried again."""
_SERVER_STOP_TIMEOUT_MS: Final = 30_000
"""A server that is told to end may have to write what an everysec policy still holds."""
_STOP_POLL_S: Final = 0.02
_WATCHED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

NotifyReady = Callable[[], None]
WorkerDied = Callable[[str, float], None]
"""(process, ms until it is started again)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One worker process. `target` runs in the child, calls its argument once when it serves, and returns the exit
    code; SIGTERM asks it to drain and return."""

    name: str
    target: Callable[[NotifyReady], int]
    cpu: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """Times in ms; see `restart_backoff_*` and `drain_timeout_ms` of the parameters."""

    state_file: Path
    drain_timeout_ms: int = 15_000
    restart_initial_ms: int = 50
    restart_max_ms: int = 5_000
    restart_factor: float = 2.0
    restart_jitter_ratio: float = 0.2
    restart_reset_ms: int = 5_000


class _Child:
    """A process that should be running."""

    __slots__ = (
        "backoff",
        "kind",
        "name",
        "pid",
        "ready",
        "ready_pipe",
        "restart_at_ms",
        "restarts",
        "start",
        "started_ms",
    )

    def __init__(self, name: str, kind: str, backoff: Backoff, start: Callable[[_Child], int]) -> None:
        self.name = name
        self.kind = kind
        self.backoff = backoff
        self.start = start
        """Starts the process and returns its pid."""
        self.pid = 0
        self.ready = False
        self.ready_pipe = -1
        self.started_ms = 0.0
        self.restart_at_ms: float | None = None
        self.restarts = 0


class Supervisor:
    """Runs a node until it is told to stop.

    `run` returns the exit code: 0 after a stop that was asked for, 1 when something had to be killed for it, 2 when a
    worker cannot start. It raises StartupError when a server cannot. `before_workers` runs between the two, once, with
    the servers ready; it must leave no thread or loop behind. `on_worker_died` hears of every worker that was reaped
    and when it is started again; it must be quick, leave nothing behind and not raise.
    """

    def __init__(
        self,
        *,
        processes: Sequence[ProcessSpec],
        servers: Sequence[RedisServer] = (),
        options: SupervisorOptions,
        before_workers: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        on_worker_died: WorkerDied = lambda name, delay_ms: None,
        clock: Clock | None = None,
    ) -> None:
        self._options = options
        self._on_worker_died = on_worker_died
        self._before_workers = before_workers
        self._on_ready = on_ready
        self._clock = clock or SystemClock()
        self._servers = [(server, self._server_child(server)) for server in servers]
        self._workers = [self._worker_child(spec) for spec in processes]
        self._selector = selectors.DefaultSelector()
        self._stop_requests = 0
        self._exit_code: int | None = None
        self._announced = False

    def run(self) -> int:
        """Start everything, watch it, stop everything. Blocks; call it in the main thread."""
        killed = False
        run_in_batches()
        with self._signals():
            try:
                self._start_servers()
                self._before_workers()
                # Children share these pages as long as no collection touches them.
                gc.freeze()
                for child in self._workers:
                    self._start(child)
                self._write_state()
                self._watch()
            finally:
                sd_notify(STOPPING)
                killed = self._stop(self._workers, self._options.drain_timeout_ms)
                servers = [child for _, child in reversed(self._servers)]
                killed = self._stop(servers, _SERVER_STOP_TIMEOUT_MS) or killed
                self._write_state()
                self._selector.close()
        if self._exit_code is not None:
            return self._exit_code
        return EXIT_FAILED if killed else EXIT_OK

    # ------------------------------------------------------------------------------------------------------- starting

    def _server_child(self, server: RedisServer) -> _Child:
        return _Child(
            server.name,
            "server",
            self._backoff(),
            lambda child: start_server(server, lock_timeout_s=30.0 if child.restarts == 0 else 0.0),
        )

    def _worker_child(self, spec: ProcessSpec) -> _Child:
        return _Child(spec.name, "worker", self._backoff(), lambda child: self._fork(child, spec))

    def _backoff(self) -> Backoff:
        options = self._options
        return Backoff(
            initial_ms=options.restart_initial_ms,
            factor=options.restart_factor,
            max_ms=options.restart_max_ms,
            jitter_ratio=options.restart_jitter_ratio,
            alive_reset_ms=options.restart_reset_ms,
            random_unit=random.random,
        )

    def _start_servers(self) -> None:
        """All at once, then wait for all: loading their files takes as long as the slowest."""
        for _, child in self._servers:
            self._start(child)
        for server, child in self._servers:
            wait_until_ready(server, child.pid, cancelled=lambda: self._stop_requests > 0)
            child.ready = True

    def _start(self, child: _Child) -> None:
        child.restart_at_ms = None
        child.started_ms = self._clock.monotonic_ms()
        child.pid = child.start(child)
        log.info("process_started", process=child.name, pid=child.pid, restarts=child.restarts)

    def _fork(self, child: _Child, spec: ProcessSpec) -> int:
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        # Blocked until the child has dropped our handlers, or a SIGTERM in between would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            self._run_child(spec, write_end, parent_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_end)
        child.ready_pipe = read_end
        self._selector.register(read_end, selectors.EVENT_READ, child)
        return pid

    def _run_child(self, spec: ProcessSpec, ready_pipe: int, parent_pid: int) -> None:
        """In the child: never returns."""
        code = EXIT_FAILED
        try:
            die_with_parent(parent_pid)
            # Its own session: Ctrl-C reaches the supervisor only, which drains its workers.
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in _WATCHED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            if spec.cpu is not None and not pin_to_cpu(spec.cpu):
                log.warning("process_not_pinned", process=spec.name, cpu=spec.cpu)
            code = spec.target(lambda: _report_ready(ready_pipe))
        except StartupError as error:
            print(f"qim: {spec.name}: {error}", file=sys.stderr)  # noqa: T201  (the one line an operator reads)
            code = EXIT_CANNOT_START
        except BaseException:  # noqa: BLE001  (nothing may return into the supervisor's frames)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    # ------------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        while self._stop_requests == 0 and self._exit_code is None:
            self._wait(self._next_restart_s())
            self._reap()
            self._restart_due()

    def _wait(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                os.read(key.fd, 4096)
            else:
                self._readiness(key.data)

    def _next_restart_s(self) -> float | None:
        due = [child.restart_at_ms for child in self._children() if child.restart_at_ms is not None]
        return max(0.0, (min(due) - self._clock.monotonic_ms()) / 1000) if due else None

    def _readiness(self, child: _Child) -> None:
        """A byte says the worker serves; the end of the pipe comes with its death."""
        if os.read(child.ready_pipe, 1):
            child.ready = True
        self._close_pipe(child)
        self._write_state()
        if self._stop_requests == 0 and not self._announced and all(worker.ready for worker in self._workers):
            self._announced = True
            sd_notify(READY)
            self._on_ready()

    def _reap(self) -> None:
        for child in self._children():
            if child.pid == 0:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._died(child, os.waitstatus_to_exitcode(status))

    def _died(self, child: _Child, code: int) -> None:
        child.pid = 0
        child.ready = False
        self._close_pipe(child)
        if child.kind == "worker" and code == EXIT_CANNOT_START and not self._announced:
            self._exit_code = EXIT_CANNOT_START
            return
        now_ms = self._clock.monotonic_ms()
        delay_ms = child.backoff.delay_after_run_ms(now_ms - child.started_ms)
        child.restart_at_ms = now_ms + delay_ms
        log.warning("process_died", process=child.name, exit_code=code, delay_ms=round(delay_ms))
        if child.kind == "worker":
            self._on_worker_died(child.name, delay_ms)
        self._write_state()

    def _restart_due(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for child in self._children():
            if child.restart_at_ms is None or child.restart_at_ms > now_ms:
                continue
            child.restarts += 1
            try:
                self._start(child)
            except (StartupError, OSError) as error:
                child.restart_at_ms = now_ms + child.backoff.delay_ms()
                log.error("process_not_started", process=child.name, error=error)
            self._write_state()

    # ------------------------------------------------------------------------------------------------------- stopping

    def _stop(self, children: Sequence[_Child], timeout_ms: int) -> bool:
        """SIGTERM to all, SIGKILL to what is left after `timeout_ms` or at a second stop request; True if one was."""
        requests = self._stop_requests
        _send(children, signal.SIGTERM)
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        killed = False
        while any(child.pid for child in children):
            self._wait(_STOP_POLL_S)
            for child in children:
                if child.pid and os.waitpid(child.pid, os.WNOHANG)[0]:
                    child.pid = 0
                    child.ready = False
                    self._close_pipe(child)
            if not killed and (self._clock.monotonic_ms() > deadline_ms or self._stop_requests > max(requests, 1)):
                killed = any(child.pid for child in children)
                _send(children, signal.SIGKILL)
        return killed

    # -------------------------------------------------------------------------------------------------------- plumbing

    def _children(self) -> Iterator[_Child]:
        yield from (child for _, child in self._servers)
        yield from self._workers

    def _close_pipe(self, child: _Child) -> None:
        if child.ready_pipe >= 0:
            self._selector.unregister(child.ready_pipe)
            os.close(child.ready_pipe)
            child.ready_pipe = -1

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals wake the select; the previous handlers come back afterwards."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        self._selector.register(read_end, selectors.EVENT_READ, None)
        previous = {number: signal.signal(number, self._on_signal) for number in _WATCHED}
        previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(read_end)
            os.close(write_end)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._stop_requests += 1

    def _write_state(self) -> None:
        """`{supervisor_pid, ready, processes: {name: {kind, pid, restarts, ready}}}`; pid 0 = not running."""
        state = {
            "supervisor_pid": os.getpid(),
            "ready": all(child.ready for child in self._workers),
            "processes": {
                child.name: {
                    "kind": child.kind,
                    "pid": child.pid,
                    "restarts": child.restarts,
                    "ready": child.ready,
                }
                for child in self._children()
            },
        }
        staged = self._options.state_file.with_suffix(".new")
        staged.write_bytes(orjson.dumps(state))
        staged.replace(self._options.state_file)


def _report_ready(ready_pipe: int) -> None:
    """In the child."""
    settle()
    os.write(ready_pipe, b"1")
    os.close(ready_pipe)


def _send(children: Sequence[_Child], number: signal.Signals) -> None:
    for child in children:
        if child.pid:
            os.kill(child.pid, number)
