"""A few seeds of the simulation in every test run; `make sim` runs many (docs/testing.md)."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from qim.obs.logs import configure_logs
from tests.sim.plan import Plan, make_plan
from tests.sim.planted import PLANTED
from tests.sim.run import report, run_plan, run_seed, shortened

SEEDS = range(1, 13)
QUICK = ("cursor_moved_by_push", "no_source_high", "no_predecessor_check", "registry_epoch_compared")
"""Rules whose absence a few dozen seeds notice; `python -m tests.sim.run --planted` tries them all."""
QUICK_SEEDS = range(1, 41)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    configure_logs(level="error", stream=io.StringIO())
    gc.disable()
    yield
    gc.enable()
    gc.collect()
    configure_logs()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_ends_with_everything_in_its_place(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.violations, f"make sim SEEDS=1 FIRST_SEED={seed}: {outcome.violations}"


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = run_seed(7), run_seed(7)
    assert (first.fingerprint, first.trace) == (second.fingerprint, second.trace)


def test_a_run_does_not_depend_on_the_order_of_sets() -> None:
    """Two interpreters that hash strings differently; the seed is one that did."""
    program = "from tests.sim.run import run_seed; run = run_seed(492); print(run.fingerprint, *run.trace, sep='\\n')"
    first, second = (
        subprocess.run(
            (sys.executable, "-c", program),
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    )
    assert first == second


@pytest.mark.parametrize("rule", QUICK)
def test_a_rule_that_is_taken_out_is_noticed(rule: str) -> None:
    assert any(run_seed(seed, PLANTED[rule]).violations for seed in QUICK_SEEDS)


def test_a_failing_seed_is_shortened_and_printed() -> None:
    seed = next(seed for seed in QUICK_SEEDS if run_seed(seed, PLANTED["cursor_moved_by_push"]).violations)
    whole: Plan = make_plan(seed)
    plan, outcome = shortened(whole, PLANTED["cursor_moved_by_push"])
    assert len(plan.faults) + len(plan.work) < len(whole.faults) + len(whole.work)
    assert run_plan(plan, PLANTED["cursor_moved_by_push"]).violations == outcome.violations
    printed = io.StringIO()
    report(plan, outcome, printed.write)
    assert printed.getvalue().startswith(f"seed {seed}: ")
    assert outcome.violations[0] in printed.getvalue()
