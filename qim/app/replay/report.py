"""The result of one played day: counts, findings, latencies and kills, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from qim.app.latency import Latency
from qim.app.replay.checker import Fault, Finding

FINDINGS_SHOWN_MAX: Final = 10
"""The report file has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill -9: who, what was in flight, how long until it had arrived everywhere."""

    role: str
    process: str
    unacknowledged_sends: int
    dispatches_above_w: int
    at_s: float
    """Since the start of the run."""
    recovery_ms: float
    """Until every SEND and dispatch that was in flight is acknowledged and materialized; -1: never."""

    @property
    def met_something(self) -> bool:
        return self.unacknowledged_sends > 0 and self.dispatches_above_w > 0


class SlowDelivery(NamedTuple):
    """One of the slowest deliveries to a device that was online."""

    latency_ms: float
    where: str
    client_message_id: str
    sent_at_s: float
    """Since the start of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayReport:
    day: str
    people: int
    devices: int
    messages: int
    deliveries: int
    elapsed_s: float
    ack: Latency
    delivery: Latency
    findings: Sequence[Finding]
    slowest: Sequence[SlowDelivery] = ()
    kills: Sequence[Kill] = ()
    kills_wanted: int = 0
    notes: Sequence[str] = field(default=())
    """Conditions of the run that a reader must know, e.g. lifted limits."""

    def failures(self) -> list[str]:
        """Why the run failed, one line each; empty = passed."""
        counts = Counter(finding.fault for finding in self.findings)
        lines = [f"{fault.value}: {count}" for fault, count in counts.items()]
        if len(self.kills) < self.kills_wanted:
            lines.append(f"only {len(self.kills)} of {self.kills_wanted} kills happened")
        for kill in self.kills:
            if not kill.met_something:
                lines.append(f"the kill of {kill.process} met nothing in flight")
            if kill.recovery_ms < 0:
                lines.append(f"no recovery after the kill of {kill.process}")
        return lines

    def text(self) -> str:
        counts = Counter(finding.fault for finding in self.findings)
        rows = [
            ("people / devices", f"{self.people} / {self.devices}"),
            ("messages", f"{self.messages}"),
            ("deliveries", f"{self.deliveries}"),
            *((fault.value, f"{counts[fault]}") for fault in Fault),
            ("ACK ms P50/P99/P99.9/max", self.ack.text()),
            ("delivery ms P50/P99/P99.9/max", self.delivery.text()),
            ("elapsed s", f"{self.elapsed_s:.1f}"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"--- {self.day}", *(f"  {name:<{width}}  {value}" for name, value in rows)]
        lines.extend(f"  note: {note}" for note in self.notes)
        if self.kills:
            lines.append(f"  {'killed':<12} {'unacked':>8} {'above W':>8} {'recovered ms':>13}")
            lines.extend(
                f"  {k.process:<12} {k.unacknowledged_sends:>8} {k.dispatches_above_w:>8} {k.recovery_ms:>13.0f}"
                for k in self.kills
            )
        lines.extend(f"  {f.fault.value}: {f.where}: {f.what}" for f in self.findings[:FINDINGS_SHOWN_MAX])
        if len(self.findings) > FINDINGS_SHOWN_MAX:
            lines.append(f"  … {len(self.findings) - FINDINGS_SHOWN_MAX} findings more")
        failures = self.failures()
        lines.append("  PASSED" if not failures else f"  FAILED: {'; '.join(failures)}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        value = asdict(self) | {
            "ack": self.ack._asdict(),
            "delivery": self.delivery._asdict(),
            "slowest": [slow._asdict() for slow in self.slowest],
            "findings": [{"fault": f.fault.value, "where": f.where, "what": f.what} for f in self.findings],
            "failures": self.failures(),
        }
        path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
