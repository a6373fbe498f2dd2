"""Part `large`: one message to 100,000 members until its last entry is written, and 1:1 traffic beside it."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import redis

from qim.app.bench.child import Child, ChildFailed
from qim.app.bench.figures import Figure, PartReport
from qim.app.bench.load import RunResult, SendOne
from qim.app.bench.node import PAYLOAD_BYTES, TENANT, BenchNode
from qim.app.bench.zadd import BareZadd
from qim.app.connect import NodeAddress
from qim.app.latency import Latency, summarize
from qim.core.ids import direct_conversation_id, group_conversation_id
from qim.core.seq import LaneVector, log_offset_of
from qim.protocol.qim_pb2 import GroupDispatch
from qim.stores.redis import keys

MEMBERS: Final = 100_000
GROUP_ID: Final = "bench-large"
PEOPLE: Final = 100
DIRECT_RATE_PER_S: Final = 200.0
QUIET_ROUNDS: Final = 5
"""Messages without other traffic, each beside a round of the floor."""
MESSAGE_EVERY_S: Final = 4.0
RATIO_MAX: Final = 2.5
DIRECT_P99_MAX_MS: Final = 30.0
_ARRIVAL_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.005
_AFTER_S: Final = 0.1
"""Traffic due this long after the last entry still counts as beside the message: it may wait for it."""

Progress = Callable[[str], None]


class Span(NamedTuple):
    """From the moment a message left until every entry was written (monotonic seconds)."""

    from_s: float
    to_s: float

    @property
    def ms(self) -> float:
        return (self.to_s - self.from_s) * 1000


class MaterializationProbe:
    """Watches logs and watermarks on the node's servers."""

    def __init__(self, node: NodeAddress, conversation_id: str) -> None:
        self._core = redis.Redis.from_url(node.core_address)
        self._mailbox = redis.Redis.from_url(node.mailbox_address)
        self._shards = range(node.mailbox_shard_count)
        self._conversation_id = conversation_id

    def log_ends(self) -> list[int]:
        """Offset of the next dispatch, per shard."""
        return [int(value or 0) for value in self._core.mget([keys.dispatch_next(shard) for shard in self._shards])]

    def wait_for(self, log_ends: Sequence[int]) -> float:
        """When the next message of the group behind `log_ends` was materialized on every shard, monotonic seconds."""
        deadline_s = time.monotonic() + _ARRIVAL_TIMEOUT_S
        wanted: dict[int, int] = {}
        left = set(self._shards)
        while left:
            for shard in left - wanted.keys():
                offset = self._find(shard, log_ends[shard])
                if offset is not None:
                    wanted[shard] = offset
            left -= self._reached({shard: wanted[shard] for shard in left if shard in wanted})
            if time.monotonic() > deadline_s:
                raise ChildFailed(f"the message did not reach {len(left)} shards in {_ARRIVAL_TIMEOUT_S:.0f} s")
            if left:
                time.sleep(_POLL_S)
        return time.monotonic()

    def entry_bytes(self, user_id: str) -> int:
        """Size of the newest stored entry of a member."""
        for name in self._mailbox.scan_iter(match=keys.mailbox_prefix(TENANT, user_id) + "*", count=10_000):
            return len(self._mailbox.zrange(name, -1, -1)[0])
        raise ChildFailed(f"{user_id} has no mailbox")

    def close(self) -> None:
        self._core.close()
        self._mailbox.close()

    def _find(self, shard: int, from_offset: int) -> int | None:
        found = self._core.xrange(keys.dispatch(shard), min=f"{from_offset + 1}-0")
        for stream_id, fields in cast(list[tuple[bytes, dict[bytes, bytes]]], found):
            if GroupDispatch.FromString(fields[keys.STREAM_FIELD]).record.conversation_id == self._conversation_id:
                return int(stream_id.split(b"-")[0]) - 1
        return None

    def _reached(self, wanted: dict[int, int]) -> set[int]:
        """Shards on which every lane has passed the offset."""
        reads = self._mailbox.pipeline(transaction=False)
        for shard in wanted:
            reads.hget(keys.shard(shard), keys.WATERMARKS_FIELD)
        done = set()
        for (shard, offset), packed in zip(wanted.items(), reads.execute(), strict=True):
            if packed and all(seq and log_offset_of(seq) >= offset for seq in LaneVector.unpack(packed).values):
                done.add(shard)
        return done


def run_large(seconds: float, progress: Progress) -> PartReport:
    """The group is made, then messages alone beside the floor, then messages with 1:1 traffic."""
    members = [f"m{number:06d}" for number in range(MEMBERS - 1)]
    conversation_id = group_conversation_id(GROUP_ID)
    people = [f"user{number:03d}" for number in range(PEOPLE)]
    with BenchNode() as node:
        owner = node.log_in(["owner"])
        probe = MaterializationProbe(node.address, conversation_id)
        try:
            before = probe.log_ends()
            node.make_group(owner, GROUP_ID, members)
            probe.wait_for(before)
            progress(f"group of {MEMBERS:,} made")
            quiet, floors = _quiet_rounds(node, owner, probe, conversation_id, members[0], progress)
            generator = node.log_in(people, first_number=1)
            busy, traffic = _busy_rounds(node, owner, generator, people, probe, conversation_id, seconds, progress)
        finally:
            probe.close()
    return _report(quiet, floors, busy, traffic, seconds)


def _send(owner: Child, probe: MaterializationProbe, conversation_id: str, run_id: str) -> Span:
    before = probe.log_ends()
    sent_s: float = owner.call(
        SendOne(conversation_id=conversation_id, payload_bytes=PAYLOAD_BYTES, run_id=run_id), _ARRIVAL_TIMEOUT_S
    )
    return Span(sent_s, probe.wait_for(before))


def _quiet_rounds(
    node: BenchNode,
    owner: Child,
    probe: MaterializationProbe,
    conversation_id: str,
    member: str,
    progress: Progress,
) -> tuple[list[float], list[float]]:
    """Milliseconds of messages and of floor rounds, alternating. The first of each makes keys and does not count."""
    _send(owner, probe, conversation_id, "first")
    floor = BareZadd(node.address.mailbox_address, count=MEMBERS, entry_bytes=probe.entry_bytes(member))
    messages, floors = [], []
    try:
        floor.run()
        for number in range(QUIET_ROUNDS):
            messages.append(_send(owner, probe, conversation_id, f"quiet{number}").ms)
            floors.append(floor.run() * 1000)
            progress(f"message {messages[-1]:.0f} ms, bare ZADD {floors[-1]:.0f} ms")
    finally:
        floor.close()
    return messages, floors


def _busy_rounds(
    node: BenchNode,
    owner: Child,
    generator: Child,
    people: Sequence[str],
    probe: MaterializationProbe,
    conversation_id: str,
    seconds: float,
    progress: Progress,
) -> tuple[list[Span], RunResult]:
    """A message every few seconds while 1:1 traffic runs; begins and ends without one."""
    targets = [direct_conversation_id(user, people[number ^ 1]) for number, user in enumerate(people)]
    from_s = node.start_run(generator, targets, DIRECT_RATE_PER_S, seconds)
    spans: list[Span] = []
    next_s = from_s + min(MESSAGE_EVERY_S, seconds / 4)
    while next_s < from_s + seconds - min(MESSAGE_EVERY_S / 2, seconds / 4):
        time.sleep(max(next_s - time.monotonic(), 0))
        spans.append(_send(owner, probe, conversation_id, f"busy{len(spans)}"))
        progress(f"message {spans[-1].ms:.0f} ms with 1:1 traffic")
        next_s = max(next_s + MESSAGE_EVERY_S, time.monotonic() + MESSAGE_EVERY_S / 2)
    return spans, node.finish_run(generator, seconds)


def beside(due_s: Sequence[float], latency_ms: Sequence[float], spans: Sequence[Span]) -> tuple[Latency, Latency]:
    """(inside, outside) of the spans: latencies by the time they were due."""
    order = sorted(range(len(due_s)), key=due_s.__getitem__)
    times = [due_s[index] for index in order]
    is_inside = [False] * len(order)
    for span in spans:
        first, last = bisect_left(times, span.from_s), bisect_right(times, span.to_s + _AFTER_S)
        is_inside[first:last] = [True] * (last - first)
    inside = [latency_ms[index] for index, within in zip(order, is_inside, strict=True) if within]
    outside = [latency_ms[index] for index, within in zip(order, is_inside, strict=True) if not within]
    return summarize(inside), summarize(outside)


def _report(
    quiet: Sequence[float], floors: Sequence[float], busy: Sequence[Span], traffic: RunResult, seconds: float
) -> PartReport:
    samples = traffic.samples
    during, otherwise = beside(samples.delivery_due_s, samples.delivery_ms, busy)
    ack_during, ack_otherwise = beside(samples.ack_due_s, samples.ack_ms, busy)
    message_ms, floor_ms = summarize(quiet).p50_ms, summarize(floors).p50_ms
    missing = len(samples.ack_ms) - len(samples.delivery_ms)
    failures = [f"{missing} deliveries of 1:1 messages are missing"] if missing > 0 else []
    if traffic.unanswered:
        failures.append(f"{traffic.unanswered} 1:1 messages got no answer")
    return PartReport(
        part="large",
        conditions=[
            f"one group of {MEMBERS:,}, only the sender online; medians of {len(quiet)} alternating rounds",
            f"1:1 traffic at {DIRECT_RATE_PER_S:.0f} msg/s between {PEOPLE} others for {seconds:.0f} s, open loop",
        ],
        figures=[
            Figure(
                name="until the last entry", value=message_ms, unit="ms", beside="bare pipelined ZADD, same bytes",
                beside_value=floor_ms, at_most=RATIO_MAX, aim_is_ratio=True,
            ),
            Figure(name="  with 1:1 traffic beside it", value=summarize([span.ms for span in busy]).p50_ms, unit="ms"),
            Figure(
                name="1:1 delivery P99 meanwhile", value=during.p99_ms, unit="ms", beside="otherwise",
                beside_value=otherwise.p99_ms, at_most=DIRECT_P99_MAX_MS,
            ),
        ],
        details={
            "message_ms": list(quiet),
            "floor_ms": list(floors),
            "message_with_traffic_ms": [span.ms for span in busy],
            "delivery_during": during._asdict(),
            "delivery_otherwise": otherwise._asdict(),
            "ack_during": ack_during._asdict(),
            "ack_otherwise": ack_otherwise._asdict(),
        },
        failures=failures,
    )  # fmt: skip
