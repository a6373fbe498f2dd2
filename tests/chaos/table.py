"""The table of a chaos run: one row a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from qim.app.replay.checker import Finding
from tests.chaos.judge import HARM_OF, Harm, count


class Recovery(NamedTuple):
    """Seconds from the beginning of a fault, its own length included; messages count when they are acknowledged and on
    every connected screen."""

    back_s: float
    """Until that was so of what was sent in the fault's first second."""
    all_s: float
    """And of what was in flight when it began."""


NOT_RECOVERED: Final = Recovery(-1.0, -1.0)
FINDINGS_SHOWN_MAX: Final = 10


@dataclass(slots=True, kw_only=True)
class FaultResult:
    """What one fault did."""

    name: str
    wanted: int
    """Injections asked for."""
    seed: int = 1
    met: list[int] = field(default_factory=list)
    """Per injection: messages not acknowledged or not on every connected screen, admin calls without an answer, and
    dispatches above W, at that moment."""
    recoveries: list[Recovery] = field(default_factory=list)
    """Per injection; NOT_RECOVERED if it did not happen in time."""
    sent: int = 0
    findings: Sequence[Finding] = ()
    orphans: int = 0
    """Of the audit, of every kind."""
    alarms: Sequence[str] = ()
    """Always-zero metrics that are not."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def harms(self) -> Counter[Harm]:
        counts = count(self.findings)
        counts[Harm.STUCK] += self.recoveries.count(NOT_RECOVERED)
        return counts

    def failures(self) -> list[str]:
        """Why this row is not as it must be; empty when it is."""
        found = [f"{number} {harm.value}" for harm, number in self.harms().items() if number]
        if self.orphans:
            found.append(f"{self.orphans} orphans")
        if self.alarms:
            found.append(f"{len(self.alarms)} alarms")
        if len(self.met) < self.wanted:
            found.append(f"{len(self.met)} of {self.wanted} injections")
        if not any(self.met):
            found.append("met nothing in flight")
        return found


def text(results: Sequence[FaultResult]) -> str:
    """The whole table and, below it, what was found."""
    head = [
        "fault",
        "injected",
        "met",
        "back P50 s",
        "max s",
        "all P50 s",
        "max s",
        *(harm.value for harm in Harm),
        "orphans",
        "alarms",
        "sent",
        "took s",
    ]
    rows = [head, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for result in results:
        lines += [f"{result.name}: note: {note}" for note in result.notes]
        lines += [f"{result.name}: alarm: {alarm}" for alarm in result.alarms]
        lines += [
            f"{result.name}: {HARM_OF[f.fault].value}: {f.where}: {f.fault.value}, {f.what}"
            for f in result.findings[:FINDINGS_SHOWN_MAX]
        ]
        if failures := result.failures():
            lines.append(f"{result.name}: FAILED: {', '.join(failures)}")
    lines.append("PASSED" if all(not result.failures() for result in results) else "FAILED")
    return "\n".join(lines)


def _row(result: FaultResult) -> list[str]:
    recovered = [recovery for recovery in result.recoveries if recovery != NOT_RECOVERED]
    times: list[list[float]] = [[recovery[at] for recovery in recovered] for at in range(2)]
    harms = result.harms()
    return [
        result.name,
        str(len(result.met)),
        str(sum(1 for number in result.met if number)),
        *(f"{of(seconds):.2f}" if seconds else "-" for seconds in times for of in (median, max)),
        *(str(harms[harm]) for harm in Harm),
        str(result.orphans),
        str(len(result.alarms)),
        str(result.sent),
        f"{result.seconds:.0f}",
    ]
