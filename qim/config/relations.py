"""What must hold between parameters; a start with contradicting values is refused (§5.2, §19.2.2, §19.3.3, §27.2.4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from qim.core.ids import VIRTUAL_BUCKET_COUNT
from qim.errors import StartupError

if TYPE_CHECKING:
    from qim.config.parameters import Parameters

_DAY_MS: Final = 86_400_000
_HOUR_MS: Final = 3_600_000
BUCKET_HASH: Final = "blake3: user_bucket = be_u64(blake3(tenant_id||0x00||user_id)[0:8]) & (virtual_bucket_count-1)"
LANE_COUNT_MAX: Final = 64
"""`lane_mask` of a stored dispatch is one u64 (DESIGN-data §2)."""


class Relation(NamedTuple):
    text: str
    """Shown when it is broken; names in it are parameters."""
    holds: Callable[[Parameters], bool]


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


RELATIONS: Final[tuple[Relation, ...]] = (
    # B.1
    Relation("bucket_hash is the only formula there is", lambda p: p.bucket_hash == BUCKET_HASH),
    Relation("virtual_bucket_count is 65536", lambda p: p.virtual_bucket_count == VIRTUAL_BUCKET_COUNT),
    Relation("mailbox_shard_count is a power of two", lambda p: _power_of_two(p.mailbox_shard_count)),
    Relation("mailbox_shard_count <= virtual_bucket_count", lambda p: p.mailbox_shard_count <= p.virtual_bucket_count),
    Relation("connection_shard_count is a power of two", lambda p: _power_of_two(p.connection_shard_count)),
    Relation(
        "connection_shard_count is a multiple of mailbox_shard_count",
        lambda p: p.connection_shard_count % p.mailbox_shard_count == 0,
    ),
    Relation("lane_count is a power of two", lambda p: _power_of_two(p.lane_count)),
    Relation("lane_count <= 64", lambda p: p.lane_count <= LANE_COUNT_MAX),
    Relation(
        "conversation_bucket_count is a power of two up to 1024",
        lambda p: _power_of_two(p.conversation_bucket_count) and p.conversation_bucket_count <= 1024,
    ),
    Relation(
        "single_host_mailbox_shard_count is a power of two",
        lambda p: _power_of_two(p.single_host_mailbox_shard_count),
    ),
    Relation(
        "writer_self_fence_deadline < shard_lease_ttl < writer_failover_wait",
        lambda p: p.writer_self_fence_deadline < p.shard_lease_ttl < p.writer_failover_wait,
    ),
    Relation("writer_lease_ttl is shard_lease_ttl", lambda p: p.writer_lease_ttl == p.shard_lease_ttl),
    Relation(
        "writer_lease_renew_interval <= shard_lease_ttl / 3",
        lambda p: p.writer_lease_renew_interval * 3 <= p.shard_lease_ttl,
    ),
    # B.2
    Relation("message_seq_bucket_width is a power of two", lambda p: _power_of_two(p.message_seq_bucket_width)),
    Relation(
        "send_retry_budget < client_dedup_ttl_seconds",
        lambda p: p.send_retry_budget < p.client_dedup_ttl_seconds * 1000,
    ),
    Relation(
        "fanout_retry_max_window < client_dedup_window_hours",
        lambda p: p.fanout_retry_max_window < p.client_dedup_window_hours * _HOUR_MS,
    ),
    # B.3; the factor is 2 and T_recover the time a shard may take to come back (§19.3.3)
    Relation("mailbox_retention_days >= 1", lambda p: p.mailbox_retention_days >= 1),
    Relation(
        "log_retention_days >= (checkpoint_interval + shard_rto_target) x 2",
        lambda p: p.log_retention_days * _DAY_MS >= (p.checkpoint_interval + p.shard_rto_target) * 2,
    ),
    Relation(
        "dispatch_progress_retention >= log_retention_days",
        lambda p: p.dispatch_progress_retention >= p.log_retention_days * _DAY_MS,
    ),
    Relation(
        "membership_version_retention > dispatch_progress_retention, log_retention_days",
        lambda p: p.membership_version_retention > max(p.dispatch_progress_retention, p.log_retention_days * _DAY_MS),
    ),
    Relation("history_hot_window >= 1 h", lambda p: p.history_hot_window >= _HOUR_MS),
    Relation(
        "1 <= default_history_retention_days <= default_history_retention_days_max",
        lambda p: 1 <= p.default_history_retention_days <= p.default_history_retention_days_max,
    ),
    Relation("1 <= history_archive_batch_max <= 4096", lambda p: 1 <= p.history_archive_batch_max <= 4096),
    Relation(
        "mailbox_event_group_max_items <= pull_mailbox_max_items",
        lambda p: 1 <= p.mailbox_event_group_max_items <= p.pull_mailbox_max_items,
    ),
    Relation("pull_mailbox_window >= 1", lambda p: p.pull_mailbox_window >= 1),
    # B.4
    Relation(
        "ping_interval_initial <= ping_interval_max_foreground <= ping_interval_max_background",
        lambda p: 0 < p.ping_interval_initial <= p.ping_interval_max_foreground <= p.ping_interval_max_background,
    ),
    Relation("presence_lease_renew < presence_lease_ttl", lambda p: p.presence_lease_renew < p.presence_lease_ttl),
    Relation(
        "access_token_ttl < revocation_record_retention",
        lambda p: p.access_token_ttl < p.revocation_record_retention,
    ),
    Relation("token_refresh_lead < access_token_ttl", lambda p: p.token_refresh_lead < p.access_token_ttl),
    Relation("unauth_connection_timeout > 0", lambda p: p.unauth_connection_timeout > 0),
    # B.5
    Relation("max_frame_bytes <= 4194304", lambda p: p.max_frame_bytes <= 4 << 20),
    Relation(
        "max_custom_payload_bytes < max_frame_bytes / 4",
        lambda p: 0 < p.max_custom_payload_bytes * 4 < p.max_frame_bytes,
    ),
    Relation("custom_type_max_bytes <= 64", lambda p: p.custom_type_max_bytes <= 64),
    Relation(
        "conn_send_low_watermark < conn_send_soft_watermark < conn_send_hard_watermark",
        lambda p: (
            p.conn_send_low_watermark < p.conn_send_soft_watermark.bytes < p.conn_send_hard_watermark.bytes
            and p.conn_send_soft_watermark.items < p.conn_send_hard_watermark.items
        ),
    ),
    Relation(
        "per_user_msg_rate <= per_user_msg_rate_burst", lambda p: p.per_user_msg_rate <= p.per_user_msg_rate_burst
    ),
    Relation("per_sender_in_conversation_burst >= 1", lambda p: p.per_sender_in_conversation_burst >= 1),
    Relation("max_devices_per_user >= 1", lambda p: p.max_devices_per_user >= 1),
    Relation(
        "inline_body_max_bytes <= inline_body_budget_bytes",
        lambda p: p.inline_body_max_bytes <= p.inline_body_budget_bytes,
    ),
    Relation("lane_stall_alert <= lane_stall_failover", lambda p: p.lane_stall_alert <= p.lane_stall_failover),
    Relation(
        "push_confirm_extended_window is tcp_user_timeout + push_grace_window",
        lambda p: p.push_confirm_extended_window == p.tcp_user_timeout + p.push_grace_window,
    ),
    # B.6
    Relation(
        "session_list_page_limit <= session_list_page_limit_max",
        lambda p: 1 <= p.session_list_page_limit <= p.session_list_page_limit_max,
    ),
    Relation("member_page_limit <= member_page_hard_limit", lambda p: p.member_page_limit <= p.member_page_hard_limit),
    Relation(
        "max_members_per_group <= max_members_per_group_target",
        lambda p: 2 <= p.max_members_per_group <= p.max_members_per_group_target,
    ),
    # ours
    Relation(
        "append_chunk_members <= mailbox_writebatch_max_entries",
        lambda p: 1 <= p.append_chunk_members <= p.mailbox_writebatch_max_entries,
    ),
    Relation("append_calls_in_flight_max >= 1", lambda p: p.append_calls_in_flight_max >= 1),
    Relation("commit_batch_max >= 1", lambda p: p.commit_batch_max >= 1),
    Relation("submit_timeout_ms < send_ack_timeout", lambda p: 0 < p.submit_timeout_ms < p.send_ack_timeout),
    Relation("delivery_lag_group_ms <= delivery_lag_ms", lambda p: 0 < p.delivery_lag_group_ms <= p.delivery_lag_ms),
    Relation(
        "lag_report_interval_ms <= delivery_lag_group_ms",
        lambda p: 0 < p.lag_report_interval_ms <= p.delivery_lag_group_ms,
    ),
    Relation(
        "history_page_limit <= history_page_limit_max", lambda p: 1 <= p.history_page_limit <= p.history_page_limit_max
    ),
    Relation(
        "restart_backoff_initial_ms <= restart_backoff_max_ms",
        lambda p: 0 < p.restart_backoff_initial_ms <= p.restart_backoff_max_ms,
    ),
    Relation("0 <= store_free_ratio_min < 1", lambda p: 0 <= p.store_free_ratio_min < 1),
)


def check_relations(parameters: Parameters) -> None:
    """StartupError naming the first relation that does not hold and the values in it."""
    for relation in RELATIONS:
        if not relation.holds(parameters):
            names = [name for name in re.findall(r"[a-z][a-z0-9_]+", relation.text) if hasattr(parameters, name)]
            values = ", ".join(f"{name} = {getattr(parameters, name)!r}" for name in dict.fromkeys(names))
            raise StartupError(f"parameters contradict each other: must hold: {relation.text}; found {values}")
