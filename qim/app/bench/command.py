"""`qim bench`: the parts one after another, each with its table and its JSON file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from qim.app.bench.figures import PartReport
from qim.app.bench.large import run_large
from qim.app.bench.push import run_push
from qim.app.bench.rates import run_direct, run_group
from qim.errors import StartupError

Part = Callable[[float, Callable[[str], None]], PartReport]

PARTS: Final[Mapping[str, Part]] = {
    "push": run_push,
    "direct": run_direct,
    "group": run_group,
    "large": run_large,
}


def run_bench(*, seconds: int, parts: Sequence[str] | None, results_dir: Path) -> int:
    """Run `parts` (None: all); 0, or 1 when a message was lost. A missed aim is shown, it does not fail."""
    chosen = list(parts or PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        raise StartupError(f"there is no part {unknown[0]}; choose of {', '.join(PARTS)}")
    if seconds < 1:
        raise StartupError("--seconds is at least 1")
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot write results to {results_dir}: {error.strerror}") from None
    failed = False
    for name in chosen:
        report = PARTS[name](float(seconds), partial(_progress, name))
        path = report.write(results_dir)
        print(f"{report.text()}\n  details: {path}", flush=True)
        failed = failed or bool(report.failures)
    return 1 if failed else 0


def _progress(part: str, line: str) -> None:
    print(f"bench: {part}: {line}", file=sys.stderr, flush=True)
