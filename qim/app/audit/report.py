"""What an audit found, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

FINDINGS_SHOWN_MAX: Final = 20
FINDINGS_KEPT_MAX: Final = 1_000
"""Findings with their text; all are counted."""


class Orphan(Enum):
    """Every kind must be 0 (§19.1)."""

    NOT_DRAINED = "not drained"
    """Fan-out or a lane did not reach what was committed when the audit began."""
    OUTBOX_NOT_DENSE = "outbox not dense"
    """The offsets do not run up to the bucket's counter without a hole."""
    COMMIT_WITHOUT_RECORD = "committed without record"
    COMMIT_WITHOUT_DISPATCH = "committed without dispatch"
    DISPATCH_WITHOUT_COMMIT = "dispatch without commit"
    COORDINATES_DIFFER = "coordinates or sender differ"
    WRONG_PARTITION = "wrong partition"
    ENTRY_MISSING = "mailbox entry missing"
    ENTRY_UNEXPECTED = "mailbox entry too many"


class Finding(NamedTuple):
    orphan: Orphan
    where: str
    what: str


@dataclass(slots=True)
class AuditReport:
    """Counts of what was looked at and of what was found."""

    examined: Counter[str] = field(default_factory=Counter)
    found: Counter[Orphan] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, orphan: Orphan, where: str, what: str) -> None:
        """Count a finding and keep its text while there is room."""
        self.found[orphan] += 1
        if len(self.findings) < FINDINGS_KEPT_MAX:
            self.findings.append(Finding(orphan, where, what))

    def passed(self) -> bool:
        return not self.found

    def text(self) -> str:
        rows: Sequence[tuple[str, int]] = [
            *self.examined.items(),
            *((orphan.value, self.found[orphan]) for orphan in Orphan),
        ]
        width = max(len(name) for name, _ in rows)
        lines = ["--- audit dispatch", *(f"  {name:<{width}}  {count}" for name, count in rows)]
        lines += [f"  {one.orphan.value}: {one.where}: {one.what}" for one in self.findings[:FINDINGS_SHOWN_MAX]]
        if self.found.total() > FINDINGS_SHOWN_MAX:
            lines.append(f"  … {self.found.total() - FINDINGS_SHOWN_MAX} findings more")
        lines.append("  PASSED" if self.passed() else "  FAILED")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed(),
            "examined": dict(self.examined),
            "found": {orphan.value: self.found[orphan] for orphan in Orphan},
            "findings": [{"orphan": f.orphan.value, "where": f.where, "what": f.what} for f in self.findings],
        }
