"""From a GroupDispatch to the entries of its members (§10.1 steps 8 to 10, DESIGN-data §2), pure.

What all recipients share is encoded once per event (`common`); a recipient costs one hash and one packed struct. The
common fragment at rest is `reference ‖ body at rest`, on the wire `reference ‖ body`: see `mailbox/bodies.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from types import MappingProxyType
from typing import Final, NamedTuple

from qim.core import ids
from qim.protocol.entry import (
    AT_ALL,
    AT_ME,
    FLAG_COUNTS_UNREAD,
    MENTION_NONE,
    ORDINAL_CONTROL,
    REF_BYTES,
    REPLY_ME,
    encode_own_ref,
    encode_ref,
    split_ref,
)
from qim.protocol.qim_pb2 import EVENT_CONTROL, DispatchEvent, Entry, GroupDispatch, OutboxRecord
from qim.stores.api import Recipient

MESSAGE_ID_AT: Final = 6
"""Where `message_id` lies in a common fragment: `80 01 <type> 8A 01 10 <16 bytes>`."""
RECENT_MESSAGES_MAX: Final = 1024
"""About 3 MB with inline bodies of the greatest size."""
_DIRECT_CACHE_ENTRIES: Final = 1 << 15
_MESSAGE_ID_TAG: Final = b"\x8a\x01\x10"
_OWN_TAG: Final = 0x42


Member = tuple[int, str]
"""A recipient: (slot, user_id); the slot orders chunks, in a single chat 0 and 1 (§7.9). A plain tuple: snapshots hold
a hundred thousand, and the collector does not look at those."""


class Share(NamedTuple):
    """Lanes that go to the store together: few members each, or one lane alone."""

    mask: int
    lanes: tuple[tuple[int, int], ...]
    """(lane, members of it), ascending."""
    members: Sequence[Member]
    """Lane by lane."""


class LaneMembers(dict[int, Sequence[Member]]):
    """Members of a dispatch on one shard: lane -> ascending by slot. Not changed once made: snapshots are shared."""

    __slots__ = ("_cut", "_mask", "_shares")

    def __init__(self, by_lane: Mapping[int, Sequence[Member]] = MappingProxyType({})) -> None:
        super().__init__((lane, members) for lane, members in sorted(by_lane.items()) if members)
        self._mask = 0
        for lane in self:
            self._mask |= 1 << lane
        self._cut = (0, 0)
        self._shares: Sequence[Share] = ()

    @property
    def mask(self) -> int:
        """The lanes that have members."""
        return self._mask

    def shares(self, chunk_size: int, members_max: int) -> Sequence[Share]:
        """As `shares_of` cuts them; kept for the next dispatch to the same members."""
        if self._cut != (chunk_size, members_max):
            self._cut = chunk_size, members_max
            self._shares = shares_of(self, chunk_size, members_max)
        return self._shares


def shares_of(by_lane: Mapping[int, Sequence[Member]], chunk_size: int, members_max: int) -> list[Share]:
    """Lanes in order, together while they have at most `members_max` members; one of more than a chunk is alone."""
    shares: list[Share] = []
    mask, lanes, together = 0, [], []  # type: int, list[tuple[int, int]], list[Member]
    for lane, members in by_lane.items():
        is_alone = len(members) > chunk_size
        if lanes and (is_alone or len(together) + len(members) > members_max):
            shares.append(Share(mask, tuple(lanes), together))
            mask, lanes, together = 0, [], []
        if is_alone:
            shares.append(Share(1 << lane, ((lane, len(members)),), members))
            continue
        mask |= 1 << lane
        lanes.append((lane, len(members)))
        together = [*together, *members]
    if lanes:
        shares.append(Share(mask, tuple(lanes), together))
    return shares


class Event:
    """One DispatchEvent, ready to be written for many users."""

    __slots__ = (
        "ordinal", "flags", "audience_all", "floors", "at_all", "at_users", "reply_to", "plain", "origin_device_id",
        "reference", "common",
    )  # fmt: skip

    def __init__(self, event: DispatchEvent, record: OutboxRecord, at_rest: bytes) -> None:
        self.ordinal = event.event_type - 1
        self.flags = event.flags
        self.audience_all = event.audience_all
        self.floors: dict[str, int] | None = None
        """The subjects and their visibility floors; None when everybody is meant."""
        if not event.audience_all:
            floors = event.joined_at or [0] * len(event.user_ids)
            self.floors = dict(zip(event.user_ids, floors, strict=True))
        self.at_all = False
        self.at_users: frozenset[str] = frozenset()
        self.reply_to = ""
        self.plain = self.floors is None and not event.HasField("mention")
        """Every recipient but the sender gets the same flags, mention and floor."""
        if event.HasField("mention"):
            self.at_all = event.mention.at_all
            self.at_users = frozenset(event.mention.user_ids)
            self.reply_to = event.mention.reply_to_user_id
        self.origin_device_id = record.sender_device_id if self.ordinal == ORDINAL_CONTROL else ""
        """The device that caused a control event: it is not pushed back there (§9.7.2)."""
        self.reference = encode_reference(event, record)
        self.common = self.reference + at_rest

    def is_for(self, user_id: str) -> bool:
        return self.floors is None or user_id in self.floors

    def mention_of(self, user_id: str) -> int:
        """The most personal mention wins: AT_ME, then REPLY_ME, then AT_ALL (§7.3)."""
        if user_id in self.at_users:
            return AT_ME
        if self.reply_to == user_id:
            return REPLY_ME
        return AT_ALL if self.at_all else MENTION_NONE


class Dispatch:
    """A GroupDispatch at its log offset. `events` is filled on admission: a folded-over record needs none."""

    __slots__ = (
        "offset", "bucket", "source", "follows", "fencing_epoch", "lane_mask", "tenant_id", "conversation_id",
        "message_id", "sender_id", "direct", "created_at_ms", "frame", "record", "events", "event_count",
        "event_prefix", "_ref_seq", "_ref_parts",
    )  # fmt: skip

    def __init__(self, offset: int, value: bytes) -> None:
        frame = GroupDispatch.FromString(value)
        record = frame.record
        self.offset = offset
        self.bucket: int = frame.source_bucket
        self.source: tuple[int, int] = (frame.source_offset, frame.source_part)
        self.follows: tuple[int, int] | None = divmod(frame.follows, 256) if frame.HasField("follows") else None
        self.fencing_epoch: int = record.fencing_epoch
        self.lane_mask: int = frame.lane_mask
        self.tenant_id: str = record.tenant_id
        self.conversation_id: str = record.conversation_id
        self.message_id: bytes = record.message_id
        self.sender_id: str = record.sender_id
        self.direct = self.conversation_id.startswith(ids.DIRECT_PREFIX)
        self.created_at_ms: int = record.created_at
        self.frame = frame
        self.record: OutboxRecord = record
        self.events: Sequence[Event] = ()
        self.event_count = 1
        self.event_prefix = b""
        self._ref_seq = -1
        self._ref_parts = (b"", b"")
        """Of the plain refs under `_ref_seq`: the same for all recipients but for their event_id."""

    def prepare(self, recent: RecentEvents) -> None:
        """Encode what all recipients share."""
        self.events = recent.of(self)
        self.event_count = len(self.events)
        self.event_prefix = ids.event_id_prefix(self.tenant_id, self.frame.dispatch_id)

    def recipients(self, mailbox_seq: int, members: Iterable[Member]) -> list[tuple[Recipient, Event]]:
        """The entries of some members, in the order of the members and then of the events."""
        if len(self.events) == 1 and self.events[0].plain:
            event = self.events[0]
            return [(recipient, event) for recipient in self._plain_recipients(mailbox_seq, event, members)]
        return [
            (self._recipient(mailbox_seq, event, user_id), event)
            for _, user_id in members
            for event in self.events
            if event.is_for(user_id)
        ]

    def chunk(
        self, mailbox_seq: int, lanes: Sequence[tuple[int, int]], members: Sequence[Member]
    ) -> tuple[bytes | list[bytes], list[Recipient], Sequence[tuple[int, int]]]:
        """(common, recipients, entries per lane) as `ChunkAppend` takes them; `lanes` = (lane, members of it)."""
        if len(self.events) == 1:
            event = self.events[0]
            if event.plain:
                return event.common, self._plain_recipients(mailbox_seq, event, members), lanes
        made: list[tuple[Recipient, Event]] = []
        entries = []
        first = 0
        for lane, count in lanes:
            before = len(made)
            made += self.recipients(mailbox_seq, members[first : first + count])
            entries.append((lane, len(made) - before))
            first += count
        recipients = [recipient for recipient, _ in made]
        if len(self.events) == 1:
            return self.events[0].common, recipients, entries
        return [event.common for _, event in made], recipients, entries

    def _plain_recipients(self, mailbox_seq: int, event: Event, members: Iterable[Member]) -> list[Recipient]:
        ordinal, sender_id = event.ordinal, self.sender_id
        if self._ref_seq != mailbox_seq:
            self._ref_seq = mailbox_seq
            self._ref_parts = split_ref(encode_ref(mailbox_seq, bytes(8), ordinal, event.flags, MENTION_NONE))
        head, tail = self._ref_parts
        users = [user_id for _, user_id in members]
        event_ids = ids.event_ids(self.event_prefix, users, ordinal)
        refs = [head + event_id[::-1] + tail for event_id in event_ids]
        made = list(zip(users, repeat(ordinal), event_ids, refs))
        if sender_id in users:
            made[users.index(sender_id)] = self._recipient(mailbox_seq, event, sender_id)
        return made

    def _recipient(self, mailbox_seq: int, event: Event, user_id: str) -> Recipient:
        event_id = ids.event_id(self.event_prefix, user_id, event.ordinal)
        floor = event.floors[user_id] if event.floors is not None else 0
        if user_id != self.sender_id:
            mention = event.mention_of(user_id)
            ref = encode_ref(mailbox_seq, event_id, event.ordinal, event.flags, mention, floor)
        else:
            flags = event.flags & ~FLAG_COUNTS_UNREAD
            ref = encode_ref(mailbox_seq, event_id, event.ordinal, flags, MENTION_NONE, floor)
            if self.record.client_message_id:
                ref = encode_own_ref(ref, self.record.client_message_id)
        return user_id, event.ordinal, event_id, ref


class RecentEvents:
    """Encoded events of the newest messages: the shards of one message meet here within milliseconds, and what they
    share is the same for all of them unless an event names users."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent: dict[tuple[bytes, int], Sequence[Event]] = {}

    def of(self, dispatch: Dispatch) -> Sequence[Event]:
        key = (dispatch.message_id, dispatch.source[1])
        events = self._recent.get(key)
        if events is not None:
            return events
        record = dispatch.record
        at_rest = encode_body_at_rest(record) if record.inline_body or not record.conversation_seq else b""
        events = [Event(event, record, at_rest) for event in record.events]
        if all(event.audience_all for event in events):
            self._recent[key] = events
            if len(self._recent) > RECENT_MESSAGES_MAX:
                del self._recent[next(iter(self._recent))]
        return events


def encode_reference(event: DispatchEvent, record: OutboxRecord) -> bytes:
    """The reference part all recipients of an event share: fields 16 to 27 of Entry."""
    entry = Entry(
        event_type=event.event_type,
        message_id=record.message_id,
        conversation_id=record.conversation_id,
        conversation_seq=record.conversation_seq,
        last_activity_id=record.message_id,
        sender_id=record.sender_id,
        created_at=record.created_at,
    )
    if event.event_type == EVENT_CONTROL:
        entry.origin_device_id = record.sender_device_id
        entry.target_message_id = event.target_message_id
        entry.target_conversation_seq = event.target_conversation_seq
        entry.target_sender_id = event.target_sender_id
        entry.target_flags = event.target_flags
    return entry.SerializeToString()


def encode_body_at_rest(source: OutboxRecord | Entry) -> bytes:
    """Fields 33 to 61 of Entry at rest: type, inline body (ADR-0005) and its key.

    `source` is the record an entry is made of, or a stored entry. Only a message with an inline body has them, and an
    announcement (conversation_seq 0), which has no record to join.
    """
    return Entry(
        message_type=source.message_type,
        custom_type=source.custom_type,
        schema_version=source.schema_version,
        inline_ciphertext=source.inline_ciphertext,
        dek_id=source.dek_id,
    ).SerializeToString()


def split_entry(entry: bytes) -> tuple[int, bytes]:
    """(length of the ref, message_id) of a stored entry: fixed places, no parsing."""
    ref_bytes = REF_BYTES
    if entry[ref_bytes] == _OWN_TAG:
        ref_bytes += 2 + entry[ref_bytes + 1]
    at = ref_bytes + MESSAGE_ID_AT
    if entry[at - 3 : at] != _MESSAGE_ID_TAG:
        raise ValueError("stored entry has an unknown layout")
    return ref_bytes, entry[at : at + 16]


def subjects_by_lane(dispatch: Dispatch, lane_count: int) -> LaneMembers:
    """Members named in the record itself, per lane: those of a single chat, or the subjects of its events."""
    slots = {
        user_id: slot
        for event in dispatch.record.events
        for user_id, slot in zip(event.user_ids, event.slots, strict=True)
    }
    by_lane: dict[int, list[Member]] = {}
    for user_id, slot in slots.items():
        by_lane.setdefault(ids.lane_id(dispatch.tenant_id, user_id, lane_count), []).append((slot, user_id))
    for members in by_lane.values():
        members.sort()
    return LaneMembers(by_lane)


@lru_cache(maxsize=_DIRECT_CACHE_ENTRIES)
def direct_by_lane(
    tenant_id: str, conversation_id: str, shard: int, lane_count: int, mailbox_shard_count: int
) -> LaneMembers:
    """The users of a single chat whose mailbox is in a shard, per lane."""
    by_lane: dict[int, list[Member]] = {}
    for slot, user_id in enumerate(ids.direct_members(conversation_id)):
        if ids.mailbox_shard_id(tenant_id, user_id, mailbox_shard_count) == shard:
            by_lane.setdefault(ids.lane_id(tenant_id, user_id, lane_count), []).append((slot, user_id))
    return LaneMembers(by_lane)


def check_members(dispatch: Dispatch, members: LaneMembers) -> None:
    """ValueError when the members found do not fill exactly the lanes the dispatch names: never an empty expansion."""
    if members.mask != dispatch.lane_mask:
        raise ValueError(f"members fill lanes {members.mask:#x}, the dispatch names {dispatch.lane_mask:#x}")
