"""The only place that builds adapters: one worker process, from its plan to its last connection.

A process runs the role instances of its plan on one uvloop. Every process has connections of its own: nothing that
works after a fork was made before it but the TLS contexts, whose session tickets all workers share on purpose.
"""

from __future__ import annotations

import asyncio
import random
import signal
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import uvloop

from qim.admin.http import AdminPlane
from qim.admin.role import AdminRole
from qim.admin.tokens import TokenIssuer
from qim.app.commit_logs import FACT, EmbeddedLogs, LogPartitions, check_fact, commit_logs
from qim.app.settings import NodeSettings, ProcessPlan
from qim.app.status import HostStatus, metrics_socket
from qim.backplane.unix import UnixBackplane, socket_path
from qim.commit_log.api import TrimmableLog
from qim.commit_log.embedded import RedisCheckpointStore
from qim.config.parameters import Parameters
from qim.errors import StartupError, StoreError
from qim.gateway.node import GatewaySettings
from qim.gateway.role import GatewayRole
from qim.obs.endpoint import MetricsEndpoint
from qim.obs.logs import configure_logs, get_logger
from qim.presence.layout import PresenceEntry
from qim.presence.shm import live_connections
from qim.registry.api import KIND_OF_POOL, LeaseKind, RouteMap
from qim.registry.keeper import LeaseKeeper
from qim.registry.lease import LeaseTimes
from qim.registry.redis import RedisShardRegistry
from qim.registry.routes import RouteCache, owners_of
from qim.runtime.clock import Clock, process_clock
from qim.runtime.prefork import EXIT_FAILED, EXIT_OK, NotifyReady
from qim.runtime.role import Role
from qim.runtime.tasks import TaskSet
from qim.shard_workers.conversation.membership import Placement
from qim.shard_workers.conversation.retention import DAY_MS, OutboxRetention, outbox_created_at_ms
from qim.shard_workers.conversation.runner import WriterRole
from qim.shard_workers.fanout.runner import FanoutRole, FanoutSettings
from qim.shard_workers.log_retention import LogRetention
from qim.shard_workers.mailbox.retention import MailboxRetentionSettings, dispatch_created_at_ms
from qim.shard_workers.mailbox.runner import MailboxRole, MailboxSettings, MailboxStores
from qim.shard_workers.mailbox.shard import ChunkGate
from qim.stores.crypto import KeyRing
from qim.stores.redis.instance import RoomWatch
from qim.stores.redis.mailbox import RedisMailboxStore
from qim.stores.redis.membership import RedisGroupMembership
from qim.stores.redis.message import MessageInstances, RedisMessageStore
from qim.stores.redis.resp import RespClient

log = get_logger(__name__)

CORE_INSTANCE: Final = "core"
"""instance_id of the server that is message and core instance of a single host."""
MAILBOX_INSTANCE: Final = "mailbox"
_SET_BY: Final = {"mailbox_shard_count": "single_host_mailbox_shard_count"}
"""Facts that a node takes from a parameter of another name."""
READY_POLL_S: Final = 0.01
_DATA_OWNERS: Final = ("writer", "fanout", "mailbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What every process of a node shares; made before the fork."""

    settings: NodeSettings
    parameters: Parameters
    cluster_id: str
    keys: KeyRing
    client_tls: ssl.SSLContext
    admin_tls: ssl.SSLContext
    log_stream: TextIO


def run_worker(context: NodeContext, plan: ProcessPlan, notify_ready: NotifyReady) -> int:
    """Main of a worker process: the exit code. StartupError when a restart would not help."""
    configure_logs(stream=context.log_stream, process=plan.name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Worker(context, plan).serve(notify_ready))


async def settle_cluster_facts(context: NodeContext, commit_log: str) -> None:
    """Store at first use what can never change, later compare; StartupError, one line, for a difference.

    `commit_log` is the fact about the logs (`commit_logs.log_fact`).
    """
    parameters = context.parameters
    facts = {
        "cluster_id": context.cluster_id,
        "conversation_bucket_count": str(parameters.conversation_bucket_count),
        "mailbox_shard_count": str(parameters.mailbox_shard_count),
        "lane_count": str(parameters.lane_count),
        "message_seq_bucket_width": str(parameters.message_seq_bucket_width),
        "message_instances": CORE_INSTANCE,
        "mailbox_instances": MAILBOX_INSTANCE,
        FACT: commit_log,
    }
    client = RespClient(f"unix://{context.settings.server_socket(CORE_INSTANCE)}", name="cluster-facts")
    try:
        await client.connect()
        stored = await RedisShardRegistry(client).cluster_map(facts)
    except StoreError as error:
        raise StartupError(f"cannot read the registry: {error}; see the log of the server redis-core") from None
    finally:
        await client.close()
    check_fact(stored.get(FACT, ""), facts.pop(FACT))
    for name, wanted in facts.items():
        if stored.get(name) != wanted:
            raise StartupError(
                f"{name} of this cluster is {stored.get(name)} for ever, not {wanted}: "
                f"correct {_SET_BY.get(name, 'the parameter')}"
            )


class _Worker:
    """One process."""

    def __init__(self, context: NodeContext, plan: ProcessPlan) -> None:
        self._context = context
        self._plan = plan
        self._clock = process_clock()
        self._roles: list[Role] = []
        self._ended = asyncio.Event()
        self._failed = False
        self._tasks = TaskSet(self._on_failure)
        processes = context.settings.processes()
        self._processes = [process.name for process in processes]
        run_dir = context.settings.run_dir
        self._sockets = {role: socket_path(run_dir, process.name) for process in processes for role in process.roles}

    async def serve(self, notify_ready: NotifyReady) -> int:
        """Start the roles, serve until SIGTERM or a failure, drain and stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        outside = Outside(self._context, self._plan.name)
        backplane = UnixBackplane(
            self._plan.name,
            self._plan.roles,
            self._sockets,
            run_dir=self._context.settings.run_dir,
            clock=self._clock,
            on_failure=self._on_failure,
        )
        socket = metrics_socket(self._context.settings.run_dir, self._plan.name)
        endpoint = MetricsEndpoint(f"unix://{socket}", self._problems)
        try:
            await outside.connect()
            if any(_kind(role) in _DATA_OWNERS for role in self._plan.roles):
                await outside.open_logs(self._tasks)
            routes = RouteCache(
                outside.registry, self._tasks, poll_interval_ms=self._context.parameters.route_poll_interval_ms
            )
            await endpoint.start()
            await self._start_roles(outside, backplane, routes)
            await self._wait_until_ready()
            if not self._ended.is_set():
                notify_ready()
                await self._ended.wait()
            await self._drain()
        except StoreError as error:
            log.error("worker_not_started", process=self._plan.name, error=error)
            self._failed = True
        finally:
            for role in reversed(self._roles):
                await role.stop()
            await self._tasks.close()
            await backplane.close()
            await endpoint.stop()
            await outside.close()
        return EXIT_FAILED if self._failed else EXIT_OK

    async def _start_roles(self, outside: Outside, backplane: UnixBackplane, routes: RouteCache) -> None:
        """Owners of data begin before the process can be reached, so that no message finds it without a handler."""
        routes.on_change(lambda found: backplane.learn(found.processes))
        builder = RoleBuilder(self._context, outside, backplane, routes, self._on_failure)
        self._roles = [builder.build(name) for name in self._plan.roles]
        await routes.start()
        if any(_kind(name) == "writer" for name in self._plan.roles):
            for room in outside.rooms:
                self._tasks.start(f"room of {room.name}", room.run())
        serving = [role for role in self._roles if _kind(role.name) in ("gateway", "admin")]
        for role in self._roles:
            if role not in serving:
                await role.start()
        await backplane.start()
        for role in serving:
            await role.start()

    async def _wait_until_ready(self) -> None:
        while not all(role.ready() for role in self._roles) and not self._ended.is_set():
            await asyncio.sleep(READY_POLL_S)

    async def _drain(self) -> None:
        """Bounded by `drain_timeout_ms`; what did not finish is durable anyway and resumes after the restart."""
        if self._failed:
            return
        try:
            async with asyncio.timeout(self._context.parameters.drain_timeout_ms / 1000 / 2):
                for role in self._roles:
                    await role.drain()
        except TimeoutError:
            log.warning("drain_timed_out", process=self._plan.name)

    def _problems(self) -> list[str]:
        return [f"{role.name} is not ready" for role in self._roles if not role.ready()] or (
            [] if self._roles else [f"{self._plan.name} is starting"]
        )

    def _on_failure(self, task: str, error: BaseException) -> None:
        """A task without which a role cannot go on has died: end, so that the supervisor starts a fresh process."""
        log.error("worker_failed", process=self._plan.name, task=task, error=error)
        self._failed = True
        self._ended.set()


class Outside:
    """Connections of one process to the servers of the host, and the stores on them."""

    def __init__(self, context: NodeContext, process: str) -> None:
        parameters = context.parameters
        self._clients: list[RespClient] = []

        def client(instance: str, purpose: str) -> RespClient:
            made = RespClient(
                f"unix://{context.settings.server_socket(instance)}",
                name=f"{instance}-{purpose}",
                timeout_ms=parameters.store_timeout_ms,
                max_in_flight=parameters.store_in_flight_max,
            )
            self._clients.append(made)
            return made

        # Commits, log and registry have a connection each: a reply of one does not wait behind a large one of another.
        message = client(CORE_INSTANCE, "message")
        core_log = client(CORE_INSTANCE, "log")
        self._registry_client = client(CORE_INSTANCE, "registry")
        mailbox = client(MAILBOX_INSTANCE, "mailbox")
        buckets, shards = parameters.conversation_bucket_count, parameters.mailbox_shard_count
        instances = MessageInstances({CORE_INSTANCE: message}, [CORE_INSTANCE] * buckets)
        self.registry = RedisShardRegistry(self._registry_client)
        self.messages = RedisMessageStore(instances, dedup_ttl_s=parameters.client_dedup_ttl_seconds)
        self.membership = RedisGroupMembership(instances)
        self.mailboxes = RedisMailboxStore([mailbox] * shards)
        self.logs = commit_logs(
            context.settings.commit_log,
            LogPartitions(
                cluster_id=context.cluster_id,
                outbox=buckets,
                dispatch=shards,
                outbox_client=message,
                dispatch_client=core_log,
            ),
        )
        self.outbox = self.logs.outbox
        self.dispatch_log = self.logs.dispatch
        self.rooms = [
            RoomWatch(found, data_dir=context.settings.data_dir, free_ratio_min=parameters.store_free_ratio_min)
            for found in (self._registry_client, mailbox)
        ]
        self._core_log = core_log
        self.checkpoints: RedisCheckpointStore

    async def connect(self) -> None:
        """StoreUnavailable when a server does not answer."""
        for client in self._clients:
            await client.connect()

    async def open_logs(self, tasks: TaskSet) -> None:
        """For the owners of data. StartupError when the logs are not those of the cluster."""
        await self.logs.open(self.registry, tasks)
        self.checkpoints = RedisCheckpointStore(self._core_log, await self.outbox.identity())

    async def close(self) -> None:
        await self.logs.close()
        for client in self._clients:
            await client.close()


class RoleBuilder:
    """Role instances by name."""

    def __init__(
        self,
        context: NodeContext,
        outside: Outside,
        backplane: UnixBackplane,
        routes: RouteCache,
        on_failure: Callable[[str, BaseException], None],
        *,
        chunk_gate: ChunkGate | None = None,
    ) -> None:
        """`chunk_gate` holds chunks of mailbox roles back in tests."""
        self._context = context
        self._parameters = context.parameters
        self._settings = context.settings
        self._outside = outside
        self._backplane = backplane
        self._routes = routes
        self._on_failure = on_failure
        self._chunk_gate = chunk_gate
        self._clock = process_clock()

    def _leases(self, name: str) -> LeaseKeeper:
        """The member `name` of its pool; it looks anew whenever the route map changes."""
        kind = KIND_OF_POOL[_kind(name)]
        parameters = self._parameters
        count = parameters.conversation_bucket_count
        keeper = LeaseKeeper(
            kind,
            parameters.mailbox_shard_count if kind is LeaseKind.MAILBOX_SHARD else count,
            name,
            self._backplane.process_name,
            registry=self._outside.registry,
            times=LeaseTimes.of(parameters),
            clock=self._clock,
            on_failure=self._on_failure,
        )
        self._routes.on_change(lambda _: keeper.poke())
        return keeper

    def build(self, name: str) -> Role:
        kind, index = _kind(name), int(name.rpartition("-")[2])
        makers: dict[str, Callable[[str, int], Role]] = {
            "gateway": self._gateway,
            "writer": self._writer,
            "fanout": self._fanout,
            "mailbox": self._mailbox,
            "admin": self._admin,
        }
        return makers[kind](name, index)

    def _gateway(self, name: str, index: int) -> Role:
        pools = self._settings.pools
        others = [f"gateway-{i}" for i in range(pools.gateway) if i != index]
        peers = [f"writer-{i}" for i in range(pools.writer)] + [f"mailbox-{i}" for i in range(pools.mailbox)]
        unlimited = self._settings.unlimited_tenant
        return GatewayRole(
            name,
            GatewaySettings(
                host=self._settings.host,
                port=self._settings.port,
                tls_context=self._context.client_tls,
                token_key=self._context.keys.token_signing_key().public_key(),
                run_dir=self._settings.run_dir,
                peers=tuple(peers),
                other_gateways=tuple(others),
                conversation_bucket_count=self._parameters.conversation_bucket_count,
                mailbox_shard_count=self._parameters.mailbox_shard_count,
                lifted_tenants=frozenset((unlimited,)) if unlimited else frozenset(),
            ),
            parameters=self._parameters,
            backplane=self._backplane,
            routes=self._routes,
            registry=self._outside.registry,
            clock=self._clock,
            random_unit=random.random,
            on_failure=self._on_failure,
        )

    def _writer(self, name: str, index: int) -> Role:
        parameters = self._parameters
        count = parameters.conversation_bucket_count
        return WriterRole(
            name,
            range(count),
            bucket_count=count,
            placement=Placement(parameters.mailbox_shard_count, parameters.lane_count),
            parameters=parameters,
            store=self._outside.messages,
            membership=self._outside.membership,
            registry=self._outside.registry,
            backplane=self._backplane,
            routes=self._routes,
            key_ring=self._context.keys,
            clock=self._clock,
            on_failure=self._on_failure,
            relay=self._outside.logs.relay(self._clock, self._on_failure, parameters.log_poll_interval_ms),
            leases=self._leases(name),
            outbox_retention=self._outbox_retention(),
            is_full=lambda _bucket: any(room.full for room in self._outside.rooms),
        )

    def _outbox_retention(self) -> OutboxRetention | None:
        """None with a broker, whose topics forget by themselves; the relay trims the streams."""
        logs, parameters = self._outside.logs, self._parameters
        dispatch = self._dispatch_retention()
        if dispatch is None or not isinstance(logs, EmbeddedLogs):
            return None
        return OutboxRetention(
            outbox=self._log_retention(
                "outbox", logs.outbox, parameters.conversation_bucket_count, outbox_created_at_ms
            ),
            checkpoints=self._outside.checkpoints,
            dispatch=dispatch,
            dispatch_partitions=range(parameters.mailbox_shard_count),
        )

    def _dispatch_retention(self) -> LogRetention | None:
        logs = self._outside.logs
        if not isinstance(logs, EmbeddedLogs):
            return None
        count = self._parameters.mailbox_shard_count
        return self._log_retention("dispatch", logs.dispatch, count, dispatch_created_at_ms)

    def _log_retention(
        self, topic: str, found: TrimmableLog, partition_count: int, created_at_ms: Callable[[bytes], int]
    ) -> LogRetention:
        return LogRetention(
            topic,
            found,
            partition_count=partition_count,
            created_at_ms=created_at_ms,
            retention_ms=self._parameters.log_retention_days * DAY_MS,
            bytes_max=self._parameters.embedded_log_bytes_max,
            clock=self._clock,
        )

    def _fanout(self, name: str, index: int) -> Role:
        parameters = self._parameters
        return FanoutRole(
            name,
            index,
            self._settings.pools.fanout,
            settings=FanoutSettings(
                conversation_bucket_count=parameters.conversation_bucket_count,
                mailbox_shard_count=parameters.mailbox_shard_count,
                lane_count=parameters.lane_count,
                poll_interval_ms=parameters.log_poll_interval_ms,
                lag_report_interval_ms=parameters.lag_report_interval_ms,
            ),
            registry=self._outside.registry,
            routes=self._routes,
            outbox=self._outside.outbox,
            dispatch_log=self._outside.dispatch_log,
            checkpoints=self._outside.checkpoints,
            membership=self._outside.membership,
            backplane=self._backplane,
            clock=self._clock,
            on_failure=self._on_failure,
            leases=self._leases(name),
        )

    def _mailbox(self, name: str, index: int) -> Role:
        parameters, outside, pools = self._parameters, self._outside, self._settings.pools
        return MailboxRole(
            name,
            index,
            pools.mailbox,
            settings=MailboxSettings(
                mailbox_shard_count=parameters.mailbox_shard_count,
                lane_count=parameters.lane_count,
                append_chunk_members=parameters.append_chunk_members,
                append_calls_in_flight_max=parameters.append_calls_in_flight_max,
                poll_interval_ms=parameters.log_poll_interval_ms,
                lag_report_interval_ms=parameters.lag_report_interval_ms,
                presence_reconcile_interval_ms=parameters.presence_reconcile_interval_ms,
                dirty_spread_ms=parameters.dirty_spread_ms,
                history_pulls_per_second=parameters.per_user_history_pull_rate,
                default_history_retention_days=parameters.default_history_retention_days,
                retention=MailboxRetentionSettings(
                    interval_ms=parameters.retention_interval_ms,
                    entries_max=parameters.max_mailbox_entries_per_user,
                    hysteresis=parameters.mailbox_entry_cap_hysteresis,
                    fold_age_ms=parameters.admission_retention_margin_ms,
                ),
            ),
            stores=MailboxStores(
                registry=outside.registry,
                dispatch_log=outside.dispatch_log,
                mailbox=outside.mailboxes,
                messages=outside.messages,
                membership=outside.membership,
                cipher=self._context.keys,
                cursor_key=self._context.keys.cursor_key,
            ),
            routes=self._routes,
            backplane=self._backplane,
            clock=self._clock,
            on_failure=self._on_failure,
            gateways=self._gateways(),
            instance_of=lambda _: MAILBOX_INSTANCE,
            present=partial(_present, self._settings.run_dir, self._clock, parameters.presence_lease_ttl),
            chunk_gate=self._chunk_gate,
            leases=self._leases(name),
            log_retention=self._dispatch_retention(),
        )

    def _admin(self, name: str, index: int) -> Role:
        del index
        processes = [process.name for process in self._settings.processes()]
        self._routes.on_change(self._link_writers)
        plane = AdminPlane(
            admin_token=self._context.keys.admin_token.reveal(),
            tokens=TokenIssuer(self._context.keys.token_signing_key()),
            registry=self._outside.registry,
            backplane=self._backplane,
            status=HostStatus(
                self._settings.run_dir, [process for process in processes if process != name], self._outside.rooms
            ),
            clock=self._clock,
            conversation_bucket_count=self._parameters.conversation_bucket_count,
            submit_timeout_ms=self._parameters.submit_timeout_ms,
        )
        return AdminRole(
            plane, host=self._settings.host, port=self._settings.admin_port, tls_context=self._context.admin_tls
        )

    def _gateways(self) -> list[str]:
        """Gateways of the host; one that joined finds those of the node by their presence tables."""
        if not self._settings.first_index:
            return [f"gateway-{i}" for i in range(self._settings.pools.gateway)]
        found = sorted(
            path.stem.removeprefix("presence-") for path in self._settings.run_dir.glob("presence-gateway-*.tbl")
        )
        self._backplane.learn({gateway: gateway for gateway in found})
        return found

    def _link_writers(self, routes: RouteMap) -> None:
        """Keep a link to every writer."""
        for owner in owners_of(routes, LeaseKind.CONVERSATION_BUCKET):
            self._backplane.connect(owner)


def _present(run_dir: Path, clock: Clock, lease_ttl_ms: int) -> Iterator[tuple[str, PresenceEntry]]:
    return live_connections(run_dir, now_unix_ms=clock.unix_ms(), lease_ttl_ms=lease_ttl_ms)


def _kind(role: str) -> str:
    return role.partition("-")[0]
