"""Model of the MailboxStore: the same semantics in plain dictionaries, for property tests and the simulation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qim.core.ids import conversation_kind, mailbox_shard_id
from qim.core.seq import LaneVector, lanes_of
from qim.errors import Fenced, StaleInstance, StoreError
from qim.stores.api import (
    AppendCall,
    AppendResult,
    AppendStatus,
    CapResult,
    ChunkAppend,
    ConversationSeen,
    ProgressRow,
    RangePage,
    RangeRequest,
    ShardState,
    UserStatus,
)
from qim.stores.mailbox_layout import (
    DAY_MS,
    DAY_PROBES,
    DAYS_AHEAD,
    DAYS_KEPT,
    DROPPED_BLOCKS_PER_CALL_MAX,
    EVENT_GROUP_ITEMS_MAX,
    LANES_MAX,
    PROGRESS_BLOCK_OFFSETS,
    SEQ_MAX,
    check_append,
    split_member,
)

_User = tuple[str, str]


@dataclass(slots=True)
class _Shard:
    epoch: int = 0
    grant_id: str = ""
    watermarks: LaneVector = field(default_factory=lambda: LaneVector(()))
    fold: bytes = b""
    fold_offset: int = -1
    low_block: int = 0
    progress: dict[tuple[int, int], ProgressRow] = field(default_factory=dict)
    day_max: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(lane, day) -> greatest (mailbox_seq, chunk) appended."""
    user_trim: dict[_User, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Contents:
    """Everything an instance holds; copied to model an instance that lost its last second."""

    shards: dict[int, _Shard] = field(default_factory=dict)
    mailboxes: dict[_User, dict[int, dict[bytes, bytes]]] = field(default_factory=dict)
    """user -> day -> 17-byte prefix -> member."""
    conversations: dict[_User, dict[str, ConversationSeen]] = field(default_factory=dict)


class MemoryMailboxStore:
    """See `qim.stores.api.MailboxStore`. One instance, one client; `now_ms` is the server's clock."""

    def __init__(self, shard_count: int, now_ms: Callable[[], int]) -> None:
        self._shard_count = shard_count
        self._now_ms = now_ms
        self._held = _Contents()
        self._loaded: set[int] = set()
        self._lane_count = 0

    def saved(self) -> object:
        """What would survive now."""
        return copy.deepcopy(self._held)

    def restart(self, saved: object | None = None) -> None:
        """The instance restarts, on what `saved` returned earlier if given; shards must be opened or loaded again."""
        if saved is not None:
            assert isinstance(saved, _Contents)
            self._held = copy.deepcopy(saved)
        self._loaded.clear()

    async def open_shard(self, shard: int, shard_epoch: int, grant_id: str, lane_count: int) -> ShardState:
        state = self._held.shards.setdefault(shard, _Shard())
        if state.epoch > shard_epoch or (state.epoch == shard_epoch and state.grant_id != grant_id):
            raise Fenced(f"mailbox shard {shard}: epoch {state.epoch} is stored, grant {grant_id} has {shard_epoch}")
        state.epoch, state.grant_id = shard_epoch, grant_id
        if not state.watermarks.values:
            state.watermarks = LaneVector.zero(lane_count)
        if len(state.watermarks.values) != lane_count:
            raise StoreError(f"stored W has {len(state.watermarks.values)} lanes, not {lane_count}")
        self._lane_count = lane_count
        self._loaded.add(shard)
        return self._state(state)

    async def load_shard(self, shard: int, shard_epoch: int) -> ShardState:
        state = self._held.shards.get(shard, _Shard())
        if state.epoch > shard_epoch:
            raise Fenced(f"mailbox shard {shard}: epoch {state.epoch} is stored, ours is {shard_epoch}")
        if state.epoch == shard_epoch:
            self._loaded.add(shard)
        return self._state(state)

    def is_loaded(self, shard: int) -> bool:
        return shard in self._loaded

    async def append(self, call: AppendCall) -> AppendResult:
        check_append(call)
        state = self._held.shards.get(call.shard, _Shard())
        if call.shard not in self._loaded or state.epoch < call.shard_epoch:
            return AppendResult(status=AppendStatus.W_MOVED)
        if state.epoch > call.shard_epoch:
            raise Fenced(f"mailbox shard {call.shard}: an epoch above {call.shard_epoch} is stored")
        if call.watermarks is not None and call.watermarks.previous != state.watermarks:
            return AppendResult(status=AppendStatus.W_MOVED)
        judged = _judge(state.progress, call.tenant_items)
        if judged is None:
            return AppendResult(status=AppendStatus.CHUNK_SIZE)
        rows, applied = judged
        if call.watermarks is not None:
            for offset, mask, chunk_count in call.watermarks.required:
                for lane in lanes_of(mask):
                    row = rows.get((offset, lane)) or state.progress.get((offset, lane))
                    if row is None or not row.is_whole(chunk_count):
                        return AppendResult(status=AppendStatus.W_MOVED)
            state.watermarks = call.watermarks.new
        state.progress.update(rows)
        refused = sum(self._write(state, item, lanes) for item, lanes in applied)
        if call.fold is not None:
            state.fold, state.fold_offset = call.fold, call.fold_offset
            self._drop_progress(state)
        return AppendResult(status=AppendStatus.OK, applied=len(applied), nondeterministic=refused)

    async def progress(self, shard: int, first_offset: int, last_offset: int) -> Mapping[tuple[int, int], ProgressRow]:
        rows = self._held.shards.get(shard, _Shard()).progress
        return {key: row for key, row in rows.items() if first_offset <= key[0] <= last_offset}

    async def range_scan(self, request: RangeRequest) -> RangePage:
        state = self._current(request.shard, request.shard_epoch)
        members = self._members(request.tenant_id, request.user_id, request.after_seq, request.up_to_seq)
        taken, total_bytes = 0, 0
        while taken < len(members) and taken < request.max_items + EVENT_GROUP_ITEMS_MAX:
            if total_bytes >= request.max_bytes and members[taken][:8] != members[taken - 1][:8]:
                break
            total_bytes += len(members[taken])
            taken += 1
        return RangePage(
            rows=[split_member(member) for member in members[:taken]],
            exhausted=taken == len(members),
            effective_trim=self._effective_trim(state, request),
            storage_keys_examined=taken,
            storage_rows_returned=taken,
            tombstones_scanned=0,
            day_probes=DAY_PROBES,
        )

    async def user_status(self, request: RangeRequest) -> UserStatus:
        state = self._current(request.shard, request.shard_epoch)
        watermark = state.watermarks[request.lane]
        members = self._members(request.tenant_id, request.user_id, request.after_seq, watermark)
        return UserStatus(
            lane_watermark=watermark,
            effective_trim=self._effective_trim(state, request),
            pending_entry_count=len(members),
            pending_bytes=sum(map(len, members)),
        )

    async def truncate_before(self, shard: int, shard_epoch: int, tenant_id: str, user_id: str, seq: int) -> None:
        state = self._current(shard, shard_epoch)
        user = (tenant_id, user_id)
        state.user_trim[user] = max(seq, state.user_trim.get(user, 0))
        for members in self._held.mailboxes.get(user, {}).values():
            for prefix in [prefix for prefix in members if int.from_bytes(prefix[:8], "big") <= seq]:
                del members[prefix]

    async def enforce_cap(
        self, shard: int, shard_epoch: int, tenant_id: str, user_id: str, above: int, leave: int, limit: int
    ) -> CapResult:
        self._current(shard, shard_epoch)
        members = self._members(tenant_id, user_id, 0, SEQ_MAX)
        if len(members) <= above:
            return CapResult(0, len(members))
        last = members[min(len(members) - leave, limit) - 1]
        await self.truncate_before(shard, shard_epoch, tenant_id, user_id, int.from_bytes(last[:8], "big"))
        left = len(self._members(tenant_id, user_id, 0, SEQ_MAX))
        return CapResult(len(members) - left, left)

    async def conversations(self, tenant_id: str, user_id: str) -> list[ConversationSeen]:
        mailbox_shard_id(tenant_id, user_id, self._shard_count)
        return list(self._held.conversations.get((tenant_id, user_id), {}).values())

    def _state(self, state: _Shard) -> ShardState:
        return ShardState(
            watermarks=state.watermarks if state.watermarks.values else LaneVector.zero(self._lane_count),
            fold=state.fold,
            fold_offset=state.fold_offset,
            stored_epoch=state.epoch,
        )

    def _current(self, shard: int, shard_epoch: int) -> _Shard:
        if shard not in self._loaded:
            raise StaleInstance(f"mailbox shard {shard} is not loaded on this connection")
        state = self._held.shards.get(shard, _Shard())
        if state.epoch > shard_epoch:
            raise Fenced(f"mailbox shard {shard}: an epoch above {shard_epoch} is stored")
        if state.epoch < shard_epoch:
            raise StaleInstance(f"mailbox shard {shard}: an epoch below {shard_epoch} is stored")
        return state

    def _today(self) -> int:
        return self._now_ms() // DAY_MS

    def _write(self, state: _Shard, item: ChunkAppend, lanes: Collection[int]) -> int:
        """Write the entries of some lanes of an item; how many were refused."""
        day = min(item.created_at_ms // DAY_MS, self._today() + DAYS_AHEAD)
        refused = first = 0
        self._register(item)
        for lane, count in item.lanes:
            if lane in lanes:
                highest = state.day_max.get((lane, day), (-1, -1))
                state.day_max[lane, day] = max(highest, (item.mailbox_seq, item.chunk_index))
                refused += self._write_entries(item, day, range(first, first + count))
            first += count
        return refused

    def _register(self, item: ChunkAppend) -> None:
        for user_id, *_ in item.recipients:
            user = (item.tenant_id, user_id)
            self._held.conversations.setdefault(user, {}).setdefault(
                item.conversation_id,
                ConversationSeen(
                    conversation_id=item.conversation_id,
                    kind=str(conversation_kind(item.conversation_id)),
                    first_seen_at_ms=item.created_at_ms,
                ),
            )

    def _write_entries(self, item: ChunkAppend, day: int, numbers: Iterable[int]) -> int:
        refused = 0
        for i in numbers if day + DAYS_KEPT > self._today() else ():
            user_id, ordinal, event_id, ref = item.recipients[i]
            common = item.common if isinstance(item.common, bytes) else item.common[i]
            prefix = item.mailbox_seq.to_bytes(8, "big") + bytes((ordinal,)) + event_id
            member = prefix + ref + common
            user = (item.tenant_id, user_id)
            members = self._held.mailboxes.setdefault(user, {}).setdefault(day, {})
            refused += members.setdefault(prefix, member) != member
        return refused

    def _drop_progress(self, state: _Shard) -> None:
        low = state.low_block
        keep = max(low, min(state.fold_offset // PROGRESS_BLOCK_OFFSETS, low + DROPPED_BLOCKS_PER_CALL_MAX))
        state.low_block = keep
        state.progress = {k: row for k, row in state.progress.items() if k[0] >= keep * PROGRESS_BLOCK_OFFSETS}

    def _members(self, tenant_id: str, user_id: str, after_seq: int, up_to_seq: int) -> list[bytes]:
        today = self._today()
        return sorted(
            member
            for day, members in self._held.mailboxes.get((tenant_id, user_id), {}).items()
            if today - DAYS_KEPT < day <= today + DAYS_AHEAD
            for prefix, member in members.items()
            if after_seq < int.from_bytes(prefix[:8], "big") <= up_to_seq
        )

    def _effective_trim(self, state: _Shard, request: RangeRequest) -> int:
        today = self._today()
        expired = [
            seq for (lane, day), (seq, _) in state.day_max.items() if lane == request.lane and day + DAYS_KEPT <= today
        ]
        return max([*expired, state.user_trim.get((request.tenant_id, request.user_id), 0)])


def _judge(
    stored: Mapping[tuple[int, int], ProgressRow], items: Sequence[ChunkAppend]
) -> tuple[dict[tuple[int, int], ProgressRow], list[tuple[ChunkAppend, list[int]]]] | None:
    """Rows as they will be, and the items with the lanes of them to write; None if a stored chunk size or count is
    another one."""
    rows: dict[tuple[int, int], ProgressRow] = {}
    applied: list[tuple[ChunkAppend, list[int]]] = []
    for item in items:
        offset, size, count = item.log_offset, item.chunk_size, item.chunk_count
        at_offset = ((offset, lane) for lane in range(LANES_MAX))
        known = [row for key in at_offset if (row := rows.get(key) or stored.get(key)) is not None]
        if any(row.chunk_size != size for row in known):
            return None
        new = []
        for lane, _ in item.lanes:
            row = rows.get((offset, lane)) or stored.get((offset, lane))
            if row is not None and row.chunk_count != count:
                return None
            done, bit = (row.done if row is not None else 0), 1 << item.chunk_index
            if not done & bit:
                rows[offset, lane] = ProgressRow(chunk_size=size, chunk_count=count, done=done | bit)
                new.append(lane)
        if new:
            applied.append((item, new))
    return rows, applied
