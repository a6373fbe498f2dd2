"""What a bench reports: each figure beside its floor or rival as a ratio, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

_COLUMNS: Final = ("figure", "measured", "beside", "", "ratio", "aim", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number. `beside` says what `beside_value` is: a floor of the same run, or a rival's figure."""

    name: str
    value: float
    unit: str
    beside: str = ""
    beside_value: float = 0.0
    at_most: float | None = None
    """Aim for `value`, or for the ratio if `aim_is_ratio`."""
    at_least: float | None = None
    aim_is_ratio: bool = False

    @property
    def ratio(self) -> float | None:
        """value / beside_value."""
        return self.value / self.beside_value if self.beside_value else None

    @property
    def met(self) -> bool | None:
        """None without an aim."""
        judged = self.ratio if self.aim_is_ratio else self.value
        if judged is None or (self.at_most is None and self.at_least is None):
            return None
        return (self.at_most is None or judged <= self.at_most) and (self.at_least is None or judged >= self.at_least)

    def row(self) -> tuple[str, ...]:
        """Cells in the order of the table's columns."""
        aim = ""
        for sign, bound in (("≤", self.at_most), ("≥", self.at_least)):
            if bound is not None:
                aim = f"{sign} {number(bound)}{' ×' if self.aim_is_ratio else ''}"
        return (
            self.name,
            f"{number(self.value)} {self.unit}".rstrip(),
            self.beside,
            number(self.beside_value) if self.beside else "",
            f"{self.ratio:.2f} ×" if self.ratio is not None else "",
            aim,
            {True: "met", False: "missed", None: ""}[self.met],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """One part of the bench. `details` goes to the JSON only; `failures` are defects, not missed aims."""

    part: str
    conditions: Sequence[str]
    figures: Sequence[Figure]
    details: dict[str, Any] = field(default_factory=dict)
    failures: Sequence[str] = ()

    def text(self) -> str:
        """The table."""
        rows = [_COLUMNS, *(figure.row() for figure in self.figures)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = [f"--- {self.part}", *(f"  {condition}" for condition in self.conditions)]
        for row in rows:
            cells = [cell.ljust(width) if at != 1 else cell.rjust(width) for at, (cell, width) in
                     enumerate(zip(row, widths, strict=True))]  # fmt: skip
            lines.append(("  " + "  ".join(cells)).rstrip())
        lines.extend(f"  FAILED: {failure}" for failure in self.failures)
        return "\n".join(lines)

    def write(self, directory: Path) -> Path:
        """`<directory>/<part>.json`."""
        path = directory / f"{self.part}.json"
        figures = [asdict(figure) | {"ratio": figure.ratio, "met": figure.met} for figure in self.figures]
        path.write_bytes(orjson.dumps(asdict(self) | {"figures": figures}, option=orjson.OPT_INDENT_2))
        return path


def number(value: float) -> str:
    """Three significant figures, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
