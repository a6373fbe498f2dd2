"""The whole cluster in one process: servers, workers under a supervisor, gateways, devices; and its director."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from qim.admin.tokens import TokenIssuer
from qim.backplane.api import PeerUnavailable
from qim.commit_log.api import Fence, LogIdentity
from qim.commit_log.memory import MemoryCheckpointStore, MemoryCommitLog
from qim.config.parameters import Parameters, default_parameters
from qim.core.ids import conversation_bucket, group_conversation_id
from qim.core.secret import Secret
from qim.errors import Fenced, StoreError
from qim.gateway.node import GatewaySettings
from qim.gateway.role import GatewayRole
from qim.presence.layout import PresenceEntry
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import SubmitGroupChange
from qim.registry.api import LeaseKind
from qim.registry.memory import MemoryShardRegistry
from qim.registry.routes import RouteCache
from qim.runtime.role import Role
from qim.runtime.tasks import TaskSet
from qim.shard_workers.conversation.membership import Placement
from qim.shard_workers.conversation.runner import WriterRole
from qim.shard_workers.fanout.runner import FanoutRole, FanoutSettings
from qim.shard_workers.mailbox.runner import MailboxRole, MailboxSettings, MailboxStores
from qim.stores.crypto import KeyRing
from qim.stores.memory_message import MemoryMessageStore
from tests.sim.devices import Device, Pipe, SimListener, SimPresence, live_connections
from tests.sim.loop import START_UNIX_MS, SimLoop, SimProcess, WallClock
from tests.sim.network import Network, SimBackplane
from tests.sim.oracle import Oracle
from tests.sim.plan import Plan
from tests.sim.servers import Connection, MailboxServer, Remote, Server, SimMailboxStore, run_now

TENANT: Final = "t"
CURSOR_KEYS: Final = KeyRing(Secret(bytes(32)))
SIGNING_KEY: Final = CURSOR_KEYS.token_signing_key()
RESTART_S: Final = 0.05
TRIM_AFTER_S: Final = 4.0
"""The dispatch log is trimmed below a C that was stored at least this long ago: twice what an instance may lose."""
TRIM_EVERY_S: Final = 0.5
FAR_S: Final = 0.01
ALIASES: Final = ("", "b")
"""A role instance that takes over under another name alternates between these suffixes."""


class Worker:
    """A process slot under the supervisor; `process` is the instance in force, older ones may live on."""

    def __init__(self, cluster: Cluster, name: str, slots: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.name = name
        self.slots = slots
        self.alias = 0
        self.process: SimProcess | None = None
        self.down_for_s = RESTART_S
        self.wall = WallClock()
        self.starts = 0

    def role_names(self) -> tuple[str, ...]:
        return tuple(slot + ALIASES[self.alias] for slot in self.slots)

    def start(self) -> None:
        self.starts += 1
        process = self.process = self.cluster.process(self.name, self.wall)
        process.on_crash = partial(self.died, process)
        process.soon(Instance(self, process).launch)

    def take_over(self, *, renamed: bool) -> None:
        """Another instance is started while this one lives on: whoever thought it dead was wrong."""
        if renamed and not self.name.startswith("gateway"):
            self.alias = 1 - self.alias
        self.start()

    def died(self, process: SimProcess) -> None:
        """The instance has ended; the supervisor starts another one, unless one is in force already."""
        if not process.alive:
            return
        self.cluster.trace(f"{process.name} (start {self.starts}) ended")
        self.cluster.bury(process)
        if process is self.process:
            self.cluster.loop.world_later(self.down_for_s, self._restart, process)
            self.down_for_s = RESTART_S

    def _restart(self, dead: SimProcess) -> None:
        if self.process is dead:
            self.start()


class Instance:
    """What `app/wiring.py` builds in a worker process."""

    def __init__(self, worker: Worker, process: SimProcess) -> None:
        self.worker = worker
        self.process = process
        cluster = self.cluster = worker.cluster
        self.backplane = SimBackplane(cluster.network, process, worker.role_names())
        self.roles: list[Role] = []
        self._tasks = TaskSet(self._failed)
        message, log, registry = (
            cluster.connection(process, cluster.core, name) for name in ("message", "log", "registry")
        )
        mailbox = cluster.connection(process, cluster.mailbox, "mailbox")
        self.messages: Any = Remote(message, cluster.messages)
        self.outbox: Any = Remote(message, cluster.outbox)
        self.dispatch_log: Any = Remote(log, cluster.broker if cluster.plan.broker else cluster.dispatch_log)
        self.checkpoints: Any = Remote(log, cluster.checkpoints)
        self.registry: Any = Remote(registry, cluster.registry)
        self.mailboxes = SimMailboxStore(mailbox, cluster.mailbox, cluster.plan.shards)
        self.routes = RouteCache(self.registry, self._tasks, poll_interval_ms=cluster.parameters.route_poll_interval_ms)

    def launch(self) -> None:
        self._tasks.start("serve", self._serve())

    async def _serve(self) -> None:
        """As `_Worker._start_roles`."""
        try:
            self.roles = [self._build(slot, name) for slot, name in zip(
                self.worker.slots, self.worker.role_names(), strict=True)]  # fmt: skip
            await self.routes.start()
            serving = [role for role in self.roles if role.name.startswith("gateway")]
            for role in self.roles:
                if role not in serving:
                    await role.start()
            await self.backplane.start()
            for role in serving:
                await role.start()
        except StoreError:
            self.worker.died(self.process)

    def _failed(self, task: str, error: BaseException) -> None:
        """A role is dead: the process ends."""
        if not isinstance(error, Fenced):
            self.cluster.oracle.violation(f"{self.process.name}: task {task} failed: {error!r}")
        self.worker.died(self.process)

    def _build(self, slot: str, name: str) -> Role:
        kind, index = slot.partition("-")[0], int(slot.rpartition("-")[2])
        makers: dict[str, Callable[[str, int], Role]] = {
            "writer": self._writer, "fanout": self._fanout, "mailbox": self._mailbox, "gateway": self._gateway,
        }  # fmt: skip
        return makers[kind](name, index)

    def _writer(self, name: str, index: int) -> Role:
        plan, cluster = self.cluster.plan, self.cluster
        return WriterRole(
            name,
            range(index, plan.buckets, plan.pools["writer"]),
            bucket_count=plan.buckets,
            placement=Placement(plan.shards, plan.lanes),
            parameters=cluster.parameters,
            store=self.messages,
            membership=self.messages,
            registry=self.registry,
            routes=self.routes,
            backplane=self.backplane,
            key_ring=CURSOR_KEYS,
            clock=self.process,
            on_failure=self._failed,
        )

    def _fanout(self, name: str, index: int) -> Role:
        plan = self.cluster.plan
        return FanoutRole(
            name,
            index,
            plan.pools["fanout"],
            settings=FanoutSettings(
                conversation_bucket_count=plan.buckets, mailbox_shard_count=plan.shards, lane_count=plan.lanes
            ),
            registry=self.registry,
            outbox=self.outbox,
            dispatch_log=self.dispatch_log,
            checkpoints=self.checkpoints,
            membership=self.messages,
            backplane=self.backplane,
            clock=self.process,
            on_failure=self._failed,
        )

    def _mailbox(self, name: str, index: int) -> Role:
        plan, cluster = self.cluster.plan, self.cluster
        chunk_members = cluster.rng_of(f"chunk/{name}/{self.worker.starts}").choice((1, 2, 3))
        return MailboxRole(
            name,
            index,
            plan.pools["mailbox"],
            settings=MailboxSettings(
                mailbox_shard_count=plan.shards,
                lane_count=plan.lanes,
                append_chunk_members=chunk_members,
                append_entries_max=plan.entries_max,
                history_pulls_per_second=1000,
            ),
            stores=MailboxStores(
                registry=self.registry,
                dispatch_log=self.dispatch_log,
                mailbox=self.mailboxes,
                messages=self.messages,
                membership=self.messages,
                cipher=CURSOR_KEYS,
                cursor_key=CURSOR_KEYS.cursor_key,
            ),
            backplane=self.backplane,
            clock=self.process,
            on_failure=self._failed,
            gateways=[f"gateway-{i}" for i in range(plan.pools["gateway"])],
            present=self._present,
        )

    def _present(self) -> Iterator[tuple[str, PresenceEntry]]:
        ttl_ms = self.cluster.parameters.presence_lease_ttl
        return live_connections(self.cluster.presence, now_unix_ms=self.process.unix_ms(), lease_ttl_ms=ttl_ms)

    def _gateway(self, name: str, index: int) -> Role:
        plan, cluster = self.cluster.plan, self.cluster
        peers = [
            f"{kind}-{i}{alias}" for kind in ("writer", "mailbox") for i in range(plan.pools[kind]) for alias in ALIASES
        ]
        return GatewayRole(
            name,
            GatewaySettings(
                host="",
                port=1,
                tls_context=None,  # type: ignore[arg-type]
                token_key=SIGNING_KEY.public_key(),
                run_dir=None,  # type: ignore[arg-type]
                peers=tuple(peers),
                other_gateways=tuple(f"gateway-{i}" for i in range(plan.pools["gateway"]) if i != index),
                conversation_bucket_count=plan.buckets,
                mailbox_shard_count=plan.shards,
                exempt_addresses=frozenset({"10.0.0.1"}),
            ),
            parameters=cluster.parameters,
            backplane=self.backplane,
            routes=self.routes,
            registry=self.registry,
            clock=self.process,
            random_unit=cluster.rng_of(f"gateway/{index}/{self.worker.starts}").random,
            on_failure=self._failed,
        )


class Cluster:
    """Everything there is in one run."""

    tenant = TENANT

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seed = plan.seed
        self.loop = SimLoop()
        self.parameters = _parameters(plan)
        self.oracle = Oracle(self)
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
        self.broker = Broker(self.dispatch_log)
        self.registry = MemoryShardRegistry()
        self.presence: dict[str, SimPresence] = {}
        self.listeners: list[SimListener] = []
        self.pipes: list[Pipe] = []
        self.processes: list[SimProcess] = []
        self.connections: dict[SimProcess, list[Connection]] = {}
        self.workers = {name: Worker(self, name, slots) for name, slots in plan.workers()}
        self.devices = {name: Device(self, user, name) for user, name in plan.devices}
        self.lines: list[str] = []
        self.triggers: list[tuple[str, list[int], Callable[[Connection], None]]] = []
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

    def start(self) -> None:
        for worker in self.workers.values():
            worker.start()
        self._admin.start()
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
        name = f"{connection.purpose}.{method}"
        for trigger in list(self.triggers):
            wanted, left, act = trigger
            if wanted == name and connection.process.alive:
                left[0] -= 1
                if left[0] <= 0:
                    self.triggers.remove(trigger)
                    self.trace(f"{name} of {connection.process.name} was executed")
                    act(connection)

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

    # ------------------------------------------------------------------------------------------------ the faults

    def crash(self, worker: str, after_callbacks: int, down_s: float) -> None:
        process = self.workers[worker].process
        if process is not None and process.alive:
            self.workers[worker].down_for_s = down_s
            process.crash_after = after_callbacks
            if process.paused:
                process.on_crash()

    def crash_at(self, call: str, nth: int, down_s: float) -> None:
        def act(connection: Connection) -> None:
            worker = self.workers.get(connection.process.name)
            if worker is not None:
                worker.down_for_s = down_s
                worker.died(connection.process)

        self.triggers.append((call, [nth], act))

    def break_at(self, call: str, nth: int, _: float) -> None:
        self.triggers.append((call, [nth], Connection.break_))

    def takeover(self, worker: str, renamed: bool) -> None:
        self.workers[worker].take_over(renamed=renamed)

    def takeover_at(self, call: str, nth: int, _: float) -> None:
        def act(connection: Connection) -> None:
            worker = self.workers.get(connection.process.name)
            if worker is not None and not worker.name.startswith("gateway"):
                worker.take_over(renamed=nth % 2 == 0)

        self.triggers.append((call, [nth], act))

    def mailbox_lost_at(self, call: str, nth: int, down_s: float) -> None:
        lost_s = 0.5 * nth
        self.triggers.append((call, [nth], lambda _: self.mailbox_lost(lost_s, down_s)))

    def pause(self, worker: str, for_s: float) -> None:
        process = self.workers[worker].process
        if process is not None and process.alive:
            process.stop()
            self.loop.world_later(for_s, process.resume)

    def clock(self, worker: str, step_ms: int, for_s: float) -> None:
        wall = self.workers[worker].wall
        wall.offset_ms += step_ms
        self.loop.world_later(for_s, setattr, wall, "offset_ms", 0)

    def break_(self, worker: str, purpose: str) -> None:
        for connection in self._connections(worker, purpose):
            connection.break_()

    def slow(self, worker: str, purpose: str, latency_s: float, for_s: float) -> None:
        for connection in self._connections(worker, purpose):
            connection.slow_s = latency_s
            self.loop.world_later(for_s, setattr, connection, "slow_s", 0.0)

    def server_freeze(self, server: str, for_s: float) -> None:
        frozen = self.core if server == "core" else self.mailbox
        if not frozen.frozen:
            frozen.freeze()
            self.loop.world_later(for_s, frozen.thaw)

    def mailbox_lost(self, since_s: float, down_s: float) -> None:
        """The mailbox instance ends and comes back as it was up to two seconds ago."""
        self.mailbox.crash()
        lost = self.mailbox.lose_since(self.loop.time() - since_s)
        self.trace(f"the mailbox instance lost {lost} writes")
        self.oracle.mailbox_rolled_back()
        self.loop.world_later(down_s, self.mailbox.restart)

    def blackout(self, since_s: float, down_s: float) -> None:
        """Power fails: every worker and the mailbox instance end at once."""
        for worker in self.workers.values():
            if worker.process is not None and worker.process.alive:
                worker.down_for_s = down_s
                worker.died(worker.process)
        self.mailbox_lost(since_s, down_s)

    def core_crash(self, down_s: float) -> None:
        self.core.crash()
        self.loop.world_later(down_s, self.core.restart)

    def cut(self, worker: str, role: str, for_s: float) -> None:
        self.network.cut(worker, role, for_s=for_s)

    def lag(self, worker: str, role: str, latency_s: float, for_s: float) -> None:
        self.network.slow[worker, role] = latency_s
        self.loop.world_later(for_s, self.network.slow.pop, (worker, role), None)

    def pipe(self, device: str, _: float) -> None:
        process = self.devices[device].process
        if process is not None:
            self.drop_pipes(process)

    def hold(self, device: str, for_s: float) -> None:
        process = self.devices[device].process
        for found in self.pipes:
            if any(end.process is process for end in found.ends):
                found.held_until_s = self.loop.time() + for_s

    def device(self, device: str, for_s: float) -> None:
        found = self.devices[device]
        if found.process is not None and found.process.alive:
            found.kill()
            self.loop.world_later(for_s, self._start_again, found)

    def _start_again(self, device: Device) -> None:
        if device.process is None or not device.process.alive:
            device.start()

    def _connections(self, worker: str, purpose: str) -> list[Connection]:
        process = self.workers[worker].process
        found = self.connections.get(process, []) if process is not None else []
        return [connection for connection in found if connection.purpose == purpose]

    # -------------------------------------------------------------------------------------------------- the end

    def heal(self) -> None:
        """Everything works from here on: nobody is stopped, slow, cut off or on another clock."""
        self.triggers.clear()
        self.network.slow.clear()
        self.network.severed.clear()
        for server in (self.core, self.mailbox):
            server.restart()
            if server.frozen:
                server.thaw()
        for process in self.processes:
            process.wall.offset_ms = 0
            process.crash_after = None
            if process.alive and process.paused:
                process.resume()
        for connections in self.connections.values():
            for connection in connections:
                connection.slow_s = 0.0
        for pipe in self.pipes:
            pipe.held_until_s = 0.0
        for worker in self.workers.values():
            if worker.process is None or not worker.process.alive:
                worker.start()
        for device in self.devices.values():
            self._start_again(device)
            if device.client is not None and not device.live and device.process is not None:
                device.process.soon(device.client.network_changed)

    def close(self) -> None:
        self.loop.dismantle()
        for device in self.devices.values():
            device.store.really_close()


class Broker:
    """The dispatch log as a broker keeps it: no fence, and of an append that was cut off a prefix may be there."""

    splits = True

    def __init__(self, log: MemoryCommitLog) -> None:
        self._log = log
        self.read = log.read
        self.watermarks = log.watermarks
        self.identity = log.identity

    async def append(self, records: Sequence[tuple[int, bytes]], fence: Fence | None = None) -> list[int]:
        return await self._log.append(records)


class Administrator:
    """The management plane: adds and removes members."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._process = cluster.process("admin-0")
        self._backplane = SimBackplane(cluster.network, self._process, ("admin-0",))

    def start(self) -> None:
        self._process.soon(self._connect)

    def _connect(self) -> None:
        plan = self._cluster.plan
        for index in range(plan.pools["writer"]):
            for alias in ALIASES:
                self._backplane.connect(f"writer-{index}{alias}")

    def change(self, group: str, user: str, *, joining: bool) -> None:
        self._process.soon(lambda: self._process.start(self._change(group, user, joining)))

    async def _change(self, group: str, user: str, joining: bool) -> None:
        bucket = conversation_bucket(TENANT, group_conversation_id(group), self._cluster.plan.buckets)
        route = await self._cluster.registry.current(LeaseKind.CONVERSATION_BUCKET, bucket)
        if route is not None:
            opcode = InternalOpcode.SUBMIT_GROUP_ADD if joining else InternalOpcode.SUBMIT_GROUP_REMOVE
            body = SubmitGroupChange(tenant_id=TENANT, group_id=group, user_ids=[user]).SerializeToString()
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
