"""Fan-out and mailboxes on the stores' models and an in-process backplane: commit here, look at what gateways get."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap

from qim.backplane.api import LinkListener, NoticeHandler, PeerUnavailable, Priority, RequestHandler
from qim.commit_log.api import LogIdentity
from qim.commit_log.memory import MemoryCheckpointStore, MemoryCommitLog
from qim.core import ids
from qim.core.hlc import HybridClock
from qim.core.secret import Secret
from qim.presence.layout import PresenceEntry
from qim.protocol.entry import FLAGS_ORDINARY
from qim.protocol.internal import PushBatch, decode_push_batches
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import (
    EVENT_MESSAGE,
    MESSAGE_TYPE_TEXT,
    DeviceTarget,
    DispatchEvent,
    Entry,
    InlineBody,
    LogHint,
    MailboxBatch,
    MailboxCursorToken,
    MailboxPull,
    MailboxPullReply,
    MarkDirty,
    MessageRecord,
    OpenSession,
    OpenSessionReply,
    OutboxRecord,
    PullMailbox,
)
from qim.registry.memory import MemoryShardRegistry
from qim.registry.routes import RouteCache
from qim.runtime.clock import SystemClock
from qim.runtime.tasks import TaskSet
from qim.shard_workers.fanout.runner import FanoutRole, FanoutSettings
from qim.shard_workers.mailbox.runner import MailboxRole, MailboxSettings, MailboxStores
from qim.shard_workers.mailbox.shard import ChunkGate
from qim.stores.api import CommitRequest, GroupMeta, ShardSnapshot, SnapshotRef
from qim.stores.crypto import KeyRing, NewDek
from qim.stores.memory_mailbox import MemoryMailboxStore
from qim.stores.memory_message import MemoryMessageStore

TENANT = "t"
BUCKETS = 4
SHARDS = 4
LANES = 64


class Hub:
    """All roles of a test; a link can be cut per peer."""

    def __init__(self) -> None:
        self.members: dict[str, HubBackplane] = {}
        self.down: set[str] = set()

    def backplane(self, role: str) -> HubBackplane:
        self.members[role] = HubBackplane(self, role)
        return self.members[role]

    def cut(self, peer: str) -> None:
        self.down.add(peer)
        self._tell(peer, False)

    def mend(self, peer: str) -> None:
        self.down.discard(peer)
        self._tell(peer, True)

    def _tell(self, peer: str, up: bool) -> None:
        for member in self.members.values():
            if peer in member.connected:
                for listener in member.listeners:
                    listener(peer, up)


class HubBackplane:
    """One role's Backplane."""

    def __init__(self, hub: Hub, role: str) -> None:
        self.hub = hub
        self.role = role
        self.notices: dict[int, NoticeHandler] = {}
        self.requests: dict[int, RequestHandler] = {}
        self.listeners: list[LinkListener] = []
        self.connected: list[str] = []
        self.lose: Callable[[int], bool] = lambda opcode: False
        """Drops one-way messages this role sends."""

    def on_notice(self, opcode: int, handler: NoticeHandler) -> None:
        self.notices[opcode] = handler

    def on_request(self, opcode: int, handler: RequestHandler) -> None:
        self.requests[opcode] = handler

    def on_link(self, listener: LinkListener) -> None:
        self.listeners.append(listener)

    def connect(self, peer: str) -> None:
        if peer not in self.connected:
            self.connected.append(peer)

    def notify(self, peer: str, opcode: int, body: bytes, priority: Priority = Priority.CONTROL) -> bool:
        target = self.hub.members.get(peer)
        if target is None or peer in self.hub.down:
            return False
        if not self.lose(opcode) and opcode in target.notices:
            asyncio.get_running_loop().call_soon(target.notices[opcode], self.role, body)
        return True

    async def request(self, peer: str, opcode: int, body: bytes, *, timeout_ms: int) -> bytes:
        target = self.hub.members.get(peer)
        if target is None or opcode not in target.requests:
            raise PeerUnavailable(peer)
        return await target.requests[opcode](self.role, body)

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""


@dataclass
class Gateway:
    """What one gateway received."""

    name: str
    batches: list[PushBatch] = field(default_factory=list)
    dirty: list[MarkDirty] = field(default_factory=list)

    def attach(self, backplane: HubBackplane) -> None:
        backplane.on_notice(InternalOpcode.PUSH_BATCH, lambda _, body: self.batches.extend(decode_push_batches(body)))
        backplane.on_notice(InternalOpcode.MARK_DIRTY, lambda _, body: self.dirty.append(MarkDirty.FromString(body)))

    def pushed(self, connection_id: int) -> list[Entry]:
        """Entries pushed to one connection, in order of arrival."""
        return [
            Entry.FromString(recipient.ref + batch.common)
            for batch in self.batches
            for recipient in batch.recipients
            if recipient.connection_id == connection_id
        ]

    def dirty_connections(self) -> set[int]:
        return {device.connection_id for frame in self.dirty for device in frame.devices}


class Pipeline:
    """One fan-out and one mailbox worker unless `start` is told otherwise; the stores outlive them."""

    def __init__(
        self, *, lane_count: int = LANES, chunk_gate: ChunkGate | None = None, chunk_members: int = 100
    ) -> None:
        self.clock = SystemClock()
        self.hub = Hub()
        self.messages = MemoryMessageStore()
        self.registry = MemoryShardRegistry()
        self.checkpoints = MemoryCheckpointStore(
            LogIdentity(cluster_id="c", topic_id="outbox", partition_count=BUCKETS)
        )
        self.outbox = MemoryCommitLog(
            LogIdentity(cluster_id="c", topic_id="outbox", partition_count=BUCKETS), records_of=self.messages.outbox
        )
        self.dispatch_log = MemoryCommitLog(
            LogIdentity(cluster_id="c", topic_id="dispatch", partition_count=SHARDS), checkpoints=self.checkpoints
        )
        self.mailbox = MemoryMailboxStore(SHARDS, self.clock.unix_ms)
        self.keys = KeyRing(Secret(bytes(32)))
        self.lane_count = lane_count
        self.chunk_gate = chunk_gate
        self.chunk_members = chunk_members
        self.gateway = Gateway("gateway-0")
        self.gateway.attach(self.hub.backplane("gateway-0"))
        self.lag_reports: list[bytes] = []
        self.hub.backplane("writer-0").on_notice(
            InternalOpcode.LAG_REPORT, lambda _, body: self.lag_reports.append(body)
        )
        self.writer = self.hub.members["writer-0"]
        self.present: list[tuple[str, PresenceEntry]] = []
        self.roles: dict[str, FanoutRole | MailboxRole] = {}
        self.failures: list[tuple[str, BaseException]] = []
        self.tasks = TaskSet(self._failed)
        self.instance = "mailbox"
        self._deks: dict[str, NewDek] = {}
        self._clocks = [HybridClock(writer_id=b, regression_reject_ms=5000) for b in range(BUCKETS)]
        self._opened = False

    # ---------------------------------------------------------------------------------------------------------- roles

    async def start_fanout(self, index: int = 0, pool: int = 1, *, name: str = "") -> FanoutRole:
        name = name or f"fanout-{index}"
        role = FanoutRole(
            name,
            index,
            pool,
            settings=FanoutSettings(
                conversation_bucket_count=BUCKETS, mailbox_shard_count=SHARDS, lane_count=self.lane_count,
                poll_interval_ms=50,
            ),
            registry=self.registry,
            routes=await self._routes(),
            outbox=self.outbox,
            dispatch_log=self.dispatch_log,
            checkpoints=self.checkpoints,
            membership=self.messages,
            backplane=self.hub.backplane(name),
            clock=self.clock,
            on_failure=self._failed,
        )  # fmt: skip
        self.prepared(role)
        await role.start()
        self.roles[name] = role
        return role

    async def start_mailbox(self, index: int = 0, pool: int = 1, *, name: str = "") -> MailboxRole:
        name = name or f"mailbox-{index}"
        role = MailboxRole(
            name,
            index,
            pool,
            settings=MailboxSettings(
                mailbox_shard_count=SHARDS, lane_count=self.lane_count, poll_interval_ms=50,
                append_chunk_members=self.chunk_members,
            ),
            stores=MailboxStores(
                registry=self.registry,
                dispatch_log=self.dispatch_log,
                mailbox=self.mailbox,
                messages=self.messages,
                membership=self.messages,
                cipher=self.keys,
                cursor_key=self.keys.cursor_key,
            ),
            routes=await self._routes(),
            backplane=self.hub.backplane(name),
            clock=self.clock,
            on_failure=self._failed,
            gateways=("gateway-0",),
            present=lambda: self.present,
            chunk_gate=self.chunk_gate,
        )  # fmt: skip
        self.prepared(role)
        await role.start()
        self.roles[name] = role
        return role

    async def _routes(self) -> RouteCache:
        """Of a process of its own."""
        routes = RouteCache(self.registry, self.tasks)
        await routes.start()
        return routes

    def prepared(self, role: FanoutRole | MailboxRole) -> None:
        """Called before a role starts."""

    async def kill(self, name: str) -> None:
        """The role is gone without a word."""
        await self.roles.pop(name).stop()

    async def close(self) -> None:
        for name in list(self.roles):
            await self.kill(name)
        await self.tasks.close()

    def _failed(self, task: str, error: BaseException) -> None:
        self.failures.append((task, error))

    # --------------------------------------------------------------------------------------------------------- commits

    async def open_buckets(self, epoch: int = 1) -> None:
        for bucket in range(BUCKETS):
            await self.messages.open_bucket(bucket, epoch, f"grant-{epoch}")
        self._opened = True

    async def send(
        self,
        conversation_id: str,
        sender_id: str,
        text: str,
        *,
        inline: bool = True,
        version: int = 0,
        events: Sequence[DispatchEvent] = (),
        epoch: int = 1,
        membership: Any = None,
    ) -> int:
        """Commit one message as the writer does and hint it; its conversation_seq."""
        if not self._opened:
            await self.open_buckets(epoch)
        bucket = ids.conversation_bucket(TENANT, conversation_id, BUCKETS)
        message_id = self._clocks[bucket].allocate(self.clock.unix_ms())
        dek = self._deks.setdefault(conversation_id, self.keys.new_dek(TENANT))
        where = (TENANT, conversation_id, message_id)
        now_ms = self.clock.unix_ms()
        record = MessageRecord(
            message_id=message_id, sender_id=sender_id, client_message_id=text, message_type=MESSAGE_TYPE_TEXT,
            payload_ciphertext=self.keys.encrypt(dek.dek, text.encode(), *where), created_at=now_ms,
            dek_id=dek.dek_id, event_type=EVENT_MESSAGE,
        )  # fmt: skip
        body = InlineBody(payload=text.encode()).SerializeToString()
        outbox = OutboxRecord(
            tenant_id=TENANT, conversation_id=conversation_id, message_id=message_id, sender_id=sender_id,
            sender_device_id=f"{sender_id}-d", client_message_id=text, fencing_epoch=epoch, membership_version=version,
            created_at=now_ms, inline_body=inline, message_type=MESSAGE_TYPE_TEXT,
            inline_ciphertext=self.keys.encrypt(dek.dek, body, *where) if inline else b"", dek_id=dek.dek_id,
            events=events or [DispatchEvent(event_type=EVENT_MESSAGE, audience_all=True, flags=FLAGS_ORDINARY)],
        )  # fmt: skip
        request = CommitRequest(
            tenant_id=TENANT, conversation_id=conversation_id, sender_id=sender_id, client_message_id=text,
            request_digest=bytes(16), after_client_message_id="", membership_version=version, message_id=message_id,
            record=record.SerializeToString(), outbox=outbox.SerializeToString(), dek_id=dek.dek_id,
            wrapped_dek=dek.wrapped, preview_ciphertext=b"", created_at_ms=now_ms, membership=membership,
        )  # fmt: skip
        (outcome,) = await self.messages.commit(bucket, epoch, [request])
        await self._hint(bucket, outcome.outbox_offset)
        return outcome.conversation_seq

    async def _hint(self, bucket: int, offset: int) -> None:
        (record,) = await self.outbox.read(bucket, offset, max_records=1)
        hint = LogHint(partition=bucket, first_offset=offset, records=[record.value])
        for name in self.roles:
            if name.startswith("fanout"):
                self.writer.notify(name, InternalOpcode.OUTBOX_HINT, hint.SerializeToString())

    async def create_group(self, group_id: str, users: Sequence[str]) -> str:
        """Version 1 of a group, published without an announcement record being dispatched."""
        if not self._opened:
            await self.open_buckets()
        conversation_id = ids.group_conversation_id(group_id)
        bucket = ids.conversation_bucket(TENANT, conversation_id, BUCKETS)
        slots = {user: slot for slot, user in enumerate(users)}
        shards = {user: ids.mailbox_shard_id(TENANT, user, SHARDS) for user in users}
        await self.messages.stage_members(bucket, 1, TENANT, group_id, slots, shards)
        snapshots = snapshots_of(slots, shards, self.lane_count)
        index = {shard: SnapshotRef(1, snap.member_count, snap.lane_mask) for shard, snap in snapshots.items()}
        meta = GroupMeta(
            membership_version=1, member_count=len(users), next_slot=len(users), creator_id=users[0],
            create_digest=bytes(16),
        )  # fmt: skip
        message_id = self._clocks[bucket].allocate(self.clock.unix_ms())
        announcement = OutboxRecord(
            tenant_id=TENANT, conversation_id=conversation_id, message_id=message_id, sender_id=users[0],
            fencing_epoch=1, membership_version=1, created_at=self.clock.unix_ms(), message_type=11,  # type: ignore[arg-type]
            custom_type="qim.group.created.v1", events=[DispatchEvent(event_type=3, audience_all=True, flags=6)],  # type: ignore[arg-type]
        )  # fmt: skip
        offset = await self.messages.publish_group(
            bucket, 1, TENANT, group_id, meta, snapshots, index, message_id, announcement.SerializeToString()
        )
        assert offset is not None
        await self._hint(bucket, offset)
        return conversation_id

    # --------------------------------------------------------------------------------------------------------- devices

    def owner_of(self, user: str) -> str:
        shard = ids.mailbox_shard_id(TENANT, user, SHARDS)
        for name in self.roles:
            if name.startswith("mailbox"):
                role = self.roles[name]
                assert isinstance(role, MailboxRole)
                if shard in role.shard_ids():
                    return name
        raise AssertionError(f"nobody owns shard {shard}")

    async def request(self, user: str, opcode: int, body: bytes) -> bytes:
        return await self.hub.members["gateway-0"].request(self.owner_of(user), opcode, body, timeout_ms=1000)

    async def login(
        self, user: str, connection_id: int = 1, cursor: MailboxCursorToken | None = None, *, reopen: bool = False,
        device_id: str = "", session_epoch: int = 1,
    ) -> OpenSessionReply:  # fmt: skip
        body = OpenSession(
            device=device(user, connection_id, device_id, session_epoch), gateway="gateway-0", cursor=cursor,
            reopen=reopen,
        )  # fmt: skip
        return OpenSessionReply.FromString(
            await self.request(user, InternalOpcode.OPEN_SESSION, body.SerializeToString())
        )

    async def pull(self, user: str, after: int = 0, up_to: int = 0, *, max_items: int = 0) -> MailboxPullReply:
        body = MailboxPull(
            device=device(user, 1), pull=PullMailbox(after_seq=after, up_to_seq=up_to, max_items=max_items)
        )
        return MailboxPullReply.FromString(
            await self.request(user, InternalOpcode.MAILBOX_PULL, body.SerializeToString())
        )

    async def entries(self, user: str, after: int = 0) -> list[Entry]:
        """Everything in a mailbox up to W, page by page."""
        found: list[Entry] = []
        while True:
            reply = await self.pull(user, after)
            assert not reply.HasField("error"), reply.error
            batch = MailboxBatch.FromString(reply.batch)
            found += batch.entries
            if not batch.has_more:
                return found
            after = batch.covered_through_seq

    async def texts(self, user: str) -> list[str]:
        return [entry.payload_or_ciphertext.decode() for entry in await self.entries(user)]


def device(user: str, connection_id: int, device_id: str = "", session_epoch: int = 1) -> DeviceTarget:
    return DeviceTarget(
        tenant_id=TENANT, user_id=user, device_id=device_id or f"{user}-d", connection_id=connection_id,
        session_epoch=session_epoch,
    )  # fmt: skip


def snapshots_of(slots: Mapping[str, int], shards: Mapping[str, int], lane_count: int) -> dict[int, ShardSnapshot]:
    """Snapshots of the shards of some members."""
    by_shard: dict[int, list[str]] = defaultdict(list)
    for user, shard in shards.items():
        by_shard[shard].append(user)
    made = {}
    for shard, users in by_shard.items():
        mask = 0
        for user in users:
            mask |= 1 << ids.lane_id(TENANT, user, lane_count)
        made[shard] = ShardSnapshot(BitMap(slots[user] for user in users).serialize(), len(users), mask)
    return made


async def eventually(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Until the condition holds; the loop runs meanwhile."""
    async with asyncio.timeout(timeout_s):
        while True:
            met = condition()
            if await met if isinstance(met, Awaitable) else met:
                return
            await asyncio.sleep(0.002)
