"""Outbox against dispatch log against mailboxes: every kind of orphan must be 0 (§19.1, DESIGN-data §4, §5).

Usable while the node works: the ends of the outboxes are taken first, then it waits until fan-out and every lane have
passed them; what comes later is compared with what it came from but not demanded. From each outbox record follow the
dispatches that must exist, from each admitted dispatch the entries of its members. Logs may be trimmed: nothing is
demanded of what lies below. Memory: some 500 bytes per record the outboxes hold, and the dispatches of one shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from qim.app.audit.evidence import AuditedLog, Evidence, User
from qim.app.audit.report import AuditReport, Orphan
from qim.commit_log.api import LogRecord, Watermarks
from qim.core import ids
from qim.core.seq import log_offset_of, mailbox_seq
from qim.errors import StoreError
from qim.protocol.qim_pb2 import DispatchEvent, GroupDispatch, MessageRecord, OutboxRecord
from qim.registry.api import epoch_owning
from qim.runtime.clock import Clock
from qim.shard_workers.fanout.dispatch import ShardTargets, Source, direct_slots, direct_targets, dispatches
from qim.shard_workers.mailbox.expand import Dispatch, LaneMembers, RecentEvents
from qim.shard_workers.mailbox.fold import AdmissionFold, Verdict
from qim.shard_workers.mailbox.members import MemberDirectory
from qim.stores.mailbox_layout import DAY_MS, DAYS_KEPT

SEQ_BUCKET_WIDTH: Final = 4096
"""`message_seq_bucket_width` (§7.1), immutable."""
DRAIN_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1

Part = tuple[int, int]
"""(mailbox shard, part) of a dispatch."""
EntryKey = tuple[int, int, bytes]
"""(mailbox_seq, ordinal, event_id)."""


class Commit(NamedTuple):
    """What a dispatch must agree with."""

    record: tuple[str, str, int, bytes, str, int]
    """tenant, conversation, conversation_seq, message_id, sender, fencing epoch"""
    expected: frozenset[Part]


class DispatchAudit:
    """One run over a node."""

    def __init__(self, evidence: Evidence, clock: Clock, *, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        self._evidence = evidence
        self._clock = clock
        self._deadline_ms = 0.0
        self._drain_timeout_ms = drain_timeout_s * 1000
        self._commits: dict[tuple[int, int], Commit] = {}
        self._missing: dict[tuple[int, int], set[Part]] = {}
        self._members = MemberDirectory(
            evidence.membership, lane_count=evidence.lane_count, mailbox_shard_count=evidence.shard_count
        )
        self._recent = RecentEvents()
        self.report = AuditReport()

    async def run(self) -> AuditReport:
        """Everything. StoreError when something cannot be read, or was trimmed while it was."""
        evidence = self._evidence
        self._deadline_ms = self._clock.monotonic_ms() + self._drain_timeout_ms
        outbox = [await evidence.outbox.watermarks(bucket) for bucket in range(evidence.bucket_count)]
        await self._wait_for_fanout([marks.high for marks in outbox])
        dispatch = [await evidence.dispatch.watermarks(shard) for shard in range(evidence.shard_count)]
        await self._wait_for_lanes([marks.high for marks in dispatch])
        for bucket, marks in enumerate(outbox):
            outbox[bucket] = await self._read_outbox(bucket, marks)
        users = await evidence.mailboxes.users()
        for shard, marks in enumerate(dispatch):
            await self._audit_shard(shard, marks, outbox, users.get(shard, ()))
        for (bucket, offset), parts in sorted(self._missing.items()):
            for shard, part in sorted(parts):
                where = f"bucket {bucket} offset {offset}"
                self.report.add(Orphan.COMMIT_WITHOUT_DISPATCH, where, f"no part {part} for mailbox shard {shard}")
        return self.report

    # -------------------------------------------------------------------------------------------------------- waiting

    async def _wait_for_fanout(self, ends: Sequence[int]) -> None:
        for bucket, end in enumerate(ends):
            while (position := await self._evidence.positions.position(bucket)) < end:
                if not await self._has_time():
                    self.report.add(Orphan.NOT_DRAINED, f"bucket {bucket}", f"fan-out stands at {position} of {end}")
                    break

    async def _wait_for_lanes(self, ends: Sequence[int]) -> None:
        for shard, end in enumerate(ends):
            while end and (lanes := await self._lanes_behind(shard, end)):
                if not await self._has_time():
                    self.report.add(Orphan.NOT_DRAINED, f"mailbox shard {shard}", f"lanes {lanes} are below {end}")
                    break

    async def _lanes_behind(self, shard: int, end: int) -> list[int]:
        watermarks = await self._evidence.mailboxes.watermarks(shard)
        if watermarks is None:
            return list(range(self._evidence.lane_count))
        return [lane for lane, seq in enumerate(watermarks.values) if not seq or log_offset_of(seq) < end - 1]

    async def _has_time(self) -> bool:
        await asyncio.sleep(_POLL_S)
        return self._clock.monotonic_ms() < self._deadline_ms

    # --------------------------------------------------------------------------------------------------------- outbox

    async def _read_outbox(self, bucket: int, demanded: Watermarks) -> Watermarks:
        """Remember every commit and what must follow from it; what came after the audit began demands nothing. The
        bounds, with what is still there as the lower one."""
        try:
            end = (await self._evidence.outbox.watermarks(bucket)).high
            low, records = await _read_all(self._evidence.outbox, bucket, demanded.low, end)
        except StoreError as error:  # the reader proves that offsets are dense and end at the counter
            self.report.add(Orphan.OUTBOX_NOT_DENSE, f"bucket {bucket}", str(error))
            return demanded
        self.report.examined["commits"] += len(records)
        by_conversation: dict[tuple[str, str], list[OutboxRecord]] = {}
        for record in records:
            source = Source(bucket, record.offset, record.value)
            commit = Commit(_coordinates(source.record), frozenset(await self._expected_parts(source)))
            self._commits[bucket, record.offset] = commit
            if record.offset < demanded.high and commit.expected:
                self._missing[bucket, record.offset] = set(commit.expected)
            if source.record.conversation_seq:
                name = (source.record.tenant_id, source.record.conversation_id)
                by_conversation.setdefault(name, []).append(source.record)
        for name, committed in by_conversation.items():
            await self._check_records(bucket, name, committed)
        return Watermarks(low, demanded.high)

    async def _expected_parts(self, source: Source) -> Iterable[Part]:
        evidence, record = self._evidence, source.record
        version = source.group_version()
        targets: ShardTargets = {}
        slots: dict[str, int] = {}
        if version is None:
            counts = (evidence.shard_count, evidence.lane_count)
            targets = direct_targets(record.tenant_id, record.conversation_id, *counts)
            slots = direct_slots(source)
        else:
            if source.is_for_all():
                targets = await evidence.membership.version_index(*version)
            subjects = source.subjects()
            found = await evidence.membership.slots_of(*version[:2], subjects)
            slots = {user: slot for user, slot in zip(subjects, found, strict=True) if slot is not None}
        made = dispatches(source, targets, slots, evidence.shard_count, evidence.lane_count, {})
        return [(shard, GroupDispatch.FromString(value).source_part) for shard, value in made]

    async def _check_records(self, bucket: int, name: tuple[str, str], committed: Sequence[OutboxRecord]) -> None:
        """Every commit has its MessageRecord, unless history has forgotten it."""
        head = await self._evidence.messages.head(*name)
        earliest = head.earliest_available_conversation_seq
        by_seq_bucket: dict[int, list[OutboxRecord]] = {}
        for outbox in committed:
            if outbox.conversation_seq >= earliest:
                by_seq_bucket.setdefault(outbox.conversation_seq // SEQ_BUCKET_WIDTH, []).append(outbox)
        for seq_bucket, wanted in by_seq_bucket.items():
            seqs = [outbox.conversation_seq for outbox in wanted]
            stored = await self._evidence.messages.records(*name, seq_bucket, seqs)
            for outbox, packed in zip(wanted, stored, strict=True):
                where = f"bucket {bucket} {name[0]} {name[1]} {outbox.conversation_seq}"
                if packed is None:
                    self.report.add(Orphan.COMMIT_WITHOUT_RECORD, where, "no MessageRecord")
                    continue
                record = MessageRecord.FromString(packed)
                if (record.message_id, record.sender_id) != (outbox.message_id, outbox.sender_id):
                    self.report.add(Orphan.COORDINATES_DIFFER, where, "the MessageRecord is another message's")

    # ---------------------------------------------------------------------------------------------------------- shards

    async def _audit_shard(
        self, shard: int, marks: Watermarks, outbox: Sequence[Watermarks], users: Sequence[User]
    ) -> None:
        low, records = await _read_all(self._evidence.dispatch, shard, marks.low, marks.high)
        marks = Watermarks(low, marks.high)
        self.report.examined["dispatches"] += len(records)
        made = [Dispatch(record.offset, record.value) for record in records]
        strange = {dispatch.offset for dispatch in made if not self._check_dispatch(shard, dispatch, outbox)}
        if marks.low:
            self._forgive_trimmed(shard, made)
        admitted = _admitted(made, marks.low)
        self.report.examined["duplicates and stale dispatches"] += len(made) - len(admitted)
        wanted = [dispatch for dispatch in admitted if dispatch.offset not in strange]
        await self._audit_entries(shard, marks, wanted, users)

    def _check_dispatch(self, shard: int, dispatch: Dispatch, outbox: Sequence[Watermarks]) -> bool:
        """False when it has no business here: then it makes no entries."""
        where = f"mailbox shard {shard} offset {dispatch.offset}"
        source_offset, part = dispatch.source
        if dispatch.frame.target_mailbox_shard != shard:
            what = f"meant for mailbox shard {dispatch.frame.target_mailbox_shard}"
            self.report.add(Orphan.WRONG_PARTITION, where, what)
            return False
        if not 0 <= dispatch.bucket < len(outbox):
            self.report.add(Orphan.DISPATCH_WITHOUT_COMMIT, where, f"there is no bucket {dispatch.bucket}")
            return False
        if source_offset < outbox[dispatch.bucket].low:
            return True  # its commit is forgotten
        commit = self._commits.get((dispatch.bucket, source_offset))
        if commit is None or (shard, part) not in commit.expected:
            what = f"nothing in bucket {dispatch.bucket} at {source_offset} calls for part {part} here"
            self.report.add(Orphan.DISPATCH_WITHOUT_COMMIT, where, what)
            return False
        self._missing.get((dispatch.bucket, source_offset), set()).discard((shard, part))
        right_id = ids.dispatch_id(dispatch.message_id, shard) == dispatch.frame.dispatch_id
        if not right_id or _coordinates(dispatch.record) != commit.record:
            what = f"differs from bucket {dispatch.bucket} offset {source_offset}"
            self.report.add(Orphan.COORDINATES_DIFFER, where, what)
        return True

    def _forgive_trimmed(self, shard: int, made: Sequence[Dispatch]) -> None:
        """Dispatches of a bucket are in order: those before the first one that is kept may have been trimmed."""
        first: dict[int, int] = {}
        for dispatch in made:
            first.setdefault(dispatch.bucket, dispatch.source[0])
        for (bucket, offset), parts in self._missing.items():
            if offset < first.get(bucket, offset + 1):
                parts.difference_update({part for part in parts if part[0] == shard})

    # --------------------------------------------------------------------------------------------------------- entries

    async def _audit_entries(
        self, shard: int, marks: Watermarks, admitted: Sequence[Dispatch], users: Sequence[User]
    ) -> None:
        boundaries = await self._evidence.registry.boundaries(shard)
        expected: list[tuple[Dispatch, list[tuple[User, EntryKey]]]] = []
        for dispatch in admitted:
            seq = mailbox_seq(epoch_owning(boundaries, dispatch.offset), dispatch.offset)
            expected.append((dispatch, _entries(dispatch, seq, await self._lane_members(dispatch))))
        stored: dict[User, set[EntryKey]] = {}
        trimmed: dict[User, int] = {}
        for user in {*users, *(user for _, made in expected for user, _ in made)}:
            rows = await self._evidence.mailboxes.rows(user)
            self.report.examined["entries"] += len(rows)
            stored[user] = {row[:3] for row in rows if marks.low <= log_offset_of(row.mailbox_seq) < marks.high}
            # Read after the rows: what was trimmed meanwhile is then known to be.
            trimmed[user] = await self._evidence.mailboxes.trim(shard, user)
        today = await self._evidence.mailboxes.today()
        doubtful = {dispatch.bucket for dispatch in admitted} if marks.low else set()
        self._compare(shard, expected, stored, trimmed, today, doubtful)

    def _compare(
        self,
        shard: int,
        expected: Sequence[tuple[Dispatch, list[tuple[User, EntryKey]]]],
        stored: dict[User, set[EntryKey]],
        trimmed: Mapping[User, int],
        today: int,
        doubtful: set[int],
    ) -> None:
        """`doubtful`: buckets whose predecessors in this log are trimmed."""
        for dispatch, made in expected:
            day = dispatch.record.created_at // DAY_MS
            due = [] if day + DAYS_KEPT <= today else [one for one in made if one[1][0] > trimmed[one[0]]]
            if dispatch.bucket in doubtful:
                # Behind trimmed records the first ones may be duplicates of what is gone, whole runs of them.
                if not any(key in stored[user] for user, key in made):
                    continue
                doubtful.discard(dispatch.bucket)
            for user, key in due:
                if key not in stored[user]:
                    what = f"message {dispatch.message_id.hex()}"
                    self.report.add(Orphan.ENTRY_MISSING, _place(shard, user, key), what)
            for user, key in made:
                stored[user].discard(key)
        for user, rest in stored.items():
            for key in sorted(rest):
                self.report.add(Orphan.ENTRY_UNEXPECTED, _place(shard, user, key), "no dispatch makes it")

    async def _lane_members(self, dispatch: Dispatch) -> LaneMembers:
        """Members as the MailboxNode finds them: the stored snapshot of the frozen version."""
        dispatch.prepare(self._recent)
        known = self._members.known(dispatch)
        return known if known is not None else await self._members.load(dispatch)


def _entries(dispatch: Dispatch, seq: int, members: LaneMembers) -> list[tuple[User, EntryKey]]:
    """What must be in the mailboxes, from the definition of `event_id` (§6.7)."""
    prefix = ids.event_id_prefix(dispatch.tenant_id, dispatch.frame.dispatch_id)
    found: list[tuple[User, EntryKey]] = []
    for lane in members.values():
        for _, user_id in lane:
            for event in dispatch.record.events:
                if _is_for(event, user_id):
                    ordinal = event.event_type - 1
                    key = (seq, ordinal, ids.event_id(prefix, user_id, ordinal))
                    found.append(((dispatch.tenant_id, user_id), key))
    return found


def _is_for(event: DispatchEvent, user_id: str) -> bool:
    return event.audience_all or user_id in event.user_ids


def _admitted(made: Sequence[Dispatch], low: int) -> list[Dispatch]:
    """What the fold admits (DESIGN-data §5); behind trimmed records it begins anew."""
    fold = AdmissionFold(low)
    return [
        dispatch
        for dispatch in made
        if fold.admit(dispatch.offset, dispatch.bucket, dispatch.source, dispatch.fencing_epoch, dispatch.follows)
        is Verdict.ADMITTED
    ]


def _coordinates(record: OutboxRecord) -> tuple[str, str, int, bytes, str, int]:
    return (
        record.tenant_id, record.conversation_id, record.conversation_seq, record.message_id, record.sender_id,
        record.fencing_epoch,
    )  # fmt: skip


def _place(shard: int, user: User, key: EntryKey) -> str:
    return f"mailbox shard {shard} {user[0]} {user[1]} {key[0]:#x}/{key[1]}/{key[2].hex()}"


async def _read_all(log: AuditedLog, partition: int, low: int, high: int) -> tuple[int, list[LogRecord]]:
    """Records up to `high`, and the offset of the first one: later than `low` when the log was trimmed meanwhile."""
    records: list[LogRecord] = []
    at = low
    while at < high:
        try:
            page = await log.read(partition, at, max_records=min(500, high - at))
        except StoreError:
            trimmed_to = (await log.watermarks(partition)).low
            if trimmed_to <= at:
                raise
            low = at = trimmed_to
            records.clear()
            continue
        if not page:
            raise StoreError(f"partition {partition} ends at {at}, its counter says {high}")
        records += page
        at = page[-1].offset + 1
    return low, records
