"""What runs: a worker under its supervisor, and in it what `app/wiring.py` builds in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from qim.core.secret import Secret
from qim.errors import StoreError
from qim.gateway.node import GatewaySettings
from qim.gateway.role import GatewayRole
from qim.presence.layout import PresenceEntry
from qim.registry.api import KIND_OF_POOL, LeaseKind
from qim.registry.keeper import LeaseKeeper
from qim.registry.lease import LeaseTimes
from qim.registry.routes import RouteCache
from qim.runtime.role import Role
from qim.runtime.tasks import TaskSet
from qim.shard_workers.conversation.membership import Placement
from qim.shard_workers.conversation.runner import WriterRole
from qim.shard_workers.fanout.runner import FanoutRole, FanoutSettings
from qim.shard_workers.mailbox.runner import MailboxRole, MailboxSettings, MailboxStores
from qim.stores.crypto import KeyRing
from tests.sim.devices import live_connections
from tests.sim.loop import SimProcess, WallClock
from tests.sim.network import SimBackplane
from tests.sim.servers import Remote, SimMailboxStore

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

CURSOR_KEYS: Final = KeyRing(Secret(bytes(32)))
SIGNING_KEY: Final = CURSOR_KEYS.token_signing_key()
RESTART_S: Final = 0.05
EXPECTED_S: Final = 1.0
"""A worker that is back within this time is expected by its pool (`app/up.py`)."""
MEMBERS_PER_SUPERVISOR: Final = 64
"""A second supervisor's members are numbered from here on, a third one's from twice that."""


class Worker:
    """A process slot under the supervisor; `process` is the instance in force, one it replaced may live on."""

    def __init__(self, cluster: Cluster, name: str, slots: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.name = name
        self.slots = slots
        self.process: SimProcess | None = None
        self.replaced: SimProcess | None = None
        self.instance: Instance | None = None
        self.down_for_s = RESTART_S
        self.wall = WallClock()
        self.starts = 0
        self._supervisor = 0
        self._members: dict[SimProcess, tuple[str, ...]] = {}

    def members(self) -> tuple[str, ...]:
        """Names of the role instances of the next process."""
        return tuple(_numbered(slot, self._supervisor) for slot in self.slots)

    def start(self) -> None:
        self.starts += 1
        process = self.process = self.cluster.process(self.name, self.wall)
        process.on_crash = partial(self.died, process)
        self._members[process] = self.members()
        self.instance = Instance(self, process)
        process.soon(self.instance.launch)

    def take_over(self, *, forced: bool) -> None:
        """Another supervisor starts an instance while this one lives on; `forced`: it is taken for dead."""
        if self.replaced is not None:
            self.died(self.replaced)
        self.replaced = self.process
        self._supervisor += 1
        self.start()
        if forced and self.replaced is not None and self.replaced.alive:
            self.cluster.lease_watch.forced()
            self.cluster.registry.release_reaped(self._members[self.replaced])

    def died(self, process: SimProcess, *, proven: bool = True) -> None:
        """The instance has ended; the supervisor starts another one, unless one is in force already. `proven`: it
        lives to reap it and tells the registry, if that answers."""
        if not process.alive:
            return
        self.cluster.trace(f"{process.name} (start {self.starts}) ended")
        self.cluster.bury(process)
        core = self.cluster.core
        in_force = process is self.process
        if proven and core.up and not core.frozen:
            expected = in_force and self.down_for_s <= EXPECTED_S
            self.cluster.registry.release_reaped(self._members[process], self.name if expected else "")
        if in_force:
            self.cluster.loop.world_later(self.down_for_s, self._restart, process)
            self.down_for_s = RESTART_S

    def drain(self) -> None:
        """SIGTERM: the instance gives everything back before it ends."""
        instance, process = self.instance, self.process
        if process is not None and process.alive and instance is not None:
            process.soon(lambda: process.start(instance.drain()))

    def _restart(self, dead: SimProcess) -> None:
        if self.process is dead:
            self.start()


def _numbered(slot: str, supervisor: int) -> str:
    kind, _, number = slot.rpartition("-")
    return f"{kind}-{int(number) + supervisor * MEMBERS_PER_SUPERVISOR}"


class Instance:
    """What `app/wiring.py` builds in a worker process."""

    def __init__(self, worker: Worker, process: SimProcess) -> None:
        self.worker = worker
        self.process = process
        cluster = self.cluster = worker.cluster
        self._names = worker.members()
        self.backplane = SimBackplane(cluster.network, process, self._names)
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
                self.worker.slots, self._names, strict=True)]  # fmt: skip
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

    async def drain(self) -> None:
        """As `_Worker._drain`; the process ends behind it."""
        for role in self.roles:
            await role.drain()
        self.worker.died(self.process)

    def _failed(self, task: str, error: BaseException) -> None:
        """A role is dead: the process ends."""
        self.cluster.oracle.violation(f"{self.process.name}: task {task} failed: {error!r}")
        self.worker.died(self.process)

    def _leases(self, name: str) -> LeaseKeeper:
        """As `RoleBuilder._leases`."""
        plan = self.cluster.plan
        kind = KIND_OF_POOL[name.partition("-")[0]]
        keeper = LeaseKeeper(
            kind,
            plan.shards if kind is LeaseKind.MAILBOX_SHARD else plan.buckets,
            name,
            self.process.name,
            registry=self.registry,
            times=LeaseTimes.of(self.cluster.parameters),
            clock=self.process,
            on_failure=self._failed,
        )
        self.routes.on_change(lambda _: keeper.poke())
        self.cluster.lease_watch.keeps(self.process, keeper)
        return keeper

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
            range(plan.buckets),
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
            leases=self._leases(name),
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
            routes=self.routes,
            outbox=self.outbox,
            dispatch_log=self.dispatch_log,
            checkpoints=self.checkpoints,
            membership=self.messages,
            backplane=self.backplane,
            clock=self.process,
            on_failure=self._failed,
            leases=self._leases(name),
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
            routes=self.routes,
            backplane=self.backplane,
            clock=self.process,
            on_failure=self._failed,
            gateways=[f"gateway-{i}" for i in range(plan.pools["gateway"])],
            present=self._present,
            leases=self._leases(name),
        )

    def _present(self) -> Iterator[tuple[str, PresenceEntry]]:
        ttl_ms = self.cluster.parameters.presence_lease_ttl
        return live_connections(self.cluster.presence, now_unix_ms=self.process.unix_ms(), lease_ttl_ms=ttl_ms)

    def _gateway(self, name: str, index: int) -> Role:
        plan, cluster = self.cluster.plan, self.cluster
        peers = [f"{kind}-{i}" for kind in ("writer", "mailbox") for i in range(plan.pools[kind])]
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
