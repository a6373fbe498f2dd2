"""`qim replay`: days one after another, each with its table; exit code 1 if any of them failed."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import uvloop

from qim.app.audit.command import audit_node
from qim.app.connect import NodeAddress
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.app.replay.checker import check
from qim.app.replay.evidence import RunDir
from qim.app.replay.plan import DayPlan, plan_day, read_day
from qim.app.replay.run import DayRun, play_day
from qim.app.settings import PoolSizes
from qim.errors import StartupError
from qim.obs.logs import configure_logs
from qim.runtime.clock import SystemClock
from qim.runtime.file_limit import raise_file_limit

TENANT: Final = "replay"
"""Rate limits are lifted for it on the node that a replay starts; every report says so."""
_ROLES: Final = ("gateway", "writer", "fanout", "mailbox")
_APART: Final = OwnNodeOptions(pools=PoolSizes(2, 2, 2, 2), apart=True, unlimited_tenant=TENANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    files: tuple[Path, ...]
    connect: Path | None = None
    chaos: bool = False
    kills_per_role: int = 5
    seed: int = 1
    speed: float = 0.0
    limit: int = 0
    report_dir: Path | None = None
    commit_log: str = ""

    def checked(self) -> ReplayOptions:
        """Itself; StartupError, one line, for options that make no sense."""
        if not self.files:
            raise StartupError("name at least one day file, e.g. tests/data/irc/2008-04-27.jsonl")
        if self.chaos and self.connect is not None:
            raise StartupError("--chaos kills processes of a node of its own: leave --connect away")
        if self.commit_log and self.connect is not None:
            raise StartupError("--commit-log is of the node a replay starts: leave --connect away")
        if self.speed < 0 or self.limit < 0 or self.kills_per_role < 1:
            raise StartupError("--speed and --limit cannot be negative, --kills is at least 1")
        return self


def replay_days(options: ReplayOptions) -> int:
    """Play every file; 0 if all passed."""
    # A device has a socket and three files of its store.
    raise_file_limit()
    plans = []
    for path in options.files:
        events = read_day(path)
        plans.append(plan_day(path.stem, events[: options.limit] if options.limit else events, options.seed))
    if options.connect is not None:
        node = NodeAddress.read(options.connect)
        tenant = node.unlimited_tenant or TENANT
        return _play_all(options, plans, node, tenant, victims=())
    with OwnNode(replace(_APART, commit_log=options.commit_log)) as own:
        victims = _victims(options.kills_per_role) if options.chaos else ()
        return _play_all(options, plans, own.address(), TENANT, victims)


def check_finished(path: Path) -> int:
    """Judge the evidence of a finished run again."""
    findings = check(RunDir(path).load())
    for finding in findings:
        print(f"{finding.fault.value}: {finding.where}: {finding.what}")
    print("FAILED" if findings else "PASSED")
    return 1 if findings else 0


def _victims(kills_per_role: int) -> Sequence[tuple[str, str]]:
    """Role by role in turn, so that a worker lives long enough between two kills for its backoff to start over."""
    return [(role, f"{role}-{kill % 2}") for kill in range(kills_per_role) for role in _ROLES]


def _play_all(
    options: ReplayOptions,
    plans: Sequence[DayPlan],
    node: NodeAddress,
    tenant_id: str,
    victims: Sequence[tuple[str, str]],
) -> int:
    passed = True
    lifted = node.unlimited_tenant == tenant_id
    limits = f"rate limits of the tenant {tenant_id} are {'lifted' if lifted else 'in force'}"
    for plan in plans:
        evidence = _evidence_dir(options.report_dir, plan.name)
        run = DayRun(
            plan=plan,
            node=node,
            tenant_id=tenant_id,
            run_name=secrets.token_hex(3),
            seed=options.seed,
            speed=options.speed,
            victims=victims,
            evidence=evidence,
            notes=(limits,),
        )
        evidence.create()
        with (
            (evidence.path / "clients.log").open("w") as log,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            configure_logs(level="warning", stream=log, process="replay")
            report = runner.run(play_day(run, SystemClock()))
            audit = runner.run(audit_node(node)) if victims else None
        configure_logs(level="warning")
        print(report.text(), flush=True)
        passed = passed and not report.failures()
        if audit is not None:
            print(audit.text(), flush=True)
            passed = passed and audit.passed()
        if options.report_dir is not None:
            report.write(evidence.path / "report.json")
        else:
            shutil.rmtree(evidence.path, ignore_errors=True)
    return 0 if passed else 1


def _evidence_dir(report_dir: Path | None, day: str) -> RunDir:
    if report_dir is None:
        return RunDir(Path(tempfile.mkdtemp(prefix="qim-replay-")))
    path = report_dir / day
    if path.exists():
        raise StartupError(f"{path} exists: name another --report directory or remove it")
    return RunDir(path)
