"""A node of the bench's own, load generators in front of it, and one measured point of an open loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from qim.app.bench.child import Child
from qim.app.bench.cpu import CpuMeter, per_item_us
from qim.app.bench.load import LogIn, MakeGroup, Run, RunResult, generate
from qim.app.connect import AdminClient, NodeAddress
from qim.app.latency import Latency, summarize
from qim.app.own_node import TEST_PARAMETERS, OwnNode, OwnNodeOptions

TENANT: Final = "bench"
"""Its rate limits are lifted on the bench's node; the bound by delivery lag stays."""
PAYLOAD_BYTES: Final = 300
DEVICE: Final = "bench"
SERVER_KIND: Final = "redis"
"""Private servers are called redis-<what they hold>."""
TOKEN_TTL_S: Final = 6 * 3600
START_AHEAD_S: Final = 0.2
"""Time for every generator to be told before the first message is due."""
WARMUP_S: Final = 2.0
LOGIN_TIMEOUT_S: Final = 300.0
RUN_MARGIN_S: Final = 60.0
ACK_P99_MAX_MS: Final = 150.0
DELIVERY_P99_MAX_MS: Final = 300.0
REFUSED_SHARE_MAX: Final = 0.001
"""A point with more refusals is overload, not sustained."""
_SERVER_MEMORY_SHARE: Final = 0.3
"""Of the host's memory, for each of the two servers: a minute of group traffic is a gigabyte."""
_TOKENS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One open-loop point. Rates count what was due in `seconds`; CPU is per acknowledged message."""

    offered_per_s: float
    seconds: float
    sent: int
    acked: int
    refused: Mapping[str, int]
    unanswered: int
    deliveries: int
    missing_deliveries: int
    """Acknowledged and never pushed to somebody online."""
    dirty: int
    closed: int
    ack: Latency
    delivery: Latency
    late: Latency
    """How late the generator was, itself part of both latencies."""
    cpu_us: Mapping[str, float]
    """By pool, per acknowledged message."""
    generator_us: float

    @property
    def server_us(self) -> float:
        """CPU of the whole node per acknowledged message."""
        return sum(self.cpu_us.values())

    @property
    def refused_share(self) -> float:
        return sum(self.refused.values()) / self.sent if self.sent else 0.0

    @property
    def sustained(self) -> bool:
        """Everything was taken and arrived within the bounds."""
        return (
            self.acked > 0
            and self.refused_share <= REFUSED_SHARE_MAX
            and not (self.unanswered or self.missing_deliveries or self.dirty or self.closed)
            and self.ack.p99_ms <= ACK_P99_MAX_MS
            and self.delivery.p99_ms <= DELIVERY_P99_MAX_MS
        )

    def line(self) -> str:
        """For the progress display."""
        return (
            f"{self.offered_per_s:,.0f}/s for {self.seconds:.0f} s: ACK {self.ack.text()} ms, delivery "
            f"{self.delivery.text()} ms, refused {self.refused_share:.1%}, node {self.server_us:.0f} µs, generator "
            f"{self.generator_us:.0f} µs a message, {'sustained' if self.sustained else 'not sustained'}"
        )

    def json(self) -> dict[str, Any]:
        """Everything, for the report file."""
        return {
            name: value._asdict() if isinstance(value, Latency) else value
            for name in self.__slots__
            for value in (getattr(self, name),)
        } | {"server_us": self.server_us, "refused_share": self.refused_share, "sustained": self.sustained}


class BenchNode:
    """Use as `with`: starts the node, and at the end stops generators and node."""

    def __init__(self, *, commit_log: str = "") -> None:
        """`commit_log`: `kafka://…`, "" for the embedded one."""
        memory_bytes = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SERVER_MEMORY_SHARE)
        self._own = OwnNode(
            OwnNodeOptions(
                unlimited_tenant=TENANT,
                commit_log=commit_log,
                parameters=dict(TEST_PARAMETERS) | {"QIM_SERVER_MEMORY_BYTES": str(memory_bytes)},
            )
        )
        self._generators: list[Child] = []
        self._runs = 0
        self.address: NodeAddress

    def __enter__(self) -> Self:
        self._own.__enter__()
        self.address = self._own.address()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generator in self._generators:
            generator.close()
        self._own.__exit__(kind, error, trace)

    def pids(self) -> dict[str, list[int]]:
        """Pool -> processes of the node: workers by their kind, each server alone."""
        pools: dict[str, list[int]] = {"supervisor": [self.address.pid]}
        for name, pid in self._own.processes().items():
            kind, _, _ = name.partition("-")
            pools.setdefault(name if kind == SERVER_KIND else kind, []).append(pid)
        return pools

    def log_in(self, users: Sequence[str], *, first_number: int = 0) -> Child:
        """A generator whose people are online."""
        tokens = asyncio.run(self._tokens(users))
        generator = Child(f"generator-{len(self._generators)}", generate)
        self._generators.append(generator)
        address = self.address
        generator.call(
            LogIn(
                host=address.client_host,
                port=address.port,
                ca_path=Path(address.ca_path),
                tenant_id=TENANT,
                users=list(zip(users, tokens, strict=True)),
                first_number=first_number,
            ),
            LOGIN_TIMEOUT_S,
        )
        return generator

    def make_group(self, generator: Child, group_id: str, members: Sequence[str]) -> None:
        """Created by the generator's first person."""
        generator.call(MakeGroup(group_id=group_id, member_ids=members), LOGIN_TIMEOUT_S)

    def start_run(self, generator: Child, targets: Sequence[str], rate_per_s: float, seconds: float) -> float:
        """Begin to send; when counting begins (monotonic seconds). `finish_run` waits for the end."""
        self._runs += 1
        start_s = time.monotonic() + START_AHEAD_S
        generator.post(
            Run(
                rate_per_s=rate_per_s,
                start_s=start_s,
                warmup_s=WARMUP_S,
                seconds=seconds,
                targets=targets,
                payload_bytes=PAYLOAD_BYTES,
                run_id=f"run{self._runs}",
                seed=self._runs,
            )
        )
        return start_s + WARMUP_S

    def finish_run(self, generator: Child, seconds: float) -> RunResult:
        result: RunResult = generator.take(WARMUP_S + seconds + RUN_MARGIN_S)
        return result

    def measure(
        self, generator: Child, targets: Sequence[str], rate_per_s: float, seconds: float, *, others: int
    ) -> Point:
        """One point at `rate_per_s`; each message is to be pushed to `others` people beside its sender."""
        meter = CpuMeter(self.pids() | {"generator": [generator.pid]})
        counting_from_s = self.start_run(generator, targets, rate_per_s, seconds)
        time.sleep(max(counting_from_s - time.monotonic(), 0))
        before = meter.read()
        time.sleep(max(counting_from_s + seconds - time.monotonic(), 0))
        after = meter.read()
        result = self.finish_run(generator, seconds)
        samples = result.samples
        acked = len(samples.ack_ms)
        cpu_us = per_item_us(before, after, acked)
        return Point(
            offered_per_s=rate_per_s,
            seconds=seconds,
            sent=samples.sent,
            acked=acked,
            refused=dict(samples.refused),
            unanswered=result.unanswered,
            deliveries=len(samples.delivery_ms),
            missing_deliveries=max(acked * others - len(samples.delivery_ms), 0),
            dirty=samples.dirty,
            closed=result.closed,
            ack=summarize(samples.ack_ms),
            delivery=summarize(samples.delivery_ms),
            late=summarize(samples.late_ms),
            generator_us=cpu_us.pop("generator"),
            cpu_us=cpu_us,
        )

    async def _tokens(self, users: Sequence[str]) -> list[str]:
        limit = asyncio.Semaphore(_TOKENS_AT_ONCE)
        async with AdminClient(self.address) as admin:

            async def token(user: str) -> str:
                async with limit:
                    return await admin.token(TENANT, user, DEVICE, TOKEN_TTL_S)

            return await asyncio.gather(*map(token, users))
