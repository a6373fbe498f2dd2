"""From PushBatch to sockets (§11.1.1) and what a MailboxNode says about pushes that may be missing.

The body of a batch is encoded once, by the MailboxNode; here each recipient adds a head of a few bytes.
"""

from __future__ import annotations

from qim.backplane.api import Backplane
from qim.gateway.connection import ClientConnection, Session
from qim.gateway.sync import HeldPush
from qim.gateway.table import ConnectionTable
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.entry import push_frame_parts
from qim.protocol.internal import PushRow, decode_push_rows, user_key
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import DeviceTarget, MarkDirty, PresenceStale

log = get_logger(__name__)


class PushDelivery:
    """Hands entries to the connections they name, and to no other: id, session epoch and user key must all agree."""

    __slots__ = ("_backplane", "_table")

    def __init__(self, table: ConnectionTable, backplane: Backplane) -> None:
        self._table = table
        self._backplane = backplane

    def on_push_batch(self, peer: str, body: bytes) -> None:
        """PUSH_BATCH: any number of batches."""
        pushed = 0
        for tenant, common, rows in decode_push_rows(body):
            self._deliver(peer, tenant, common, rows)
            pushed += len(rows)
        metrics.PUSHED_TOTAL.inc(pushed)

    def on_mark_dirty(self, peer: str, mark: MarkDirty) -> None:
        """MARK_DIRTY: these connections may have missed a push."""
        for device in mark.devices:
            connection = self._table.by_id.get(device.connection_id)
            session = connection.session if connection else None
            if connection is None or session is None or session.epoch != device.session_epoch:
                key = user_key(device.tenant_id, device.user_id)
                self._stale(peer, device.tenant_id, key, device.connection_id, device.session_epoch, session)
            else:
                connection.mark_dirty()

    def _deliver(self, peer: str, tenant: bytes, common: bytes, rows: list[PushRow]) -> None:
        find = self._table.by_id.get
        head, head_seq, head_ref_bytes = b"", -1, 0
        for key, connection_id, epoch, mailbox_seq, ref in rows:
            connection = find(connection_id)
            session = connection.session if connection is not None else None
            if connection is None or session is None or session.epoch != epoch or session.user_key != key:
                self._stale(peer, tenant.decode(), key, connection_id, epoch, session)
            elif connection.barrier is None:
                if mailbox_seq != head_seq or len(ref) != head_ref_bytes:
                    # recipients of one dispatch share mailbox_seq, so nearly all of them share the head
                    head = push_frame_parts(mailbox_seq, ref, common)[0]
                    head_seq, head_ref_bytes = mailbox_seq, len(ref)
                connection.push_event(mailbox_seq, (head, ref, common))
            else:
                self._hold(connection, HeldPush(mailbox_seq, ref, common))
        metrics.PUSH_BATCH_RECIPIENTS.observe(len(rows))

    def _hold(self, connection: ClientConnection, push: HeldPush) -> None:
        """Before ONLINE_READY; an overflow is told to the client right behind it (§9.4.1)."""
        assert connection.barrier is not None
        if not connection.barrier.hold(push):
            connection.mark_dirty()

    def _stale(
        self, peer: str, tenant_id: str, key: bytes, connection_id: int, epoch: int, session: Session | None
    ) -> None:
        """The MailboxNode's index is behind: it is told what it named and what is here instead (§5.4.3)."""
        metrics.SESSION_EPOCH_REJECT_TOTAL.inc()
        device = DeviceTarget(tenant_id=tenant_id, connection_id=connection_id, session_epoch=epoch)
        observed = session.epoch if session is not None else 0
        stale = PresenceStale(device=device, observed_epoch=observed, user_key=key)
        self._backplane.notify(peer, InternalOpcode.PRESENCE_STALE, stale.SerializeToString())
