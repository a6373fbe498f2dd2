"""The stores' contracts: what is atomic, what is ordered, what may be repeated (DESIGN-data §3, §5, §8).

Implementations: `stores/redis` (real) and `stores/memory` (the model used by property tests and simulation); one
contract suite runs on both. Every call of an owner carries the epoch it was granted; a store that holds a greater one
raises `Fenced` and writes nothing. A broken or timed-out call raises `StoreUnavailable`: it may have happened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from qim.core.seq import LaneVector
from qim.core.visibility import Interval
from qim.errors import StoreError

# ---------------------------------------------------------------------------------------------- message store


class CommitStatus(Enum):
    COMMITTED = "committed"
    DUPLICATE = "duplicate"
    """Stored dedup hit, or an earlier request of the same call: coordinates are those of the first commit."""
    REUSED = "reused"
    """Same client_message_id, other content: PERMISSION_DENIED client_message_id_reused."""
    STALE_VERSION = "stale_version"
    """membership_version is not the frozen one any more; `membership_version` tells the current."""
    ID_NOT_GREATER = "id_not_greater"
    """message_id is not above the bucket's hlc; `message_id` tells the stored one."""
    DEK_MISMATCH = "dek_mismatch"
    """The conversation has another DEK; `dek_id` and `wrapped_dek` tell it."""
    OUT_OF_ORDER = "out_of_order"
    """The named predecessor is not committed (DESIGN-data §3.5): retryable."""
    UNJUDGED = "unjudged"
    """An earlier request of the same conversation in this call was refused retryably: judge again later."""


RETRY_IN_PLACE = frozenset({CommitStatus.STALE_VERSION, CommitStatus.ID_NOT_GREATER, CommitStatus.DEK_MISMATCH})


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipRewrite:
    """What a membership control message changes in the same atomic step (DESIGN-data §8).

    Joining users get interval (J-1, open) and the slots given; leaving users' last interval ends at J, where J is the
    conversation_seq that the commit assigns. `index` and `snapshots` are those of `new_version`.
    """

    group_id: str
    new_version: int
    member_count: int
    joining: Mapping[str, int]
    """user_id -> slot; a returning user keeps the old slot."""
    joining_shards: Mapping[str, int]
    """user_id -> mailbox shard, for the slot -> user map of that shard."""
    leaving: tuple[str, ...]
    next_slot: int
    snapshots: Mapping[int, ShardSnapshot]
    """mailbox shard -> new snapshot, only the shards that changed (copy on write)."""
    index: Mapping[int, SnapshotRef]
    """mailbox shard -> snapshot reference, every shard that has members."""


class SnapshotRef(NamedTuple):
    """Where a shard's members of a version are and what fan-out needs of them."""

    snapshot_version: int
    member_count: int
    lane_mask: int


class ShardSnapshot(NamedTuple):
    bitmap: bytes
    """RoaringBitmap of slots, portable format (§7.9)."""
    member_count: int
    lane_mask: int


@dataclass(slots=True, kw_only=True)
class CommitRequest:
    """One message to commit. `record` is an encoded MessageRecord, `outbox` an OutboxRecord without its sequence."""

    tenant_id: str
    conversation_id: str
    sender_id: str
    client_message_id: str
    request_digest: bytes
    """16 bytes over what the client asked for; equal content has an equal digest."""
    after_client_message_id: str
    membership_version: int
    """0 = single chat, no membership record to check."""
    message_id: bytes
    record: bytes
    outbox: bytes
    dek_id: str
    wrapped_dek: bytes
    """Used only if the conversation has no DEK yet."""
    preview_ciphertext: bytes
    created_at_ms: int
    membership: MembershipRewrite | None = None


@dataclass(slots=True, kw_only=True)
class CommitOutcome:
    status: CommitStatus
    message_id: bytes = b""
    conversation_seq: int = 0
    outbox_offset: int = -1
    """-1 unless COMMITTED by this call."""
    membership_version: int = 0
    dek_id: str = ""
    wrapped_dek: bytes = b""


class BucketCommit(NamedTuple):
    """What one bucket commits in a call."""

    bucket: int
    fencing_epoch: int
    requests: Sequence[CommitRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    last_message_id: bytes
    """16 zero bytes when nothing was committed."""
    next_outbox_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationHead:
    """§7.4. Zero sequences when nothing was committed."""

    latest_conversation_seq: int = 0
    earliest_available_conversation_seq: int = 1
    last_message_id: bytes = b""
    last_sender_id: str = ""
    preview_ciphertext: bytes = b""
    member_count: int = 0
    fencing_epoch: int = 0
    head_version: int = 0
    updated_at_ms: int = 0
    dek_id: str = ""
    wrapped_dek: bytes = b""


class MessageStore(Protocol):
    """Commit facts of conversations, per conversation bucket (instance `message`, fsync always)."""

    async def open_bucket(self, bucket: int, fencing_epoch: int, grant_id: str) -> BucketState:
        """Raise the bucket's stored fence to `fencing_epoch`. Fenced if a greater one, or the same one of another
        grant, is stored. Idempotent for the same grant."""
        ...

    async def commit(self, bucket: int, fencing_epoch: int, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        """Judge the requests one after another against the state the earlier ones leave, then commit all that passed in
        one atomic step: outbox record, conversation_seq, record, dedup (7200 s), head (DESIGN-data §3.1 to §3.3).
        One outcome per request, in order. Idempotent by (bucket, tenant, sender, client_message_id)."""
        ...

    async def commit_each(self, calls: Sequence[BucketCommit]) -> list[list[CommitOutcome] | StoreError]:
        """`commit` of many buckets of one instance in one round trip: for each, in order, its outcomes, or why the
        store refused it whole and wrote nothing of it. Each bucket is atomic and judged by its own epoch; a refusal of
        one touches no other. StoreUnavailable is raised: of each bucket the call may have happened."""
        ...

    def instance_of(self, bucket: int) -> str:
        """Buckets with one answer are kept by one instance and may share a call."""
        ...

    async def lookup_dedup(
        self, bucket: int, tenant_id: str, sender_id: str, client_message_id: str, request_digest: bytes
    ) -> CommitOutcome | None:
        """What the dedup row of this key says, read without writing: DUPLICATE with the coordinates of the first
        commit when the digest is equal, REUSED when it is not, None when there is no row. Asked before every final
        refusal, so that the retry of a committed message is acknowledged (DESIGN-data §3.2)."""
        ...

    async def head(self, tenant_id: str, conversation_id: str) -> ConversationHead: ...

    async def records(
        self, tenant_id: str, conversation_id: str, seq_bucket: int, seqs: Sequence[int]
    ) -> list[bytes | None]:
        """Encoded MessageRecords of one (conversation, seq_bucket): exactly one range read. None where none is."""
        ...

    async def scan_conversations(self, buckets: Collection[int], position: bytes) -> tuple[bytes, list[StoredName]]:
        """A step of a walk over everything that has a head, those of `buckets` only, and the position of the next step;
        b"" begins and ends the walk. Costs the server about 1 ms. What exists during the whole walk is seen at least
        once, whatever changes meanwhile."""
        ...

    async def forget_history(
        self, bucket: int, fencing_epoch: int, tenant_id: str, conversation_id: str, earliest_seq: int
    ) -> int:
        """Records below `earliest_seq` vanish for good, FORGET_RECORDS_MAX in one call at most; the new
        `earliest_available_conversation_seq`, which never falls and never passes latest + 1."""
        ...


class StoredName(NamedTuple):
    """Where a conversation is."""

    bucket: int
    tenant_id: str
    conversation_id: str


FORGET_VERSIONS_MAX: Final = 100
"""Versions one call of `forget_versions` drops."""
FORGET_RECORDS_MAX: Final = 500
"""Records one call of `forget_history` removes: well under 1 ms of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeta:
    membership_version: int
    member_count: int
    next_slot: int
    creator_id: str
    create_digest: bytes
    """16 bytes over the sorted initial member list: a repeated CREATE_GROUP is recognised by it."""


class GroupMembership(Protocol):
    """Members, slots, intervals and immutable version snapshots of groups, beside the commit facts of the group."""

    async def meta(self, tenant_id: str, group_id: str) -> GroupMeta | None: ...

    async def stage_members(
        self,
        bucket: int,
        fencing_epoch: int,
        tenant_id: str,
        group_id: str,
        slots: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> None:
        """Write slots, slot -> user and interval (0, open) of <= 1,000 initial members of a group that is not published
        yet. Repeating overwrites with the same values. The call that holds slot 0 comes first: it drops what an
        abandoned creation left. Leftovers are invisible; `publish_group` refuses if not exactly `member_count` members
        are staged (StoreError)."""
        ...

    async def publish_group(
        self,
        bucket: int,
        fencing_epoch: int,
        tenant_id: str,
        group_id: str,
        meta: GroupMeta,
        snapshots: Mapping[int, ShardSnapshot],
        index: Mapping[int, SnapshotRef],
        message_id: bytes,
        outbox: bytes,
    ) -> int | None:
        """Atomically make version 1 visible and append the announcing outbox record; its offset. None if the group
        already exists (nothing written). The announcement takes no conversation_seq."""
        ...

    async def version_index(self, tenant_id: str, group_id: str, membership_version: int) -> Mapping[int, SnapshotRef]:
        """Target shards of one version. StoreError if the version is unknown: never an empty answer."""
        ...

    async def shard_snapshot(
        self, tenant_id: str, group_id: str, mailbox_shard: int, snapshot_version: int
    ) -> ShardSnapshot:
        """StoreError if unknown."""
        ...

    async def slot_users(self, tenant_id: str, group_id: str, mailbox_shard: int) -> Mapping[int, str]:
        """slot -> user of every slot this shard ever had; slots are never reused, so it serves every version."""
        ...

    async def slots_of(self, tenant_id: str, group_id: str, user_ids: Sequence[str]) -> list[int | None]: ...

    async def intervals(self, tenant_id: str, group_id: str, user_id: str) -> tuple[Interval, ...]:
        """Empty if the user never was a member."""
        ...

    async def intervals_of_many(
        self, tenant_id: str, group_id: str, user_ids: Sequence[str]
    ) -> list[tuple[Interval, ...]]: ...

    async def member_ids(self, tenant_id: str, group_id: str) -> list[str]:
        """Every user that ever was a member (filter by intervals); for audits and listings, not for delivery."""
        ...

    async def forget_versions(
        self, bucket: int, fencing_epoch: int, tenant_id: str, group_id: str, now_ms: int, retention_ms: int
    ) -> int:
        """Drop version indexes and snapshots that were superseded at least `retention_ms` ago, FORGET_VERSIONS_MAX at
        most; how many versions went. Time is told by marks: a call writes down the current version, and what is older
        than a mark of that age is superseded for as long. So a version lives between one and two retentions when this
        is called often."""
        ...


# ---------------------------------------------------------------------------------------------- mailbox store


class StoredRow(NamedTuple):
    """One mailbox member, taken apart. `entry` is an encoded Entry at rest."""

    mailbox_seq: int
    event_ordinal: int
    event_id: bytes
    entry: bytes


Recipient = tuple[str, int, bytes, bytes]
"""One entry to append: (user_id, event_ordinal, event_id, ref), with the member be64(mailbox_seq) ‖ u8 ordinal ‖
event_id[8] ‖ ref ‖ common. A plain tuple: made at a third of the cost, and the collector does not look at it twice."""


class ChunkAppend(NamedTuple):
    """Entries of the dispatch at `log_offset` and their progress bits, atomically: the only chunk of each of some
    lanes, or chunk `chunk_index` of one lane that has several."""

    log_offset: int
    lanes: Sequence[tuple[int, int]]
    """(lane, entries of it) in the order of `recipients`, each lane once; exactly one when `chunk_count` is above 1."""
    chunk_index: int
    chunk_count: int
    chunk_size: int
    """Members per chunk, stored at the first touch of the dispatch; another value is refused (DESIGN-data §5)."""
    mailbox_seq: int
    tenant_id: str
    conversation_id: str
    created_at_ms: int
    common: bytes | Sequence[bytes]
    """Shared part of the entries: one for all, or one per recipient."""
    recipients: Sequence[Recipient]


@dataclass(slots=True, kw_only=True)
class Watermarks:
    """A move of W: `previous` is what the caller believes is stored. For every non-empty (offset, lane) in between,
    `required` has a row (log_offset, mask of lanes, chunk_count of each of them); the store moves W only if it finds
    all those bits set."""

    previous: LaneVector
    new: LaneVector
    required: Sequence[tuple[int, int, int]]


@dataclass(slots=True, kw_only=True)
class AppendCall:
    """One script call for one shard and tick: items, then W, then the fold, all or nothing but for idempotent items."""

    shard: int
    shard_epoch: int
    tenant_items: Sequence[ChunkAppend]
    watermarks: Watermarks | None
    fold: bytes | None = None
    """Encoded {C, rows} to save with this move; C <= min of the new W (DESIGN-data §5)."""
    fold_offset: int = -1
    """C of `fold`: progress blocks wholly below it are dropped."""


class AppendStatus(Enum):
    OK = "ok"
    W_MOVED = "w_moved"
    """Stored W is not `previous`, or a required bit is missing: nothing written; reload and fold again."""
    CHUNK_SIZE = "chunk_size"
    """Stored chunk size differs: nothing written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    status: AppendStatus
    applied: int = 0
    """Items of which a bit was newly set."""
    nondeterministic: int = 0
    """Entries refused because another member stands under their 17-byte prefix (event_id_nondeterminism_total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """What a new owner or a new connection starts from."""

    watermarks: LaneVector
    fold: bytes
    """b"" when none was saved."""
    fold_offset: int
    """C, -1 when none was saved."""
    stored_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRow:
    chunk_size: int
    chunk_count: int
    done: int
    """Bitmap as an int: bit k = chunk k."""

    def is_whole(self, chunk_count: int) -> bool:
        """All of so many chunks are done."""
        return self.chunk_count == chunk_count and self.done == (1 << chunk_count) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    tenant_id: str
    user_id: str
    shard: int
    shard_epoch: int
    lane: int
    after_seq: int
    up_to_seq: int
    max_items: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePage:
    """Rows ascending by (mailbox_seq, ordinal, event_id). `exhausted`: the scan reached up_to_seq."""

    rows: Sequence[StoredRow]
    exhausted: bool
    effective_trim: int
    storage_keys_examined: int
    storage_rows_returned: int
    tombstones_scanned: int
    day_probes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserStatus:
    """State a login needs, read after the epoch check in one call."""

    lane_watermark: int
    effective_trim: int
    pending_entry_count: int
    pending_bytes: int


class CapResult(NamedTuple):
    """Entries of one user that the cap removed, and how many there are now."""

    removed: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSeen:
    """Row of `user_conversation_state`: registered once when a conversation first enters a user's set."""

    conversation_id: str
    kind: str
    first_seen_at_ms: int


class MailboxStore(Protocol):
    """Personal mailboxes and the durable state of MailboxShards (instance `mailbox`, fsync everysec)."""

    async def open_shard(self, shard: int, shard_epoch: int, grant_id: str, lane_count: int) -> ShardState:
        """Raise the stored epoch, return W and the fold. Fenced as in MessageStore.open_bucket."""
        ...

    async def load_shard(self, shard: int, shard_epoch: int) -> ShardState:
        """W and the fold under an epoch already opened. Fenced if the stored epoch is greater, W_MOVED does not exist
        here; `stored_epoch` lower than ours tells that the instance lost its last second: open again."""
        ...

    def is_loaded(self, shard: int) -> bool:
        """The shard was opened or loaded on the connection in use; False from a reconnect to the next of either. Asked
        often by owners without traffic: an instance that lost its last second must not wait for a call to tell."""
        ...

    async def append(self, call: AppendCall) -> AppendResult:
        """See AppendCall. Idempotent: a lane of an item whose bit is set writes nothing. Keeps day_max per (shard,
        lane, UTC day) and registers first-seen conversations; an entry of an expired day only raises day_max."""
        ...

    async def progress(self, shard: int, first_offset: int, last_offset: int) -> Mapping[tuple[int, int], ProgressRow]:
        """(log_offset, lane) -> row, for replay."""
        ...

    async def range_scan(self, request: RangeRequest) -> RangePage:
        """Rows in (after_seq, up_to_seq] of one user, cut nowhere inside an event group except when not exhausted (the
        caller cuts, core.coverage.cut_page). Touches only this user's keys. Uses the server's clock for expiry."""
        ...

    async def user_status(self, request: RangeRequest) -> UserStatus:
        """W of the user's lane, trim and the size of (after_seq, W]; up_to_seq is ignored."""
        ...

    async def truncate_before(self, shard: int, shard_epoch: int, tenant_id: str, user_id: str, seq: int) -> None:
        """Entries with mailbox_seq <= seq vanish for good and user_trim_seq rises to seq (§18.1.2)."""
        ...

    async def enforce_cap(
        self, shard: int, shard_epoch: int, tenant_id: str, user_id: str, above: int, leave: int, limit: int
    ) -> CapResult:
        """If the user has more than `above` entries, the oldest go until `leave` are left, at most about `limit` in
        this call, and user_trim_seq rises to the greatest removed mailbox_seq. Event groups go whole (§18.3.3)."""
        ...

    async def conversations(self, tenant_id: str, user_id: str) -> list[ConversationSeen]: ...


@dataclass(slots=True)
class InstanceMap:
    """bucket -> message instance and shard -> mailbox instance; immutable once stored in the registry."""

    message_of_bucket: list[str] = field(default_factory=list)
    mailbox_of_shard: list[str] = field(default_factory=list)
