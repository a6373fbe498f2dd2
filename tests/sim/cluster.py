"""The whole cluster in one process: servers, workers under a supervisor, gateways, devices; and its director."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Sequence
from typing import Any, Final

from qim.admin.tokens import TokenIssuer
from qim.backplane.api import PeerUnavailable
from qim.commit_log.api import AppendRun, LogIdentity
from qim.commit_log.memory import MemoryCheckpointStore, MemoryCommitLog
from qim.config.parameters import Parameters, default_parameters
from qim.core.ids import conversation_bucket, group_conversation_id
from qim.errors import StoreError
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import SubmitGroupChange
from qim.registry.api import LeaseKind
from qim.registry.memory import MemoryShardRegistry
from qim.stores.memory_message import MemoryMessageStore
from tests.sim.devices import Device, Pipe, SimListener, SimPresence
from tests.sim.faults import Faults
from tests.sim.lease_watch import LeaseWatch
from tests.sim.loop import START_UNIX_MS, SimLoop, SimProcess, WallClock
from tests.sim.network import Network, SimBackplane
from tests.sim.oracle import Oracle
from tests.sim.plan import Plan
from tests.sim.processes import SIGNING_KEY, Worker
from tests.sim.servers import Connection, MailboxServer, Server, run_now

TENANT: Final = "t"
TRIM_AFTER_S: Final = 4.0
"""The dispatch log is trimmed below a C that was stored at least this long ago: twice what an instance may lose."""
TRIM_EVERY_S: Final = 0.5
FAR_S: Final = 0.01
LINK_S: Final = 0.005
"""A new link of the administrator is up by then."""


class Cluster:
    """Everything there is in one run."""

    tenant = TENANT

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seed = plan.seed
        self.loop = SimLoop()
        self.parameters = _parameters(plan)
        self.oracle = Oracle(self)
        self.lease_watch = LeaseWatch(self)
        self.network = Network(self.loop, plan.seed, self.oracle.violation)
        self.core = Server(self.loop, "core")
        self.mailbox = MailboxServer(self.loop, plan.shards, self.server_unix_ms)
        self.core.executed = self.mailbox.executed = self._executed
        self.messages = MemoryMessageStore()
        outbox = LogIdentity(cluster_id="sim", topic_id="outbox", partition_count=plan.buckets)
        dispatch = LogIdentity(cluster_id="sim", topic_id="dispatch", partition_count=plan.shards)
        self.checkpoints = MemoryCheckpointStore(outbox)
        self.outbox = MemoryCommitLog(outbox, records_of=self.messages.outbox)
        self.dispatched: list[list[bytes]] = [[] for _ in range(plan.shards)]
        self.dispatch_log = MemoryCommitLog(
            dispatch, records_of=self.dispatched.__getitem__, checkpoints=self.checkpoints
        )
        self.broker = Broker(self.dispatch_log, self.rng_of("broker"))
        self.registry = MemoryShardRegistry(self.registry_ms)
        self._registry_offset_ms = 0
        self.presence: dict[str, SimPresence] = {}
        self.listeners: list[SimListener] = []
        self.pipes: list[Pipe] = []
        self.processes: list[SimProcess] = []
        self.connections: dict[SimProcess, list[Connection]] = {}
        self.workers = {name: Worker(self, name, slots) for name, slots in plan.workers()}
        self.devices = {name: Device(self, user, name) for user, name in plan.devices}
        self.lines: list[str] = []
        self.faults = Faults(self)
        self.trim_after_s = TRIM_AFTER_S
        self._offline: set[str] = set()
        self._folds: dict[int, list[int]] = {shard: [] for shard in range(plan.shards)}
        self._admin = Administrator(self)

    # ------------------------------------------------------------------------------------------------ building

    def process(self, name: str, wall: WallClock | None = None) -> SimProcess:
        process = SimProcess(name, self.loop, wall or WallClock())
        process.cluster = self  # type: ignore[attr-defined]
        self.processes.append(process)
        return process

    def rng_of(self, name: str) -> random.Random:
        """A source of its own for every user of chance: a fault that is left out changes nobody else's."""
        return random.Random(f"{self.seed}/{name}")

    def connection(self, process: SimProcess, server: Server, purpose: str) -> Connection:
        made = Connection(server, process, purpose, self.seed)
        if purpose == "mailbox" and self.plan.far_mailboxes:
            made.slow_s = FAR_S
        self.connections.setdefault(process, []).append(made)
        return made

    def token(self, user: str, device: str) -> str:
        return TokenIssuer(SIGNING_KEY).issue(
            tenant_id=TENANT, user_id=user, device_id=device, now_ms=START_UNIX_MS - 60_000, ttl_s=86_400
        )

    def server_unix_ms(self) -> int:
        return START_UNIX_MS + round(self.loop.time() * 1000)

    def registry_ms(self) -> int:
        return self.server_unix_ms() + self._registry_offset_ms

    def registry_step(self, offset_ms: int) -> None:
        """The clock of the registry jumps to so far beside the true time."""
        if offset_ms != self._registry_offset_ms:
            self._registry_offset_ms = offset_ms
            self.lease_watch.clock_stepped()

    def start(self) -> None:
        for worker in self.workers.values():
            worker.start()
        self.loop.world_later(TRIM_EVERY_S, self._trim)

    def trace(self, line: str) -> None:
        self.lines.append(f"{self.loop.time():9.4f} {line}")

    # ---------------------------------------------------------------------------------------------- ends of things

    def bury(self, process: SimProcess) -> None:
        """The process is dead: what it had sent may still arrive."""
        process.kill()
        rng = self.rng_of(f"bury/{process.name}/{self.loop.time()}")
        self.network.process_died(process, deliver_rest=rng.random() < 0.5)
        for connection in self.connections.pop(process, []):
            connection.close()
        self.listeners = [found for found in self.listeners if found.process is not process]
        self.drop_pipes(process)

    def drop_pipes(self, process: SimProcess) -> None:
        for pipe in self.pipes:
            if any(end.process is process for end in pipe.ends):
                pipe.reset()

    def network_down(self, device: str) -> bool:
        return device in self._offline

    # ------------------------------------------------------------------------------------------------ the servers

    def _executed(self, connection: Connection, method: str, args: tuple[Any, ...], outcome: Any) -> None:
        self.oracle.executed(connection.purpose, method, args, outcome)
        self.lease_watch.executed(connection, method, args, outcome)
        self.faults.executed(connection, method)

    def _trim(self) -> None:
        """Retention: the dispatch log below a C nobody can fall back behind, the outbox below the checkpoint.

        A C seen long enough ago is not enough: it may have been rolled back since. The least one seen since then is.
        """
        looks = round(self.trim_after_s / TRIM_EVERY_S) + 1
        for shard, history in self._folds.items():
            state = self.mailbox.store._held.shards.get(shard)
            history.append(state.fold_offset if state else -1)
            if len(history) >= looks and (safe := min(history[-looks:]) + 1) > 0:
                run_now(self.dispatch_log.trim(shard, safe))
        for bucket, position in self.checkpoints._positions.items():
            run_now(self.outbox.trim(bucket, position.next_offset))
        self.loop.world_later(TRIM_EVERY_S, self._trim)

    # ------------------------------------------------------------------------------------------------ the users

    def login(self, device: str) -> None:
        self.devices[device].start()

    def send(self, device: str, conversation_id: str, client_message_id: str) -> None:
        self.devices[device].send(conversation_id, client_message_id)

    def create_group(self, device: str, group: str, members: tuple[str, ...]) -> None:
        self.devices[device].do(lambda client: client.create_group(group, members))

    def group_add(self, group: str, user: str) -> None:
        self._admin.change(group, user, joining=True)

    def group_remove(self, group: str, user: str) -> None:
        self._admin.change(group, user, joining=False)

    def close(self) -> None:
        self.loop.dismantle()
        for device in self.devices.values():
            device.store.really_close()


class Broker:
    """The dispatch log as a broker keeps it: no fence, of an append that was cut off a prefix may be there, and of one
    with a record that is refused everything else."""

    splits = True
    ends_together = False

    def __init__(self, log: MemoryCommitLog, rng: random.Random) -> None:
        self._log = log
        self._rng = rng
        self.refusals = 0
        """Records still to be refused, one of an append."""
        self.read = log.read
        self.watermarks = log.watermarks
        self.identity = log.identity

    async def append_each(self, runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        count = sum(len(run.records) for run in runs)
        refused = -1
        if self.refusals and count > 1:
            self.refusals -= 1
            refused = self._rng.randrange(count)
        numbers = itertools.count()
        kept = [AppendRun(None, [record for record in run.records if next(numbers) != refused]) for run in runs]
        offsets = await self._log.append_each(kept)
        if refused >= 0:
            raise StoreError("the broker refused a record")
        return offsets


class Administrator:
    """The management plane: adds and removes members."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._process = cluster.process("admin-0")
        self._backplane = SimBackplane(cluster.network, self._process, ("admin-0",))

    def change(self, group: str, user: str, *, joining: bool) -> None:
        self._process.soon(lambda: self._process.start(self._change(group, user, joining)))

    async def _change(self, group: str, user: str, joining: bool) -> None:
        bucket = conversation_bucket(TENANT, group_conversation_id(group), self._cluster.plan.buckets)
        route = await self._cluster.registry.current(LeaseKind.CONVERSATION_BUCKET, bucket)
        if route is not None:
            opcode = InternalOpcode.SUBMIT_GROUP_ADD if joining else InternalOpcode.SUBMIT_GROUP_REMOVE
            body = SubmitGroupChange(tenant_id=TENANT, group_id=group, user_ids=[user]).SerializeToString()
            self._backplane.connect(route.owner)
            await asyncio.sleep(LINK_S)
            with contextlib.suppress(PeerUnavailable):
                await self._backplane.request(route.owner, opcode, body, timeout_ms=2000)


def _parameters(plan: Plan) -> Parameters:
    changes: dict[str, Any] = {
        "conversation_bucket_count": plan.buckets,
        "sync_delay_hint_ms": {"min_ms": 0, "max_ms": 300},
        "per_user_msg_rate": 1000,
        "per_user_msg_rate_burst": 1000,
        "per_sender_in_conversation_burst": 1000,
    }
    if plan.tight_rate:
        changes["per_sender_in_conversation_rate"] = {"messages": 1, "per_ms": 12}
        changes["per_sender_in_conversation_burst"] = 2
    return default_parameters(**changes)
