from __future__ import annotations

import re
from typing import Any

import pytest

from qim.config.parameters import default_parameters, parameter_names
from qim.config.relations import RELATIONS
from qim.errors import StartupError

BROKEN: list[dict[str, Any]] = [
    {"bucket_hash": "md5"},
    {"virtual_bucket_count": 1024},
    {"mailbox_shard_count": 100},
    {"mailbox_shard_count": 2048},
    {"mailbox_shard_count": 1 << 17},
    {"connection_shard_count": 1000},
    {"lane_count": 48},
    {"lane_count": 128},
    {"conversation_bucket_count": 2048},
    {"single_host_mailbox_shard_count": 0},
    {"shard_lease_ttl": 12_000, "writer_lease_ttl": 12_000},
    {"writer_lease_ttl": 14_000},
    {"writer_lease_renew_interval": 6000},
    {"message_seq_bucket_width": 1000},
    {"client_dedup_ttl_seconds": 60},
    {"client_dedup_window_hours": 0},
    {"mailbox_retention_days": 0},
    {"log_retention_days": 0},
    {"dispatch_progress_retention": 1},
    {"membership_version_retention": 604_800_000},
    {"history_hot_window": 1},
    {"default_history_retention_days": 0},
    {"history_archive_batch_max": 5000},
    {"pull_mailbox_max_items": 7},
    {"pull_mailbox_window": 0},
    {"ping_interval_initial": 121_000},
    {"presence_lease_renew": 30_000},
    {"revocation_record_retention": 3_600_000},
    {"token_refresh_lead": 3_600_000},
    {"unauth_connection_timeout": 0},
    {"max_frame_bytes": 8 << 20},
    {"max_custom_payload_bytes": 2 << 20},
    {"custom_type_max_bytes": 65},
    {"conn_send_low_watermark": 2 << 20},
    {"per_user_msg_rate": 41},
    {"per_sender_in_conversation_burst": 0},
    {"max_devices_per_user": 0},
    {"inline_body_max_bytes": 9000},
    {"lane_stall_alert": 200_000},
    {"push_grace_window": 1},
    {"session_list_page_limit": 201},
    {"member_page_limit": 201},
    {"max_members_per_group": 100_001},
    {"append_chunk_members": 2001},
    {"append_calls_in_flight_max": 0},
    {"commit_batch_max": 0},
    {"submit_timeout_ms": 3000},
    {"delivery_lag_group_ms": 501},
    {"lag_report_interval_ms": 251},
    {"history_page_limit": 201},
    {"restart_backoff_initial_ms": 6000},
    {"store_free_ratio_min": 1.0},
]


@pytest.mark.parametrize("overrides", BROKEN, ids=str)
def test_a_contradiction_is_named_with_its_values(overrides: dict[str, Any]) -> None:
    with pytest.raises(StartupError) as refused:
        default_parameters(**overrides)
    text = str(refused.value)
    assert text.startswith("parameters contradict each other: must hold: ")
    name, value = next(iter(overrides.items()))
    assert f"{name} = {value!r}" in text


def test_every_relation_is_broken_by_one_of_the_cases() -> None:
    told = set()
    for overrides in BROKEN:
        with pytest.raises(StartupError) as refused:
            default_parameters(**overrides)
        told.add(re.split("must hold: |; found", str(refused.value))[1])
    assert told == {relation.text for relation in RELATIONS}


def test_relations_name_parameters() -> None:
    for relation in RELATIONS:
        assert set(re.findall(r"[a-z][a-z0-9_]+", relation.text)) & parameter_names(), relation.text
