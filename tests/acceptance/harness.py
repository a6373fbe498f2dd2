"""A whole node in the loop of the test: real servers, stores, log, registry and roles, TLS on loopback.

What `qim/app/wiring.py` puts into processes runs side by side here, made by the same builders, so that a case can look
into it: stores, shards and their W, every frame of every device. Limits of the tenant `acme` are lifted: the cases
that load the node are not about them (26.0, load-generator note).
"""

from __future__ import annotations

import asyncio
import io
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol

from prometheus_client import Counter, Gauge

from qim.admin.tokens import TokenIssuer
from qim.app.data_dir import claimed, open_identity
from qim.app.settings import NodeSettings, PoolSizes
from qim.app.tls import client_context, ensure_certificates, server_context
from qim.app.up import claim_servers, private_servers
from qim.app.wiring import CORE_INSTANCE, MAILBOX_INSTANCE, NodeContext, Outside, RoleBuilder
from qim.backplane.unix import UnixBackplane
from qim.client.aio import Client
from qim.client.link import ClientOptions
from qim.client.store import LocalStore
from qim.config.parameters import default_parameters
from qim.core import ids
from qim.core.seq import mailbox_seq
from qim.gateway.role import GatewayRole
from qim.obs import metrics
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import CreateGroup, GroupReply, SubmitCreateGroup
from qim.registry.api import LeaseKind
from qim.registry.routes import RouteCache
from qim.runtime.clock import SystemClock
from qim.runtime.role import Role
from qim.runtime.tasks import TaskSet
from qim.shard_workers.fanout.runner import FanoutRole
from qim.shard_workers.mailbox.runner import MailboxRole
from qim.shard_workers.mailbox.shard import ShardRunner
from qim.stores.api import RangeRequest, StoredRow
from tests.acceptance.devices import Device, RecordedClient
from tests.support.raw_client import RawClient
from tests.support.redis_server import PrivateServer
from tests.support.run_dir import short_run_dir

TENANT = "acme"
ALL_ROLES = ("gateway-0", "writer-0", "fanout-0", "mailbox-0")
WITHOUT_FANOUT = ("gateway-0", "writer-0", "mailbox-0")
"""The test writes the dispatch logs itself (dispatching.py), to reach exact offsets."""
SHARDS = 16
WAIT_S = 30.0
TOKEN_TTL_S = 3600
_MAILBOX_NOTICES = (InternalOpcode.DISPATCH_HINT, InternalOpcode.CLOSE_SESSION, InternalOpcode.PRESENCE_STALE)
_MAILBOX_REQUESTS = (
    InternalOpcode.OPEN_SESSION,
    InternalOpcode.MAILBOX_PULL,
    InternalOpcode.HISTORY_PULL,
    InternalOpcode.SESSION_LIST_PULL,
)
_DEFAULTS: dict[str, Any] = {
    "mailbox_shard_count": SHARDS,
    "presence_slots_per_worker": 1024,
    "per_ip_connect_rate": 100_000,
    "per_ip_max_connections": 100_000,
    "sync_delay_hint_ms": {"min_ms": 0, "max_ms": 0},
    "server_memory_bytes": 1 << 30,
}


class Node:
    """One node. `roles` by name; `outside` has the stores, the logs and the registry the roles use."""

    def __init__(self, context: NodeContext, ca_context: ssl.SSLContext) -> None:
        self.context = context
        self.parameters = context.parameters
        self.outside = Outside(context, "node")
        self.roles: dict[str, Role] = {}
        self.failures: list[tuple[str, BaseException]] = []
        self.clock = SystemClock()
        self.tasks = TaskSet(self.failed)
        self.backplane: UnixBackplane
        self._builder: RoleBuilder
        self._ca_context = ca_context
        self._devices: list[Device] = []
        self._clients: list[Client] = []
        self._raw_clients: list[RawClient] = []
        self._tokens = TokenIssuer(context.keys.token_signing_key())

    def failed(self, task: str, error: BaseException) -> None:
        """A role reports the death of a task it needs."""
        self.failures.append((task, error))

    # ---------------------------------------------------------------------------------------------------------- parts

    @property
    def gateway(self) -> GatewayRole:
        role = self.roles["gateway-0"]
        assert isinstance(role, GatewayRole)
        return role

    @property
    def mailbox(self) -> MailboxRole:
        role = self.roles["mailbox-0"]
        assert isinstance(role, MailboxRole)
        return role

    @property
    def fanout(self) -> FanoutRole:
        role = self.roles["fanout-0"]
        assert isinstance(role, FanoutRole)
        return role

    @property
    def core_address(self) -> str:
        """The server that holds commits, registry and logs."""
        return f"unix://{self.context.settings.server_socket(CORE_INSTANCE)}"

    @property
    def mailbox_address(self) -> str:
        return f"unix://{self.context.settings.server_socket(MAILBOX_INSTANCE)}"

    def shard(self, number: int) -> ShardRunner:
        return self.mailbox._shards[number]

    def shard_of(self, user: str) -> int:
        return ids.mailbox_shard_id(TENANT, user, self.parameters.mailbox_shard_count)

    def lane_of(self, user: str) -> int:
        return ids.lane_id(TENANT, user, self.parameters.lane_count)

    def bucket_of(self, conversation_id: str) -> int:
        return ids.conversation_bucket(TENANT, conversation_id, self.parameters.conversation_bucket_count)

    def seq(self, user: str, log_offset: int) -> int:
        """`mailbox_seq` of a log offset of the user's shard under its present epoch."""
        return mailbox_seq(self.shard(self.shard_of(user)).machine.shard_epoch, log_offset)

    # ---------------------------------------------------------------------------------------------- waiting and looking

    def watermark(self, user: str) -> int:
        """W of the user's lane as the store acknowledged it."""
        return self.shard(self.shard_of(user)).machine.acked[self.lane_of(user)]

    async def watermark_reaches(self, user: str, seq: int) -> None:
        await until(lambda: self.watermark(user) >= seq)
        assert self.watermark(user) == seq

    async def delivered(self, timeout_s: float = WAIT_S) -> None:
        """Until everything that is committed by now is dispatched and covered by W on every lane; each within
        `timeout_s`."""
        buckets = range(self.parameters.conversation_bucket_count)
        outbox = await asyncio.gather(*(self.outside.outbox.watermarks(bucket) for bucket in buckets))
        partitions = self.fanout._partitions
        await until(
            lambda: all(partitions[bucket].machine.durable >= outbox[bucket].high for bucket in buckets), timeout_s
        )
        shards = range(self.parameters.mailbox_shard_count)
        logs = await asyncio.gather(*(self.outside.dispatch_log.watermarks(shard) for shard in shards))
        machines = [self.shard(shard).machine for shard in shards]
        ends = [machine.seq_of(log.high - 1) for machine, log in zip(machines, logs, strict=True)]
        await until(
            lambda: all(min(machine.acked) >= end for machine, end in zip(machines, ends, strict=True)), timeout_s
        )

    async def stored_rows(self, user: str, after_seq: int = 0, up_to_seq: int = (1 << 63) - 1) -> list[StoredRow]:
        """Everything stored for a user in a range, whatever W is."""
        shard = self.shard_of(user)
        page = await self.outside.mailboxes.range_scan(
            RangeRequest(
                tenant_id=TENANT,
                user_id=user,
                shard=shard,
                shard_epoch=self.shard(shard).machine.shard_epoch,
                lane=self.lane_of(user),
                after_seq=after_seq,
                up_to_seq=up_to_seq,
                max_items=1 << 20,
                max_bytes=1 << 30,
            )
        )
        assert page.exhausted
        return list(page.rows)

    async def truncate_before(self, user: str, seq: int) -> None:
        """Raise the user's trim watermark to `seq`."""
        shard = self.shard_of(user)
        epoch = self.shard(shard).machine.shard_epoch
        await self.outside.mailboxes.truncate_before(shard, epoch, TENANT, user, seq)

    # ---------------------------------------------------------------------------------------------------------- clients

    async def device(self, user: str, device_id: str = "phone") -> Device:
        """A TLS connection of a device that has sent nothing and does nothing by itself."""
        made = await Device.connect(
            self.gateway.port, self._ca_context, device_id=device_id, access_token=await self.token(user, device_id)
        )
        self._devices.append(made)
        return made

    async def online(self, user: str, device_id: str = "phone") -> Device:
        """A device that has pulled its backlog and got ONLINE_READY."""
        device = await self.device(user, device_id)
        await device.go_online()
        return device

    def client(
        self,
        user: str,
        device_id: str = "phone",
        *,
        store: LocalStore | None = None,
        options: ClientOptions | None = None,
    ) -> RecordedClient:
        """The SDK on a store in memory, started."""
        made = RecordedClient(
            "127.0.0.1",
            self.gateway.port,
            tenant_id=TENANT,
            user_id=user,
            device_id=device_id,
            token=lambda: self.token(user, device_id),
            store=store or LocalStore(),
            ssl_context=self._ca_context,
            options=options,
        )
        self._clients.append(made)
        made.start()
        return made

    async def raw_client(self) -> RawClient:
        """A TLS connection for any bytes at all."""
        made = await RawClient.connect(self.gateway.port, self._ca_context)
        self._raw_clients.append(made)
        return made

    async def token(self, user: str, device_id: str, tenant: str = TENANT) -> str:
        return self._tokens.issue(
            tenant_id=tenant, user_id=user, device_id=device_id, now_ms=self.clock.unix_ms(), ttl_s=TOKEN_TTL_S
        )

    async def create_group(self, group_id: str, creator: str, members: Sequence[str]) -> str:
        """A group with the creator and `members`, made by its writer; a frame of a client could not name 100,000."""
        conversation_id = ids.group_conversation_id(group_id)
        submit = SubmitCreateGroup(
            tenant_id=TENANT, user_id=creator, request=CreateGroup(group_id=group_id, member_ids=members)
        )
        route = await self.outside.registry.current(LeaseKind.CONVERSATION_BUCKET, self.bucket_of(conversation_id))
        assert route is not None
        answer = await self.backplane.request(
            route.owner, InternalOpcode.SUBMIT_CREATE_GROUP, submit.SerializeToString(), timeout_ms=60_000
        )
        reply = GroupReply.FromString(answer)
        assert not reply.HasField("error"), reply.error
        return conversation_id

    # ---------------------------------------------------------------------------------------------------------- life

    async def stop_mailbox(self) -> None:
        """As if the MailboxNode's process had died: what it kept in memory is gone, and nobody answers for it."""
        old = self.mailbox
        await old.stop()
        for opcode in _MAILBOX_NOTICES:
            del self.backplane._notices[opcode]
        for opcode in _MAILBOX_REQUESTS:
            del self.backplane._requests[opcode]
        self.backplane._listeners.remove(old._on_link)
        self.backplane._own_wanted.difference_update(old._known_gateways)

    async def start_mailbox(self) -> None:
        """Its successor, with new grants, once it serves."""
        self.roles["mailbox-0"] = self._builder.build("mailbox-0")
        await self.mailbox.start()
        await until(self.mailbox.ready)

    async def start(self, roles: Sequence[str], chunk_gate: Callable[[int, int, int], bool] | None) -> None:
        """In the order of a worker process: owners of data before anything can reach them."""
        self.backplane = UnixBackplane(
            "node", roles, {}, run_dir=self.context.settings.run_dir, clock=self.clock, on_failure=self.failed
        )
        await self.outside.connect()
        await self.outside.open_logs(self.tasks)
        routes = RouteCache(self.outside.registry, self.tasks, poll_interval_ms=self.parameters.route_poll_interval_ms)
        self._builder = RoleBuilder(
            self.context, self.outside, self.backplane, routes, self.failed, chunk_gate=chunk_gate
        )
        self.roles = {name: self._builder.build(name) for name in roles}
        for role in self.roles.values():
            if not isinstance(role, GatewayRole):
                await role.start()
        await routes.start()
        await self.backplane.start()
        await self.gateway.start()
        await until(lambda: all(role.ready() for role in self.roles.values()))

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()
        for device in self._devices:
            await device.close()
        for raw in self._raw_clients:
            await raw.close()
        for role in reversed(self.roles.values()):
            await role.stop()
        await self.tasks.close()
        await self.backplane.close()
        await self.outside.close()


@asynccontextmanager
async def running_node(
    *,
    roles: Sequence[str] = ALL_ROLES,
    chunk_gate: Callable[[int, int, int], bool] | None = None,
    **parameters: Any,
) -> AsyncIterator[Node]:
    """A started node on an empty cluster of its own. On the way out no role may have failed and no metric that must
    stay 0 may have moved (§24.1.5)."""
    before = violations()
    with _context(parameters) as (context, ca_context):
        await asyncio.to_thread(claim_servers, context, known=False)  # it has a loop of its own
        node = Node(context, ca_context)
        try:
            await node.start(roles, chunk_gate)
            yield node
        finally:
            await node.stop()
        assert node.failures == []
    assert violations() == before


@contextmanager
def _context(overrides: dict[str, Any]) -> Iterator[tuple[NodeContext, ssl.SSLContext]]:
    """Data directory, keys, certificates and the two private servers of a node."""
    parameters = default_parameters(**{**_DEFAULTS, **overrides})
    with short_run_dir() as directory, ExitStack() as servers:
        settings = NodeSettings(
            data_dir=directory / "data", port=0, pools=PoolSizes(1, 1, 1, 1), apart=False, unlimited_tenant=TENANT
        )
        servers.enter_context(claimed(settings))
        identity, keys = open_identity(settings)
        files = ensure_certificates(settings.tls_dir, settings.host, SystemClock().unix_ms())
        for server in private_servers(settings, parameters):
            private = PrivateServer(server)
            private.start()
            servers.callback(private.kill, signal.SIGTERM)
        context = NodeContext(
            settings=settings,
            parameters=parameters,
            cluster_id=identity.cluster_id,
            keys=keys,
            client_tls=server_context(files),
            admin_tls=server_context(files, alpn=("http/1.1",)),
            log_stream=io.StringIO(),
        )
        yield context, client_context(files.ca_path)


class Gate:
    """The fault hook of MailboxRole: chunks of the (shard, lane, log offset) in `held` stay where they are."""

    def __init__(self) -> None:
        self.held: set[tuple[int, int, int]] = set()

    def __call__(self, shard: int, lane: int, offset: int) -> bool:
        return (shard, lane, offset) in self.held


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait for what parts of the node do in their own time and tell nobody."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


class _Reading(Protocol):
    def get(self) -> float: ...


def reading(metric: Counter | Gauge) -> float:
    """Present value of a metric without labels."""
    value: _Reading = metric._value
    return value.get()


def violations() -> dict[str, float]:
    """Always-zero metrics that are not. The heartbeat wheel's is the loop's: a test may keep that busy."""
    found = metrics.always_zero_violations(metrics.render().decode())
    found.pop("timewheel_tick_overrun_total", None)
    return found


def named_users(
    count: int,
    *,
    shard: int | None = None,
    lane: int | None = None,
    prefix: str = "u",
    shards: int = SHARDS,
    lanes: int = 64,
    without: Collection[int] = (),
) -> list[str]:
    """The first `count` names whose hashes put them on the shard and lane asked for, and not on the lanes `without`."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        name = f"{prefix}{number}"
        number += 1
        user_lane = ids.lane_id(TENANT, name, lanes)
        if shard is not None and ids.mailbox_shard_id(TENANT, name, shards) != shard:
            continue
        if (lane is None or user_lane == lane) and user_lane not in without:
            found.append(name)
    return found
