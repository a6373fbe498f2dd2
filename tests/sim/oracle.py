"""What must hold in every run, checked from outside: on every executed call, every frame, and when all is quiet."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyroaring import BitMap

from qim.client.events import ClientEvent, MessageFailed, MessageSent
from qim.core import ids
from qim.core.seq import log_offset_of
from qim.core.visibility import is_visible
from qim.protocol.qim_pb2 import Entry, GroupDispatch, OutboxRecord
from qim.stores.api import AppendCall, AppendResult, AppendStatus, CommitOutcome, CommitRequest, CommitStatus
from qim.stores.memory_message import _Group

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.devices import Device

VIOLATIONS_MAX: Final = 20
_PREFIX: Final = struct.Struct(">QB8s")


class Wanted(NamedTuple):
    """Who must get a dispatch, per lane."""

    message_id: bytes
    users: dict[int, tuple[str, ...]]


class Oracle:
    """Invariants of one run; `violations` is empty in a correct one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.violations: list[str] = []
        self._floors: dict[str, int] = {}
        self._queued: dict[tuple[str, str], list[str]] = {}
        """(device, conversation) -> client_message_ids in the order the user sent them."""
        self.sent: dict[str, bytes] = {}
        self.failed: dict[str, MessageFailed] = {}
        self._entries: dict[str, dict[bytes, tuple[bytes, int]]] = {}
        """user -> mailbox prefix -> (message_id, ordinal)."""
        self._held: dict[str, dict[tuple[bytes, int], bytes]] = {}
        """user -> (message_id, ordinal) -> mailbox prefix."""
        self._wanted: list[list[Wanted]] = [[] for _ in range(cluster.plan.shards)]
        self._dispatched: dict[tuple[int, int], int] = {}
        """(shard, bucket) -> source of the newest dispatch that counts, as `GroupDispatch.follows`."""
        self._last_message_id: dict[int, bytes] = {}
        self._last_seq: dict[str, int] = {}
        self._checkpoints: dict[int, int] = {}
        self._cursors: dict[str, int] = {}
        self._must: dict[str, set[bytes]] = {}
        """user -> message_ids of committed messages that are his."""
        self._outbox_read: dict[int, int] = {}
        self.committed: dict[str, tuple[str, int, bytes]] = {}
        """client_message_id -> (conversation, seq, message_id)."""

    def violation(self, text: str) -> None:
        if len(self.violations) < VIOLATIONS_MAX:
            self._cluster.trace(f"VIOLATION {text}")
            self.violations.append(f"at {self._cluster.loop.time():.3f} s: {text}")

    # ------------------------------------------------------------------------------------------ at executed calls

    def executed(self, purpose: str, method: str, args: tuple[Any, ...], outcome: Any) -> None:
        """A server executed a call."""
        if isinstance(outcome, Exception):
            return
        if method == "commit_each":
            for call, result in zip(args[0], outcome, strict=True):
                if not isinstance(result, Exception):
                    self._committed(call.bucket, call.requests, result)
        elif purpose == "mailbox" and method == "append":
            self._appended(args[0], outcome)
        elif method == "save":
            stored = self._cluster.checkpoints._positions[args[0]].next_offset
            if stored < self._checkpoints.get(args[0], 0):
                self.violation(f"the fan-out checkpoint of partition {args[0]} went back to {stored}")
            self._checkpoints[args[0]] = stored

    def _committed(self, bucket: int, requests: Sequence[CommitRequest], outcomes: list[CommitOutcome]) -> None:
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome.status is not CommitStatus.COMMITTED:
                continue
            if request.message_id <= self._last_message_id.get(bucket, b""):
                self.violation(f"message_id {request.message_id.hex()} of bucket {bucket} is not above the one before")
            self._last_message_id[bucket] = request.message_id
            seq = outcome.conversation_seq
            if seq != self._last_seq.get(request.conversation_id, 0) + 1:
                self.violation(f"conversation_seq {seq} of {request.conversation_id} does not follow the one before")
            self._last_seq[request.conversation_id] = seq

    def _appended(self, call: AppendCall, result: AppendResult) -> None:
        if result.nondeterministic:
            self.violation(f"shard {call.shard}: {result.nondeterministic} entries differ from those stored")
        if result.status is not AppendStatus.OK:
            return
        for item in call.tenant_items:
            for user_id, *_ in item.recipients:
                self._index(item.tenant_id, user_id)
        moves = call.watermarks
        if moves is None:
            return
        for lane, (old, new) in enumerate(zip(moves.previous.values, moves.new.values, strict=True)):
            if new > old:
                first = log_offset_of(old) + 1 if old else 0
                self._check_covered(call.shard, lane, first, log_offset_of(new))

    def _check_covered(self, shard: int, lane: int, first: int, last: int) -> None:
        wanted = self._wanted_of(shard)
        if last >= len(wanted):
            self.violation(f"W[{lane}] of shard {shard} is {last}, the log ends at {len(wanted) - 1}")
            return
        for offset in range(first, last + 1):
            for user in wanted[offset].users.get(lane, ()):
                self._index(self._cluster.tenant, user)
                if (wanted[offset].message_id, 0) not in self._messages_of(user):
                    self.violation(f"W[{lane}] of shard {shard} passed offset {offset}, {user} has no entry of it")

    def _index(self, tenant: str, user: str) -> None:
        """Look at the entries of a mailbox that were not there before."""
        known = self._entries.setdefault(user, {})
        held = self._held.setdefault(user, {})
        for members in self._cluster.mailbox.store._held.mailboxes.get((tenant, user), {}).values():
            if len(members) == len(known):
                continue
            for prefix, member in members.items():
                if prefix in known:
                    continue
                entry = Entry.FromString(member[_PREFIX.size :])
                identity = known[prefix] = (entry.message_id, entry.event_ordinal)
                other = held.setdefault(identity, prefix)
                if other != prefix:
                    seqs = [f"{_PREFIX.unpack(found)[0]:#x}" for found in (other, prefix)]
                    self.violation(f"the mailbox of {user} holds a message twice, at {seqs[0]} and {seqs[1]}")

    def _messages_of(self, user: str) -> set[tuple[bytes, int]]:
        """(message_id, 0) of the entries of a user, whatever their ordinal."""
        return {(message_id, 0) for message_id, _ in self._held.get(user, {})}

    def mailbox_rolled_back(self) -> None:
        self._entries.clear()
        self._held.clear()

    # ------------------------------------------------------------------------------------------------- the log

    def _wanted_of(self, shard: int) -> list[Wanted]:
        wanted = self._wanted[shard]
        records = self._cluster.dispatched[shard]
        while len(wanted) < len(records):
            wanted.append(self._expand(shard, GroupDispatch.FromString(records[len(wanted)])))
        return wanted

    def _expand(self, shard: int, dispatch: GroupDispatch) -> Wanted:
        plan, tenant = self._cluster.plan, self._cluster.tenant
        record = dispatch.record
        key = shard, dispatch.source_bucket
        if dispatch.HasField("follows") and dispatch.follows > self._dispatched.get(key, -1):
            return Wanted(record.message_id, {})  # what it follows was refused: both come again
        source = dispatch.source_offset << 8 | dispatch.source_part
        self._dispatched[key] = max(source, self._dispatched.get(key, -1))
        users: set[str] = set()
        for event in record.events:
            if not event.audience_all:
                users.update(event.user_ids)
            elif record.conversation_id.startswith(ids.DIRECT_PREFIX):
                users.update(ids.direct_members(record.conversation_id))
            else:
                users.update(self._snapshot(shard, record.conversation_id, dispatch.snapshot_version))
        by_lane: dict[int, tuple[str, ...]] = {}
        for user in sorted(users):
            if ids.mailbox_shard_id(tenant, user, plan.shards) == shard:
                lane = ids.lane_id(tenant, user, plan.lanes)
                by_lane[lane] = (*by_lane.get(lane, ()), user)
        return Wanted(record.message_id, by_lane)

    def _group(self, conversation_id: str) -> _Group:
        return self._cluster.messages._groups[self._cluster.tenant, ids.group_id_of(conversation_id)]

    def _snapshot(self, shard: int, conversation_id: str, version: int) -> Iterator[str]:
        group = self._group(conversation_id)
        for slot in BitMap.deserialize(group.snapshots[shard, version].bitmap):
            yield group.users[shard][slot]

    # ---------------------------------------------------------------------------------------------- the devices

    def watermark_floor(self, device: str) -> int:
        """The highest W any device of the user has been told."""
        return self._floors.get(self._cluster.devices[device].user, 0)

    def watermark_told(self, device: str, watermark: int, floor: int) -> None:
        user = self._cluster.devices[device].user
        if watermark < floor:
            self.violation(f"{device} was told W {watermark:#x} after {floor:#x}")
        self._floors[user] = max(self._floors.get(user, 0), watermark)

    def queued(self, device: Device, conversation_id: str, client_message_id: str) -> None:
        self._queued.setdefault((device.name, conversation_id), []).append(client_message_id)

    def client_event(self, device: Device, event: ClientEvent) -> None:
        if isinstance(event, MessageSent):
            self.sent[event.client_message_id] = event.result.message_id
            self._check_recoverable(event)
        elif isinstance(event, MessageFailed):
            self.failed[event.client_message_id] = event

    def _check_recoverable(self, event: MessageSent) -> None:
        cluster = self._cluster
        seq = event.result.conversation_seq
        if cluster.messages._records.get((cluster.tenant, event.conversation_id, seq)) is None:
            self.violation(f"{event.client_message_id} was acknowledged as {seq} and is not stored")

    def check_cursors(self) -> None:
        """Whatever lies at or below a device's stored cursor is in its store."""
        for device in self._cluster.devices.values():
            client = device.client
            if client is None:
                continue
            position = client.state.sync.cursor.last_applied_mailbox_seq
            if position == self._cursors.get(device.name, 0):
                continue
            self._cursors[device.name] = position
            self._check_cursor(device, device.store.cursor().last_applied_mailbox_seq)

    def _check_cursor(self, device: Device, cursor: int) -> None:
        if not cursor:
            return
        plan, tenant = self._cluster.plan, self._cluster.tenant
        shard = ids.mailbox_shard_id(tenant, device.user, plan.shards)
        lane = ids.lane_id(tenant, device.user, plan.lanes)
        stored = device_messages(device)
        for offset, wanted in enumerate(self._wanted_of(shard)[: log_offset_of(cursor) + 1]):
            if device.user in wanted.users.get(lane, ()) and wanted.message_id not in stored:
                self.violation(f"the cursor of {device.name} is at {cursor:#x}, offset {offset} never reached it")
                return

    # ------------------------------------------------------------------------------------------- when all is quiet

    def missing(self) -> list[str]:
        """What has not converged yet."""
        self._read_outboxes()
        found = []
        for user, must in self._must.items():
            self._index(self._cluster.tenant, user)
            absent = must.difference(message_id for message_id, _ in self._held.get(user, {}))
            if absent:
                found.append(f"the mailbox of {user} has not got {len(absent)} messages")
        for device in self._cluster.devices.values():
            if not device.live:
                found.append(f"{device.name} is not live")
                continue
            if device.unsettled():
                found.append(f"{device.name} waits for {device.unsettled()} answers")
            lacking = self._must.get(device.user, set()) - device_messages(device)
            if lacking:
                names = sorted(name for name, (_, _, message) in self.committed.items() if message in lacking)
                found.append(f"{device.name} has not got {len(lacking)} messages: {' '.join(names)}")
        return found

    def _read_outboxes(self) -> None:
        messages = self._cluster.messages
        for bucket in range(self._cluster.plan.buckets):
            records = messages.outbox(bucket)
            for offset in range(self._outbox_read.get(bucket, 0), len(records)):
                record = OutboxRecord.FromString(records[offset])
                if record.client_message_id:
                    self.committed[record.client_message_id] = (
                        record.conversation_id, record.conversation_seq, record.message_id,
                    )  # fmt: skip
                for user in sorted(self._audience(record)):
                    self._must.setdefault(user, set()).add(record.message_id)
            self._outbox_read[bucket] = len(records)

    def _audience(self, record: OutboxRecord) -> set[str]:
        if record.conversation_id.startswith(ids.DIRECT_PREFIX):
            return set(ids.direct_members(record.conversation_id))
        users: set[str] = set()
        for event in record.events:
            if event.audience_all:
                index = self._group(record.conversation_id).index[record.membership_version]
                for shard, ref in index.items():
                    users.update(self._snapshot(shard, record.conversation_id, ref.snapshot_version))
            else:
                users.update(event.user_ids)
        return users

    def check_end(self) -> None:
        """All devices have converged: everything is there, in order, once, and nobody has what is not his."""
        self._read_outboxes()
        self._check_mailboxes()
        for (device, conversation_id), queued in self._queued.items():
            seqs = [self.committed[name][1] for name in queued if name in self.committed]
            if seqs != sorted(seqs):
                self.violation(f"{device} sent to {conversation_id} in another order than committed: {seqs}")
        for name, event in self.failed.items():
            if name in self.committed and name not in self.sent:
                self.violation(f"{name} is committed and shown as failed ({event.code} {event.detail})")
        for name in self.sent:
            if name not in self.committed:
                self.violation(f"{name} was acknowledged and is in no outbox")
        for found in self._cluster.devices.values():
            self._check_rows(found)

    def _check_mailboxes(self) -> None:
        for user, must in sorted(self._must.items()):
            self._index(self._cluster.tenant, user)
            held = [message_id for message_id, _ in self._held.get(user, {})]
            for message_id in sorted(must.difference(held)):
                self.violation(f"message {message_id.hex()} is not in the mailbox of {user}")
            for message_id in sorted(set(held).difference(must)):
                self.violation(f"message {message_id.hex()} is in the mailbox of {user}, who is no recipient")

    def _check_rows(self, device: Device) -> None:
        rows = device.store._db.execute("SELECT conversation_id, conversation_seq, message_id FROM local_message")
        seen: dict[tuple[str, int], bytes] = {}
        for conversation_id, seq, message_id in rows.fetchall():
            if not seq:
                continue
            if seen.setdefault((conversation_id, seq), message_id) != message_id:
                self.violation(f"{device.name} shows two messages at {conversation_id} {seq}")
            if conversation_id.startswith(ids.GROUP_PREFIX):
                intervals = self._group(conversation_id).intervals.get(device.user, ())
                if not is_visible(intervals, seq):
                    self.violation(f"{device.name} got {conversation_id} {seq}, outside its membership {intervals}")


def device_messages(device: Device) -> set[bytes]:
    """message_ids in the store of a device."""
    return {bytes(found) for (found,) in device.store._db.execute("SELECT message_id FROM local_message")}
