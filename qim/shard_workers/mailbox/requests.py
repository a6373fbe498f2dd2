"""What gateways ask of a MailboxNode: logins, pulls, history (DESIGN-data §7)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from qim.core.cursor import CursorScope
from qim.core.ids import lane_id, mailbox_shard_id
from qim.core.secret import Secret
from qim.errors import ErrorCode, Fenced, StaleInstance, StoreError, WireError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.qim_pb2 import (
    SHARD_MOVED,
    CloseSession,
    DeviceTarget,
    Error,
    HistoryPull,
    HistoryPullReply,
    MailboxPull,
    MailboxPullReply,
    OpenSession,
    OpenSessionReply,
    PresenceStale,
    SessionListBatch,
    SessionListPull,
    SessionListPullReply,
)
from qim.runtime.clock import Clock
from qim.shard_workers.mailbox.history import HistoryReader
from qim.shard_workers.mailbox.online import OnlineDevice, OnlineIndex
from qim.shard_workers.mailbox.pull import MailboxPuller, Reader
from qim.shard_workers.mailbox.session import Position, issue_cursor, judge_cursor
from qim.shard_workers.mailbox.session_list import SessionListReader
from qim.shard_workers.mailbox.shard import ShardRunner
from qim.stores.api import MailboxStore, RangeRequest

log = get_logger(__name__)

_Reply = TypeVar("_Reply", OpenSessionReply, MailboxPullReply, SessionListBatch)

SHARD_MOVED_RETRY_MS: Final = 200
"""A lane that is not caught up usually is after a few ms; ± 30 % so that clients do not come back together."""
_JITTER: Final = 0.3
PULLS_AT_ONCE: Final = 4
"""Batches made at the same time, the others wait in order: one takes about 10 ms of this process, and a login storm
must not keep appends, pushes and the answers of the store waiting behind hundreds of them."""


def moved() -> Error:
    """SHARD_MOVED with a jittered retry."""
    spread = 1 + _JITTER * (2 * random.random() - 1)
    return Error(code=SHARD_MOVED, retry_after_ms=int(SHARD_MOVED_RETRY_MS * spread))


class GatewayRequests:
    """Handlers of the frames gateways send; `shards` are those of this role, by id."""

    def __init__(
        self,
        shards: Mapping[int, ShardRunner],
        store: MailboxStore,
        index: OnlineIndex,
        puller: MailboxPuller,
        history: HistoryReader,
        session_list: SessionListReader,
        clock: Clock,
        *,
        mailbox_shard_count: int,
        lane_count: int,
        cursor_key: Secret[bytes],
        on_gateway: Callable[[str], None],
        on_missed: Callable[[Sequence[OnlineDevice]], None],
    ) -> None:
        self._shards = shards
        self._store = store
        self._index = index
        self._puller = puller
        self._history = history
        self._session_list = session_list
        self._clock = clock
        self._mailbox_shard_count = mailbox_shard_count
        self._lane_count = lane_count
        self._cursor_key = cursor_key
        self._on_gateway = on_gateway
        self._on_missed = on_missed
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)

    def device_of(
        self, tenant_id: str, user_id: str, device_id: str, *, gateway: str, connection_id: int, session_epoch: int
    ) -> OnlineDevice:
        """An index row with its shard and lane."""
        return OnlineDevice(
            tenant_id,
            user_id,
            device_id,
            gateway=gateway,
            connection_id=connection_id,
            session_epoch=session_epoch,
            shard=mailbox_shard_id(tenant_id, user_id, self._mailbox_shard_count),
            lane=lane_id(tenant_id, user_id, self._lane_count),
        )

    # --------------------------------------------------------------------------------------------------------- logins

    async def open_session(self, peer: str, body: bytes) -> bytes:
        """OPEN: the device enters the index first, then W is read; so nothing lies between them (DESIGN-data §7)."""
        request = OpenSession.FromString(body)
        target = request.device
        device = self.device_of(
            target.tenant_id,
            target.user_id,
            target.device_id,
            gateway=request.gateway,
            connection_id=target.connection_id,
            session_epoch=target.session_epoch,
        )
        runner = self._shards.get(device.shard)
        if runner is None:
            return OpenSessionReply(error=moved()).SerializeToString()
        self._on_gateway(request.gateway)
        if self._index.open(device) and request.reopen:
            # It was online and not in the index: the presence tables did not show it when the shard opened (a lease
            # that a clock step had ended), so no DIRTY was sent for what was pushed to nobody.
            self._on_missed((device,))
        reply = await self._guarded(runner, device.lane, self._open(runner, device, request))
        if reply is None:
            reply = OpenSessionReply(error=moved())
        if reply.HasField("error") and not request.reopen:
            self._index.close(device.tenant_id, device.user_id, device.gateway, device.connection_id)
        return reply.SerializeToString()

    async def _open(self, runner: ShardRunner, device: OnlineDevice, request: OpenSession) -> OpenSessionReply | None:
        if not runner.serves(device.lane):
            return None
        machine = runner.machine
        last_applied = request.cursor.last_applied_mailbox_seq
        status = await self._store.user_status(
            RangeRequest(
                tenant_id=device.tenant_id,
                user_id=device.user_id,
                shard=device.shard,
                shard_epoch=machine.shard_epoch,
                lane=device.lane,
                after_seq=last_applied,
                up_to_seq=0,
                max_items=0,
                max_bytes=0,
            )
        )
        if not runner.serves(device.lane):
            return None
        scope = CursorScope(
            tenant_id=device.tenant_id,
            user_id=device.user_id,
            device_id=device.device_id,
            mailbox_shard_id=device.shard,
            lane_id=device.lane,
            shard_epoch=machine.shard_epoch,
            issued_at_ms=self._clock.unix_ms(),
        )
        position = Position(scope=scope, lane_watermark=status.lane_watermark, effective_trim=status.effective_trim)
        if not request.reopen:
            error = judge_cursor(request.cursor, position, machine.boundaries, self._cursor_key.reveal())
            if error is not None:
                return OpenSessionReply(error=error if error.code != SHARD_MOVED else moved())
        if not machine.publish(device.lane, status.lane_watermark):
            runner.note_regressions()
            return None
        return OpenSessionReply(
            lane_watermark=status.lane_watermark,
            trim_watermark=status.effective_trim,
            lane_id=device.lane,
            has_offline=status.pending_entry_count > 0,
            pending_entry_count=status.pending_entry_count,
            pending_bytes=status.pending_bytes,
            mailbox_cursor=issue_cursor(scope, last_applied, self._cursor_key.reveal()),
            shard_epoch=machine.shard_epoch,
        )

    def close_session(self, peer: str, body: bytes) -> None:
        """CONN_CLOSED (§16.1.2)."""
        device = CloseSession.FromString(body).device
        self._forget(device)

    def presence_stale(self, peer: str, body: bytes) -> None:
        """A push met a connection that is gone or another session's (§5.4.3)."""
        metrics.PRESENCE_STALE_TOTAL.inc()
        stale = PresenceStale.FromString(body)
        stale.device.user_id = self._index.user_of(stale.user_key)
        self._forget(stale.device)

    def _forget(self, target: DeviceTarget) -> None:
        for device in self._index.devices_of(target.tenant_id, target.user_id):
            if device.connection_id == target.connection_id and device.session_epoch <= target.session_epoch:
                self._index.close(device.tenant_id, device.user_id, device.gateway, device.connection_id)

    # ---------------------------------------------------------------------------------------------------------- pulls

    async def pull_mailbox(self, peer: str, body: bytes) -> bytes:
        """MAILBOX_PULL: a batch up to the W of the user's lane, never beyond (26.1.3)."""
        async with self._pulls:
            return await self._pull_mailbox(MailboxPull.FromString(body))

    async def _pull_mailbox(self, request: MailboxPull) -> bytes:
        tenant_id, user_id = request.device.tenant_id, request.device.user_id
        shard = mailbox_shard_id(tenant_id, user_id, self._mailbox_shard_count)
        lane = lane_id(tenant_id, user_id, self._lane_count)
        runner = self._shards.get(shard)
        reply = None
        if runner is not None and runner.serves(lane):
            reader = Reader(
                tenant_id=tenant_id,
                user_id=user_id,
                shard=shard,
                shard_epoch=runner.machine.shard_epoch,
                lane=lane,
                watermark=runner.machine.watermark(lane),
            )
            work = self._puller.pull(reader, request.pull, zero_cursor=request.zero_cursor)
            reply = await self._guarded(runner, lane, work)
        return (reply or MailboxPullReply(error=moved())).SerializeToString()

    async def pull_history(self, peer: str, body: bytes) -> bytes:
        """HISTORY_PULL: needs no lane, so any owner may answer."""
        request = HistoryPull.FromString(body)
        try:
            batch = await self._history.pull(request.device.tenant_id, request.device.user_id, request.pull)
            reply = HistoryPullReply(batch=batch.SerializeToString())
        except WireError as error:
            reply = HistoryPullReply(error=_wire_error(error))
        except StoreError as error:
            log.warning("history_unreadable", tenant_id=request.device.tenant_id, error=error)
            reply = HistoryPullReply(error=moved())
        return reply.SerializeToString()

    async def pull_session_list(self, peer: str, body: bytes) -> bytes:
        """SESSION_LIST_PULL: from a lane that is caught up, so that no conversation it ever showed is missing."""
        request = SessionListPull.FromString(body)
        tenant_id, user_id = request.device.tenant_id, request.device.user_id
        runner = self._shards.get(mailbox_shard_id(tenant_id, user_id, self._mailbox_shard_count))
        lane = lane_id(tenant_id, user_id, self._lane_count)
        batch: SessionListBatch | None = None
        if runner is not None and runner.serves(lane):
            async with self._pulls:
                batch = await self._guarded(runner, lane, self._session_list.pull(tenant_id, user_id, request.pull))
        reply = SessionListPullReply()
        if batch is None:
            reply.error.CopyFrom(moved())
        else:
            reply.batch = batch.SerializeToString()
        return reply.SerializeToString()

    async def _guarded(self, runner: ShardRunner, lane: int, work: Awaitable[_Reply | None]) -> _Reply | None:
        """The outcome of a read, or None when it cannot be trusted: it failed, or the shard reloaded meanwhile."""
        incarnation = runner.machine.incarnation
        try:
            reply = await work
        except Fenced as error:
            runner.fenced(error)
            return None
        except StaleInstance as error:
            runner.doubt(str(error))
            return None
        except StoreError as error:
            log.warning("mailbox_unreadable", mailbox_shard=runner.shard, error=error)
            return None
        return reply if runner.machine.incarnation == incarnation and runner.serves(lane) else None


def _wire_error(error: WireError) -> Error:
    return Error(code=ErrorCode(error.code).value, retry_after_ms=error.retry_after_ms, detail=error.detail)  # type: ignore[arg-type]  # equal values
