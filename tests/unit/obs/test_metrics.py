from __future__ import annotations

from qim.obs import metrics


def test_names_are_exposed_as_the_contract_spells_them() -> None:
    text = metrics.render().decode()
    for name in (
        "connections_online",
        "kicked_total",
        "send_reject_total",
        "mailbox_seq_regression_count",
        "event_id_nondeterminism_total",
        "storage_keys_examined",
        "body_encode_count",
        "unknown_opcode_dropped",
        "presence_stale_total",
    ):
        assert f"# TYPE {name} " in text or f"# TYPE {name}_total " in text, name
    assert "_created" not in text


def test_always_zero_violations_are_named() -> None:
    text = "\n".join(
        [
            "# HELP mailbox_seq_regression_count x",
            "mailbox_seq_regression_count 0.0",
            "clock_unsafe_total 2.0",
            'push_drop_by_priority_total{class="control"} 1.0',
            'push_drop_by_priority_total{class="room"} 5.0',
            "connections_online 3.0",
        ]
    )
    assert metrics.always_zero_violations(text) == {
        "clock_unsafe_total": 2.0,
        'push_drop_by_priority_total{class="control"}': 1.0,
    }


def test_counters_without_a_threshold_alert_under_any_label() -> None:
    text = (
        'mailbox_entry_cap_evicted_total{tenant="a"} 0.0\n'
        'mailbox_entry_cap_evicted_total{tenant="b"} 3.0\n'
        'qim_mailbox_lane_refused{shard="7"} 3.0\n'
        "dedup_hit_total 7.0\n"
    )
    assert metrics.firing_alerts(text) == {"mailbox_entry_cap_evicted_total": "P2", "qim_mailbox_lane_refused": "P1"}
    assert metrics.firing_alerts(text.replace("3.0", "0.0")) == {}
