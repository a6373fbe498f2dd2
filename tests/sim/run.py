"""Runs seeds: `python -m tests.sim.run --seeds 500 --first-seed 1`; a failing one prints its shortest trace."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import multiprocessing
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from typing import Any, Final
from unittest import mock

from qim.obs.logs import configure_logs
from tests.sim import devices, planted
from tests.sim.cluster import Cluster
from tests.sim.devices import Device
from tests.sim.plan import Plan, Step, make_plan
from tests.sim.planted import Planting

CONVERGE_S: Final = 40.0
"""Bound of the quiet time: reconnects, DIRTY spread over at most 5 s, pulls 5 s apart; less than a heartbeat."""
LOOK_S: Final = 0.25
CURSOR_LOOK_S: Final = 0.1
SHRINK_RUNS_MAX: Final = 40

SHRUNK_MAX: Final = 3
"""Failing seeds that are shortened and printed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed."""

    seed: int
    violations: tuple[str, ...]
    trace: tuple[str, ...]
    callbacks: int
    quiet_s: float
    """Virtual time from the last fault to convergence."""
    fingerprint: int


@contextlib.contextmanager
def simulated(plan: Plan) -> Iterator[None]:
    """The product's few ties to sockets, mapped files and unseeded chance, cut for one run."""
    rng = random.Random(f"{plan.seed}/secrets")
    state = random.getstate()
    random.seed(f"{plan.seed}/random")
    patches: list[Any] = [
        mock.patch.object(secrets, "token_hex", lambda size=32: rng.randbytes(size).hex()),
        mock.patch("qim.gateway.node._opened", devices.opened),
        mock.patch("qim.gateway.node.Listener", devices.SimListener),
        mock.patch("qim.client.link.connect", devices.connect),
        mock.patch("qim.shard_workers.mailbox.machine.FOLD_SAVE_RECORDS", plan.fold_save_records),
        mock.patch("qim.stores.memory_mailbox.PROGRESS_BLOCK_OFFSETS", 4),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
    random.setstate(state)


def run_plan(plan: Plan, planting: Planting = contextlib.nullcontext) -> Outcome:
    """One run of a plan, from nothing to convergence."""
    with simulated(plan), planting():
        cluster = Cluster(plan)
        try:
            quiet_s = _drive(cluster)
        finally:
            cluster.close()
    return Outcome(
        seed=plan.seed,
        violations=tuple(cluster.oracle.violations),
        trace=tuple(cluster.lines),
        callbacks=cluster.loop.handles_run,
        quiet_s=quiet_s,
        fingerprint=cluster.loop.handles_run * 1_000_003 + round(cluster.loop.time() * 1e6),
    )


def _drive(cluster: Cluster) -> float:
    loop, oracle = cluster.loop, cluster.oracle
    cluster.start()
    for step in (*cluster.plan.work, *cluster.plan.faults):
        loop.world_at(step.at_s, _perform, cluster, step)
    while loop.time() < cluster.plan.length_s and not oracle.violations:
        loop.run_until_s(loop.time() + CURSOR_LOOK_S)
        oracle.check_cursors()
    if oracle.violations:
        return 0.0
    cluster.faults.heal()
    quiet_s = _converge(cluster)
    if not oracle.violations:
        oracle.check_end()
    if not oracle.violations:
        _log_in_afresh(cluster)
    for context in loop.unhandled:
        oracle.violation(f"unhandled: {context.get('message')} {context.get('exception')!r}")
    return quiet_s


def _perform(cluster: Cluster, step: Step) -> None:
    cluster.trace(f"{step.kind} {' '.join(map(str, step.args))}")
    name = "break_" if step.kind == "break" else step.kind
    getattr(cluster.faults if hasattr(cluster.faults, name) else cluster, name)(*step.args)


def _converge(cluster: Cluster) -> float:
    loop, oracle = cluster.loop, cluster.oracle
    start_s = loop.time()
    missing = ["nothing was looked at"]
    while missing and loop.time() < start_s + CONVERGE_S and not oracle.violations:
        for _ in range(2):
            loop.run_until_s(loop.time() + LOOK_S / 2)
            oracle.check_cursors()
        missing = oracle.missing()
    took_s = loop.time() - start_s
    for text in missing if not oracle.violations else ():
        oracle.violation(f"not converged after {CONVERGE_S:.0f} quiet seconds: {text}")
    if not oracle.violations:
        loop.run_until_s(loop.time() + 1.0)
        oracle.check_cursors()
    return took_s


def _log_in_afresh(cluster: Cluster) -> None:
    """A new device of every user finds everything."""
    for user in cluster.plan.users:
        fresh = Device(cluster, user, f"{user}-fresh")
        cluster.devices[fresh.name] = fresh
        fresh.start()
    _converge(cluster)
    if not cluster.oracle.violations:
        cluster.oracle.check_end()


def run_seed(seed: int, planting: Planting = contextlib.nullcontext) -> Outcome:
    return run_plan(make_plan(seed), planting)


def shortened(plan: Plan, planting: Planting = contextlib.nullcontext) -> tuple[Plan, Outcome]:
    """Leave out faults, then work, one after another, while the run still fails; bounded."""
    best = run_plan(plan, planting)
    runs = 0
    for part in ("faults", "work"):
        size = max(1, len(getattr(plan, part)) // 2)
        while size:
            at = 0
            while at < len(getattr(plan, part)) and runs < SHRINK_RUNS_MAX:
                steps = getattr(plan, part)
                candidate = replace(plan, **{part: steps[:at] + steps[at + size :]})
                outcome = run_plan(candidate, planting)
                runs += 1
                if outcome.violations:
                    plan, best = candidate, outcome
                else:
                    at += size
            size //= 2
    return plan, best


def report(plan: Plan, outcome: Outcome, write: Callable[[str], object]) -> None:
    """A failing seed, for people."""
    write(f"seed {plan.seed}: buckets {plan.buckets}, shards {plan.shards}, lanes {plan.lanes}, pools {plan.pools}, "
          f"{'apart' if plan.apart else 'merged'}\n")  # fmt: skip
    for violation in outcome.violations:
        write(f"  {violation}\n")
    for line in outcome.trace:
        write(f"    {line}\n")


def _silent() -> None:
    configure_logs(level="error", stream=io.StringIO())
    gc.disable()


def _run(task: tuple[int, str]) -> Outcome:
    """In a worker process: a seed, with a rule taken out if one is named."""
    seed, rule = task
    try:
        return run_seed(seed, {**planted.PLANTED, **planted.TRIPWIRES}[rule] if rule else contextlib.nullcontext)
    finally:
        gc.collect()


def _pool(processes: int) -> Pool:
    return multiprocessing.get_context("spawn").Pool(processes or None, _silent)


def _run_seeds(seeds: range, processes: int) -> int:
    started_s = time.perf_counter()
    failed: list[int] = []
    quiet_s = 0.0
    with _pool(processes) as pool:
        for outcome in pool.imap_unordered(_run, [(seed, "") for seed in seeds]):
            quiet_s = max(quiet_s, outcome.quiet_s)
            if outcome.violations:
                failed.append(outcome.seed)
                sys.stdout.write(f"seed {outcome.seed} fails: {outcome.violations[0]}\n")
                sys.stdout.flush()
    took_s = time.perf_counter() - started_s
    sys.stdout.write(f"{len(seeds)} seeds, {len(failed)} failed, {took_s:.0f} s, quiet after {quiet_s:.1f} s at most\n")
    _silent()
    for seed in sorted(failed)[:SHRUNK_MAX]:
        report(*shortened(make_plan(seed)), sys.stdout.write)
    return 1 if failed else 0


def _run_planted(rules: Sequence[str], seeds: range, processes: int) -> int:
    """The first seed that notices each rule that was taken out; 1 when one of PLANTED is not noticed."""
    missed = 0
    for rule in rules or (*planted.PLANTED, *planted.TRIPWIRES):
        found = None
        with _pool(processes) as pool:
            for outcome in pool.imap(_run, [(seed, rule) for seed in seeds]):
                if outcome.violations:
                    found = outcome
                    break
            pool.terminate()
        if found is None:
            missed += rule in planted.PLANTED
            sys.stdout.write(f"{rule:26s} not noticed within {len(seeds)} seeds\n")
        else:
            sys.stdout.write(f"{rule:26s} seed {found.seed:4d}: {found.violations[0]}\n")
        sys.stdout.flush()
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sim")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=0, help="0: one per core")
    parser.add_argument(
        "--planted", nargs="*", metavar="RULE", help="take rules out and name the seeds that notice; all by default"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.planted or ()) - planted.PLANTED.keys() - planted.TRIPWIRES.keys()
    if unknown:
        parser.error(f"no rule is called {', '.join(sorted(unknown))}; docs/testing.md lists them")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.planted is not None:
        return _run_planted(options.planted, seeds, options.processes)
    return _run_seeds(seeds, options.processes)


if __name__ == "__main__":
    sys.exit(main())
