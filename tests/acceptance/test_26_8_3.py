"""26.8.3 Disk full, scaled as `acceptance.md` allows (maxmemory with noeviction): all criteria.

The mailbox server of a node of processes refuses every write for 10 s while 400 lines wait to be materialized and more
are written. What every MAILBOX_BATCH of that time claimed is compared with the mailbox as it is in the end.
"""

from __future__ import annotations

import pytest

from qim.config.parameters import default_parameters
from qim.errors import Detail, ErrorCode
from qim.protocol.opcodes import Opcode
from tests.acceptance.full_store import BURST, FULL_S, USERS, FullStore

SHARDS = default_parameters().single_host_mailbox_shard_count


@pytest.mark.timeout(240)
def test_a_full_store_stops_the_watermark_and_nothing_else_is_claimed(full_store: FullStore) -> None:
    run = full_store
    print(
        f"{run.failures:.0f} appends failed, {run.waiting} dispatches waited, {len(run.claims)} batches, "
        f"{len(run.refusals)} sends refused, ready again {run.ready_again_s:.2f} s after; {run.entries} entries"
    )
    assert run.failures > 0
    assert run.waiting > BURST / 4, "hardly anything was committed before the writers knew"
    assert run.failures <= SHARDS * (FULL_S + 10), "a full store is asked ever more rarely"

    # criterion: mailbox write failure stops the lane's watermark; no MAILBOX_BATCH success for what is not there
    assert {claim.user for claim in run.claims} == set(USERS), "what is there can still be read"
    for claim in run.claims:
        covered = {found for found in run.final[claim.user] if claim.after < found[0] <= claim.covered}
        assert claim.found == covered, "something came to lie below what was said to be complete"
        assert run.final[claim.user] != covered, "the claim was made while lines were waiting"
    assert run.beyond
    for answer in run.beyond:
        assert answer.opcode is Opcode.ERROR
        assert answer.body.code in (ErrorCode.CURSOR_INVALID, ErrorCode.SHARD_MOVED)

    # criterion: the node goes read-only and alerts
    assert any("mailbox" in problem and "5 %" in problem for problem in run.not_ready), run.not_ready
    late = run.refusals[len(run.refusals) // 2 :]
    assert late
    for answer in late:
        assert answer.opcode is Opcode.ERROR
        assert (answer.body.code, answer.body.detail) == (ErrorCode.RATE_LIMITED, Detail.STORE_FULL)
        assert answer.body.retry_after_ms > 0
    assert run.watch.alerts["qim_stores_full"] == "P1"

    assert run.audit.passed(), run.audit.text()  # lost 0, duplicate 0, after room was made
    run.watch.check_sequences()
