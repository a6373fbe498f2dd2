"""Which sends a writer takes now: rates, the tenant's fan-out quota and delivery lag (§8.2, DESIGN-data §4), pure.

Order: L1 per sender, L2 per conversation, L3 per tenant, then delivery lag; the first refusal ends it and takes no
token of any layer. Nothing is allocated before, so a refused message leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Protocol

from qim.config.parameters import Parameters
from qim.core.ids import direct_members
from qim.core.rate_limit import RateLimiter
from qim.errors import Detail, ErrorCode
from qim.shard_workers.conversation.membership import Placement

LAG_REPORT_EXPIRES_MS: Final = 1000
"""A reporter that is silent this long has died: its numbers no longer bound anything (DESIGN-data §4)."""
DAY_MS: Final = 86_400_000


class Refusal(NamedTuple):
    """Why a request is not served. `dimension` names the limit in metrics; `retry_after_ms` gets its jitter later."""

    code: ErrorCode
    detail: str = ""
    retry_after_ms: float = 0.0
    dimension: str = ""


DENIED: Final = Refusal(ErrorCode.PERMISSION_DENIED)
BAD_REQUEST: Final = Refusal(ErrorCode.PERMISSION_DENIED, Detail.BAD_REQUEST)
TOO_LARGE: Final = Refusal(ErrorCode.PAYLOAD_TOO_LARGE)


class FanoutQuota(Protocol):
    """L3: `tenant_fanout_quota` in estimated mailbox entries."""

    def wait_ms(self, tenant_id: str, entries: int, now_ms: float) -> float:
        """0 when the tenant may cause `entries` more, else when to ask again; takes nothing."""
        ...

    def take(self, tenant_id: str, entries: int, now_ms: float) -> None: ...


class UnlimitedQuota:
    """No tenant has a contract that bounds its fan-out."""

    __slots__ = ()

    def wait_ms(self, tenant_id: str, entries: int, now_ms: float) -> float:
        return 0.0

    def take(self, tenant_id: str, entries: int, now_ms: float) -> None:
        """Nothing to count."""


class LagTable:
    """The newest LAG_REPORT of every partition and shard: queueing delays in ms."""

    __slots__ = ("_lane_count", "_partitions", "_shards", "_worst_ms", "_worst_until_ms")

    def __init__(self, lane_count: int) -> None:
        self._lane_count = lane_count
        self._partitions: dict[int, tuple[float, int]] = {}
        self._shards: dict[int, tuple[float, Sequence[int], int]] = {}
        self._worst_ms = 0
        self._worst_until_ms = 0.0

    def update_partitions(self, partitions: Sequence[int], lags_ms: Sequence[int], now_ms: float) -> None:
        """Age of the oldest outbox record whose dispatches are not durable, per partition."""
        for partition, lag_ms in zip(partitions, lags_ms, strict=True):
            self._partitions[partition] = (now_ms, lag_ms)
        self._find_worst(now_ms)

    def update_shards(self, shards: Sequence[int], lane_lags_ms: Sequence[int], now_ms: float) -> None:
        """Age of each lane's head item that waits; `lane_count` numbers per shard. ValueError on another length."""
        count = self._lane_count
        if len(lane_lags_ms) != len(shards) * count:
            raise ValueError(f"{len(lane_lags_ms)} lags for {len(shards)} shards of {count} lanes")
        for position, shard in enumerate(shards):
            lags_ms = tuple(lane_lags_ms[position * count : (position + 1) * count])
            self._shards[shard] = (now_ms, lags_ms, max(lags_ms))
        self._find_worst(now_ms)

    def all_below(self, limit_ms: float, now_ms: float) -> bool:
        """True when nothing reported lags that much: the usual case, answered without a look-up."""
        return self._worst_ms <= limit_ms or now_ms > self._worst_until_ms

    def partition_ms(self, partition: int, now_ms: float) -> int:
        at_ms, lag_ms = self._partitions.get(partition, (0.0, 0))
        return lag_ms if now_ms - at_ms <= LAG_REPORT_EXPIRES_MS else 0

    def lane_ms(self, shard: int, lane: int, now_ms: float) -> int:
        found = self._shards.get(shard)
        return found[1][lane] if found and now_ms - found[0] <= LAG_REPORT_EXPIRES_MS else 0

    def shard_ms(self, shard: int, now_ms: float) -> int:
        """The largest lane of a shard."""
        found = self._shards.get(shard)
        return found[2] if found and now_ms - found[0] <= LAG_REPORT_EXPIRES_MS else 0

    def _find_worst(self, now_ms: float) -> None:
        oldest_ms = now_ms - LAG_REPORT_EXPIRES_MS
        worst_ms = 0
        for at_ms, lag_ms in self._partitions.values():
            if at_ms >= oldest_ms and lag_ms > worst_ms:
                worst_ms = lag_ms
        for at_ms, _, lag_ms in self._shards.values():
            if at_ms >= oldest_ms and lag_ms > worst_ms:
                worst_ms = lag_ms
        self._worst_ms = worst_ms
        self._worst_until_ms = now_ms + LAG_REPORT_EXPIRES_MS


class SendFacts(NamedTuple):
    """What admission looks at; `shards` only for a group: the MailboxShards that have members."""

    tenant_id: str
    conversation_id: str
    sender_id: str
    bucket: int
    member_count: int
    shards: Collection[int] | None
    mentions_all: bool
    limits_lifted: bool
    queued_ms: float = 0.0
    """How long the bucket's commit queue is: the age of the oldest send in its call under way."""


class WriterAdmission:
    """The limiters and lag of one writer; shared by all its buckets."""

    __slots__ = (
        "_at_all_day", "_at_all_rate", "_at_all_sent", "_parameters", "_per_conversation", "_per_sender", "_per_user",
        "_placement", "_quota", "lag",
    )  # fmt: skip

    def __init__(self, parameters: Parameters, placement: Placement, *, quota: FanoutQuota | None = None) -> None:
        self._parameters = parameters
        self._placement = placement
        self._quota = quota or UnlimitedQuota()
        self.lag = LagTable(placement.lane_count)
        sender = parameters.per_sender_in_conversation_rate
        self._per_sender = RateLimiter(
            per_ms=sender.per_ms / sender.messages, burst=parameters.per_sender_in_conversation_burst
        )
        self._per_user = RateLimiter(
            per_ms=1000 / parameters.per_user_msg_rate, burst=parameters.per_user_msg_rate_burst
        )
        self._per_conversation = {
            tier.msgs_per_second: RateLimiter(per_ms=1000 / tier.msgs_per_second, burst=tier.msgs_per_second)
            for tier in parameters.per_conversation_msg_rate
        }
        at_all = parameters.at_all_rate_per_conversation
        self._at_all_rate = RateLimiter(per_ms=at_all.per_ms / at_all.times, burst=at_all.times)
        self._at_all_day = -1
        self._at_all_sent: dict[tuple[str, str], int] = {}

    def judge(self, facts: SendFacts, now_ms: float, unix_ms: int) -> Refusal | None:
        """None admits the send and takes the tokens of every layer it passed."""
        refusal = None if facts.limits_lifted else self._over_rate(facts, now_ms, unix_ms)
        if refusal is None:
            refusal = self._over_quota(facts, now_ms) or self._over_lag(facts, now_ms)
        if refusal is None:
            self._take(facts, now_ms)
        return refusal

    def _over_rate(self, facts: SendFacts, now_ms: float, unix_ms: int) -> Refusal | None:
        """L1a, L1b, L2; a message to all has a quota of its own instead of L2 (§11.4.2)."""
        user = (facts.tenant_id, facts.sender_id)
        conversation = (facts.tenant_id, facts.conversation_id)
        wait_ms = self._per_sender.wait_ms((user, facts.conversation_id), now_ms)
        if wait_ms > 0:
            return _rate_limited(wait_ms, "per_sender_in_conversation_rate")
        wait_ms = self._per_user.wait_ms(user, now_ms)
        if wait_ms > 0:
            return _rate_limited(wait_ms, "per_user_msg_rate")
        if facts.mentions_all:
            return self._over_at_all(user, conversation, now_ms, unix_ms)
        wait_ms = self._conversation_limiter(facts).wait_ms(conversation, now_ms)
        return _rate_limited(wait_ms, "per_conversation_msg_rate") if wait_ms > 0 else None

    def _over_at_all(
        self, user: tuple[str, str], conversation: tuple[str, str], now_ms: float, unix_ms: int
    ) -> Refusal | None:
        day = unix_ms // DAY_MS
        if day != self._at_all_day:
            self._at_all_day = day
            self._at_all_sent.clear()
        if self._at_all_sent.get(user, 0) >= self._parameters.at_all_daily_quota_per_sender:
            return _rate_limited(DAY_MS - unix_ms % DAY_MS, "at_all_daily_quota_per_sender")
        wait_ms = self._at_all_rate.wait_ms(conversation, now_ms)
        return _rate_limited(wait_ms, "at_all_rate_per_conversation") if wait_ms > 0 else None

    def _over_quota(self, facts: SendFacts, now_ms: float) -> Refusal | None:
        wait_ms = self._quota.wait_ms(facts.tenant_id, facts.member_count, now_ms)
        if wait_ms > 0:
            return Refusal(ErrorCode.FANOUT_QUOTA_EXCEEDED, "", wait_ms, "tenant_fanout_quota")
        return None

    def _over_lag(self, facts: SendFacts, now_ms: float) -> Refusal | None:
        direct = facts.shards is None
        limit_ms = self._parameters.delivery_lag_ms if direct else self._parameters.delivery_lag_group_ms
        lag = self.lag
        if lag.all_below(limit_ms - facts.queued_ms, now_ms) and facts.queued_ms <= limit_ms:
            return None
        lag_ms = lag.partition_ms(facts.bucket, now_ms)
        if facts.shards is None:
            for user_id in direct_members(facts.conversation_id):
                shard = self._placement.shard(facts.tenant_id, user_id)
                lane = self._placement.lane(facts.tenant_id, user_id)
                lag_ms = max(lag_ms, lag.lane_ms(shard, lane, now_ms))
        else:
            lag_ms = max(lag_ms, max((lag.shard_ms(shard, now_ms) for shard in facts.shards), default=0))
        # what is sent now waits for both: the queue before the commit, and those behind it
        lag_ms += int(facts.queued_ms)
        if lag_ms <= limit_ms:
            return None
        clip = self._parameters.delivery_lag_retry_ms
        retry_ms = min(max(lag_ms, clip.min_ms), clip.max_ms)
        return Refusal(ErrorCode.RATE_LIMITED, Detail.DELIVERY_LAG, retry_ms, "delivery_lag")

    def _take(self, facts: SendFacts, now_ms: float) -> None:
        self._quota.take(facts.tenant_id, facts.member_count, now_ms)
        if facts.limits_lifted:
            return
        user = (facts.tenant_id, facts.sender_id)
        conversation = (facts.tenant_id, facts.conversation_id)
        self._per_sender.take((user, facts.conversation_id), now_ms)
        self._per_user.take(user, now_ms)
        if facts.mentions_all:
            self._at_all_rate.take(conversation, now_ms)
            self._at_all_sent[user] = self._at_all_sent.get(user, 0) + 1
        else:
            self._conversation_limiter(facts).take(conversation, now_ms)

    def _conversation_limiter(self, facts: SendFacts) -> RateLimiter:
        """The tier follows the member count of the moment (§8.2)."""
        return self._per_conversation[int(self._parameters.conversation_msg_rate(facts.member_count))]


def _rate_limited(wait_ms: float, dimension: str) -> Refusal:
    return Refusal(ErrorCode.RATE_LIMITED, "", wait_ms, dimension)
