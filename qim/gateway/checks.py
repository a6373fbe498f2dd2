"""What a request must look like before anything is asked of another part (§20.2.2); pure.

A conversation that does not exist and one the user may not see get the same answer. Membership of groups is judged by
the writer and the MailboxNode, which hold it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from qim.config.parameters import Parameters
from qim.core.ids import CLIENT_MESSAGE_ID_BYTES_MAX, ROOM_PREFIX, conversation_kind, direct_members, is_name
from qim.errors import Detail, ErrorCode
from qim.protocol.qim_pb2 import (
    MESSAGE_TYPE_CONTROL,
    MESSAGE_TYPE_UNSPECIFIED,
    NEWER,
    OLDER,
    CreateGroup,
    LeaveGroup,
    MessageType,
    PullHistory,
    PullMailbox,
    SendMessage,
)

_CLIENT_TYPES: Final = frozenset(MessageType.values()) - {MESSAGE_TYPE_UNSPECIFIED, MESSAGE_TYPE_CONTROL}


class Refused(NamedTuple):
    """The answer to a request that is not passed on."""

    code: ErrorCode
    detail: str = ""


DENIED: Final = Refused(ErrorCode.PERMISSION_DENIED)
BAD_REQUEST: Final = Refused(ErrorCode.PERMISSION_DENIED, Detail.BAD_REQUEST)
TOO_LARGE: Final = Refused(ErrorCode.PAYLOAD_TOO_LARGE)
UNSERVED: Final = Refused(ErrorCode.UPGRADE_REQUIRED)


@lru_cache(maxsize=1 << 14)
def may_address(conversation_id: str, user_id: str) -> bool:
    """A well-formed conversation that may have this user as a member."""
    kind = conversation_kind(conversation_id)
    if kind == "direct":
        return user_id in direct_members(conversation_id)
    return kind is not None


def check_send(message: SendMessage, user_id: str, limits: Parameters) -> Refused | None:
    """None passes a SEND_MESSAGE on to the writer."""
    conversation_id = message.conversation_id
    if not may_address(conversation_id, user_id):
        return DENIED
    if conversation_id.startswith(ROOM_PREFIX):
        return UNSERVED
    if (
        len(message.payload) > limits.max_custom_payload_bytes
        or len(message.custom_type.encode()) > limits.custom_type_max_bytes
        or (
            message.HasField("media_metadata")
            and len(message.media_metadata.thumbnail) > limits.media_thumbnail_max_bytes
        )
    ):
        return TOO_LARGE
    if message.message_type not in _CLIENT_TYPES:
        return BAD_REQUEST
    if not 0 < len(message.client_message_id.encode()) <= CLIENT_MESSAGE_ID_BYTES_MAX:
        return BAD_REQUEST
    if len(message.after_client_message_id.encode()) > CLIENT_MESSAGE_ID_BYTES_MAX:
        return BAD_REQUEST
    if message.HasField("mention_targets") and not all(map(is_name, message.mention_targets.user_ids)):
        return BAD_REQUEST
    return None


def check_history(pull: PullHistory, user_id: str, limits: Parameters) -> Refused | None:
    """None passes a PULL_HISTORY on; its limits are then within their caps."""
    if not may_address(pull.conversation_id, user_id) or conversation_kind(pull.conversation_id) == "room":
        return DENIED
    if pull.direction not in (OLDER, NEWER):
        return BAD_REQUEST
    pull.limit = min(pull.limit or limits.history_page_limit, limits.history_page_limit_max)
    pull.max_bytes = min(pull.max_bytes or limits.history_page_bytes, limits.history_page_bytes)
    return None


def check_pull(pull: PullMailbox, limits: Parameters) -> Refused | None:
    """None passes a PULL_MAILBOX on; its soft limits are then within their caps."""
    if pull.up_to_seq and pull.after_seq > pull.up_to_seq:
        return BAD_REQUEST
    pull.max_items = min(pull.max_items or limits.pull_mailbox_max_items, limits.pull_mailbox_max_items)
    pull.max_bytes = min(pull.max_bytes or limits.pull_mailbox_max_bytes, limits.pull_mailbox_max_bytes)
    return None


def check_group(request: CreateGroup | LeaveGroup) -> Refused | None:
    """None passes a CREATE_GROUP or LEAVE_GROUP on to the writer."""
    if not is_name(request.group_id):
        return DENIED
    if isinstance(request, CreateGroup) and not all(map(is_name, request.member_ids)):
        return BAD_REQUEST
    return None
