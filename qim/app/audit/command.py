"""`qim audit dispatch`: run the audit on a node of this host; exit code 1 if anything was found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson

from qim.app.audit.dispatch import DRAIN_TIMEOUT_S, DispatchAudit
from qim.app.audit.evidence import evidence_of
from qim.app.audit.report import AuditReport
from qim.app.connect import NodeAddress
from qim.runtime.clock import SystemClock


def audit_dispatch(data_dir: Path, *, as_json: bool = False, timeout_s: float = DRAIN_TIMEOUT_S) -> int:
    """Audit the node that runs in `data_dir` and print the result; 0 if every kind of orphan is 0."""
    report = asyncio.run(audit_node(NodeAddress.read(data_dir), timeout_s=timeout_s))
    print(orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2).decode() if as_json else report.text(), flush=True)
    return 0 if report.passed() else 1


async def audit_node(node: NodeAddress, *, timeout_s: float = DRAIN_TIMEOUT_S) -> AuditReport:
    """The audit's report. StoreError when a server does not answer."""
    async with evidence_of(node) as evidence:
        return await DispatchAudit(evidence, SystemClock(), drain_timeout_s=timeout_s).run()
