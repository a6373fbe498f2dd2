"""26.8.5 Log partition unavailable: all criteria, 2 minutes, on the embedded log and on Kafka.

One partition of the dispatch log refuses appends and fetches: embedded, the server finds no stream under its name; on
Kafka, the broker that alone holds it is killed. People write all the time, a bare sender notes every answer.
"""

from __future__ import annotations

import pytest

from qim.errors import ErrorCode
from qim.protocol.opcodes import Opcode
from tests.acceptance.log_outage import OUTAGE_S, LogOutage, refused

TIMEOUT_S = OUTAGE_S + 480


@pytest.mark.timeout(TIMEOUT_S)
def test_senders_wait_and_nothing_is_lost(log_outages: dict[str, LogOutage]) -> None:
    check(log_outages["embedded"])


@pytest.mark.kafka
@pytest.mark.timeout(TIMEOUT_S)
def test_senders_wait_and_nothing_is_lost_on_kafka(log_outages: dict[str, LogOutage]) -> None:
    check(log_outages["kafka"])


def check(run: LogOutage) -> None:
    behind, elsewhere = refused(run.answers, to_partition=True), refused(run.answers, to_partition=False)
    print(
        f"behind the partition {dict(behind)}, elsewhere {dict(elsewhere)} (0 = SEND_ACK); {run.suppressed:.0f} "
        f"dispatches suppressed, {run.messages} messages, {run.entries} entries"
    )
    assert run.stalled_s >= OUTAGE_S, "the partition was not away"
    assert run.moved_elsewhere > 0
    # criterion: the sender gets RATE_LIMITED or is queued
    assert set(behind) <= {0, ErrorCode.RATE_LIMITED}
    assert behind[ErrorCode.RATE_LIMITED] > behind.total() * 0.8
    for one in run.answers:
        if one.answer.opcode is Opcode.ERROR:
            assert one.answer.body.retry_after_ms > 0
    assert set(elsewhere) <= {0, ErrorCode.RATE_LIMITED}
    assert elsewhere[0] > elsewhere.total() * 0.75, "other partitions go on"
    # criteria: silently lost mailbox references == 0; after recovery duplicates == 0, by dispatch_id and by triple
    assert run.audit.passed(), run.audit.text()
    run.watch.check_sequences()
