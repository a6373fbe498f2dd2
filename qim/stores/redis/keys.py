"""Names of every Redis key, by instance role (DESIGN-data §1). Nothing else composes a key.

`{bNNNN}` is a conversation bucket, `sNNNN` a mailbox shard. Ids contain no `:` or `{`; a conversation id has `:` only
after its own prefix, so a name reads back without doubt. Servers are standalone, so a script may add a suffix to a
prefix it was given; such prefixes end in `:` and are named `*_prefix`.
"""

from __future__ import annotations

from typing import Final

STAMP: Final = "stamp"
"""JSON {cluster_id, roles, instance_id, format_version}: which instance this is (any role)."""

STREAM_FIELD: Final = b"r"
"""Name of the only field of an entry of the streams `outbox` and `dispatch`; its value is the record."""

# ------------------------------------------------------------------------------------------------ message instance


def bucket_tag(bucket: int) -> str:
    """`{bNNNN}:`, the part every key of a conversation bucket shares."""
    return f"{{b{bucket:04d}}}:"


def fence(bucket: int) -> str:
    """Hash {epoch, grant}: the writer that may commit."""
    return f"fence:{{b{bucket:04d}}}"


def hlc(bucket: int) -> str:
    """Greatest message_id committed, 16 bytes."""
    return f"hlc:{{b{bucket:04d}}}"


def outbox(bucket: int) -> str:
    """Stream of OutboxRecords; offset n has the id (n+1)-0."""
    return f"outbox:{{b{bucket:04d}}}"


def outbox_next(bucket: int) -> str:
    """Offset the next outbox record gets, decimal."""
    return f"outboxn:{{b{bucket:04d}}}"


def dedup(bucket: int, tenant_id: str, sender_id: str, client_message_id: str) -> str:
    """ClientDedup (7200 s): digest[16] ‖ message_id[16] ‖ be64(seq) ‖ `<tenant>:<conversation id>`."""
    return f"dedup:{{b{bucket:04d}}}:{tenant_id}:{sender_id}:{client_message_id}"


def conversation(bucket: int, tenant_id: str, conversation_id: str) -> str:
    """Hash, the conversation's head (§7.4) and wrapped DEK."""
    return f"conv:{{b{bucket:04d}}}:{tenant_id}:{conversation_id}"


CONVERSATIONS: Final = "conv:{b*"
"""Pattern of the heads of all conversations of an instance."""


def split_conversation(name: bytes) -> tuple[int, str, str]:
    """Bucket, tenant and conversation of a head's key."""
    _, tag, tenant_id, conversation_id = name.decode().split(":", 3)
    return int(tag[2:-1]), tenant_id, conversation_id


def records(bucket: int, tenant_id: str, conversation_id: str, seq_bucket: int) -> str:
    """Hash decimal conversation_seq -> MessageRecord; seq_bucket = conversation_seq / 4096 (§7.1)."""
    return f"{records_prefix(bucket, tenant_id, conversation_id)}{seq_bucket}"


def records_prefix(bucket: int, tenant_id: str, conversation_id: str) -> str:
    """+ seq_bucket."""
    return f"rec:{{b{bucket:04d}}}:{tenant_id}:{conversation_id}:"


def group(bucket: int, tenant_id: str, group_id: str) -> str:
    """Hash {version, count, next_slot, creator, digest}; exists once the group is published. `low` is the lowest
    version still stored (absent: 1), `mark` a version that was the current one at `mark_at` (unix ms)."""
    return f"grp:{{b{bucket:04d}}}:{tenant_id}:{group_id}"


def group_slots(bucket: int, tenant_id: str, group_id: str) -> str:
    """Hash user -> decimal slot, of everybody who ever was a member."""
    return f"grpslot:{{b{bucket:04d}}}:{tenant_id}:{group_id}"


def group_intervals(bucket: int, tenant_id: str, group_id: str) -> str:
    """Hash user -> packed intervals (core.visibility)."""
    return f"grpmember:{{b{bucket:04d}}}:{tenant_id}:{group_id}"


def group_users(bucket: int, tenant_id: str, group_id: str, mailbox_shard: int) -> str:
    """Hash decimal slot -> user, of one mailbox shard."""
    return f"grpusers:{{b{bucket:04d}}}:{tenant_id}:{group_id}:{mailbox_shard}"


def group_snapshots(bucket: int, tenant_id: str, group_id: str, mailbox_shard: int) -> str:
    """Hash decimal snapshot version -> be32(member_count) ‖ be64(lane_mask) ‖ bitmap, of one mailbox shard."""
    return f"{group_snapshots_prefix(bucket, tenant_id, group_id)}{mailbox_shard}"


def group_snapshots_prefix(bucket: int, tenant_id: str, group_id: str) -> str:
    """+ mailbox shard."""
    return f"grpver:{{b{bucket:04d}}}:{tenant_id}:{group_id}:"


def group_index(bucket: int, tenant_id: str, group_id: str) -> str:
    """Hash decimal membership version -> snapshot references of every shard that has members."""
    return f"grpidx:{{b{bucket:04d}}}:{tenant_id}:{group_id}"


# --------------------------------------------------------------------------------------------------- core instance


def registry_leases(kind: str) -> str:
    """Hash id -> "<epoch> <owner> <grant id>" of one kind of lease; owner and grant id are "-" when nobody has it."""
    return f"reg:lease:{kind}"


def registry_beats(kind: str) -> str:
    """Hash grant id -> "<last beat, unix ms of the server> <owner> <process>" of one pool."""
    return f"reg:beat:{kind}"


def registry_pins(kind: str) -> str:
    """Hash id -> the member an operator wants it at."""
    return f"reg:pin:{kind}"


REGISTRY_VERSION: Final = "reg:version"
"""Version of the route map; rises with every grant, release, pin, and with members that come or leave."""
REGISTRY_CLUSTER: Final = "reg:cluster"
"""Hash of immutable cluster facts, written once."""


def registry_boundaries(mailbox_shard: int) -> str:
    """Hash epoch -> be64 start_mailbox_seq ‖ be64 prev_epoch_end_mailbox_seq."""
    return f"reg:bound:{mailbox_shard:04d}"


def log_identity(topic: str) -> str:
    """Hash {cluster_id, topic_id, partition_count} of an embedded topic, on the instance of its partition 0."""
    return f"log:{topic}"


def session(tenant_id: str, user_id: str) -> str:
    """Hash device -> "<session epoch> <last login, unix ms>", and the user's counter under ":epoch"."""
    return f"sess:{tenant_id}:{user_id}"


def fanout_checkpoint(partition: int) -> str:
    """Hash {epoch, grant, next, log}: position of fan-out in an outbox partition of the topic identified by `log`."""
    return f"fanck:{partition:04d}"


def dispatch(mailbox_shard: int) -> str:
    """Stream of GroupDispatch records; offset n has the id (n+1)-0."""
    return f"dispatch:{mailbox_shard:04d}"


def dispatch_next(mailbox_shard: int) -> str:
    """Offset the next dispatch record gets, decimal."""
    return f"dispatchn:{mailbox_shard:04d}"


# ------------------------------------------------------------------------------------------------ mailbox instance


WATERMARKS_FIELD: Final = "watermarks"
"""Field of a shard's hash: lane_count big-endian u64, the vector W."""


def shard(mailbox_shard: int) -> str:
    """Hash {epoch, grant, watermarks, fold, fold_offset, low, lane byte -> day_max of the lane}."""
    return f"shard:s{mailbox_shard:04d}"


def progress_prefix(mailbox_shard: int) -> str:
    """+ block number (log offset / 1024): hash of DispatchProgress rows."""
    return f"prog:s{mailbox_shard:04d}:"


def user_trim(mailbox_shard: int) -> str:
    """Hash user -> user_trim_seq."""
    return f"trim:s{mailbox_shard:04d}"


def mailbox_prefix(tenant_id: str, user_id: str) -> str:
    """+ UTC day: sorted set of one user's entries of that day, all scores 0."""
    return f"mailbox:{tenant_id}:{user_id}:"


def user_conversations(tenant_id: str, user_id: str) -> str:
    """Hash conversation id -> kind and first_seen_at (`user_conversation_state`)."""
    return f"ucs:{tenant_id}:{user_id}"
