from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    CURSOR_EXPIRED: _ClassVar[ErrorCode]
    CURSOR_REBASED: _ClassVar[ErrorCode]
    CURSOR_INVALID: _ClassVar[ErrorCode]
    MAILBOX_DIRTY: _ClassVar[ErrorCode]
    SYNC_INCOMPLETE: _ClassVar[ErrorCode]
    SHARD_MOVED: _ClassVar[ErrorCode]
    REGION_FAILOVER: _ClassVar[ErrorCode]
    RATE_LIMITED: _ClassVar[ErrorCode]
    FANOUT_QUOTA_EXCEEDED: _ClassVar[ErrorCode]
    TOKEN_EXPIRED: _ClassVar[ErrorCode]
    TOKEN_REVOKED: _ClassVar[ErrorCode]
    UPGRADE_REQUIRED: _ClassVar[ErrorCode]
    CLOCK_UNSAFE: _ClassVar[ErrorCode]
    PAYLOAD_TOO_LARGE: _ClassVar[ErrorCode]
    PERMISSION_DENIED: _ClassVar[ErrorCode]
    PREKEY_EXHAUSTED: _ClassVar[ErrorCode]

class EventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_TYPE_UNSPECIFIED: _ClassVar[EventType]
    EVENT_MESSAGE: _ClassVar[EventType]
    EVENT_MENTION: _ClassVar[EventType]
    EVENT_MEMBERSHIP: _ClassVar[EventType]
    EVENT_CONTROL: _ClassVar[EventType]

class MessageType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MESSAGE_TYPE_UNSPECIFIED: _ClassVar[MessageType]
    MESSAGE_TYPE_TEXT: _ClassVar[MessageType]
    MESSAGE_TYPE_RICH_TEXT: _ClassVar[MessageType]
    MESSAGE_TYPE_EMOJI: _ClassVar[MessageType]
    MESSAGE_TYPE_IMAGE: _ClassVar[MessageType]
    MESSAGE_TYPE_AUDIO: _ClassVar[MessageType]
    MESSAGE_TYPE_VIDEO: _ClassVar[MessageType]
    MESSAGE_TYPE_FILE: _ClassVar[MessageType]
    MESSAGE_TYPE_LOCATION: _ClassVar[MessageType]
    MESSAGE_TYPE_CARD: _ClassVar[MessageType]
    MESSAGE_TYPE_CUSTOM: _ClassVar[MessageType]
    MESSAGE_TYPE_CONTROL: _ClassVar[MessageType]

class MentionType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MENTION_TYPE_UNSPECIFIED: _ClassVar[MentionType]
    AT_ME: _ClassVar[MentionType]
    AT_ALL: _ClassVar[MentionType]
    REPLY_ME: _ClassVar[MentionType]

class MessageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MESSAGE_STATE_UNSPECIFIED: _ClassVar[MessageState]
    RECALLED: _ClassVar[MessageState]
    EDITED: _ClassVar[MessageState]
    DELETED: _ClassVar[MessageState]

class RetentionClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETENTION_CLASS_UNSPECIFIED: _ClassVar[RetentionClass]
    EPHEMERAL_24H: _ClassVar[RetentionClass]
    COMPLIANCE_HOLD: _ClassVar[RetentionClass]
    TENANT_CUSTOM: _ClassVar[RetentionClass]

class NetworkType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NETWORK_TYPE_UNSPECIFIED: _ClassVar[NetworkType]
    WIFI: _ClassVar[NetworkType]
    CELLULAR: _ClassVar[NetworkType]
    ETHERNET: _ClassVar[NetworkType]

class PresenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRESENCE_STATE_UNSPECIFIED: _ClassVar[PresenceState]
    ONLINE: _ClassVar[PresenceState]
    OFFLINE: _ClassVar[PresenceState]

class KickReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KICK_REASON_UNSPECIFIED: _ClassVar[KickReason]
    REPLACED: _ClassVar[KickReason]
    ADMIN_REVOKED: _ClassVar[KickReason]
    BANNED: _ClassVar[KickReason]
    KICKED_TOKEN_REVOKED: _ClassVar[KickReason]

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_UNSPECIFIED: _ClassVar[Direction]
    OLDER: _ClassVar[Direction]
    NEWER: _ClassVar[Direction]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    OWNER: _ClassVar[Role]
    ADMIN: _ClassVar[Role]
    MEMBER: _ClassVar[Role]
    GUEST: _ClassVar[Role]

class WritePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_POLICY_UNSPECIFIED: _ClassVar[WritePolicy]
    MENTION_ONLY: _ClassVar[WritePolicy]

class NotificationPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTIFICATION_POLICY_UNSPECIFIED: _ClassVar[NotificationPolicy]
    NOTIFY_MENTION_ONLY: _ClassVar[NotificationPolicy]
    NOTIFY_NONE: _ClassVar[NotificationPolicy]

class MemberFilter(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_FILTER_UNSPECIFIED: _ClassVar[MemberFilter]
    FILTER_ADMIN: _ClassVar[MemberFilter]
    FILTER_BANNED: _ClassVar[MemberFilter]
    FILTER_SEARCH: _ClassVar[MemberFilter]

class SubscribeAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUBSCRIBE_ACTION_UNSPECIFIED: _ClassVar[SubscribeAction]
    SUBSCRIBE: _ClassVar[SubscribeAction]
    UNSUBSCRIBE: _ClassVar[SubscribeAction]
    REPLACE: _ClassVar[SubscribeAction]

class MediaIntent(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_INTENT_UNSPECIFIED: _ClassVar[MediaIntent]
    UPLOAD: _ClassVar[MediaIntent]
    DOWNLOAD: _ClassVar[MediaIntent]

class ReactAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REACT_ACTION_UNSPECIFIED: _ClassVar[ReactAction]
    REACT_ADD: _ClassVar[ReactAction]
    REACT_REMOVE: _ClassVar[ReactAction]
ERROR_CODE_UNSPECIFIED: ErrorCode
CURSOR_EXPIRED: ErrorCode
CURSOR_REBASED: ErrorCode
CURSOR_INVALID: ErrorCode
MAILBOX_DIRTY: ErrorCode
SYNC_INCOMPLETE: ErrorCode
SHARD_MOVED: ErrorCode
REGION_FAILOVER: ErrorCode
RATE_LIMITED: ErrorCode
FANOUT_QUOTA_EXCEEDED: ErrorCode
TOKEN_EXPIRED: ErrorCode
TOKEN_REVOKED: ErrorCode
UPGRADE_REQUIRED: ErrorCode
CLOCK_UNSAFE: ErrorCode
PAYLOAD_TOO_LARGE: ErrorCode
PERMISSION_DENIED: ErrorCode
PREKEY_EXHAUSTED: ErrorCode
EVENT_TYPE_UNSPECIFIED: EventType
EVENT_MESSAGE: EventType
EVENT_MENTION: EventType
EVENT_MEMBERSHIP: EventType
EVENT_CONTROL: EventType
MESSAGE_TYPE_UNSPECIFIED: MessageType
MESSAGE_TYPE_TEXT: MessageType
MESSAGE_TYPE_RICH_TEXT: MessageType
MESSAGE_TYPE_EMOJI: MessageType
MESSAGE_TYPE_IMAGE: MessageType
MESSAGE_TYPE_AUDIO: MessageType
MESSAGE_TYPE_VIDEO: MessageType
MESSAGE_TYPE_FILE: MessageType
MESSAGE_TYPE_LOCATION: MessageType
MESSAGE_TYPE_CARD: MessageType
MESSAGE_TYPE_CUSTOM: MessageType
MESSAGE_TYPE_CONTROL: MessageType
MENTION_TYPE_UNSPECIFIED: MentionType
AT_ME: MentionType
AT_ALL: MentionType
REPLY_ME: MentionType
MESSAGE_STATE_UNSPECIFIED: MessageState
RECALLED: MessageState
EDITED: MessageState
DELETED: MessageState
RETENTION_CLASS_UNSPECIFIED: RetentionClass
EPHEMERAL_24H: RetentionClass
COMPLIANCE_HOLD: RetentionClass
TENANT_CUSTOM: RetentionClass
NETWORK_TYPE_UNSPECIFIED: NetworkType
WIFI: NetworkType
CELLULAR: NetworkType
ETHERNET: NetworkType
PRESENCE_STATE_UNSPECIFIED: PresenceState
ONLINE: PresenceState
OFFLINE: PresenceState
KICK_REASON_UNSPECIFIED: KickReason
REPLACED: KickReason
ADMIN_REVOKED: KickReason
BANNED: KickReason
KICKED_TOKEN_REVOKED: KickReason
DIRECTION_UNSPECIFIED: Direction
OLDER: Direction
NEWER: Direction
ROLE_UNSPECIFIED: Role
OWNER: Role
ADMIN: Role
MEMBER: Role
GUEST: Role
WRITE_POLICY_UNSPECIFIED: WritePolicy
MENTION_ONLY: WritePolicy
NOTIFICATION_POLICY_UNSPECIFIED: NotificationPolicy
NOTIFY_MENTION_ONLY: NotificationPolicy
NOTIFY_NONE: NotificationPolicy
MEMBER_FILTER_UNSPECIFIED: MemberFilter
FILTER_ADMIN: MemberFilter
FILTER_BANNED: MemberFilter
FILTER_SEARCH: MemberFilter
SUBSCRIBE_ACTION_UNSPECIFIED: SubscribeAction
SUBSCRIBE: SubscribeAction
UNSUBSCRIBE: SubscribeAction
REPLACE: SubscribeAction
MEDIA_INTENT_UNSPECIFIED: MediaIntent
UPLOAD: MediaIntent
DOWNLOAD: MediaIntent
REACT_ACTION_UNSPECIFIED: ReactAction
REACT_ADD: ReactAction
REACT_REMOVE: ReactAction

class MailboxCursorToken(_message.Message):
    __slots__ = ("token", "last_applied_mailbox_seq")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_MAILBOX_SEQ_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    last_applied_mailbox_seq: int
    def __init__(self, token: _Optional[bytes] = ..., last_applied_mailbox_seq: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("mailbox_seq", "event_id", "event_ordinal", "flags", "mention_type", "visibility_floor_conversation_seq", "target_mention_type", "client_message_id", "event_type", "message_id", "conversation_id", "conversation_seq", "last_activity_id", "sender_id", "created_at", "origin_device_id", "target_message_id", "target_conversation_seq", "target_sender_id", "target_flags", "body_included", "message_type", "custom_type", "schema_version", "payload_or_ciphertext", "media_metadata", "inline_ciphertext", "dek_id")
    MAILBOX_SEQ_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    MENTION_TYPE_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FLOOR_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    TARGET_MENTION_TYPE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    TARGET_SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FLAGS_FIELD_NUMBER: _ClassVar[int]
    BODY_INCLUDED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_TYPE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_OR_CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_METADATA_FIELD_NUMBER: _ClassVar[int]
    INLINE_CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    DEK_ID_FIELD_NUMBER: _ClassVar[int]
    mailbox_seq: int
    event_id: int
    event_ordinal: int
    flags: int
    mention_type: int
    visibility_floor_conversation_seq: int
    target_mention_type: int
    client_message_id: str
    event_type: EventType
    message_id: bytes
    conversation_id: str
    conversation_seq: int
    last_activity_id: bytes
    sender_id: str
    created_at: int
    origin_device_id: str
    target_message_id: bytes
    target_conversation_seq: int
    target_sender_id: str
    target_flags: int
    body_included: bool
    message_type: MessageType
    custom_type: str
    schema_version: int
    payload_or_ciphertext: bytes
    media_metadata: MediaMetadata
    inline_ciphertext: bytes
    dek_id: str
    def __init__(self, mailbox_seq: _Optional[int] = ..., event_id: _Optional[int] = ..., event_ordinal: _Optional[int] = ..., flags: _Optional[int] = ..., mention_type: _Optional[int] = ..., visibility_floor_conversation_seq: _Optional[int] = ..., target_mention_type: _Optional[int] = ..., client_message_id: _Optional[str] = ..., event_type: _Optional[_Union[EventType, str]] = ..., message_id: _Optional[bytes] = ..., conversation_id: _Optional[str] = ..., conversation_seq: _Optional[int] = ..., last_activity_id: _Optional[bytes] = ..., sender_id: _Optional[str] = ..., created_at: _Optional[int] = ..., origin_device_id: _Optional[str] = ..., target_message_id: _Optional[bytes] = ..., target_conversation_seq: _Optional[int] = ..., target_sender_id: _Optional[str] = ..., target_flags: _Optional[int] = ..., body_included: _Optional[bool] = ..., message_type: _Optional[_Union[MessageType, str]] = ..., custom_type: _Optional[str] = ..., schema_version: _Optional[int] = ..., payload_or_ciphertext: _Optional[bytes] = ..., media_metadata: _Optional[_Union[MediaMetadata, _Mapping]] = ..., inline_ciphertext: _Optional[bytes] = ..., dek_id: _Optional[str] = ...) -> None: ...

class MediaMetadata(_message.Message):
    __slots__ = ("object_id", "mime", "bytes", "width", "height", "duration_ms", "thumbnail", "blurhash", "checksum")
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    MIME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_FIELD_NUMBER: _ClassVar[int]
    BLURHASH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    object_id: str
    mime: str
    bytes: int
    width: int
    height: int
    duration_ms: int
    thumbnail: bytes
    blurhash: str
    checksum: str
    def __init__(self, object_id: _Optional[str] = ..., mime: _Optional[str] = ..., bytes: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., duration_ms: _Optional[int] = ..., thumbnail: _Optional[bytes] = ..., blurhash: _Optional[str] = ..., checksum: _Optional[str] = ...) -> None: ...

class MentionTargets(_message.Message):
    __slots__ = ("all", "user_ids")
    ALL_FIELD_NUMBER: _ClassVar[int]
    USER_IDS_FIELD_NUMBER: _ClassVar[int]
    all: bool
    user_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, all: _Optional[bool] = ..., user_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Auth(_message.Message):
    __slots__ = ("access_token", "device_id", "client_version", "capabilities", "mailbox_cursor")
    ACCESS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_CURSOR_FIELD_NUMBER: _ClassVar[int]
    access_token: str
    device_id: str
    client_version: str
    capabilities: int
    mailbox_cursor: MailboxCursorToken
    def __init__(self, access_token: _Optional[str] = ..., device_id: _Optional[str] = ..., client_version: _Optional[str] = ..., capabilities: _Optional[int] = ..., mailbox_cursor: _Optional[_Union[MailboxCursorToken, _Mapping]] = ...) -> None: ...

class AuthOk(_message.Message):
    __slots__ = ("session_epoch", "lane_id", "lane_watermark", "trim_watermark", "sync_to_seq", "has_offline", "pending_entry_count_hint", "pending_bytes_hint", "total_unread", "total_mention", "muted_unread", "badge_projection_mailbox_seq", "projection_complete", "preferred_endpoint", "sync_delay_hint_ms", "next_ping_interval_ms", "capabilities", "mailbox_cursor")
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    TRIM_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    SYNC_TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    HAS_OFFLINE_FIELD_NUMBER: _ClassVar[int]
    PENDING_ENTRY_COUNT_HINT_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_HINT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_UNREAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MENTION_FIELD_NUMBER: _ClassVar[int]
    MUTED_UNREAD_FIELD_NUMBER: _ClassVar[int]
    BADGE_PROJECTION_MAILBOX_SEQ_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SYNC_DELAY_HINT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PING_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_CURSOR_FIELD_NUMBER: _ClassVar[int]
    session_epoch: int
    lane_id: int
    lane_watermark: int
    trim_watermark: int
    sync_to_seq: int
    has_offline: bool
    pending_entry_count_hint: int
    pending_bytes_hint: int
    total_unread: int
    total_mention: int
    muted_unread: int
    badge_projection_mailbox_seq: int
    projection_complete: bool
    preferred_endpoint: str
    sync_delay_hint_ms: int
    next_ping_interval_ms: int
    capabilities: int
    mailbox_cursor: MailboxCursorToken
    def __init__(self, session_epoch: _Optional[int] = ..., lane_id: _Optional[int] = ..., lane_watermark: _Optional[int] = ..., trim_watermark: _Optional[int] = ..., sync_to_seq: _Optional[int] = ..., has_offline: _Optional[bool] = ..., pending_entry_count_hint: _Optional[int] = ..., pending_bytes_hint: _Optional[int] = ..., total_unread: _Optional[int] = ..., total_mention: _Optional[int] = ..., muted_unread: _Optional[int] = ..., badge_projection_mailbox_seq: _Optional[int] = ..., projection_complete: _Optional[bool] = ..., preferred_endpoint: _Optional[str] = ..., sync_delay_hint_ms: _Optional[int] = ..., next_ping_interval_ms: _Optional[int] = ..., capabilities: _Optional[int] = ..., mailbox_cursor: _Optional[_Union[MailboxCursorToken, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("ping_id", "client_time", "last_applied_mailbox_seq", "network_type", "probe")
    PING_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_MAILBOX_SEQ_FIELD_NUMBER: _ClassVar[int]
    NETWORK_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ping_id: int
    client_time: int
    last_applied_mailbox_seq: int
    network_type: NetworkType
    probe: bool
    def __init__(self, ping_id: _Optional[int] = ..., client_time: _Optional[int] = ..., last_applied_mailbox_seq: _Optional[int] = ..., network_type: _Optional[_Union[NetworkType, str]] = ..., probe: _Optional[bool] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("ping_id", "server_time", "echo_client_time", "last_pushed_user_seq", "mailbox_dirty", "next_ping_interval_ms", "idle_timeout_ms")
    PING_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_FIELD_NUMBER: _ClassVar[int]
    ECHO_CLIENT_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_PUSHED_USER_SEQ_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_DIRTY_FIELD_NUMBER: _ClassVar[int]
    NEXT_PING_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ping_id: int
    server_time: int
    echo_client_time: int
    last_pushed_user_seq: int
    mailbox_dirty: bool
    next_ping_interval_ms: int
    idle_timeout_ms: int
    def __init__(self, ping_id: _Optional[int] = ..., server_time: _Optional[int] = ..., echo_client_time: _Optional[int] = ..., last_pushed_user_seq: _Optional[int] = ..., mailbox_dirty: _Optional[bool] = ..., next_ping_interval_ms: _Optional[int] = ..., idle_timeout_ms: _Optional[int] = ...) -> None: ...

class Redirect(_message.Message):
    __slots__ = ("route_token", "connection_shard", "endpoint_hint", "exp")
    ROUTE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_SHARD_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_HINT_FIELD_NUMBER: _ClassVar[int]
    EXP_FIELD_NUMBER: _ClassVar[int]
    route_token: bytes
    connection_shard: int
    endpoint_hint: str
    exp: int
    def __init__(self, route_token: _Optional[bytes] = ..., connection_shard: _Optional[int] = ..., endpoint_hint: _Optional[str] = ..., exp: _Optional[int] = ...) -> None: ...

class Kicked(_message.Message):
    __slots__ = ("reason", "replaced_by_device")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPLACED_BY_DEVICE_FIELD_NUMBER: _ClassVar[int]
    reason: KickReason
    replaced_by_device: str
    def __init__(self, reason: _Optional[_Union[KickReason, str]] = ..., replaced_by_device: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "retry_after_ms", "detail", "request_id", "trim_watermark", "rebuild_required", "new_cursor", "replay_from_seq", "client_message_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRIM_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    REBUILD_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    NEW_CURSOR_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    retry_after_ms: int
    detail: str
    request_id: int
    trim_watermark: int
    rebuild_required: bool
    new_cursor: MailboxCursorToken
    replay_from_seq: int
    client_message_id: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., retry_after_ms: _Optional[int] = ..., detail: _Optional[str] = ..., request_id: _Optional[int] = ..., trim_watermark: _Optional[int] = ..., rebuild_required: _Optional[bool] = ..., new_cursor: _Optional[_Union[MailboxCursorToken, _Mapping]] = ..., replay_from_seq: _Optional[int] = ..., client_message_id: _Optional[str] = ...) -> None: ...

class PullMailbox(_message.Message):
    __slots__ = ("after_seq", "up_to_seq", "max_items", "max_bytes", "acked_seq")
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    UP_TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACKED_SEQ_FIELD_NUMBER: _ClassVar[int]
    after_seq: int
    up_to_seq: int
    max_items: int
    max_bytes: int
    acked_seq: int
    def __init__(self, after_seq: _Optional[int] = ..., up_to_seq: _Optional[int] = ..., max_items: _Optional[int] = ..., max_bytes: _Optional[int] = ..., acked_seq: _Optional[int] = ...) -> None: ...

class MailboxBatch(_message.Message):
    __slots__ = ("entries", "covered_through_seq", "lane_watermark", "has_more")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COVERED_THROUGH_SEQ_FIELD_NUMBER: _ClassVar[int]
    LANE_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    covered_through_seq: int
    lane_watermark: int
    has_more: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., covered_through_seq: _Optional[int] = ..., lane_watermark: _Optional[int] = ..., has_more: _Optional[bool] = ...) -> None: ...

class SyncComplete(_message.Message):
    __slots__ = ("sync_to_seq",)
    SYNC_TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    sync_to_seq: int
    def __init__(self, sync_to_seq: _Optional[int] = ...) -> None: ...

class OnlineReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendMessage(_message.Message):
    __slots__ = ("request_id", "client_message_id", "conversation_id", "message_type", "custom_type", "payload", "mention_targets", "reply_to_conversation_seq", "after_client_message_id", "schema_version", "media_metadata")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MENTION_TARGETS_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    AFTER_CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEDIA_METADATA_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    client_message_id: str
    conversation_id: str
    message_type: MessageType
    custom_type: str
    payload: bytes
    mention_targets: MentionTargets
    reply_to_conversation_seq: int
    after_client_message_id: str
    schema_version: int
    media_metadata: MediaMetadata
    def __init__(self, request_id: _Optional[int] = ..., client_message_id: _Optional[str] = ..., conversation_id: _Optional[str] = ..., message_type: _Optional[_Union[MessageType, str]] = ..., custom_type: _Optional[str] = ..., payload: _Optional[bytes] = ..., mention_targets: _Optional[_Union[MentionTargets, _Mapping]] = ..., reply_to_conversation_seq: _Optional[int] = ..., after_client_message_id: _Optional[str] = ..., schema_version: _Optional[int] = ..., media_metadata: _Optional[_Union[MediaMetadata, _Mapping]] = ...) -> None: ...

class SendAck(_message.Message):
    __slots__ = ("request_id", "client_message_id", "message_id", "conversation_seq", "last_activity_id", "room_seq")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_SEQ_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    client_message_id: str
    message_id: bytes
    conversation_seq: int
    last_activity_id: bytes
    room_seq: int
    def __init__(self, request_id: _Optional[int] = ..., client_message_id: _Optional[str] = ..., message_id: _Optional[bytes] = ..., conversation_seq: _Optional[int] = ..., last_activity_id: _Optional[bytes] = ..., room_seq: _Optional[int] = ...) -> None: ...

class PushEvents(_message.Message):
    __slots__ = ("last_pushed_user_seq", "events")
    LAST_PUSHED_USER_SEQ_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    last_pushed_user_seq: int
    events: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, last_pushed_user_seq: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class PullHistory(_message.Message):
    __slots__ = ("conversation_id", "direction", "anchor_conversation_seq", "limit", "max_bytes")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    direction: Direction
    anchor_conversation_seq: int
    limit: int
    max_bytes: int
    def __init__(self, conversation_id: _Optional[str] = ..., direction: _Optional[_Union[Direction, str]] = ..., anchor_conversation_seq: _Optional[int] = ..., limit: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class HistoryMessage(_message.Message):
    __slots__ = ("conversation_seq", "message_id", "last_activity_id", "sender_id", "client_message_id", "message_type", "custom_type", "schema_version", "payload_or_ciphertext", "media_metadata", "reply_to_conversation_seq", "mention_targets", "state", "recall_event_conversation_seq", "edited_at_activity_id", "created_at", "retention_class", "event_type", "body_included")
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_TYPE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_OR_CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_METADATA_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    MENTION_TARGETS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RECALL_EVENT_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    EDITED_AT_ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    BODY_INCLUDED_FIELD_NUMBER: _ClassVar[int]
    conversation_seq: int
    message_id: bytes
    last_activity_id: bytes
    sender_id: str
    client_message_id: str
    message_type: MessageType
    custom_type: str
    schema_version: int
    payload_or_ciphertext: bytes
    media_metadata: MediaMetadata
    reply_to_conversation_seq: int
    mention_targets: MentionTargets
    state: MessageState
    recall_event_conversation_seq: int
    edited_at_activity_id: bytes
    created_at: int
    retention_class: RetentionClass
    event_type: EventType
    body_included: bool
    def __init__(self, conversation_seq: _Optional[int] = ..., message_id: _Optional[bytes] = ..., last_activity_id: _Optional[bytes] = ..., sender_id: _Optional[str] = ..., client_message_id: _Optional[str] = ..., message_type: _Optional[_Union[MessageType, str]] = ..., custom_type: _Optional[str] = ..., schema_version: _Optional[int] = ..., payload_or_ciphertext: _Optional[bytes] = ..., media_metadata: _Optional[_Union[MediaMetadata, _Mapping]] = ..., reply_to_conversation_seq: _Optional[int] = ..., mention_targets: _Optional[_Union[MentionTargets, _Mapping]] = ..., state: _Optional[_Union[MessageState, str]] = ..., recall_event_conversation_seq: _Optional[int] = ..., edited_at_activity_id: _Optional[bytes] = ..., created_at: _Optional[int] = ..., retention_class: _Optional[_Union[RetentionClass, str]] = ..., event_type: _Optional[_Union[EventType, str]] = ..., body_included: _Optional[bool] = ...) -> None: ...

class HistoryBatch(_message.Message):
    __slots__ = ("messages", "latest_conversation_seq", "earliest_available_conversation_seq", "has_more", "conversation_id")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LATEST_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_AVAILABLE_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[HistoryMessage]
    latest_conversation_seq: int
    earliest_available_conversation_seq: int
    has_more: bool
    conversation_id: str
    def __init__(self, messages: _Optional[_Iterable[_Union[HistoryMessage, _Mapping]]] = ..., latest_conversation_seq: _Optional[int] = ..., earliest_available_conversation_seq: _Optional[int] = ..., has_more: _Optional[bool] = ..., conversation_id: _Optional[str] = ...) -> None: ...

class PullSessionList(_message.Message):
    __slots__ = ("snapshot_revision", "page_cursor", "limit")
    SNAPSHOT_REVISION_FIELD_NUMBER: _ClassVar[int]
    PAGE_CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    snapshot_revision: int
    page_cursor: bytes
    limit: int
    def __init__(self, snapshot_revision: _Optional[int] = ..., page_cursor: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("conversation_id", "latest_conversation_seq", "last_activity_id", "last_message_id", "preview_or_placeholder", "unread_count", "unread_exact", "mention_count", "mention_first_conversation_seq", "pin_rank", "muted", "archived", "write_policy", "delivered_conversation_seq", "read_conversation_seq")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    LATEST_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_OR_PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    UNREAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNREAD_EXACT_FIELD_NUMBER: _ClassVar[int]
    MENTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    MENTION_FIRST_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    PIN_RANK_FIELD_NUMBER: _ClassVar[int]
    MUTED_FIELD_NUMBER: _ClassVar[int]
    ARCHIVED_FIELD_NUMBER: _ClassVar[int]
    WRITE_POLICY_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    READ_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    latest_conversation_seq: int
    last_activity_id: bytes
    last_message_id: bytes
    preview_or_placeholder: str
    unread_count: int
    unread_exact: bool
    mention_count: int
    mention_first_conversation_seq: int
    pin_rank: int
    muted: bool
    archived: bool
    write_policy: WritePolicy
    delivered_conversation_seq: int
    read_conversation_seq: int
    def __init__(self, conversation_id: _Optional[str] = ..., latest_conversation_seq: _Optional[int] = ..., last_activity_id: _Optional[bytes] = ..., last_message_id: _Optional[bytes] = ..., preview_or_placeholder: _Optional[str] = ..., unread_count: _Optional[int] = ..., unread_exact: _Optional[bool] = ..., mention_count: _Optional[int] = ..., mention_first_conversation_seq: _Optional[int] = ..., pin_rank: _Optional[int] = ..., muted: _Optional[bool] = ..., archived: _Optional[bool] = ..., write_policy: _Optional[_Union[WritePolicy, str]] = ..., delivered_conversation_seq: _Optional[int] = ..., read_conversation_seq: _Optional[int] = ...) -> None: ...

class SessionListBatch(_message.Message):
    __slots__ = ("sessions", "snapshot_revision", "next_page_cursor", "has_more", "projection_complete")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REVISION_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_CURSOR_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    snapshot_revision: int
    next_page_cursor: bytes
    has_more: bool
    projection_complete: bool
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., snapshot_revision: _Optional[int] = ..., next_page_cursor: _Optional[bytes] = ..., has_more: _Optional[bool] = ..., projection_complete: _Optional[bool] = ...) -> None: ...

class SessionDelta(_message.Message):
    __slots__ = ("conversation_id", "driving_event_id", "driving_mailbox_seq", "projection_mailbox_seq", "latest_conversation_seq", "last_activity_id", "last_message_id", "preview_or_placeholder", "unread_count", "unread_exact", "mention_count", "mention_first_conversation_seq")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    DRIVING_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    DRIVING_MAILBOX_SEQ_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_MAILBOX_SEQ_FIELD_NUMBER: _ClassVar[int]
    LATEST_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_OR_PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    UNREAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNREAD_EXACT_FIELD_NUMBER: _ClassVar[int]
    MENTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    MENTION_FIRST_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    driving_event_id: int
    driving_mailbox_seq: int
    projection_mailbox_seq: int
    latest_conversation_seq: int
    last_activity_id: bytes
    last_message_id: bytes
    preview_or_placeholder: str
    unread_count: int
    unread_exact: bool
    mention_count: int
    mention_first_conversation_seq: int
    def __init__(self, conversation_id: _Optional[str] = ..., driving_event_id: _Optional[int] = ..., driving_mailbox_seq: _Optional[int] = ..., projection_mailbox_seq: _Optional[int] = ..., latest_conversation_seq: _Optional[int] = ..., last_activity_id: _Optional[bytes] = ..., last_message_id: _Optional[bytes] = ..., preview_or_placeholder: _Optional[str] = ..., unread_count: _Optional[int] = ..., unread_exact: _Optional[bool] = ..., mention_count: _Optional[int] = ..., mention_first_conversation_seq: _Optional[int] = ...) -> None: ...

class BadgeUpdate(_message.Message):
    __slots__ = ("total_unread", "total_mention", "muted_unread", "badge_projection_mailbox_seq")
    TOTAL_UNREAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MENTION_FIELD_NUMBER: _ClassVar[int]
    MUTED_UNREAD_FIELD_NUMBER: _ClassVar[int]
    BADGE_PROJECTION_MAILBOX_SEQ_FIELD_NUMBER: _ClassVar[int]
    total_unread: int
    total_mention: int
    muted_unread: int
    badge_projection_mailbox_seq: int
    def __init__(self, total_unread: _Optional[int] = ..., total_mention: _Optional[int] = ..., muted_unread: _Optional[int] = ..., badge_projection_mailbox_seq: _Optional[int] = ...) -> None: ...

class MarkRead(_message.Message):
    __slots__ = ("conversation_id", "read_conversation_seq")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    READ_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    read_conversation_seq: int
    def __init__(self, conversation_id: _Optional[str] = ..., read_conversation_seq: _Optional[int] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("conversation_id", "target_conversation_seq")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    target_conversation_seq: int
    def __init__(self, conversation_id: _Optional[str] = ..., target_conversation_seq: _Optional[int] = ...) -> None: ...

class Edit(_message.Message):
    __slots__ = ("conversation_id", "target_conversation_seq", "new_payload")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    NEW_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    target_conversation_seq: int
    new_payload: bytes
    def __init__(self, conversation_id: _Optional[str] = ..., target_conversation_seq: _Optional[int] = ..., new_payload: _Optional[bytes] = ...) -> None: ...

class Typing(_message.Message):
    __slots__ = ("conversation_id", "user_id", "expires_in_ms")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    user_id: str
    expires_in_ms: int
    def __init__(self, conversation_id: _Optional[str] = ..., user_id: _Optional[str] = ..., expires_in_ms: _Optional[int] = ...) -> None: ...

class PresenceSub(_message.Message):
    __slots__ = ("action", "conversation_ids", "user_ids", "entries")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_IDS_FIELD_NUMBER: _ClassVar[int]
    USER_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    action: SubscribeAction
    conversation_ids: _containers.RepeatedScalarFieldContainer[str]
    user_ids: _containers.RepeatedScalarFieldContainer[str]
    entries: _containers.RepeatedCompositeFieldContainer[PresenceSubEntry]
    def __init__(self, action: _Optional[_Union[SubscribeAction, str]] = ..., conversation_ids: _Optional[_Iterable[str]] = ..., user_ids: _Optional[_Iterable[str]] = ..., entries: _Optional[_Iterable[_Union[PresenceSubEntry, _Mapping]]] = ...) -> None: ...

class PresenceSubEntry(_message.Message):
    __slots__ = ("user_id", "state", "last_active_at")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVE_AT_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    state: PresenceState
    last_active_at: int
    def __init__(self, user_id: _Optional[str] = ..., state: _Optional[_Union[PresenceState, str]] = ..., last_active_at: _Optional[int] = ...) -> None: ...

class ReadSync(_message.Message):
    __slots__ = ("conversation_id", "read_conversation_seq")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    READ_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    read_conversation_seq: int
    def __init__(self, conversation_id: _Optional[str] = ..., read_conversation_seq: _Optional[int] = ...) -> None: ...

class ConversationUpdate(_message.Message):
    __slots__ = ("conversation_id", "pin_rank", "muted", "archived", "notification_policy", "mark_unread", "clear_history", "delete_conversation")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_RANK_FIELD_NUMBER: _ClassVar[int]
    MUTED_FIELD_NUMBER: _ClassVar[int]
    ARCHIVED_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATION_POLICY_FIELD_NUMBER: _ClassVar[int]
    MARK_UNREAD_FIELD_NUMBER: _ClassVar[int]
    CLEAR_HISTORY_FIELD_NUMBER: _ClassVar[int]
    DELETE_CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    pin_rank: int
    muted: bool
    archived: bool
    notification_policy: NotificationPolicy
    mark_unread: bool
    clear_history: bool
    delete_conversation: bool
    def __init__(self, conversation_id: _Optional[str] = ..., pin_rank: _Optional[int] = ..., muted: _Optional[bool] = ..., archived: _Optional[bool] = ..., notification_policy: _Optional[_Union[NotificationPolicy, str]] = ..., mark_unread: _Optional[bool] = ..., clear_history: _Optional[bool] = ..., delete_conversation: _Optional[bool] = ...) -> None: ...

class RoomJoin(_message.Message):
    __slots__ = ("room_id",)
    ROOM_ID_FIELD_NUMBER: _ClassVar[int]
    room_id: str
    def __init__(self, room_id: _Optional[str] = ...) -> None: ...

class RoomLeave(_message.Message):
    __slots__ = ("room_id",)
    ROOM_ID_FIELD_NUMBER: _ClassVar[int]
    room_id: str
    def __init__(self, room_id: _Optional[str] = ...) -> None: ...

class RoomReplay(_message.Message):
    __slots__ = ("room_id", "after_room_seq")
    ROOM_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROOM_SEQ_FIELD_NUMBER: _ClassVar[int]
    room_id: str
    after_room_seq: int
    def __init__(self, room_id: _Optional[str] = ..., after_room_seq: _Optional[int] = ...) -> None: ...

class RoomEvent(_message.Message):
    __slots__ = ("room_seq", "message_id", "sender_id", "message_type", "payload", "created_at", "custom_type", "schema_version")
    ROOM_SEQ_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_TYPE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    room_seq: int
    message_id: bytes
    sender_id: str
    message_type: MessageType
    payload: bytes
    created_at: int
    custom_type: str
    schema_version: int
    def __init__(self, room_seq: _Optional[int] = ..., message_id: _Optional[bytes] = ..., sender_id: _Optional[str] = ..., message_type: _Optional[_Union[MessageType, str]] = ..., payload: _Optional[bytes] = ..., created_at: _Optional[int] = ..., custom_type: _Optional[str] = ..., schema_version: _Optional[int] = ...) -> None: ...

class RoomBatch(_message.Message):
    __slots__ = ("room_id", "room_epoch", "events", "latest_room_seq", "earliest_replay_room_seq", "replay_truncated")
    ROOM_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LATEST_ROOM_SEQ_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_REPLAY_ROOM_SEQ_FIELD_NUMBER: _ClassVar[int]
    REPLAY_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    room_id: str
    room_epoch: int
    events: _containers.RepeatedCompositeFieldContainer[RoomEvent]
    latest_room_seq: int
    earliest_replay_room_seq: int
    replay_truncated: bool
    def __init__(self, room_id: _Optional[str] = ..., room_epoch: _Optional[int] = ..., events: _Optional[_Iterable[_Union[RoomEvent, _Mapping]]] = ..., latest_room_seq: _Optional[int] = ..., earliest_replay_room_seq: _Optional[int] = ..., replay_truncated: _Optional[bool] = ...) -> None: ...

class RtcSignal(_message.Message):
    __slots__ = ("conversation_id", "target_user_id", "signal_payload", "sender_id")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_USER_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    target_user_id: str
    signal_payload: bytes
    sender_id: str
    def __init__(self, conversation_id: _Optional[str] = ..., target_user_id: _Optional[str] = ..., signal_payload: _Optional[bytes] = ..., sender_id: _Optional[str] = ...) -> None: ...

class MediaTicket(_message.Message):
    __slots__ = ("intent", "object_id", "bytes", "url", "expires_at")
    INTENT_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    intent: MediaIntent
    object_id: str
    bytes: int
    url: str
    expires_at: int
    def __init__(self, intent: _Optional[_Union[MediaIntent, str]] = ..., object_id: _Optional[str] = ..., bytes: _Optional[int] = ..., url: _Optional[str] = ..., expires_at: _Optional[int] = ...) -> None: ...

class SignedPrekey(_message.Message):
    __slots__ = ("key_id", "pub", "signature")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PUB_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    key_id: int
    pub: bytes
    signature: bytes
    def __init__(self, key_id: _Optional[int] = ..., pub: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class OneTimePrekey(_message.Message):
    __slots__ = ("key_id", "pub")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PUB_FIELD_NUMBER: _ClassVar[int]
    key_id: int
    pub: bytes
    def __init__(self, key_id: _Optional[int] = ..., pub: _Optional[bytes] = ...) -> None: ...

class PrekeyPublish(_message.Message):
    __slots__ = ("identity_pub", "signed_prekey", "one_time_prekeys")
    IDENTITY_PUB_FIELD_NUMBER: _ClassVar[int]
    SIGNED_PREKEY_FIELD_NUMBER: _ClassVar[int]
    ONE_TIME_PREKEYS_FIELD_NUMBER: _ClassVar[int]
    identity_pub: bytes
    signed_prekey: SignedPrekey
    one_time_prekeys: _containers.RepeatedCompositeFieldContainer[OneTimePrekey]
    def __init__(self, identity_pub: _Optional[bytes] = ..., signed_prekey: _Optional[_Union[SignedPrekey, _Mapping]] = ..., one_time_prekeys: _Optional[_Iterable[_Union[OneTimePrekey, _Mapping]]] = ...) -> None: ...

class PrekeyBundle(_message.Message):
    __slots__ = ("device_id", "identity_pub", "signed_prekey", "one_time_prekey", "one_time_exhausted")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_PUB_FIELD_NUMBER: _ClassVar[int]
    SIGNED_PREKEY_FIELD_NUMBER: _ClassVar[int]
    ONE_TIME_PREKEY_FIELD_NUMBER: _ClassVar[int]
    ONE_TIME_EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    identity_pub: bytes
    signed_prekey: SignedPrekey
    one_time_prekey: OneTimePrekey
    one_time_exhausted: bool
    def __init__(self, device_id: _Optional[str] = ..., identity_pub: _Optional[bytes] = ..., signed_prekey: _Optional[_Union[SignedPrekey, _Mapping]] = ..., one_time_prekey: _Optional[_Union[OneTimePrekey, _Mapping]] = ..., one_time_exhausted: _Optional[bool] = ...) -> None: ...

class PrekeyFetch(_message.Message):
    __slots__ = ("target_user_id", "target_device_ids", "bundles")
    TARGET_USER_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    target_user_id: str
    target_device_ids: _containers.RepeatedScalarFieldContainer[str]
    bundles: _containers.RepeatedCompositeFieldContainer[PrekeyBundle]
    def __init__(self, target_user_id: _Optional[str] = ..., target_device_ids: _Optional[_Iterable[str]] = ..., bundles: _Optional[_Iterable[_Union[PrekeyBundle, _Mapping]]] = ...) -> None: ...

class React(_message.Message):
    __slots__ = ("conversation_id", "conversation_seq", "reaction_key", "action")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    REACTION_KEY_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    conversation_seq: int
    reaction_key: str
    action: ReactAction
    def __init__(self, conversation_id: _Optional[str] = ..., conversation_seq: _Optional[int] = ..., reaction_key: _Optional[str] = ..., action: _Optional[_Union[ReactAction, str]] = ...) -> None: ...

class ReactionUpdate(_message.Message):
    __slots__ = ("conversation_id", "conversation_seq", "counts", "summary_version", "self_reaction_keys")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SELF_REACTION_KEYS_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    conversation_seq: int
    counts: _containers.ScalarMap[str, int]
    summary_version: int
    self_reaction_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, conversation_id: _Optional[str] = ..., conversation_seq: _Optional[int] = ..., counts: _Optional[_Mapping[str, int]] = ..., summary_version: _Optional[int] = ..., self_reaction_keys: _Optional[_Iterable[str]] = ...) -> None: ...

class PullReactions(_message.Message):
    __slots__ = ("conversation_id", "conversation_seq", "reaction_key", "offset", "limit")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    REACTION_KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    conversation_seq: int
    reaction_key: str
    offset: int
    limit: int
    def __init__(self, conversation_id: _Optional[str] = ..., conversation_seq: _Optional[int] = ..., reaction_key: _Optional[str] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ReactionList(_message.Message):
    __slots__ = ("users", "total", "has_more")
    USERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedScalarFieldContainer[str]
    total: int
    has_more: bool
    def __init__(self, users: _Optional[_Iterable[str]] = ..., total: _Optional[int] = ..., has_more: _Optional[bool] = ...) -> None: ...

class PullMembers(_message.Message):
    __slots__ = ("conversation_id", "filter", "query", "offset", "limit")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    filter: MemberFilter
    query: str
    offset: int
    limit: int
    def __init__(self, conversation_id: _Optional[str] = ..., filter: _Optional[_Union[MemberFilter, str]] = ..., query: _Optional[str] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("user_id", "role", "joined_at_conversation_seq", "display_hint")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    JOINED_AT_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_HINT_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    role: Role
    joined_at_conversation_seq: int
    display_hint: str
    def __init__(self, user_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., joined_at_conversation_seq: _Optional[int] = ..., display_hint: _Optional[str] = ...) -> None: ...

class MemberListBatch(_message.Message):
    __slots__ = ("members", "total_hint", "next_offset", "has_more")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_HINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    total_hint: int
    next_offset: int
    has_more: bool
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., total_hint: _Optional[int] = ..., next_offset: _Optional[int] = ..., has_more: _Optional[bool] = ...) -> None: ...

class CreateGroup(_message.Message):
    __slots__ = ("group_id", "member_ids")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_IDS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    member_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group_id: _Optional[str] = ..., member_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaveGroup(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    def __init__(self, group_id: _Optional[str] = ...) -> None: ...

class MessageRecord(_message.Message):
    __slots__ = ("message_id", "sender_id", "sender_device_id", "client_message_id", "message_type", "custom_type", "schema_version", "payload_ciphertext", "media_ciphertext", "reply_to_conversation_seq", "mention_targets", "state", "recall_event_conversation_seq", "edited_at_activity_id", "created_at", "retention_class", "dek_id", "event_type")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_TYPE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    MENTION_TARGETS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RECALL_EVENT_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    EDITED_AT_ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEK_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    message_id: bytes
    sender_id: str
    sender_device_id: str
    client_message_id: str
    message_type: MessageType
    custom_type: str
    schema_version: int
    payload_ciphertext: bytes
    media_ciphertext: bytes
    reply_to_conversation_seq: int
    mention_targets: MentionTargets
    state: MessageState
    recall_event_conversation_seq: int
    edited_at_activity_id: bytes
    created_at: int
    retention_class: RetentionClass
    dek_id: str
    event_type: EventType
    def __init__(self, message_id: _Optional[bytes] = ..., sender_id: _Optional[str] = ..., sender_device_id: _Optional[str] = ..., client_message_id: _Optional[str] = ..., message_type: _Optional[_Union[MessageType, str]] = ..., custom_type: _Optional[str] = ..., schema_version: _Optional[int] = ..., payload_ciphertext: _Optional[bytes] = ..., media_ciphertext: _Optional[bytes] = ..., reply_to_conversation_seq: _Optional[int] = ..., mention_targets: _Optional[_Union[MentionTargets, _Mapping]] = ..., state: _Optional[_Union[MessageState, str]] = ..., recall_event_conversation_seq: _Optional[int] = ..., edited_at_activity_id: _Optional[bytes] = ..., created_at: _Optional[int] = ..., retention_class: _Optional[_Union[RetentionClass, str]] = ..., dek_id: _Optional[str] = ..., event_type: _Optional[_Union[EventType, str]] = ...) -> None: ...

class OutboxRecord(_message.Message):
    __slots__ = ("conversation_seq", "tenant_id", "conversation_id", "message_id", "sender_id", "sender_device_id", "client_message_id", "fencing_epoch", "membership_version", "created_at", "inline_body", "inline_ciphertext", "dek_id", "events", "message_type", "custom_type", "schema_version", "trace_id")
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCING_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    INLINE_BODY_FIELD_NUMBER: _ClassVar[int]
    INLINE_CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    DEK_ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_TYPE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    conversation_seq: int
    tenant_id: str
    conversation_id: str
    message_id: bytes
    sender_id: str
    sender_device_id: str
    client_message_id: str
    fencing_epoch: int
    membership_version: int
    created_at: int
    inline_body: bool
    inline_ciphertext: bytes
    dek_id: str
    events: _containers.RepeatedCompositeFieldContainer[DispatchEvent]
    message_type: MessageType
    custom_type: str
    schema_version: int
    trace_id: str
    def __init__(self, conversation_seq: _Optional[int] = ..., tenant_id: _Optional[str] = ..., conversation_id: _Optional[str] = ..., message_id: _Optional[bytes] = ..., sender_id: _Optional[str] = ..., sender_device_id: _Optional[str] = ..., client_message_id: _Optional[str] = ..., fencing_epoch: _Optional[int] = ..., membership_version: _Optional[int] = ..., created_at: _Optional[int] = ..., inline_body: _Optional[bool] = ..., inline_ciphertext: _Optional[bytes] = ..., dek_id: _Optional[str] = ..., events: _Optional[_Iterable[_Union[DispatchEvent, _Mapping]]] = ..., message_type: _Optional[_Union[MessageType, str]] = ..., custom_type: _Optional[str] = ..., schema_version: _Optional[int] = ..., trace_id: _Optional[str] = ...) -> None: ...

class InlineBody(_message.Message):
    __slots__ = ("payload", "media_metadata")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MEDIA_METADATA_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    media_metadata: MediaMetadata
    def __init__(self, payload: _Optional[bytes] = ..., media_metadata: _Optional[_Union[MediaMetadata, _Mapping]] = ...) -> None: ...

class DispatchEvent(_message.Message):
    __slots__ = ("event_type", "audience_all", "user_ids", "slots", "flags", "mention", "joined_at", "target_message_id", "target_conversation_seq", "target_sender_id", "target_flags")
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    AUDIENCE_ALL_FIELD_NUMBER: _ClassVar[int]
    USER_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    MENTION_FIELD_NUMBER: _ClassVar[int]
    JOINED_AT_FIELD_NUMBER: _ClassVar[int]
    TARGET_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    TARGET_SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FLAGS_FIELD_NUMBER: _ClassVar[int]
    event_type: EventType
    audience_all: bool
    user_ids: _containers.RepeatedScalarFieldContainer[str]
    slots: _containers.RepeatedScalarFieldContainer[int]
    flags: int
    mention: MentionRule
    joined_at: _containers.RepeatedScalarFieldContainer[int]
    target_message_id: bytes
    target_conversation_seq: int
    target_sender_id: str
    target_flags: int
    def __init__(self, event_type: _Optional[_Union[EventType, str]] = ..., audience_all: _Optional[bool] = ..., user_ids: _Optional[_Iterable[str]] = ..., slots: _Optional[_Iterable[int]] = ..., flags: _Optional[int] = ..., mention: _Optional[_Union[MentionRule, _Mapping]] = ..., joined_at: _Optional[_Iterable[int]] = ..., target_message_id: _Optional[bytes] = ..., target_conversation_seq: _Optional[int] = ..., target_sender_id: _Optional[str] = ..., target_flags: _Optional[int] = ...) -> None: ...

class MentionRule(_message.Message):
    __slots__ = ("at_all", "user_ids", "reply_to_user_id")
    AT_ALL_FIELD_NUMBER: _ClassVar[int]
    USER_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_USER_ID_FIELD_NUMBER: _ClassVar[int]
    at_all: bool
    user_ids: _containers.RepeatedScalarFieldContainer[str]
    reply_to_user_id: str
    def __init__(self, at_all: _Optional[bool] = ..., user_ids: _Optional[_Iterable[str]] = ..., reply_to_user_id: _Optional[str] = ...) -> None: ...

class GroupDispatch(_message.Message):
    __slots__ = ("dispatch_id", "target_mailbox_shard", "source_offset", "source_part", "source_bucket", "lane_mask", "snapshot_version", "member_count", "record", "follows")
    DISPATCH_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_MAILBOX_SHARD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PART_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BUCKET_FIELD_NUMBER: _ClassVar[int]
    LANE_MASK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    dispatch_id: bytes
    target_mailbox_shard: int
    source_offset: int
    source_part: int
    source_bucket: int
    lane_mask: int
    snapshot_version: int
    member_count: int
    record: OutboxRecord
    follows: int
    def __init__(self, dispatch_id: _Optional[bytes] = ..., target_mailbox_shard: _Optional[int] = ..., source_offset: _Optional[int] = ..., source_part: _Optional[int] = ..., source_bucket: _Optional[int] = ..., lane_mask: _Optional[int] = ..., snapshot_version: _Optional[int] = ..., member_count: _Optional[int] = ..., record: _Optional[_Union[OutboxRecord, _Mapping]] = ..., follows: _Optional[int] = ...) -> None: ...

class DeviceTarget(_message.Message):
    __slots__ = ("tenant_id", "user_id", "device_id", "connection_id", "session_epoch")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    user_id: str
    device_id: str
    connection_id: int
    session_epoch: int
    def __init__(self, tenant_id: _Optional[str] = ..., user_id: _Optional[str] = ..., device_id: _Optional[str] = ..., connection_id: _Optional[int] = ..., session_epoch: _Optional[int] = ...) -> None: ...

class SubmitSend(_message.Message):
    __slots__ = ("tenant_id", "user_id", "device_id", "message", "limits_lifted")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_LIFTED_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    user_id: str
    device_id: str
    message: SendMessage
    limits_lifted: bool
    def __init__(self, tenant_id: _Optional[str] = ..., user_id: _Optional[str] = ..., device_id: _Optional[str] = ..., message: _Optional[_Union[SendMessage, _Mapping]] = ..., limits_lifted: _Optional[bool] = ...) -> None: ...

class SubmitSendReply(_message.Message):
    __slots__ = ("ack", "error")
    ACK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ack: SendAck
    error: Error
    def __init__(self, ack: _Optional[_Union[SendAck, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class SubmitCreateGroup(_message.Message):
    __slots__ = ("tenant_id", "user_id", "request")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    user_id: str
    request: CreateGroup
    def __init__(self, tenant_id: _Optional[str] = ..., user_id: _Optional[str] = ..., request: _Optional[_Union[CreateGroup, _Mapping]] = ...) -> None: ...

class SubmitLeaveGroup(_message.Message):
    __slots__ = ("tenant_id", "user_id", "request")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    user_id: str
    request: LeaveGroup
    def __init__(self, tenant_id: _Optional[str] = ..., user_id: _Optional[str] = ..., request: _Optional[_Union[LeaveGroup, _Mapping]] = ...) -> None: ...

class SubmitGroupChange(_message.Message):
    __slots__ = ("tenant_id", "group_id", "user_ids", "operator")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    USER_IDS_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    group_id: str
    user_ids: _containers.RepeatedScalarFieldContainer[str]
    operator: str
    def __init__(self, tenant_id: _Optional[str] = ..., group_id: _Optional[str] = ..., user_ids: _Optional[_Iterable[str]] = ..., operator: _Optional[str] = ...) -> None: ...

class GroupReply(_message.Message):
    __slots__ = ("members", "error", "conversation_seq", "membership_version")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_SEQ_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    members: MemberListBatch
    error: Error
    conversation_seq: int
    membership_version: int
    def __init__(self, members: _Optional[_Union[MemberListBatch, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., conversation_seq: _Optional[int] = ..., membership_version: _Optional[int] = ...) -> None: ...

class LogHint(_message.Message):
    __slots__ = ("partition", "first_offset", "records")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    first_offset: int
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, partition: _Optional[int] = ..., first_offset: _Optional[int] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LagReport(_message.Message):
    __slots__ = ("reporter", "partitions", "partition_lag_ms", "shards", "shard_lane_lag_ms")
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_LAG_MS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_LANE_LAG_MS_FIELD_NUMBER: _ClassVar[int]
    reporter: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    partition_lag_ms: _containers.RepeatedScalarFieldContainer[int]
    shards: _containers.RepeatedScalarFieldContainer[int]
    shard_lane_lag_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reporter: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., partition_lag_ms: _Optional[_Iterable[int]] = ..., shards: _Optional[_Iterable[int]] = ..., shard_lane_lag_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("device", "gateway", "cursor", "capabilities", "reopen")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    REOPEN_FIELD_NUMBER: _ClassVar[int]
    device: DeviceTarget
    gateway: str
    cursor: MailboxCursorToken
    capabilities: int
    reopen: bool
    def __init__(self, device: _Optional[_Union[DeviceTarget, _Mapping]] = ..., gateway: _Optional[str] = ..., cursor: _Optional[_Union[MailboxCursorToken, _Mapping]] = ..., capabilities: _Optional[int] = ..., reopen: _Optional[bool] = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("error", "lane_watermark", "trim_watermark", "lane_id", "has_offline", "pending_entry_count", "pending_bytes", "mailbox_cursor", "shard_epoch")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LANE_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    TRIM_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_OFFLINE_FIELD_NUMBER: _ClassVar[int]
    PENDING_ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_CURSOR_FIELD_NUMBER: _ClassVar[int]
    SHARD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    error: Error
    lane_watermark: int
    trim_watermark: int
    lane_id: int
    has_offline: bool
    pending_entry_count: int
    pending_bytes: int
    mailbox_cursor: MailboxCursorToken
    shard_epoch: int
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., lane_watermark: _Optional[int] = ..., trim_watermark: _Optional[int] = ..., lane_id: _Optional[int] = ..., has_offline: _Optional[bool] = ..., pending_entry_count: _Optional[int] = ..., pending_bytes: _Optional[int] = ..., mailbox_cursor: _Optional[_Union[MailboxCursorToken, _Mapping]] = ..., shard_epoch: _Optional[int] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("device", "last_pushed_user_seq")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LAST_PUSHED_USER_SEQ_FIELD_NUMBER: _ClassVar[int]
    device: DeviceTarget
    last_pushed_user_seq: int
    def __init__(self, device: _Optional[_Union[DeviceTarget, _Mapping]] = ..., last_pushed_user_seq: _Optional[int] = ...) -> None: ...

class MailboxPull(_message.Message):
    __slots__ = ("device", "pull", "zero_cursor")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    ZERO_CURSOR_FIELD_NUMBER: _ClassVar[int]
    device: DeviceTarget
    pull: PullMailbox
    zero_cursor: bool
    def __init__(self, device: _Optional[_Union[DeviceTarget, _Mapping]] = ..., pull: _Optional[_Union[PullMailbox, _Mapping]] = ..., zero_cursor: _Optional[bool] = ...) -> None: ...

class MailboxPullReply(_message.Message):
    __slots__ = ("error", "covered_through_seq", "up_to_seq", "batch")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COVERED_THROUGH_SEQ_FIELD_NUMBER: _ClassVar[int]
    UP_TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    error: Error
    covered_through_seq: int
    up_to_seq: int
    batch: bytes
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., covered_through_seq: _Optional[int] = ..., up_to_seq: _Optional[int] = ..., batch: _Optional[bytes] = ...) -> None: ...

class HistoryPull(_message.Message):
    __slots__ = ("device", "pull")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    device: DeviceTarget
    pull: PullHistory
    def __init__(self, device: _Optional[_Union[DeviceTarget, _Mapping]] = ..., pull: _Optional[_Union[PullHistory, _Mapping]] = ...) -> None: ...

class HistoryPullReply(_message.Message):
    __slots__ = ("error", "batch")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    error: Error
    batch: bytes
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., batch: _Optional[bytes] = ...) -> None: ...

class SessionListPull(_message.Message):
    __slots__ = ("device", "pull")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    device: DeviceTarget
    pull: PullSessionList
    def __init__(self, device: _Optional[_Union[DeviceTarget, _Mapping]] = ..., pull: _Optional[_Union[PullSessionList, _Mapping]] = ...) -> None: ...

class SessionListPullReply(_message.Message):
    __slots__ = ("error", "batch")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    error: Error
    batch: bytes
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., batch: _Optional[bytes] = ...) -> None: ...

class PresenceStale(_message.Message):
    __slots__ = ("device", "observed_epoch", "user_key")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    USER_KEY_FIELD_NUMBER: _ClassVar[int]
    device: DeviceTarget
    observed_epoch: int
    user_key: bytes
    def __init__(self, device: _Optional[_Union[DeviceTarget, _Mapping]] = ..., observed_epoch: _Optional[int] = ..., user_key: _Optional[bytes] = ...) -> None: ...

class MarkDirty(_message.Message):
    __slots__ = ("devices", "shard", "shard_epoch")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceTarget]
    shard: int
    shard_epoch: int
    def __init__(self, devices: _Optional[_Iterable[_Union[DeviceTarget, _Mapping]]] = ..., shard: _Optional[int] = ..., shard_epoch: _Optional[int] = ...) -> None: ...

class ReplaceSession(_message.Message):
    __slots__ = ("device", "reason", "replaced_by_device")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPLACED_BY_DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: DeviceTarget
    reason: KickReason
    replaced_by_device: str
    def __init__(self, device: _Optional[_Union[DeviceTarget, _Mapping]] = ..., reason: _Optional[_Union[KickReason, str]] = ..., replaced_by_device: _Optional[str] = ...) -> None: ...

class PlaneReply(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: Error
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...
