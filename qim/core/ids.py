"""Identifiers and the hashes made of them (§5.2, §6.2, §6.5.1, §6.7, §7.8).

Every byte made here is immutable for the life of a cluster (§27.2.4); `tests/golden` pins them.
Names given by applications are opaque ASCII `[A-Za-z0-9._@-]{1,64}`, so `0x00`, `:` and `/` are free as separators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal, NewType

from blake3 import blake3

TenantId = NewType("TenantId", str)
UserId = NewType("UserId", str)
DeviceId = NewType("DeviceId", str)
ConversationId = NewType("ConversationId", str)
MessageIdBytes = NewType("MessageIdBytes", bytes)
"""16 bytes big-endian (§6.2); `last_activity_id` shares the format (§6.4)."""

_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}", re.ASCII)
_HASH_CACHE_ENTRIES: Final = 1 << 17
"""Bound of each hash cache: about 20 MiB a process when full; a hash costs 1 µs, a hit 0.1 µs."""

VIRTUAL_BUCKET_COUNT: Final = 65536
DIRECT_PREFIX: Final = "dm:"
GROUP_PREFIX: Final = "g:"
ROOM_PREFIX: Final = "r:"
CLIENT_MESSAGE_ID_BYTES_MAX: Final = 64
"""A UUID in any notation fits; the id is stored in the dedup key and in the sender's own entry."""

_ORDINAL_SUFFIX: Final = tuple(b"\x00" + bytes((ordinal,)) for ordinal in range(256))

ConversationKind = Literal["direct", "group", "room"]


def is_name(text: str) -> bool:
    """True if `text` may name a tenant, user, device, group or room."""
    return _NAME.fullmatch(text) is not None


def direct_conversation_id(user_a: str, user_b: str) -> ConversationId:
    """`dm:<a>:<b>` with a < b bytewise; the same two users always get the same conversation."""
    low, high = sorted((user_a, user_b))
    return ConversationId(f"{DIRECT_PREFIX}{low}:{high}")


def group_conversation_id(group_id: str) -> ConversationId:
    """`g:<group_id>`."""
    return ConversationId(GROUP_PREFIX + group_id)


def conversation_kind(conversation_id: str) -> ConversationKind | None:
    """Kind of a well-formed conversation id, None for anything else."""
    if conversation_id.startswith(DIRECT_PREFIX):
        low, _, high = conversation_id[len(DIRECT_PREFIX) :].partition(":")
        return "direct" if is_name(low) and is_name(high) and low < high else None
    if conversation_id.startswith(GROUP_PREFIX):
        return "group" if is_name(conversation_id[len(GROUP_PREFIX) :]) else None
    if conversation_id.startswith(ROOM_PREFIX):
        return "room" if is_name(conversation_id[len(ROOM_PREFIX) :]) else None
    return None


def direct_members(conversation_id: str) -> tuple[str, str]:
    """The two members of a `dm:` conversation; slot 0 is the first, slot 1 the second (membership_version 0)."""
    low, _, high = conversation_id[len(DIRECT_PREFIX) :].partition(":")
    return low, high


def group_id_of(conversation_id: str) -> str:
    """Group id of a `g:` conversation."""
    return conversation_id[len(GROUP_PREFIX) :]


@lru_cache(maxsize=_HASH_CACHE_ENTRIES)
def _user_digest(tenant_id: str, user_id: str) -> bytes:
    return blake3(tenant_id.encode() + b"\x00" + user_id.encode()).digest()


def user_bucket(tenant_id: str, user_id: str) -> int:
    """Virtual bucket of a user, 0..65535 (§5.2): be_u64 of the first 8 hash bytes, masked."""
    return int.from_bytes(_user_digest(tenant_id, user_id)[:8], "big") & (VIRTUAL_BUCKET_COUNT - 1)


def mailbox_shard_id(tenant_id: str, user_id: str, mailbox_shard_count: int) -> int:
    """MailboxShard of a user (§5.2); `mailbox_shard_count` is a power of two."""
    return user_bucket(tenant_id, user_id) & (mailbox_shard_count - 1)


def connection_shard_id(tenant_id: str, user_id: str, connection_shard_count: int) -> int:
    """ConnectionShard of a user (§5.2); `connection_shard_count` is a power of two."""
    return user_bucket(tenant_id, user_id) & (connection_shard_count - 1)


def lane_id(tenant_id: str, user_id: str, lane_count: int) -> int:
    """Lane of a user (§6.5.1): `blake3(tenant ‖ 00 ‖ user)[0] & (lane_count-1)`, independent of the bucket."""
    return _user_digest(tenant_id, user_id)[0] & (lane_count - 1)


@lru_cache(maxsize=_HASH_CACHE_ENTRIES)
def conversation_bucket(tenant_id: str, conversation_id: str, conversation_bucket_count: int) -> int:
    """Bucket of a conversation: writer lane = outbox partition = MessageStore instance key (DESIGN §4)."""
    digest = blake3(tenant_id.encode() + b"\x00" + conversation_id.encode()).digest(8)
    return int.from_bytes(digest, "big") & (conversation_bucket_count - 1)


def dispatch_id(message_id: bytes, target_mailbox_shard: int) -> bytes:
    """16 bytes naming the dispatch of one message to one shard (§7.8), frozen."""
    return blake3(b"qim.group-dispatch.v1\x00" + message_id + target_mailbox_shard.to_bytes(4, "big")).digest(16)


def event_id_prefix(tenant_id: str, dispatch: bytes) -> bytes:
    """The part of the `event_id` input that all recipients of a dispatch share."""
    return tenant_id.encode() + b"\x00" + dispatch


def event_id(prefix: bytes, user_id: str, event_ordinal: int) -> bytes:
    """8 bytes big-endian: `blake3(tenant ‖ 00 ‖ dispatch_id ‖ user ‖ 00 ‖ u8 ordinal)[0:8]` (§6.7)."""
    return blake3(prefix + user_id.encode() + _ORDINAL_SUFFIX[event_ordinal]).digest(length=8)


def event_ids(prefix: bytes, user_ids: Iterable[str], event_ordinal: int) -> list[bytes]:
    """`event_id` of many users: what a large group costs most of."""
    suffix = _ORDINAL_SUFFIX[event_ordinal]
    return [blake3(prefix + user_id.encode() + suffix).digest(8) for user_id in user_ids]
