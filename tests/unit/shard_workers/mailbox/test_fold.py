from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qim.errors import StoreError
from qim.shard_workers.mailbox.fold import AdmissionFold, Verdict

Record = tuple[int, tuple[int, int], int]
"""(bucket, source, fencing epoch)."""


def _fold_all(records: list[Record], fold: AdmissionFold | None = None) -> tuple[AdmissionFold, list[Verdict]]:
    fold = fold or AdmissionFold()
    verdicts = [fold.admit(n, *records[n]) for n in range(fold.next_offset, len(records))]
    return fold, verdicts


@st.composite
def produced_logs(draw: st.DrawFn) -> list[Record]:
    """The dispatch log of one shard: per bucket an outbox with epochs that never fall, produced in order by fan-outs
    that restart anywhere at or below what they had produced."""
    log: list[Record] = []
    outboxes: dict[int, list[tuple[tuple[int, int], int]]] = {}
    for bucket in range(draw(st.integers(1, 3))):
        epoch, sources = 1, []
        for offset in range(draw(st.integers(0, 12))):
            epoch += draw(st.integers(0, 1))
            if draw(st.booleans()):
                sources += [((offset, part), epoch) for part in range(draw(st.integers(1, 3)))]
        outboxes[bucket] = sources
    positions = dict.fromkeys(outboxes, 0)
    produced = dict.fromkeys(outboxes, 0)
    while any(produced[bucket] < len(sources) for bucket, sources in outboxes.items()):
        bucket = draw(st.sampled_from(sorted(outboxes)))
        if positions[bucket] and draw(st.integers(0, 4)) == 0:
            offset = outboxes[bucket][draw(st.integers(0, positions[bucket] - 1))][0][0]
            positions[bucket] = next(n for n, (source, _) in enumerate(outboxes[bucket]) if source[0] == offset)
        if positions[bucket] < len(outboxes[bucket]):
            source, epoch = outboxes[bucket][positions[bucket]]
            log.append((bucket, source, epoch))
            positions[bucket] += 1
            produced[bucket] = max(produced[bucket], positions[bucket])
    return log


@given(produced_logs())
def test_every_produced_record_is_admitted_exactly_once_and_in_order(log: list[Record]) -> None:
    _, verdicts = _fold_all(log)
    admitted = [record for record, verdict in zip(log, verdicts, strict=True) if verdict is Verdict.ADMITTED]
    assert len(set(admitted)) == len(admitted)
    assert set(admitted) == set(log)
    for bucket in {record[0] for record in log}:
        sources = [record[1] for record in admitted if record[0] == bucket]
        assert sources == sorted(sources)
    assert Verdict.STALE not in verdicts


@given(produced_logs(), st.data())
def test_a_fold_from_any_saved_prefix_equals_the_whole_fold(log: list[Record], data: st.DataObject) -> None:
    whole, verdicts = _fold_all(log)
    cut = data.draw(st.integers(0, len(log)))
    prefix, _ = _fold_all(log[:cut])
    resumed = AdmissionFold.decode(prefix.encode())
    assert resumed.next_offset == cut
    resumed, rest = _fold_all(log, resumed)
    assert rest == verdicts[cut:]
    assert resumed == whole


@given(produced_logs(), st.data())
def test_only_admitted_records_change_a_row(log: list[Record], data: st.DataObject) -> None:
    fold = AdmissionFold()
    for n, record in enumerate(log):
        before = fold.encode()[13:]
        if fold.admit(n, *record) is not Verdict.ADMITTED:
            assert fold.encode()[13:] == before


def test_a_record_of_a_dead_writer_behind_its_successors_is_stale() -> None:
    fold, verdicts = _fold_all([(1, (5, 0), 7), (1, (6, 0), 8), (1, (9, 0), 7), (2, (0, 0), 3), (1, (7, 0), 8)])
    assert verdicts == [Verdict.ADMITTED, Verdict.ADMITTED, Verdict.STALE, Verdict.ADMITTED, Verdict.ADMITTED]
    assert fold.next_offset == 5


def test_what_a_dead_writer_acknowledged_before_its_successor_arrives() -> None:
    _, verdicts = _fold_all([(1, (5, 0), 7), (1, (6, 0), 7), (1, (7, 0), 8)])
    assert verdicts == [Verdict.ADMITTED] * 3


def test_a_record_whose_predecessor_was_refused_waits_for_their_repetition() -> None:
    """A broker refused (5, 0) for good and took the two behind it; fan-out appends all three again."""
    fold = AdmissionFold()
    calls = [
        ((4, 0), None), ((5, 1), (5, 0)), ((6, 0), (5, 1)),
        ((5, 0), None), ((5, 1), (5, 0)), ((6, 0), (5, 1)), ((7, 0), (6, 0)),
    ]  # fmt: skip
    verdicts = [fold.admit(n, 1, source, 3, follows) for n, (source, follows) in enumerate(calls)]
    assert verdicts == [Verdict.ADMITTED, Verdict.ORPHANED, Verdict.ORPHANED, *[Verdict.ADMITTED] * 4]


def test_the_first_record_of_a_bucket_may_be_an_orphan_unless_the_log_was_trimmed() -> None:
    assert AdmissionFold().admit(0, 1, (5, 0), 3, (4, 0)) is Verdict.ORPHANED
    assert AdmissionFold(9).admit(9, 1, (5, 0), 3, (4, 0)) is Verdict.ADMITTED
    restored = AdmissionFold.decode(_fold_all([(2, (0, 0), 1)])[0].encode())
    assert restored.admit(1, 1, (5, 0), 3, (4, 0)) is Verdict.ORPHANED


@settings(deadline=None)
@given(produced_logs(), st.data())
def test_whatever_a_broker_refuses_nothing_is_lost_and_the_order_stays(log: list[Record], data: st.DataObject) -> None:
    """Append calls of any size; each may lose any of its records, and is repeated until it loses none."""
    fold, offset = AdmissionFold(), 0
    admitted: list[Record] = []
    for bucket in {record[0] for record in log}:
        sources = sorted({record for record in log if record[0] == bucket}, key=lambda record: record[1])
        while sources:
            size = data.draw(st.integers(1, 4))
            call, sources = sources[:size], sources[size:]
            for lossy in (True, True, False):
                follows = None
                for record in call:
                    if not (lossy and data.draw(st.booleans())):
                        if fold.admit(offset, *record, follows) is Verdict.ADMITTED:
                            admitted.append(record)
                        offset += 1
                    follows = record[1]
    assert len(set(admitted)) == len(admitted)
    assert set(admitted) == set(log)
    for bucket in {record[0] for record in log}:
        assert [record[1] for record in admitted if record[0] == bucket] == sorted(
            record[1] for record in admitted if record[0] == bucket
        )


def test_a_fold_skips_nothing() -> None:
    with pytest.raises(ValueError, match="where 0 is due"):
        AdmissionFold().admit(1, 0, (0, 0), 1)


def test_the_bytes_of_a_fold_are_fixed() -> None:
    fold, _ = _fold_all([(3, (258, 1), 2), (1, (7, 0), 1)])
    assert fold.encode().hex() == (
        "01" "0000000000000002" "00000002"
        "00000001" "0000000000000007" "00" "00000001" "0000000000000001"
        "00000003" "0000000000000102" "01" "00000002" "0000000000000000"
    )  # fmt: skip


@pytest.mark.parametrize("packed", [b"\x01", b"\x02" + bytes(12), b"\x01" + bytes(11) + b"\x01"])
def test_a_saved_fold_that_is_none_is_refused(packed: bytes) -> None:
    with pytest.raises(StoreError, match="saved fold"):
        AdmissionFold.decode(packed)


def test_no_saved_fold_is_the_empty_prefix() -> None:
    assert AdmissionFold.decode(b"").next_offset == 0
