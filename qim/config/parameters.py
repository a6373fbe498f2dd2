"""Appendix B and our own parameters as one typed, frozen table.

Values come from `defaults.toml`, then from a file of the same names, then from `QIM_<NAME>`; a later source wins.
Unknown names, wrong types and contradicting values raise StartupError before anything else is done.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from qim.config.relations import check_relations
from qim.config.shapes import (
    BufferBudget,
    BurnRate,
    CompactionWindow,
    IdleTimeout,
    MigrationThreshold,
    RangeMs,
    Rate,
    RateTier,
    ReconnectBackoff,
    TcpKeepalive,
    Times,
    UploadQuota,
    Watermark,
)
from qim.errors import StartupError

ENV_PREFIX: Final = "QIM_"
TEST_ENV_PREFIX: Final = "QIM_TEST_"
ENV_ALIASES: Final = {
    "QIM_HISTORY_HOT_WINDOW_MS": "history_hot_window",
    "QIM_ARCHIVER_BATCH_MAX": "history_archive_batch_max",
}
"""Names the contract gives besides `QIM_<NAME>`."""
REFUSED_ENV: Final = "QIM_STORE_BACKEND"
UNSET: Final = "unset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """One field per parameter; units and sections of the contract are in `defaults.toml`."""

    # B.1 sharding and routing
    virtual_bucket_count: int
    bucket_hash: str
    mailbox_shard_count: int
    mailbox_shard_count_starter: int
    connection_shard_count: int
    lane_count: int
    shard_lease_ttl: int
    redirect_max_per_connection: int
    route_token_ttl: int
    # B.2 sequences and idempotency
    clock_regression_reject_ms: int
    conversation_seq_reserve_window: int
    message_seq_bucket_width: int
    client_dedup_ttl_seconds: int
    mailbox_event_group_max_items: int
    mailbox_event_group_max_bytes: int
    fanout_retry_max_window: int
    membership_version_merge_window: int
    slot_compaction_ratio: int
    # B.3 sync and retention
    mailbox_retention_days: int
    device_inactive_gc_days: int
    room_log_retention_minutes: int
    log_retention_days: int
    dispatch_progress_retention: int
    membership_version_retention: int
    client_resync_min_interval: int
    pull_mailbox_max_items: int
    history_hot_window: int
    default_history_retention_days: int
    default_history_retention_days_max: int
    history_archive_batch_max: int
    history_max_empty_bucket_scan: int
    pull_mailbox_max_bytes: int
    pull_mailbox_window: int
    read_sync_merge_window: int
    trim_safety_margin: int
    pending_hint_error_ratio: float
    # B.4 connections and heartbeat
    ping_interval_initial: int
    ping_interval_max_foreground: int
    ping_interval_max_background: int
    ping_interval_step: int
    ping_interval_step_after_successes: int
    ping_backoff_factor: float
    ping_backoff_lock: int
    ping_probe_timeout: int
    idle_timeout: IdleTimeout
    send_ack_timeout: int
    tcp_user_timeout: int
    tcp_keepalive: TcpKeepalive
    unauth_connection_timeout: int
    takeover_admit_rate: float
    sync_delay_hint_ms: RangeMs
    reconnect_backoff: ReconnectBackoff
    presence_lease_renew: int
    presence_lease_ttl: int
    presence_propagation_target: int
    access_token_ttl: int
    refresh_token_ttl: int
    token_refresh_lead: int
    token_expiry_grace: int
    revocation_propagation_target: int
    authz_recheck_interval: int
    transport_fallback_step_timeout: int
    transport_choice_cache_ttl: int
    heartbeat_wheel_tick: int
    heartbeat_wheel_slots: int
    pong_batch_window: int
    stream_scheduling_quantum: int
    revocation_record_retention: int
    # B.5 flow control and quotas
    max_frame_bytes: int
    stream_write_chunk_bytes: int
    frag_assembly_timeout: int
    frame_compress_min_bytes: int
    max_custom_payload_bytes: int
    custom_type_max_bytes: int
    media_thumbnail_max_bytes: int
    conn_send_soft_watermark: Watermark
    conn_send_hard_watermark: Watermark
    conn_send_low_watermark: int
    node_send_buffer_budget: BufferBudget
    frame_priority: tuple[str, ...]
    per_conversation_msg_rate: tuple[RateTier, ...]
    per_sender_in_conversation_rate: Rate
    per_user_msg_rate: int
    per_user_msg_rate_burst: int
    tenant_fanout_quota: float | None
    room_msg_rate: int
    room_outbound_frame_rate: int
    max_devices_per_user: int
    max_conversations_per_user: int
    per_ip_connect_rate: int
    per_user_history_pull_rate: int
    per_user_media_upload_quota: UploadQuota
    media_ticket_ttl: int
    rtc_signal_max_bytes: int
    quota_refill_interval: int
    tenant_shard_share_limit: float
    tenant_quota_lease_interval: int
    per_ip_max_connections: int
    at_all_rate_per_conversation: Times
    at_all_daily_quota_per_sender: int
    at_all_min_role: str
    moderation_sync_timeout_ms: int
    new_account_probation_hours: int
    media_orphan_grace: int
    # B.5.1 mailbox and dispatch
    mailbox_writebatch_max_entries: int
    mailbox_writebatch_commit_p99: int
    mailbox_subtask_timeout: int
    lane_stall_failover: int
    lane_stall_alert: int
    mailbox_takeover_rto_target: int
    rebuild_concurrency: int
    policy_switch_exit_ratio: float
    policy_switch_min_interval: int
    active_window_days: int
    quota_sustained_window: int
    push_coalesce_window: int
    dedup_inflight_timeout: int
    client_pending_max_age: int
    gc_grace_seconds: int
    membership_event_broadcast_max_members: int
    dispatch_expand_duration_p99_target: int
    lane_watermark_advance_p99: int
    max_mailbox_entries_per_user: int
    mailbox_entry_cap_hysteresis: float
    inline_body_budget_bytes: int
    inline_body_max_bytes: int
    # B.5.2 offline push
    push_grace_window: int
    push_confirm_extended_window: int
    push_merge_window: int
    push_dedup_ttl: int
    push_rate_per_user_per_min: int
    push_rate_per_conversation_per_min: int
    push_quiet_hours: str
    push_token_inactive_days: int
    push_retry_max_attempts: int
    push_retry_backoff_ms: tuple[int, ...]
    nse_pull_max_items: int
    # B.5.3 consistency and disaster recovery
    writer_lease_ttl: int
    writer_lease_renew_interval: int
    writer_failover_wait: int
    writer_self_fence_deadline: int
    checkpoint_interval: int
    checkpoint_full_multiple: int
    backup_retention_days: int
    rpo_target: int
    shard_rto_target: int
    region_rto_target: int
    home_region_migration_threshold: MigrationThreshold
    hot_retention_days: int
    dsar_response_days: int
    user_deletion_grace: int
    region_failover_retry_after_ms: int
    send_retry_budget: int
    takeover_catchup_lag_entries: int
    takeover_catchup_stable_window: int
    disaster_rto_target: int
    backup_full_interval: int
    backup_incremental_interval: int
    internal_cert_ttl: int
    mailbox_store_shadow_read_ratio: float
    shadow_read_diff_ratio_max: float
    shadow_read_observe_hours: int
    slo_burnrate_fast: BurnRate
    slo_burnrate_slow: BurnRate
    tenant_deletion_grace: int
    tenant_key_rotation_days: int
    key_destroy_lag: int
    dek_cache_ttl: int
    observability_log_retention_days: int
    audit_retention_years: int
    # B.6 session list and unread
    projection_compaction_window: CompactionWindow
    projection_lag_target_p99: int
    session_delta_merge_window: RangeMs
    unread_precise_limit: int
    session_list_page_limit: int
    session_list_page_limit_max: int
    snapshot_ttl: int
    include_muted_in_badge: bool
    client_dedup_window_items: int
    client_dedup_window_hours: int
    unread_audit_sample_rate: float
    projection_lag_selfheal_threshold: float
    projection_write_ratio_max: float
    # B.6.1 ephemeral and rooms
    typing_merge_window: int
    typing_ttl: int
    presence_sub_max_targets: int
    presence_sub_merge_window: int
    max_rooms_per_connection: int
    recall_self_window: int
    edit_self_window: int
    large_group_member_threshold: int
    max_members_per_group: int
    max_members_per_group_target: int
    e2ee_max_members: int
    rtc_voip_push_daily_quota: int
    rtc_ring_timeout: int
    e2ee_signed_prekey_rotation_days: int
    e2ee_prekey_low_watermark: int
    reaction_push_merge_window: int
    reaction_detail_max_members: int
    reaction_detail_max_per_message: int
    reaction_detail_page_limit: int
    per_user_reaction_rate: int
    member_page_limit: int
    member_page_hard_limit: int
    member_search_min_prefix: int
    # B.7 to be measured
    entry_logical_bytes: int
    entry_ondisk_bytes: int
    lsm_write_amp: int
    lsm_space_amp: float
    mailbox_replicas: int
    per_shard_entry_budget: int
    per_node_entry_budget: int
    per_node_connection_budget: int
    partition_dispatch_budget: int
    compaction_ratio: float
    d_online: float
    checkpoint_bytes: float | None
    replay_rate: float | None
    checkpoint_load_time_budget: int
    per_node_frame_budget: int
    per_node_syscall_budget: int
    per_node_tls_cpu_budget: float
    per_node_pps_budget: int
    target_utilization: float
    big_group_lazy_threshold: int
    read_diffusion_min_saving: float | None
    read_diffusion_max_active_ratio: float | None
    # ours
    conversation_bucket_count: int
    single_host_mailbox_shard_count: int
    append_chunk_members: int
    append_calls_in_flight_max: int
    commit_batch_max: int
    submit_timeout_ms: int
    sends_in_flight_max: int
    per_sender_in_conversation_burst: int
    delivery_lag_ms: int
    delivery_lag_group_ms: int
    delivery_lag_retry_ms: RangeMs
    lag_report_interval_ms: int
    log_poll_interval_ms: int
    route_poll_interval_ms: int
    dirty_spread_ms: int
    fold_save_records: int
    progress_block_offsets: int
    admission_retention_margin_ms: int
    retention_interval_ms: int
    embedded_log_bytes_max: int
    history_page_limit: int
    history_page_limit_max: int
    history_page_bytes: int
    group_add_max_users: int
    membership_stage_max_members: int
    presence_slots_per_worker: int
    presence_reconcile_interval_ms: int
    restart_backoff_initial_ms: int
    restart_backoff_max_ms: int
    restart_backoff_factor: float
    restart_backoff_jitter_ratio: float
    restart_backoff_reset_ms: int
    drain_timeout_ms: int
    store_timeout_ms: int
    store_in_flight_max: int
    store_free_ratio_min: float
    server_memory_bytes: int
    shm_prefix: str

    def conversation_msg_rate(self, member_count: int) -> float:
        """Messages per second a conversation of this size may carry (`per_conversation_msg_rate`)."""
        for tier in self.per_conversation_msg_rate:
            if tier.max_members is None or member_count <= tier.max_members:
                return tier.msgs_per_second
        return self.per_conversation_msg_rate[-1].msgs_per_second


def load_parameters(path: Path | None, environ: Mapping[str, str], *, reserved_env: Collection[str] = ()) -> Parameters:
    """Defaults, then the file, then the environment; checked. `reserved_env` names `QIM_` variables of other parts."""
    values = _defaults()
    if path is not None:
        values.update(_known(_flat(_read(path)), str(path)))
    values.update(_from_environment(environ, reserved_env))
    return build_parameters(values)


def build_parameters(values: Mapping[str, Any]) -> Parameters:
    """A checked table from plain TOML values, one per field."""
    hints = get_type_hints(Parameters)
    parameters = Parameters(**{name: _typed(hints[name], value, name) for name, value in values.items()})
    check_relations(parameters)
    return parameters


def default_parameters(**overrides: Any) -> Parameters:
    """Defaults with single values replaced, for programs and tests that set parameters in code."""
    return build_parameters({**_defaults(), **_known(overrides, "overrides")})


def parameter_names() -> frozenset[str]:
    """Every parameter there is."""
    return frozenset(field.name for field in fields(Parameters))


def _defaults() -> dict[str, Any]:
    text = resources.files("qim.config").joinpath("defaults.toml").read_text(encoding="utf-8")
    return _flat(tomllib.loads(text))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read the parameter file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not TOML: {error}") from None


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Without sections. A table of a known parameter name is a value, any other table a section."""
    names = parameter_names()
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict) and name not in names:
            flat.update(value)
        else:
            flat[name] = value
    return flat


def _known(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    unknown = sorted(values.keys() - parameter_names())
    if unknown:
        raise StartupError(f"{source}: there is no parameter {unknown[0]}; see qim/config/defaults.toml for the names")
    return values


def _from_environment(environ: Mapping[str, str], reserved_env: Collection[str]) -> dict[str, Any]:
    if REFUSED_ENV in environ:
        raise StartupError(f"{REFUSED_ENV} selects two stores at once and is refused; unset it")
    names = parameter_names()
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(TEST_ENV_PREFIX) or variable in reserved_env:
            continue
        name = ENV_ALIASES.get(variable, variable.removeprefix(ENV_PREFIX).lower())
        if name not in names:
            raise StartupError(f"{variable}: there is no such parameter or setting; unset it or correct its name")
        values[name] = _environment_value(text)
    return values


def _environment_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _typed(kind: Any, value: Any, name: str) -> Any:
    """`value` as `kind`; StartupError that names the parameter when it is something else."""
    if isinstance(kind, UnionType):
        options = get_args(kind)
        if NoneType in options and value in (UNSET, None):
            return None
        return _typed(next(option for option in options if option is not NoneType), value, name)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_typed(get_args(kind)[0], item, name) for item in value)
    if is_dataclass(kind) and isinstance(value, dict):
        return _typed_record(kind, value, name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is kind:
        return value
    raise StartupError(f"parameter {name}: {value!r} is not {_kind_text(kind)}")


def _typed_record(kind: Any, value: Mapping[str, Any], name: str) -> Any:
    hints = get_type_hints(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise StartupError(f"parameter {name}: there is no part {unknown[0]}")
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if missing := sorted(required - value.keys()):
        raise StartupError(f"parameter {name}: {missing[0]} is missing")
    return kind(**{part: _typed(hints[part], item, f"{name}.{part}") for part, item in value.items()})


def _kind_text(kind: Any) -> str:
    if kind in (int, float, str, bool):
        return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
    if is_dataclass(kind):
        return "a table of " + ", ".join(field.name for field in fields(kind))
    return "a list"
