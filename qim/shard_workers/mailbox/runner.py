"""MailboxRole: the mailbox shards of one worker and what gateways ask of them (DESIGN-data §5 to §7)."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from qim.backplane.api import Backplane
from qim.commit_log.api import CommitLog
from qim.core.rate_limit import RateLimiter
from qim.core.secret import Secret
from qim.errors import Fenced
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.presence.layout import PresenceEntry
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import LagReport, LogHint
from qim.registry.api import Grant, LeaseKind, RouteMap, ShardRegistry
from qim.registry.keeper import LeaseKeeper
from qim.registry.routes import RouteCache, owners_of
from qim.runtime.clock import Clock
from qim.runtime.tasks import FailureHandler, TaskSet
from qim.shard_workers.log_retention import LogRetention
from qim.shard_workers.mailbox.bodies import BodyCipher, BodyReader
from qim.shard_workers.mailbox.calls import CallScheduler
from qim.shard_workers.mailbox.dirty import TICK_MS, DirtySpreader
from qim.shard_workers.mailbox.expand import RecentEvents
from qim.shard_workers.mailbox.history import HistoryReader
from qim.shard_workers.mailbox.machine import ShardMachine
from qim.shard_workers.mailbox.members import MemberDirectory
from qim.shard_workers.mailbox.online import OnlineDevice, OnlineIndex
from qim.shard_workers.mailbox.pull import MailboxPuller
from qim.shard_workers.mailbox.push import PushPump
from qim.shard_workers.mailbox.requests import GatewayRequests
from qim.shard_workers.mailbox.retention import MailboxRetention, MailboxRetentionSettings
from qim.shard_workers.mailbox.session_list import SessionListReader
from qim.shard_workers.mailbox.shard import ChunkGate, ShardRunner, ShardServices
from qim.stores.api import GroupMembership, MailboxStore, MessageStore

log = get_logger(__name__)

PresentConnections = Callable[[], Iterable[tuple[str, PresenceEntry]]]
"""All live connections of all gateways: (gateway, entry)."""
OBSERVE_INTERVAL_MS = 1000.0
GATE_POLL_MS = 20.0
"""How often a test's chunk gate is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxSettings:
    """Counts are those of the cluster map, intervals in ms."""

    mailbox_shard_count: int
    lane_count: int = 64
    append_chunk_members: int = 100
    append_entries_max: int = 100
    append_calls_in_flight_max: int = 2
    """Per mailbox instance; small calls of several shards count as one."""
    poll_interval_ms: float = 1000.0
    lag_report_interval_ms: float = 100.0
    presence_reconcile_interval_ms: float = 60_000.0
    dirty_spread_ms: float = 5_000.0
    history_pulls_per_second: int = 5
    default_history_retention_days: int = 30
    retention: MailboxRetentionSettings = field(default_factory=MailboxRetentionSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxStores:
    """The outside worlds of a MailboxNode."""

    registry: ShardRegistry
    dispatch_log: CommitLog
    mailbox: MailboxStore
    messages: MessageStore
    membership: GroupMembership
    cipher: BodyCipher
    cursor_key: Secret[bytes]


class MailboxRole:
    """Role "mailbox-<i>": owns the mailbox shards that are its share of the pool, as `leases` says; without `leases`
    those with id mod pool_size = index, from its start to its end. `routes` is already started."""

    def __init__(
        self,
        name: str,
        index: int,
        pool_size: int,
        *,
        settings: MailboxSettings,
        stores: MailboxStores,
        routes: RouteCache,
        backplane: Backplane,
        clock: Clock,
        on_failure: FailureHandler,
        gateways: Sequence[str] = (),
        instance_of: Callable[[int], str] = lambda shard: "",
        present: PresentConnections = lambda: (),
        chunk_gate: ChunkGate | None = None,
        log_retention: LogRetention | None = None,
        leases: LeaseKeeper | None = None,
    ) -> None:
        """`gateways` of the topology; `instance_of` names the mailbox instance of a shard; `present` reads the presence
        tables; `chunk_gate` holds chunks back in tests; `log_retention` trims the dispatch log, None if a broker does.
        """
        self.name = name
        self._numbers = [n for n in range(settings.mailbox_shard_count) if n % pool_size == index]
        self._settings = settings
        self._stores = stores
        self._backplane = backplane
        self._clock = clock
        self._on_failure = on_failure
        self._gateways = gateways
        self._known_gateways: set[str] = set()
        self._instance_of = instance_of
        self._present = present
        self._chunk_gate = chunk_gate
        self._routes = routes
        self._tasks = TaskSet(self._failed)
        self._index = OnlineIndex()
        self._dirty = DirtySpreader(backplane, self._index, settings.dirty_spread_ms)
        self._bodies = BodyReader(
            stores.messages, stores.cipher, clock, retention_days=settings.default_history_retention_days
        )
        self._leases = leases
        self._shards: dict[int, ShardRunner] = {}
        self.retention = MailboxRetention(
            self._shards, stores.mailbox, log_retention, clock, settings.retention, random_unit=random.random
        )
        self._running: dict[int, asyncio.Task[object]] = {}
        self._calls: dict[str, CallScheduler] = {}
        self._recent = RecentEvents()
        self._services = self._make_services()
        self._requests = self._make_requests()
        self._stalled: set[tuple[int, int]] = set()
        self._draining = False
        self._ready = False

    def _make_requests(self) -> GatewayRequests:
        settings, stores = self._settings, self._stores
        rate = RateLimiter(per_ms=1000 / settings.history_pulls_per_second, burst=settings.history_pulls_per_second)
        return GatewayRequests(
            self._shards,
            stores.mailbox,
            self._index,
            MailboxPuller(stores.mailbox, self._bodies),
            HistoryReader(stores.messages, stores.membership, self._bodies, self._clock, rate),
            SessionListReader(stores.mailbox, stores.messages, stores.membership, self._bodies),
            self._clock,
            mailbox_shard_count=settings.mailbox_shard_count,
            lane_count=settings.lane_count,
            cursor_key=stores.cursor_key,
            on_gateway=self._know_gateway,
            on_missed=self._mark_dirty,
        )

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Begin to take the shards over. StoreError when the registry does not answer."""
        grants: list[Grant] = []
        if self._leases is None:
            kind, grant_id = LeaseKind.MAILBOX_SHARD, secrets.token_hex(8)
            grants = await self._stores.registry.grant(kind, self._numbers, self.name, grant_id)
        self._routes.on_change(self._link_writers)
        self._link_writers(self._routes.map)
        self._backplane.on_link(self._on_link)
        self._backplane.on_notice(InternalOpcode.DISPATCH_HINT, self._on_hint)
        self._backplane.on_notice(InternalOpcode.CLOSE_SESSION, self._requests.close_session)
        self._backplane.on_notice(InternalOpcode.PRESENCE_STALE, self._requests.presence_stale)
        self._backplane.on_request(InternalOpcode.OPEN_SESSION, self._requests.open_session)
        self._backplane.on_request(InternalOpcode.MAILBOX_PULL, self._requests.pull_mailbox)
        self._backplane.on_request(InternalOpcode.HISTORY_PULL, self._requests.pull_history)
        self._backplane.on_request(InternalOpcode.SESSION_LIST_PULL, self._requests.pull_session_list)
        for gateway in self._gateways:
            self._know_gateway(gateway)
        for grant in grants:
            await self.open_shard(grant)
        self._tasks.start(f"{self.name} report", self._report())
        self._tasks.start(f"{self.name} presence", self._keep_reconciling())
        self._tasks.start(f"{self.name} retention", self.retention.run())
        if self._chunk_gate is not None:
            self._tasks.start(f"{self.name} gate", self._poll_gate())
        self._ready = True
        if self._leases is not None:
            self._leases.start(self)
        log.info("mailbox_started", role=self.name, count=len(self._shards))

    def _link_writers(self, routes: RouteMap) -> None:
        """Keep a link to everybody who is sent lag."""
        for owner in owners_of(routes, LeaseKind.CONVERSATION_BUCKET):
            self._backplane.connect(owner)

    def _make_services(self) -> ShardServices:
        settings, stores = self._settings, self._stores
        pushes = PushPump(
            self._backplane,
            self._index,
            self._bodies,
            self._tasks,
            mailbox_shard_count=settings.mailbox_shard_count,
            on_missed=lambda devices: self._dirty.mark(devices, self._clock.monotonic_ms()),
            on_gateway_missed=self._dirty.gateway_missed,
        )
        return ShardServices(
            store=stores.mailbox,
            dispatch_log=stores.dispatch_log,
            registry=stores.registry,
            members=MemberDirectory(
                stores.membership, lane_count=settings.lane_count, mailbox_shard_count=settings.mailbox_shard_count
            ),
            pushes=pushes,
            clock=self._clock,
            tasks=self._tasks,
            poll_interval_ms=settings.poll_interval_ms,
            chunk_gate=self._chunk_gate,
            on_lanes_missed=self._on_lanes_missed,
            on_fenced=self._shard_fenced,
            on_appended=self.retention.sampler.appended,
        )

    async def drain(self) -> None:
        """Take no more records, finish the calls in flight, give the shards back; what is not materialized stays in
        the log."""
        if self._leases is not None:
            await self._leases.leave()
        self._draining = True
        for runner in self._shards.values():
            await runner.drained()

    async def stop(self) -> None:
        self._ready = False
        if self._leases is not None:
            await self._leases.close()
        await self._tasks.close()

    def shard_ids(self) -> list[int]:
        """Mailbox shards that are here now."""
        return list(self._shards)

    def ready(self) -> bool:
        """True once every shard serves its lanes."""
        settled = self._leases is None or self._leases.settled()
        return self._ready and settled and all(runner.caught_up() for runner in self._shards.values())

    def _failed(self, task: str, error: BaseException) -> None:
        self._ready = False
        self._on_failure(task, error)

    # -------------------------------------------------------------------------------------------------------- shards

    async def open_shard(self, grant: Grant) -> None:
        """Begin to take the shard over, in the order of DESIGN-data §6; its lanes are served as they catch up."""
        settings = self._settings
        machine = ShardMachine(
            grant.shard_id,
            grant.epoch,
            lane_count=settings.lane_count,
            chunk_size=settings.append_chunk_members,
            entries_max=settings.append_entries_max,
            recent=self._recent,
            join_lanes=self._chunk_gate is None,
        )
        runner = ShardRunner(grant, machine, self._calls_to(self._instance_of(grant.shard_id)), self._services)
        self._shards[grant.shard_id] = runner
        self._running[grant.shard_id] = self._tasks.start(f"{self.name} shard {grant.shard_id}", runner.run())

    async def close_shard(self, shard_id: int) -> None:
        """Finish the calls in flight and push what they covered; the rest is the next owner's."""
        await self._shards[shard_id].drained()
        self.drop_shard(shard_id)

    def drop_shard(self, shard_id: int) -> None:
        """Serve and send nothing of the shard any more."""
        runner = self._shards.pop(shard_id, None)
        if runner is None:
            return
        runner.end()
        running = self._running.pop(shard_id)
        if running is not asyncio.current_task():
            running.cancel()
        self._index.forget_shard(shard_id)
        metrics.LANE_WATERMARK_SKEW_SEQ.labels(shard=shard_id).set(0)
        metrics.LANE_REFUSED.labels(shard=shard_id).set(0)

    def _shard_fenced(self, shard_id: int, epoch: int, error: Fenced) -> None:
        """Another MailboxNode owns the shard: it goes, the others stay."""
        if self._leases is not None:
            self._leases.fenced(shard_id, epoch)
            return
        metrics.FENCED_TOTAL.labels(kind=LeaseKind.MAILBOX_SHARD).inc()
        self._failed(f"mailbox shard {shard_id}", error)

    def _calls_to(self, instance: str) -> CallScheduler:
        settings = self._settings
        scheduler = self._calls.get(instance)
        if scheduler is None:
            entries_max = settings.append_entries_max
            scheduler = self._calls[instance] = CallScheduler(
                self._stores.mailbox, self._clock, entries_max=entries_max
            )
            for slot in range(settings.append_calls_in_flight_max):
                self._tasks.start(f"{self.name} append {instance}#{slot}", scheduler.run_slot())
        return scheduler

    # ------------------------------------------------------------------------------------------------------ gateways

    def _know_gateway(self, gateway: str) -> None:
        """Keep a link to it: pushes leave on links of our own."""
        if gateway in self._known_gateways:
            return
        self._known_gateways.add(gateway)
        try:
            self._backplane.connect(gateway)
        except KeyError:
            log.error("gateway_unknown", peer=gateway)

    def _on_link(self, peer: str, up: bool) -> None:
        if peer in self._known_gateways:
            self._dirty.link_changed(peer, up, self._clock.monotonic_ms())

    def _on_lanes_missed(self, shard: int, lanes: Sequence[int] | None) -> None:
        """A shard opened (all lanes), or a reload found W ahead of what was pushed (some)."""
        if lanes is None:
            self._reconcile(frozenset((shard,)))
        devices = self._index.of_shard(shard, lanes)
        mark = self._dirty.mark_all if lanes is None else self._dirty.mark
        mark(devices, self._clock.monotonic_ms())

    def _reconcile(self, shards: frozenset[int]) -> int:
        """Differences between index and presence tables; a device that was missing may have missed pushes."""
        differences, added = self._index.reconcile(map(self._device, self._present()), shards)
        self._mark_dirty(added)
        return differences

    def _mark_dirty(self, devices: Sequence[OnlineDevice]) -> None:
        self._dirty.mark_all(devices, self._clock.monotonic_ms())

    def _device(self, found: tuple[str, PresenceEntry]) -> OnlineDevice:
        gateway, entry = found
        return self._requests.device_of(
            entry.tenant_id,
            entry.user_id,
            entry.device_id,
            gateway=gateway,
            connection_id=entry.connection_id,
            session_epoch=entry.session_epoch,
        )

    async def _keep_reconciling(self) -> None:
        """Twice in an interval: what is gone is taken out when it is missed for the second time, and must be by its end
        (26.5.2)."""
        while True:
            await asyncio.sleep(self._settings.presence_reconcile_interval_ms / 1000 / 2)
            metrics.PRESENCE_RECONCILE_DIFF.set(self._reconcile(frozenset(self._shards)))

    # ----------------------------------------------------------------------------------------------------- log and lag

    def _on_hint(self, peer: str, body: bytes) -> None:
        hint = LogHint.FromString(body)
        runner = self._shards.get(hint.partition)
        if runner is not None and not self._draining:
            runner.offer_hint(hint.first_offset, hint.records)

    async def _poll_gate(self) -> None:
        while True:
            await asyncio.sleep(GATE_POLL_MS / 1000)
            for runner in self._shards.values():
                runner.pump()

    async def _report(self) -> None:
        """Each 100 ms: due MAILBOX_DIRTY marks, the lag of every lane to the writers; each second stalled lanes."""
        interval_ms = min(self._settings.lag_report_interval_ms, TICK_MS)
        observe_at_ms = 0.0
        while True:
            await asyncio.sleep(interval_ms / 1000)
            now_ms = self._clock.monotonic_ms()
            epochs = {shard: runner.machine.shard_epoch for shard, runner in self._shards.items()}
            self._dirty.tick(now_ms, epochs)
            report = self._lag_report(now_ms).SerializeToString()
            for writer in self._routes.owners(LeaseKind.CONVERSATION_BUCKET):
                self._backplane.notify(writer, InternalOpcode.LAG_REPORT, report)
            if now_ms >= observe_at_ms:
                observe_at_ms = now_ms + OBSERVE_INTERVAL_MS
                self._observe_lanes(now_ms)

    def _lag_report(self, now_ms: float) -> LagReport:
        report = LagReport(reporter=self.name, shards=list(self._shards))
        for runner in self._shards.values():
            report.shard_lane_lag_ms.extend(runner.lane_lags_ms(now_ms))
        return report

    def _observe_lanes(self, now_ms: float) -> None:
        stalled: set[tuple[int, int]] = set()
        for shard, runner in self._shards.items():
            machine = runner.machine
            metrics.LANE_WATERMARK_SKEW_SEQ.labels(shard=shard).set(max(machine.acked) - min(machine.acked))
            metrics.LANE_REFUSED.labels(shard=shard).set(len(machine.refused))
            for lane in machine.lanes.active():
                stall_ms = machine.stall_ms(lane, now_ms)
                if stall_ms >= OBSERVE_INTERVAL_MS:
                    stalled.add((shard, lane))
                    metrics.LANE_WATERMARK_STALL_MS.labels(shard=shard, lane=lane).set(stall_ms)
        for shard, lane in self._stalled - stalled:
            metrics.LANE_WATERMARK_STALL_MS.labels(shard=shard, lane=lane).set(0)
        self._stalled = stalled
