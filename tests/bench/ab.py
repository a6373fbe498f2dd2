"""What a message costs in this tree and in an earlier commit, measured alternately: `make bench-ab`.

Both do the same work at the same rate, so that CPU per message can be compared; medians of all runs are printed, and
their ratio. Exit code 1 when the ratio of CPU is above the bound, or a message was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.kafka_server import running_kafka

BEFORE_LEASES_AND_KAFKA: Final = "52e3633"
CPU_RATIO_MAX: Final = 1.05
RATES_PER_S: Final[Mapping[str, float]] = {"direct": 1000.0, "group": 50.0}
"""Well below what either can do: at its limit a version is measured in its queues."""
POINT_TIMEOUT_S: Final = 600.0
HERE: Final = Path(__file__).resolve().parents[2]
_FIGURES: Final = (
    ("cpu_us", "CPU of the node, µs per message"),
    ("ack_p99_ms", "ACK P99, ms"),
    ("delivery_p99_ms", "delivery P99, ms"),
    ("redis_bytes", "Redis, bytes per message"),
)

Figures = dict[str, float]


class Variant(NamedTuple):
    name: str
    tree: Path
    commit_log: str = ""
    """Where the topics are; each run gets a prefix of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-ab")
    parser.add_argument("--base", default=BEFORE_LEASES_AND_KAFKA, metavar="COMMIT", help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="of each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of a run (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=tuple(RATES_PER_S), default=list(RATES_PER_S))
    parser.add_argument(
        "--rate", type=float, default=0.0, metavar="R", help="messages per second, instead of the part's"
    )
    parser.add_argument("--kafka", action="store_true", help="also this tree on a private Kafka")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="(%(default)s)")
    options = parser.parse_args(arguments)
    known = subprocess.run(
        ["git", "-C", str(HERE), "cat-file", "-e", f"{options.base}^{{commit}}"], capture_output=True
    )
    if known.returncode:
        parser.error(f"{options.base} is no commit of this repository; in a shallow clone: git fetch --unshallow")
    failed = False
    results: dict[str, dict[str, list[Figures]]] = {}
    with _worktree(options.base) as base, contextlib.ExitStack() as stack:
        variants = [Variant(f"base ({options.base})", base), Variant("now", HERE)]
        if options.kafka:
            server = stack.enter_context(running_kafka())
            variants.append(Variant("now, on Kafka", HERE, f"kafka://{server.servers}"))
        for part in options.parts:
            rate = options.rate or RATES_PER_S[part]
            found: dict[str, list[Figures]] = {variant.name: [] for variant in variants}
            results[part] = found
            for run in range(options.runs):
                for variant in variants if run % 2 == 0 else reversed(variants):
                    figures = _measure(variant, part, rate, options.seconds)
                    found[variant.name].append(figures)
                    print(f"{part} run {run + 1} {variant.name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
            failed |= _print(part, rate, options.seconds, found)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ab.json").write_text(json.dumps(results, indent=2))
    return 1 if failed else 0


@contextlib.contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="qim-ab-") as directory:
        tree = Path(directory) / "base"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _measure(variant: Variant, part: str, rate: float, seconds: float) -> Figures:
    command = [sys.executable, str(HERE / "tests/bench/point.py"), part, str(rate), str(seconds)]
    if variant.commit_log:
        command += ["--commit-log", f"{variant.commit_log}/ab{secrets.token_hex(4)}?replicas=1"]
    environment = os.environ | {"PYTHONPATH": str(variant.tree)}
    done = subprocess.run(
        command, cwd=variant.tree, env=environment, stdout=subprocess.PIPE, timeout=POINT_TIMEOUT_S, check=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _print(part: str, rate: float, seconds: float, found: Mapping[str, Sequence[Figures]]) -> bool:
    """The table of a part; True when a bound is exceeded."""
    base, now, *_ = found
    print(f"--- {part}: {rate:g} messages/s for {seconds:g} s, {len(found[base])} runs of each, alternately; medians")
    for key, label in _FIGURES:
        medians = {name: statistics.median(run[key] for run in runs) for name, runs in found.items()}
        cells = "  ".join(f"{name} {median:.4g}" for name, median in medians.items())
        print(f"  {label:34s} {cells}  now/base {medians[now] / medians[base]:.3f}", flush=True)
    ratio = statistics.median(run["cpu_us"] for run in found[now]) / statistics.median(
        run["cpu_us"] for run in found[base]
    )
    lost = sum(run["missing"] for runs in found.values() for run in runs)
    if ratio > CPU_RATIO_MAX:
        print(f"  CPU per message is {ratio:.3f} of the base's, at most {CPU_RATIO_MAX} is allowed")
    if lost:
        print(f"  {lost:.0f} deliveries are missing")
    return ratio > CPU_RATIO_MAX or lost > 0


if __name__ == "__main__":
    sys.exit(main())
