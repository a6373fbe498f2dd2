"""Every metric, declared once (§24, acceptance observation points §26.0).

Names are those of the contract. A contract metric that ends in `_p99` is the 0.99 quantile of the histogram named
without the ending; a ratio is the quotient of the two counters whose texts name it. Counts whose contract name does not
end in `_total` are gauges that only grow, because the text format would rename a counter. Histograms are in
milliseconds.
`ALWAYS_ZERO` lists what is a defect when it is not 0.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from qim.obs.tally import TalliedCounter, TalliedGauge, TalliedHistogram

disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY: Final = CollectorRegistry(auto_describe=False)
"""One per process: each worker has its own endpoint, nothing is shared through files."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_MS: Final = (0.5, 1, 2, 5, 10, 20, 50, 100, 150, 300, 500, 800, 1000, 2000, 5000, 10000, 30000)
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return TalliedCounter(name, text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return TalliedGauge(name, text, labels, registry=REGISTRY)


def _latency_ms(name: str, text: str, *labels: str) -> Histogram:
    return TalliedHistogram(name, text, labels, registry=REGISTRY, buckets=_LATENCY_MS)


def _size(name: str, text: str, *labels: str) -> Histogram:
    return TalliedHistogram(name, text, labels, registry=REGISTRY, buckets=_SIZES)


# ------------------------------------------------------------------------------- connection and authentication (24.1.1)
CONNECTIONS_ONLINE: Final = _gauge("connections_online", "authenticated connections of this worker")
UNAUTH_CONNECTION_COUNT: Final = _gauge("unauth_connection_count", "connections without completed AUTH")
CONNECTIONS_OPENED_TOTAL: Final = _counter("connections_opened_total", "accepted connections (reconnect_rate)")
CONNECTIONS_CLOSED_TOTAL: Final = _counter("connections_closed_total", "closed connections", "reason")
AUTH_ATTEMPTS_TOTAL: Final = _counter("auth_attempts_total", "AUTH frames judged (auth_success_rate)")
LOGIN_TOTAL: Final = _counter("login_total", "successful AUTH (auth_success_rate, cursor_expired ratio)")
AUTH_LATENCY_MS: Final = _latency_ms("auth_latency_ms", "AUTH received to AUTH_OK written")
ONLINE_READY_LATENCY_MS: Final = _latency_ms(
    "online_ready_latency_ms", "AUTH received to ONLINE_READY written", "backlog"
)
KICKED_TOTAL: Final = _counter("kicked_total", "KICKED sent", "reason")
SESSION_EPOCH_REJECT_TOTAL: Final = _counter("session_epoch_reject_total", "pushes to an old session_epoch discarded")

# -------------------------------------------------------------------------------------------- message commit (24.1.2)
SEND_TO_ACK_LATENCY_MS: Final = _latency_ms("send_to_ack_latency_ms", "SEND_MESSAGE received to SEND_ACK written")
SEND_TOTAL: Final = _counter("send_total", "SEND_MESSAGE frames judged")
SEND_REJECT_TOTAL: Final = _counter("send_reject_total", "refused sends", "code")
CONVERSATION_SEQ_ALLOC_MS: Final = _latency_ms("conversation_seq_alloc_ms", "one commit call: sequence, record, outbox")
COMMIT_BATCH_MESSAGES: Final = _size("qim_writer_commit_batch_messages", "messages a commit call carried")
COMMITTED_TOTAL: Final = _counter("qim_writer_committed_total", "messages committed")
DEDUP_HIT_TOTAL: Final = _counter("qim_writer_dedup_hit_total", "sends answered from ClientDedup")
COMMIT_RETRY_TOTAL: Final = _counter("qim_writer_commit_retry_total", "refusals retried in place", "status")
OUTBOX_LAG_SECONDS: Final = _gauge("outbox_lag_seconds", "age of the oldest outbox record not dispatched", "partition")
CLOCK_UNSAFE_TOTAL: Final = _counter("clock_unsafe_total", "backward clock steps above clock_regression_reject_ms")
CONVERSATION_SEQ_REGRESSION_COUNT: Final = _gauge(
    "conversation_seq_regression_count", "conversation_seq seen going back (§19.1)"
)
MEMBERSHIP_VERSION_TOTAL: Final = _counter("membership_version_total", "member versions produced")

# ---------------------------------------------------------------------------------------- fan-out and dispatch (24.1.3)
FANOUT_LAG_MS: Final = _latency_ms("fanout_lag_ms", "commit to GroupDispatch durable")
FANOUT_TARGET_SHARDS_PER_MESSAGE: Final = _size("fanout_target_shards_per_message", "MailboxShards of one message")
DISPATCH_TOTAL: Final = _counter("qim_fanout_dispatch_total", "GroupDispatch records appended")
FANOUT_ENTRIES_TOTAL: Final = _counter("fanout_entries_total", "mailbox entries written", "tenant", "shard")
DISPATCH_DUPLICATE_SUPPRESSED_TOTAL: Final = _counter(
    "dispatch_duplicate_suppressed_total", "dispatches the admission fold judged duplicate"
)
DISPATCH_ORPHANED_TOTAL: Final = _counter(
    "qim_dispatch_orphaned_total", "dispatches whose predecessor in the append call was refused; appended again"
)
STALE_EPOCH_DISPATCH_DROPPED_TOTAL: Final = _counter(
    "stale_epoch_dispatch_dropped_total", "dispatches with an old fencing_epoch dropped whole (§19.2.1)"
)
PER_USER_RPC_COUNT: Final = _gauge("per_user_rpc_count", "calls fan-out made per user instead of per shard (26.3)")
HINT_GAP_TOTAL: Final = _counter("qim_log_hint_gap_total", "hints that did not carry the next offset", "topic")

# ----------------------------------------------------------------------------- materialization and lanes (24.1.4, 26.0)
LANE_WATERMARK_STALL_MS: Final = _gauge(
    "lane_watermark_stall_ms", "time since W[lane] last advanced with work waiting", "shard", "lane"
)
LANE_WATERMARK_SKEW_SEQ: Final = _gauge("lane_watermark_skew_seq", "max(W) - min(W)", "shard")
LANE_REFUSED: Final = _gauge(
    "qim_mailbox_lane_refused", "lanes refused at takeover: recomputed W below W_floor; not 0 is a P1 alert", "shard"
)
MATERIALIZED_LAG_MS: Final = _latency_ms("materialized_lag_ms", "commit to covered by W, of the newest of a call")
MAILBOX_WRITES_TOTAL: Final = _counter("mailbox_writes_total", "append calls (mailbox_write_fail_rate)")
MAILBOX_WRITE_FAILURES_TOTAL: Final = _counter("mailbox_write_failures_total", "append calls that failed")
MAILBOX_STORE_WRITE_MS: Final = _latency_ms("mailbox_store_write_ms", "one append call (mailbox_store_write_p99)")
STORAGE_KEYS_EXAMINED: Final = _gauge("storage_keys_examined", "rows looked at by range scans")
STORAGE_ROWS_RETURNED: Final = _gauge("storage_rows_returned", "rows returned by range scans")
TOMBSTONES_SCANNED: Final = _gauge("tombstones_scanned", "tombstones met by range scans")
BODY_JOIN_COUNT: Final = _gauge("body_join_count", "record reads by which entries got their bodies, one per bucket")
BODY_INCLUDED_FALSE_COUNT: Final = _gauge("body_included_false_count", "entries sent without a body")
BODY_CACHE_TOTAL: Final = _counter("body_cache_total", "look-ups (body_cache_hit_ratio)", "result")
MEMBER_BITMAP_CACHE_TOTAL: Final = _counter("member_bitmap_cache_total", "look-ups of shard members", "result")

SESSION_LIST_LATENCY_MS: Final = _latency_ms("session_list_latency_ms", "PULL_SESSION_LIST to SESSION_LIST_BATCH")

# ------------------------------------------------------------------------------------------------ retention (§18.3)
MAILBOX_ENTRY_CAP_EVICTED_TOTAL: Final = _counter(
    "mailbox_entry_cap_evicted_total", "entries removed by the cap of a mailbox; not 0 is a P2 alert", "tenant"
)
LOG_TRIMMED_TOTAL: Final = _counter("qim_retention_log_trimmed_total", "records dropped from embedded logs", "topic")
LOG_BYTES: Final = _gauge("qim_retention_log_bytes", "memory of the partitions of this worker", "topic")
HISTORY_FORGOTTEN_TOTAL: Final = _counter("qim_retention_history_forgotten_total", "message records dropped by age")
MEMBERSHIP_VERSIONS_FORGOTTEN_TOTAL: Final = _counter(
    "qim_retention_membership_versions_forgotten_total", "superseded membership versions dropped"
)

# --------------------------------------------------------------------------------------------- correctness (24.1.5)
MAILBOX_SEQ_REGRESSION_COUNT: Final = _gauge("mailbox_seq_regression_count", "W or a mailbox_seq seen going back")
CURSOR_ADVANCED_BY_PUSH_TOTAL: Final = _counter("cursor_advanced_by_push_total", "device cursors moved by PUSH_EVENTS")
SILENT_GAP_DETECTED_TOTAL: Final = _counter("silent_gap_detected_total", "sync claimed complete over a gap")
EVENT_ID_NONDETERMINISM_TOTAL: Final = _counter(
    "event_id_nondeterminism_total", "entries refused because another one stands under their key (§6.7)"
)
MAILBOX_CURSOR_REBASE_COUNT: Final = _gauge("mailbox_cursor_rebase_count", "CURSOR_REBASED sent")
CURSOR_EXPIRED_TOTAL: Final = _counter("cursor_expired_total", "CURSOR_EXPIRED sent")
CURSOR_INVALID_TOTAL: Final = _counter("cursor_invalid_total", "cursors with a bad signature or out of range")

# ---------------------------------------------------------------------------------------- push and sockets (24.1.6)
PUSH_E2E_LATENCY_MS: Final = _latency_ms("push_e2e_latency_ms", "commit to written to the socket")
SLOW_CONNECTIONS_DEGRADED: Final = _gauge("slow_connections_degraded", "connections above the soft watermark")
SLOW_CONNECTION_CLOSED_TOTAL: Final = _counter("slow_connection_closed_total", "closed by the hard watermark")
MAILBOX_DIRTY_SENT_TOTAL: Final = _counter("mailbox_dirty_sent_total", "MAILBOX_DIRTY sent")
PUSH_DROP_BY_PRIORITY_TOTAL: Final = _counter("push_drop_by_priority_total", "frames dropped from send queues", "class")
PUSH_BATCH_RECIPIENTS: Final = _size("push_batch_recipients", "sockets per PushBatch (push_batch_fanout_ratio)")
PUSHED_TOTAL: Final = _counter("qim_gateway_pushed_total", "PUSH_EVENTS frames written")
BODY_ENCODE_COUNT: Final = _gauge("body_encode_count", "bodies encoded for a push, one per batch (26.3)")
PRESENCE_STALE_TOTAL: Final = _counter("presence_stale_total", "PRESENCE_STALE received")
PRESENCE_RECONCILE_DIFF: Final = _gauge("presence_reconcile_diff", "differences the last full reconcile found (§5.4.3)")

# --------------------------------------------------------------------------------------------- heartbeat (24.1.7)
PING_TOTAL: Final = _counter("qim_gateway_ping_total", "PING received", "kind")
TIMEWHEEL_TICK_OVERRUN_TOTAL: Final = _counter("timewheel_tick_overrun_total", "ticks of the heartbeat wheel missed")
PULL_MAILBOX_TOTAL: Final = _counter("pull_mailbox_total", "PULL_MAILBOX answered (empty_pull_ratio)")
EMPTY_PULL_TOTAL: Final = _counter("empty_pull_total", "PULL_MAILBOX that returned no entry (empty_pull_ratio)")
PULL_HISTORY_LATENCY_MS: Final = _latency_ms("pull_history_latency_ms", "PULL_HISTORY to HISTORY_BATCH")
IGNORED_PULL_TOTAL: Final = _counter("ignored_pull_total", "fallback pulls inside client_resync_min_interval (§20.4.1)")
HISTORY_EMPTY_SCAN_EXCEEDED_TOTAL: Final = _counter(
    "history_max_empty_bucket_scan_exceeded_total", "history pages cut by empty buckets (B.3)"
)

# ------------------------------------------------------------------------------------------------------- bad input
FRAMING_ERROR_TOTAL: Final = _counter(
    "qim_gateway_framing_error_total", "connections closed for what they sent", "kind"
)
UNKNOWN_OPCODE_DROPPED: Final = _gauge("unknown_opcode_dropped", "frames with an opcode not served (§27.1)")
BAD_REQUEST_TOTAL: Final = _counter(
    "qim_gateway_bad_request_total", "well-framed requests that make no sense", "opcode"
)
RATE_LIMIT_HIT_TOTAL: Final = _counter("rate_limit_hit_total", "rate-limit hits (§20.4.1)", "tenant", "dimension")

# ------------------------------------------------------------------------------------------------- inside the process
STORE_CALL_MS: Final = _latency_ms("qim_stores_call_ms", "one command or script, queueing included", "instance")
STORE_RECONNECT_TOTAL: Final = _counter("qim_stores_reconnect_total", "new connections to an instance", "instance")
STORE_FULL: Final = _gauge("qim_stores_full", "1 while an instance has too little room for new messages", "instance")
LEASES_HELD: Final = _gauge("qim_registry_leases_held", "ids this process holds the lease of", "kind")
LEASE_SELF_FENCED_TOTAL: Final = _counter(
    "qim_registry_self_fenced_total", "times all leases were dropped because the registry did not answer", "kind"
)
LEASE_EPOCH_EXHAUSTED_TOTAL: Final = _counter(
    "qim_registry_epoch_exhausted_total", "grants refused because no greater epoch exists; a P1 alert", "kind"
)
FENCED_TOTAL: Final = _counter("qim_stores_fenced_total", "calls refused for an old epoch", "kind")
BACKPLANE_DROPPED_TOTAL: Final = _counter("qim_backplane_dropped_total", "one-way messages dropped", "peer")
BACKPLANE_LINK_UP: Final = _gauge("qim_backplane_link_up", "1 while the link carries messages", "peer")
BACKPLANE_REQUEST_TIMEOUT_TOTAL: Final = _counter("qim_backplane_request_timeout_total", "requests unanswered", "peer")
BACKPLANE_HANDLER_FAILED_TOTAL: Final = _counter("qim_backplane_handler_failed_total", "handlers that raised", "opcode")
TASK_FAILED_TOTAL: Final = _counter("qim_runtime_task_failed_total", "supervised tasks that crashed")
LOG_FIELDS_DROPPED_TOTAL: Final = _counter("qim_obs_log_fields_dropped_total", "log fields not on the allow-list")

ALWAYS_ZERO: Final = frozenset(
    {
        "mailbox_seq_regression_count",
        "cursor_advanced_by_push_total",
        "silent_gap_detected_total",
        "event_id_nondeterminism_total",
        "clock_unsafe_total",
        "timewheel_tick_overrun_total",
        'push_drop_by_priority_total{class="control"}',
        "conversation_seq_regression_count",
        "per_user_rpc_count",
    }
)
"""§24.1.5 and its companions: any other value is a defect by itself. Series names as the text format prints them."""

ALERT_UNLESS_ZERO: Final = {
    "mailbox_seq_regression_count": "P1",
    "clock_unsafe_total": "P1",
    "qim_stores_full": "P1",
    "mailbox_entry_cap_evicted_total": "P2",
    "qim_mailbox_lane_refused": "P1",
    "qim_registry_epoch_exhausted_total": "P1",
}
"""Counts without a threshold: not 0, under any label, is an alert of this severity (§24.1)."""


def render() -> bytes:
    """All metrics of this process in the Prometheus text format."""
    return generate_latest(REGISTRY)


def always_zero_violations(exposition: str) -> dict[str, float]:
    """Series of `ALWAYS_ZERO` that are not 0 in a text of `render`."""
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        series, _, value = line.rpartition(" ")
        if series in ALWAYS_ZERO and float(value) != 0:
            found[series] = float(value)
    return found


def firing_alerts(exposition: str) -> dict[str, str]:
    """Name -> severity of `ALERT_UNLESS_ZERO` that fire in a text of `render`."""
    found: dict[str, str] = {}
    for line in exposition.splitlines():
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        if name in ALERT_UNLESS_ZERO and float(value) != 0:
            found[name] = ALERT_UNLESS_ZERO[name]
    return found
