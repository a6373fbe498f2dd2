"""26.8.2 Network partition, node <-> dispatch log link: all criteria, 60 s, lease times at their defaults.

A writer, a fan-out and a mailbox worker lose every connection to the server that holds log, registry and commits, and
find it unreachable; a second one of each keeps theirs. The embedded log lies in that server. Not here: the inter-region
link, as there are no regions yet.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from qim.config.parameters import default_parameters
from qim.errors import ErrorCode
from qim.registry.api import LeaseKind
from tests.acceptance.link_loss import CUT_S, LinkLoss

P = default_parameters()
JITTER = 0.3


@pytest.mark.timeout(CUT_S + 240)
def test_a_node_without_its_log_commits_nothing_and_says_so(link_loss: LinkLoss) -> None:
    run = link_loss
    refused = [answer for answer in run.cut_off if answer.code]
    served_again = min(answer.sent_s for answer in run.cut_off if not answer.code)
    print(
        f"cut off: {len(refused)} refused, served again {served_again:.1f} s after the cut, slowest answer "
        f"{max(answer.took_s for answer in run.cut_off):.2f} s; the other half: {len(run.served)} sends, "
        f"{sum(1 for answer in run.served if answer.code)} refused; {run.entries} entries"
    )
    # criterion: double-active writers == 0; the same for fan-out and mailbox owners
    assert len(run.held) > CUT_S
    for held in run.held:
        for kind, (cut_off, other) in held.items():
            assert cut_off + other <= run.counts[kind], held
    assert run.held[0][LeaseKind.CONVERSATION_BUCKET][0] > 0
    assert run.held[-1] == {kind: (0, count) for kind, count in run.counts.items()}
    epochs = [[record.fencing_epoch for record in records] for records in run.outboxes]
    assert all(found == sorted(found) for found in epochs), "a replaced writer committed after its successor"
    assert max(len(set(found)) for found in epochs) >= 2, "no bucket changed hands under traffic"

    # criterion: the partitioned side answers REGION_FAILOVER with retry_after_ms, and answers everything
    assert refused
    assert {answer.code for answer in refused} == {ErrorCode.REGION_FAILOVER}
    base_ms = P.region_failover_retry_after_ms
    for answer in refused:
        assert base_ms * (1 - JITTER) - 1 <= answer.retry_after_ms <= base_ms * (1 + JITTER) + 1
    assert run.unanswered == 0
    assert max(answer.took_s for answer in run.cut_off) * 1000 <= P.submit_timeout_ms + 1000, "send_ack_timeout is 3 s"
    # an unproven death: the wait, and 5 s
    assert P.writer_self_fence_deadline / 1000 < served_again <= P.writer_failover_wait / 1000 + 5
    assert {answer.code for answer in run.served} <= {0, ErrorCode.RATE_LIMITED}, "the other half goes on"
    assert sum(1 for answer in run.served if not answer.code) > len(run.served) / 2

    # criterion: double allocation of conversation_seq == 0 (of the crowd's: crowd.expected)
    allocated = defaultdict(list)
    for records in run.outboxes:
        for record in records:
            if record.conversation_seq:
                allocated[record.conversation_id].append(record.conversation_seq)
    assert all(seqs == list(range(1, len(seqs) + 1)) for seqs in allocated.values())
    for one in (*run.cut_off, *run.served):
        assert one.code or one.conversation_seq in allocated[one.conversation_id]
    given = [(one.conversation_id, one.conversation_seq) for one in (*run.cut_off, *run.served) if not one.code]
    assert len(given) == len(set(given))
    assert run.audit.passed(), run.audit.text()  # lost 0, duplicate 0
    run.watch.check_sequences()
