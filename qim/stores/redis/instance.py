"""Start-up probes and identity of a Redis instance, and the watch over its free room (DESIGN-data §1, §0.2, §18.1.2b).

Probes run before any event loop, on redis-py; the watch runs beside the hot path on its own connection's commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
import redis

from qim.errors import StartupError, StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.stores.redis import keys
from qim.stores.redis.resp import RespClient, parse_address

log = get_logger(__name__)

FORMAT_VERSION: Final = 1
"""Version of keys and stored bytes; another one refuses start."""
REDIS_VERSION_MIN: Final = (7, 0, 0)
FREE_RATIO_MIN: Final = 0.05
WATCH_INTERVAL_S: Final = 1.0
_PROBE_TIMEOUT_S: Final = 5.0
_VERSION: Final = re.compile(r"^redis_version:(.*)$", re.MULTILINE)
_THREE_PARTS: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class InstanceRole(StrEnum):
    MESSAGE = "message"
    CORE = "core"
    MAILBOX = "mailbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Which instance of which cluster a server is; written at first use, never changed."""

    cluster_id: str
    roles: str
    """Sorted and joined by "+": one server may be message and core."""
    instance_id: str
    format_version: int = FORMAT_VERSION


class Connection(Protocol):
    """What the probes use of a redis-py client."""

    def execute_command(self, *args: object) -> Any: ...


def join_roles(roles: Collection[InstanceRole]) -> str:
    """The stamp's form of a set of roles."""
    return "+".join(sorted(roles))


def inspect_instance(address: str, roles: Collection[InstanceRole]) -> Stamp | None:
    """Probe a server for its roles and return its stamp, None if it has none. StartupError, one line, if it is unfit.

    Writes nothing, so whether the cluster is new can be known before the key file is made.
    """
    with _connected(address) as connection:
        _check_server(connection, address)
        _check_durability(connection, address, always=set(roles) != {InstanceRole.MAILBOX})
        return _read_stamp(connection, address)


def claim_instance(address: str, stamp: Stamp, *, known: bool) -> None:
    """Stamp an empty server, or check that it carries this stamp. StartupError otherwise.

    `known`: the registry says that this instance_id has been stamped before, so an empty server has lost its data and
    must not start over at sequence 1.
    """
    with _connected(address) as connection:
        found = _read_stamp(connection, address)
        if found is None:
            if connection.execute_command("DBSIZE") != 0:
                raise StartupError(
                    f"{address} holds data that is not ours: name an empty server for {stamp.instance_id}"
                )
            if known:
                raise StartupError(
                    f"{address} is empty, but {stamp.instance_id} of cluster {stamp.cluster_id} has held data: "
                    "start the server with its data directory or restore it from your backup"
                )
            connection.execute_command("SET", keys.STAMP, orjson.dumps(asdict(stamp)), "NX")
            found = _read_stamp(connection, address)
        if found != stamp:
            raise StartupError(f"{address} is {_describe(found)}, expected {_describe(stamp)}: correct the address")


class RoomWatch:
    """Whether an instance has room for new messages: at least 5 % of its memory and of its disk, and a working AOF.

    `full` keeps its last value while the instance does not answer: that is another error with its own answer.
    """

    def __init__(
        self, client: RespClient, *, data_dir: Path | None = None, free_ratio_min: float = FREE_RATIO_MIN
    ) -> None:
        self.full = False
        self.name = client.name
        self._client = client
        self._data_dir = data_dir
        self._used_ratio_max = 1.0 - free_ratio_min
        self._gauge = metrics.STORE_FULL.labels(instance=client.name)

    async def refresh(self) -> bool:
        """Ask the server once; the new value of `full`."""
        with contextlib.suppress(StoreError):
            memory = await self._client.call("INFO", "memory")
            persistence = await self._client.call("INFO", "persistence")
            self._set(self._is_full(_fields(memory.decode()), _fields(persistence.decode())))
        return self.full

    async def run(self) -> None:
        """Refresh for ever; a supervised task."""
        while True:
            await self.refresh()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _is_full(self, memory: dict[str, str], persistence: dict[str, str]) -> bool:
        limit_bytes = int(memory["maxmemory"])
        if limit_bytes and int(memory["used_memory"]) > limit_bytes * self._used_ratio_max:
            return True
        if persistence.get("aof_last_write_status", "ok") != "ok":
            return True
        if self._data_dir is None:
            return False
        disk = shutil.disk_usage(self._data_dir)
        return disk.free < disk.total * (1.0 - self._used_ratio_max)

    def _set(self, full: bool) -> None:
        if full != self.full:
            log.warning("store_room_changed", instance=self._client.name, state="full" if full else "ok")
        self.full = full
        self._gauge.set(full)


@contextmanager
def _connected(address: str) -> Iterator[Connection]:
    parse_address(address)
    client = redis.Redis.from_url(
        address, socket_timeout=_PROBE_TIMEOUT_S, socket_connect_timeout=_PROBE_TIMEOUT_S, decode_responses=True
    )
    client.set_response_callback("INFO", lambda text, **_: text)
    try:
        yield client
    except redis.RedisError as error:
        raise StartupError(f"cannot use the Redis at {address}: {error}") from None
    finally:
        client.close()


def _check_server(connection: Connection, address: str) -> None:
    text = connection.execute_command("INFO", "server")
    versions = _VERSION.findall(text)
    match = _THREE_PARTS.fullmatch(versions[0].strip()) if len(versions) == 1 else None
    if match is None:
        raise StartupError(f"{address} does not tell one three-part redis_version: use Redis >= 7.0.0 or Valkey")
    if tuple(int(part) for part in match.groups()) < REDIS_VERSION_MIN:
        raise StartupError(f"{address} runs redis_version {match.group()}: use Redis >= 7.0.0 or Valkey")
    clustered = _fields(connection.execute_command("INFO", "cluster")).get("cluster_enabled")
    fields = _fields(text)
    mode = fields.get("redis_mode") or fields.get("server_mode")
    if mode != "standalone" or clustered != "0":
        raise StartupError(f"{address} runs in mode {mode}: only a standalone server keeps our atomic steps")
    if _fields(connection.execute_command("INFO", "replication")).get("role") != "master":
        raise StartupError(f"{address} is a replica: name its primary")


def _check_durability(connection: Connection, address: str, *, always: bool) -> None:
    """`always` where messages are committed (§0.2); mailboxes are covered by the replay of the dispatch log."""
    wanted = {"appendonly": {"yes"}, "maxmemory-policy": {"noeviction"}, "appendfsync": {"always"}}
    if always:
        wanted["no-appendfsync-on-rewrite"] = {"no"}
    else:
        wanted["appendfsync"] = {"always", "everysec"}
    for name, values in wanted.items():
        reply = connection.execute_command("CONFIG", "GET", name)
        found = reply.get(name) if isinstance(reply, dict) else reply[1]
        if found not in values:
            raise StartupError(f"{address} has {name} {found}: set it to {' or '.join(sorted(values))}")


def _read_stamp(connection: Connection, address: str) -> Stamp | None:
    text = connection.execute_command("GET", keys.STAMP)
    if text is None:
        return None
    try:
        return Stamp(**orjson.loads(text))
    except (TypeError, orjson.JSONDecodeError):
        raise StartupError(f"{address} carries the stamp of another program or a newer version of this one") from None


def _describe(stamp: Stamp | None) -> str:
    if stamp is None:
        return "unstamped"
    return f"{stamp.instance_id} ({stamp.roles}, format {stamp.format_version}) of cluster {stamp.cluster_id}"


def _fields(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)
