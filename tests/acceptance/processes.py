"""A node as processes, with bare devices on it and, beside it, joined workers that a case may kill, stop or plant a
fault in (planted.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import redis

from qim.app.audit.evidence import Evidence, evidence_of
from qim.app.commit_logs import LogPartitions, commit_logs
from qim.app.connect import AdminClient, NodeAddress
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.app.settings import POOL_SIZE_MAX, PoolSizes
from qim.app.shards import move_shard
from qim.app.status import metrics_socket
from qim.commit_log.api import CommitLog, LogRecord
from qim.core.seq import log_offset_of
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.registry.api import EpochBoundary, LeaseKind
from qim.registry.redis import RedisShardRegistry
from qim.runtime.parent_death import die_with_parent
from qim.stores.redis import keys
from qim.stores.redis.resp import RespClient
from tests.acceptance.devices import Device
from tests.acceptance.harness import TENANT
from tests.support.redis_monitor import Command

TOKEN_TTL_S = 3600
APART = OwnNodeOptions(pools=PoolSizes(1, 1, 1, 1), apart=True, unlimited_tenant=TENANT)
"""One process of each role; the others of a case join."""
UNLIMITED_LAG = {"delivery_lag_ms": "600000", "delivery_lag_group_ms": "600000"}
"""Admission by lag is another case's: here it would refuse sends, and keep a backlog from growing."""


class Joined:
    """A second supervisor with one worker: `name` is its role instance and its process. It dies with its supervisor, so
    that nobody reports the death."""

    def __init__(self, node: OwnNode, pool: str, place: int, plant: str) -> None:
        self.name = f"{pool}-{place * POOL_SIZE_MAX}"
        self._control = node.directory / f"{self.name}.control"
        self._state = Path(node.address().run_dir) / f"supervisor-{place * POOL_SIZE_MAX}.json"
        self.log = node.directory / f"{self.name}.log"
        argv = ["-m", "qim", "join", "--data", str(node.data_dir), f"--{_PLURALS[pool]}", "1", "--apart"]
        if plant:
            argv = ["-m", "tests.acceptance.planted", plant, "--data", str(node.data_dir), "--pool", pool]
            argv += ["--control", str(self._control)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("QIM_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *argv], stdout=log, stderr=log, env=inherited | dict(node._options.parameters),
                start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )  # fmt: skip

    def control(self, **value: int) -> None:
        """Tell the plant."""
        staged = self._control.with_suffix(".new")
        staged.write_bytes(orjson.dumps(value))
        staged.replace(self._control)

    def worker_pid(self) -> int:
        pid: int = orjson.loads(self._state.read_bytes())["processes"][self.name]["pid"]
        return pid

    def kill(self) -> None:
        """kill -9, supervisor first."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


_PLURALS = {"writer": "writers", "mailbox": "mailboxes"}


@contextmanager
def joined(node: OwnNode, pool: str, *, place: int = 1, plant: str = "") -> Iterator[Joined]:
    """`place` counts the joined supervisors that run, this one included."""
    made = Joined(node, pool, place, plant)
    try:
        yield made
    finally:
        made.end()


class Cluster:
    """Clients of a node of processes, and what its servers and processes say."""

    def __init__(self, node: OwnNode, admin: AdminClient, evidence: Evidence, log: CommitLog) -> None:
        self.node = node
        self.address: NodeAddress = node.address()
        self.evidence = evidence
        self.dispatch_log = log
        self.core = redis.Redis(unix_socket_path=self.address.core_address.removeprefix("unix://"))
        self.mailboxes = redis.Redis(unix_socket_path=self.address.mailbox_address.removeprefix("unix://"))
        self._admin = admin
        self._devices: list[Device] = []

    @property
    def registry(self) -> RedisShardRegistry:
        registry = self.evidence.registry
        assert isinstance(registry, RedisShardRegistry)
        return registry

    # ---------------------------------------------------------------------------------------------------------- clients

    async def device(self, user: str, device_id: str = "phone") -> Device:
        """A connection that has sent nothing."""
        token = await self._admin.token(TENANT, user, device_id, TOKEN_TTL_S)
        context = self.address.client_tls()
        made = await Device.connect(self.address.port, context, device_id=device_id, access_token=token)
        self._devices.append(made)
        return made

    async def online(self, user: str, device_id: str = "phone") -> Device:
        """Past the barrier; a shard that is on its way to its owner is waited for."""
        device = await self.device(user, device_id)
        async with asyncio.timeout(30):
            while (answer := await device.authenticate()).opcode is not Opcode.AUTH_OK:
                assert answer.body.code in (pb.SHARD_MOVED, pb.REGION_FAILOVER), answer
                await asyncio.sleep(answer.body.retry_after_ms / 1000)
        device.welcome = answer.body
        if device.welcome.has_offline:
            await device.pull_through(0, device.welcome.sync_to_seq)
        await device.complete()
        return device

    async def close(self) -> None:
        for device in self._devices:
            await device.close()
        self.core.close()
        self.mailboxes.close()

    # ------------------------------------------------------------------------------------------------------------ looks

    async def owned_by(self, kind: LeaseKind, shard_id: int, owner: str, timeout_s: float = 60.0) -> None:
        """Pin an id to a member, once that has joined, and wait until it owns it."""
        async with asyncio.timeout(timeout_s):
            await self.has_joined(owner)
            await move_shard(self.address, kind, shard_id, owner)

    async def has_joined(self, member: str) -> None:
        """Before the next one is started, or this one is killed: a place that is free is taken again."""
        async with asyncio.timeout(30):
            while member not in (await self.registry.routes()).processes:
                await asyncio.sleep(0.05)

    def watermarks(self, shard: int) -> list[int]:
        """W of every lane as it is stored."""
        packed = self.mailboxes.hget(keys.shard(shard), keys.WATERMARKS_FIELD)
        assert isinstance(packed, bytes)
        return [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]

    async def covered(self, shard: int, records: int) -> int:
        """Until W of every lane is at the end of a log of at least so many records; how many it has."""
        async with asyncio.timeout(60):
            while True:
                high = (await self.dispatch_log.watermarks(shard)).high
                if high >= records and min(map(log_offset_of, self.watermarks(shard))) == high - 1:
                    return high
                await asyncio.sleep(0.02)

    async def boundaries(self, shard: int) -> list[EpochBoundary]:
        return await self.registry.boundaries(shard)

    async def dispatches(self, shard: int) -> list[LogRecord]:
        """The whole dispatch log of a shard."""
        low, high = await self.dispatch_log.watermarks(shard)
        found: list[LogRecord] = []
        while low + len(found) < high:
            found += await self.dispatch_log.read(shard, low + len(found))
        return found

    def events(self, event: str, process: str = "") -> list[dict[str, Any]]:
        """Log lines of the node's and the joined processes with this event."""
        texts = [path.read_text(errors="replace") for path in self.node.directory.glob("*.log")]
        lines = [line for text in texts for line in text.splitlines()]
        found = [orjson.loads(line) for line in lines if line.startswith("{") and f'"event":"{event}"' in line]
        return [line for line in found if process in ("", line.get("process"))]

    async def series(self, process: str) -> Mapping[str, float]:
        """All metrics of a process, {} while it does not answer."""
        path = str(metrics_socket(Path(self.address.run_dir), process))
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(path=path), timeout=aiohttp.ClientTimeout(total=2)
                ) as session,
                session.get("http://worker/metrics") as response,
            ):
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return {}
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}


def written_offsets(shard: int, commands: Sequence[Command]) -> set[int]:
    """Log offsets in whose progress rows something was set, as MONITOR saw it."""
    found: set[int] = set()
    for command in commands:
        if command.name == "HSET" and command.arguments[0].startswith(keys.progress_prefix(shard)):
            for name in command.arguments[1::2]:
                found.add(int.from_bytes(name.encode().decode("unicode_escape").encode("latin-1")[:6], "big"))
    return found


@asynccontextmanager
async def cluster_of(node: OwnNode) -> AsyncIterator[Cluster]:
    """Everything is closed at the end; no always-zero metric of a process that still runs may have moved."""
    address = node.address()
    async with AsyncExitStack() as stack:
        evidence = await stack.enter_async_context(evidence_of(address))
        admin = await stack.enter_async_context(AdminClient(address))
        client = RespClient(address.core_address, name="case")
        await client.connect()
        stack.push_async_callback(client.close)
        logs = commit_logs(
            address.commit_log,
            LogPartitions(
                cluster_id=(await RedisShardRegistry(client).cluster_map({}))["cluster_id"],
                outbox=address.conversation_bucket_count,
                dispatch=address.mailbox_shard_count,
                outbox_client=client,
                dispatch_client=client,
            ),
        )
        stack.push_async_callback(logs.close)
        cluster = Cluster(node, admin, evidence, logs.dispatch)
        stack.push_async_callback(cluster.close)
        yield cluster
