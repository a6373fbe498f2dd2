"""Rates, quota and delivery lag of one writer."""

from __future__ import annotations

from typing import Any

import pytest

from qim.config.parameters import default_parameters
from qim.core.ids import lane_id, mailbox_shard_id
from qim.errors import Detail, ErrorCode
from qim.shard_workers.conversation.admission import (
    LAG_REPORT_EXPIRES_MS,
    LagTable,
    Refusal,
    SendFacts,
    WriterAdmission,
)
from qim.shard_workers.conversation.membership import Placement

LIMITS = default_parameters()
LANES = 64
SHARDS = 16
NOON_MS = 20_000 * 86_400_000 + 43_200_000
DIRECT = SendFacts("t", "dm:ann:bob", "ann", 7, 2, None, False, False)
GROUP = DIRECT._replace(conversation_id="g:choir", member_count=30, shards=(1, 2))


class FixedQuota:
    """Allows so many entries altogether."""

    def __init__(self, entries: int) -> None:
        self.left = entries

    def wait_ms(self, tenant_id: str, entries: int, now_ms: float) -> float:
        return 0 if entries <= self.left else 1000

    def take(self, tenant_id: str, entries: int, now_ms: float) -> None:
        self.left -= entries


def admission(**fields: Any) -> WriterAdmission:
    return WriterAdmission(LIMITS, Placement(SHARDS, LANES), **fields)


def judge(made: WriterAdmission, facts: SendFacts, now_ms: float = 1000.0, unix_ms: int = NOON_MS) -> Refusal | None:
    return made.judge(facts, now_ms, unix_ms)


def admitted_at_once(made: WriterAdmission, facts: SendFacts, *, vary_sender: bool) -> int:
    for count in range(1000):
        sender = f"u{count}" if vary_sender else facts.sender_id
        if judge(made, facts._replace(sender_id=sender)) is not None:
            return count
    raise AssertionError("no limit")


def test_one_sender_has_a_burst_and_then_one_message_every_three_seconds() -> None:
    made = admission()
    burst = LIMITS.per_sender_in_conversation_burst
    assert admitted_at_once(made, DIRECT, vary_sender=False) == burst
    refused = judge(made, DIRECT)
    assert refused == Refusal(ErrorCode.RATE_LIMITED, "", 3000, "per_sender_in_conversation_rate")
    assert judge(made, DIRECT, now_ms=4000) is None


def test_one_user_is_bounded_over_all_conversations() -> None:
    made = admission()
    for index in range(LIMITS.per_user_msg_rate_burst):
        assert judge(made, DIRECT._replace(conversation_id=f"dm:ann:u{index}")) is None
    refused = judge(made, DIRECT._replace(conversation_id="dm:ann:zoe"))
    assert refused is not None
    assert refused.dimension == "per_user_msg_rate"


@pytest.mark.parametrize(("members", "at_once"), [(1000, 20), (1001, 5), (10_000, 5), (10_001, 2)])
def test_a_conversation_is_bounded_by_its_size(members: int, at_once: int) -> None:
    facts = GROUP._replace(member_count=members)
    assert admitted_at_once(admission(), facts, vary_sender=True) == at_once


def test_lifted_limits_lift_rates_but_not_lag() -> None:
    made = admission()
    lifted = DIRECT._replace(limits_lifted=True)
    assert all(judge(made, lifted) is None for _ in range(1000))
    made.lag.update_partitions([7], [900], 1000)
    refused = judge(made, lifted)
    assert refused is not None
    assert refused.detail == Detail.DELIVERY_LAG


def test_a_refusal_takes_no_token_of_any_layer() -> None:
    made = admission(quota=FixedQuota(4))
    assert judge(made, DIRECT) is None
    made.lag.update_partitions([7], [900], 1000)
    for _ in range(100):
        assert judge(made, DIRECT) is not None
    made.lag.update_partitions([7], [0], 1000)
    assert judge(made, DIRECT) is None
    refused = judge(made, DIRECT)
    assert refused == Refusal(ErrorCode.FANOUT_QUOTA_EXCEEDED, "", 1000, "tenant_fanout_quota")


def test_addressing_everybody_has_a_quota_of_its_own() -> None:
    made = admission()
    to_all = GROUP._replace(mentions_all=True)
    assert judge(made, to_all) is None
    refused = judge(made, to_all)
    assert refused is not None
    assert refused.dimension == "at_all_rate_per_conversation"
    assert 0 < refused.retry_after_ms <= 600_000
    assert admitted_at_once(made, GROUP, vary_sender=True) == 20, "no token of the conversation was taken"


def test_addressing_everybody_is_counted_per_day() -> None:
    made = admission()
    for index in range(LIMITS.at_all_daily_quota_per_sender):
        facts = GROUP._replace(conversation_id=f"g:c{index}", mentions_all=True)
        assert judge(made, facts) is None
    late = GROUP._replace(conversation_id="g:more", mentions_all=True)
    refused = judge(made, late)
    assert refused is not None
    assert refused.dimension == "at_all_daily_quota_per_sender"
    assert refused.retry_after_ms == 43_200_000
    assert judge(made, late, unix_ms=NOON_MS + 43_200_000) is None


def lane_lags(lane: int, lag_ms: int) -> list[int]:
    lags = [0] * LANES
    lags[lane] = lag_ms
    return lags


def test_a_single_chat_is_judged_by_its_two_lanes_alone() -> None:
    made = admission()
    shard, lane = mailbox_shard_id("t", "bob", SHARDS), lane_id("t", "bob", LANES)
    made.lag.update_shards([shard], lane_lags((lane + 1) % LANES, 5000), 1000)
    assert judge(made, DIRECT) is None
    made.lag.update_shards([shard], lane_lags(lane, LIMITS.delivery_lag_ms), 1000)
    assert judge(made, DIRECT) is None
    made.lag.update_shards([shard], lane_lags(lane, LIMITS.delivery_lag_ms + 1), 1000)
    refused = judge(made, DIRECT)
    assert refused == Refusal(ErrorCode.RATE_LIMITED, Detail.DELIVERY_LAG, 501, "delivery_lag")


def test_a_group_is_judged_by_the_largest_lane_of_its_shards() -> None:
    made = admission()
    made.lag.update_shards([3], lane_lags(5, 5000), 1000)
    assert judge(made, GROUP) is None
    made.lag.update_shards([1, 2], lane_lags(9, 0) + lane_lags(9, LIMITS.delivery_lag_group_ms + 1), 1000)
    refused = judge(made, GROUP)
    assert refused is not None
    assert refused.retry_after_ms == LIMITS.delivery_lag_group_ms + 1
    assert judge(made, DIRECT._replace(conversation_id="dm:cid:dan")) is None


def test_the_commit_queue_counts_on_top_of_what_lies_behind_it() -> None:
    made = admission()
    limit_ms = LIMITS.delivery_lag_ms
    made.lag.update_partitions([7], [300], 1000)
    assert judge(made, DIRECT._replace(queued_ms=limit_ms - 300)) is None
    refused = judge(made, DIRECT._replace(queued_ms=limit_ms - 299))
    assert refused == Refusal(ErrorCode.RATE_LIMITED, Detail.DELIVERY_LAG, limit_ms + 1, "delivery_lag")
    assert judge(admission(), DIRECT._replace(queued_ms=limit_ms)) is None
    assert judge(admission(), DIRECT._replace(queued_ms=limit_ms + 1)) is not None


@pytest.mark.parametrize(("lag_ms", "retry_ms"), [(251, 251), (9000, 2000)])
def test_the_wait_is_the_lag_clipped(lag_ms: int, retry_ms: int) -> None:
    made = admission()
    made.lag.update_partitions([7], [lag_ms], 1000)
    refused = judge(made, GROUP)
    assert refused is not None
    assert refused.retry_after_ms == retry_ms


def test_a_silent_reporter_bounds_nothing() -> None:
    lag = LagTable(LANES)
    lag.update_partitions([7], [900], 1000)
    lag.update_shards([1], lane_lags(3, 800), 1000)
    assert (lag.partition_ms(7, 1500), lag.lane_ms(1, 3, 1500), lag.shard_ms(1, 1500)) == (900, 800, 800)
    assert not lag.all_below(500, 1500)
    late_ms = 1001 + LAG_REPORT_EXPIRES_MS
    assert (lag.partition_ms(7, late_ms), lag.lane_ms(1, 3, late_ms), lag.shard_ms(1, late_ms)) == (0, 0, 0)
    assert lag.all_below(500, late_ms)


def test_a_report_of_another_lane_count_is_refused() -> None:
    with pytest.raises(ValueError, match="lanes"):
        LagTable(LANES).update_shards([1], [0] * 10, 1000)
