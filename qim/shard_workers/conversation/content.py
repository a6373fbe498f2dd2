"""What a message may contain, what identifies it and what a list of conversations shows of it (§8.1, §13.1), pure.

The gateway refuses most of this earlier; the writer believes no caller (R-17.3-3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from qim.config.parameters import Parameters
from qim.core.ids import CLIENT_MESSAGE_ID_BYTES_MAX, conversation_kind, direct_members, is_name
from qim.protocol.qim_pb2 import (
    MESSAGE_TYPE_AUDIO,
    MESSAGE_TYPE_CARD,
    MESSAGE_TYPE_CONTROL,
    MESSAGE_TYPE_CUSTOM,
    MESSAGE_TYPE_EMOJI,
    MESSAGE_TYPE_FILE,
    MESSAGE_TYPE_IMAGE,
    MESSAGE_TYPE_LOCATION,
    MESSAGE_TYPE_RICH_TEXT,
    MESSAGE_TYPE_TEXT,
    MESSAGE_TYPE_UNSPECIFIED,
    MESSAGE_TYPE_VIDEO,
    RETENTION_CLASS_UNSPECIFIED,
    MessageType,
    SendMessage,
)
from qim.shard_workers.conversation.admission import BAD_REQUEST, DENIED, TOO_LARGE, Refusal

MENTION_USERS_MAX: Final = 200
"""Users one message may mention by name: the page size of the member list they are picked from."""
PREVIEW_CHARACTERS: Final = 100
_CHARACTER_BYTES_MAX: Final = 4
_CLIENT_TYPES: Final = frozenset(MessageType.values()) - {MESSAGE_TYPE_UNSPECIFIED, MESSAGE_TYPE_CONTROL}
_PLACEHOLDERS: Final[dict[int, bytes]] = {
    MESSAGE_TYPE_RICH_TEXT: b"[rich text]",
    MESSAGE_TYPE_EMOJI: b"[emoji]",
    MESSAGE_TYPE_IMAGE: b"[image]",
    MESSAGE_TYPE_AUDIO: b"[audio]",
    MESSAGE_TYPE_VIDEO: b"[video]",
    MESSAGE_TYPE_FILE: b"[file]",
    MESSAGE_TYPE_LOCATION: b"[location]",
    MESSAGE_TYPE_CARD: b"[card]",
    MESSAGE_TYPE_CUSTOM: b"[custom]",
    MESSAGE_TYPE_CONTROL: b"[members]",
}


def check_send(message: SendMessage, sender_id: str, limits: Parameters) -> Refusal | None:
    """None: well-formed and, in a single chat, from one of its two members."""
    kind = conversation_kind(message.conversation_id)
    if kind == "direct":
        if sender_id not in direct_members(message.conversation_id):
            return DENIED
    elif kind != "group":
        return DENIED
    if (
        len(message.payload) > limits.max_custom_payload_bytes
        or len(message.custom_type.encode()) > limits.custom_type_max_bytes
        or (
            message.HasField("media_metadata")
            and len(message.media_metadata.thumbnail) > limits.media_thumbnail_max_bytes
        )
    ):
        return TOO_LARGE
    if (
        message.message_type not in _CLIENT_TYPES
        or not 0 < len(message.client_message_id.encode()) <= CLIENT_MESSAGE_ID_BYTES_MAX
        or len(message.after_client_message_id.encode()) > CLIENT_MESSAGE_ID_BYTES_MAX
    ):
        return BAD_REQUEST
    if message.HasField("mention_targets"):
        mentioned = message.mention_targets.user_ids
        if len(mentioned) > MENTION_USERS_MAX or not all(map(is_name, mentioned)):
            return BAD_REQUEST
    return None


def check_users(user_ids: Sequence[str], count_max: int) -> Refusal | None:
    """None: at least one and at most `count_max` well-formed names."""
    if not 0 < len(user_ids) <= count_max or not all(map(is_name, user_ids)):
        return BAD_REQUEST
    return None


def request_digest(message: SendMessage) -> bytes:
    """16 bytes over what the sender asked for: everything but the ids of this attempt (DESIGN-data §3.2)."""
    asked = SendMessage()
    asked.CopyFrom(message)
    asked.ClearField("request_id")
    asked.ClearField("client_message_id")
    asked.ClearField("after_client_message_id")
    return blake3(asked.SerializeToString(deterministic=True)).digest(16)


def preview(message_type: int, payload: bytes) -> bytes:
    """UTF-8 of what a list of conversations shows: the beginning of a text, else a word for the type."""
    if message_type != MESSAGE_TYPE_TEXT:
        return _PLACEHOLDERS[message_type]
    beginning = payload[: PREVIEW_CHARACTERS * _CHARACTER_BYTES_MAX].decode(errors="ignore")
    return beginning[:PREVIEW_CHARACTERS].encode()


def may_inline(member_count: int, body_bytes: int, retention_class: int, limits: Parameters) -> bool:
    """The inline rule (ADR-0005), decided here once for every shard: small, for few, and of the default retention
    class, because a copy in a mailbox would outlive what another class promises."""
    return (
        retention_class == RETENTION_CLASS_UNSPECIFIED
        and body_bytes <= limits.inline_body_max_bytes
        and member_count * body_bytes <= limits.inline_body_budget_bytes
    )
