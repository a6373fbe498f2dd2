"""A finished run can be judged from its files alone; every fault planted in them is named and gives exit code 1."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from qim.app.cli import main
from qim.app.replay.checker import CommittedRecord, SentMessage, check
from qim.app.replay.evidence import DeviceState, RunDir, RunFacts
from qim.client.actions import Cursor
from qim.client.store import LocalStore
from qim.client.timeline import MessageRow, row_from_entry
from qim.core.visibility import Interval
from qim.errors import StartupError
from qim.protocol.qim_pb2 import EVENT_MESSAGE, MESSAGE_TYPE_TEXT, Entry

GROUP = "g:day"
SENDERS = ("ann", "bob", "ann", "bob", "ann", "bob")
INTERVALS = {"ann": (Interval(0),), "bob": (Interval(0),), "cat": (Interval(2),)}
CAT = "cat__phone.db"


def row(seq: int) -> MessageRow:
    return row_from_entry(
        Entry(
            mailbox_seq=(1 << 48) + seq,
            event_id=seq,
            event_ordinal=0,
            event_type=EVENT_MESSAGE,
            message_id=seq.to_bytes(16, "big"),
            conversation_id=GROUP,
            conversation_seq=seq,
            sender_id=SENDERS[seq - 1],
            body_included=True,
            message_type=MESSAGE_TYPE_TEXT,
            payload_or_ciphertext=f"text {seq}".encode(),
        )
    )


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    """Six messages; cat joined before the third. Every device holds what it must."""
    run = RunDir(tmp_path / "day")
    run.create()
    for user, intervals in INTERVALS.items():
        store = LocalStore(run.device_path(user, "phone"))
        run.log_cursor(user, "phone")
        for seq in range(1, 7):
            if intervals[0].contains(seq):
                store.apply([row(seq)], (), Cursor(b"", (1 << 48) + seq, 0))
        store.close()
    numbered = list(enumerate(SENDERS, 1))
    run.save(
        RunFacts(
            conversation_id=GROUP,
            plan="day",
            seed=1,
            control_reaches_all=True,
            devices=tuple(DeviceState(user=user, device="phone", converged=True) for user in INTERVALS),
        ),
        [
            SentMessage(
                user=user,
                device="phone",
                client_message_id=f"m{seq}",
                text=f"text {seq}",
                conversation_seq=seq,
                message_id=row(seq).message_id.hex(),
            )
            for seq, user in numbered
        ],
        [
            CommittedRecord(
                conversation_seq=seq,
                message_id=row(seq).message_id.hex(),
                sender=user,
                client_message_id=f"m{seq}",
            )
            for seq, user in numbered
        ],
        INTERVALS,
    )
    return run


def plant(run: RunDir, *statements: str) -> None:
    with closing(sqlite3.connect(run.path / "devices" / CAT)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_a_clean_run_is_read_back_and_passes(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = finished.load()
    assert check(evidence) == []
    assert [message.text for message in evidence.devices[2].shown] == ["text 3", "text 4", "text 5", "text 6"]
    assert len(evidence.devices[0].cursor_positions) == 6
    assert main(["replay", "--check", str(finished.path)]) == 0
    assert "PASSED" in capsys.readouterr().out


COPY = """INSERT INTO local_message SELECT conversation_id, conversation_seq + 100, event_ordinal, message_id,
timeline_anchor_seq + 100, event_id, mailbox_seq, sender_id, created_at_ms, last_activity_id, flags, mention_type,
client_message_id, message_type, custom_type, schema_version, payload, media, body_included, state
FROM local_message WHERE conversation_seq = 4"""
SWAP = (
    "UPDATE local_message SET timeline_anchor_seq = 99 WHERE conversation_seq = 4",
    "UPDATE local_message SET timeline_anchor_seq = 4 WHERE conversation_seq = 5",
    "UPDATE local_message SET timeline_anchor_seq = 5 WHERE timeline_anchor_seq = 99",
)
LEAK = f"""INSERT INTO local_message SELECT conversation_id, 2, event_ordinal, x'{row(2).message_id.hex()}', 2,
event_id, mailbox_seq, sender_id, created_at_ms, last_activity_id, flags, mention_type, client_message_id, message_type,
custom_type, schema_version, CAST('text 2' AS BLOB), media, body_included, state
FROM local_message WHERE conversation_seq = 3"""
PLANTED = {
    "loss": (("DELETE FROM local_message WHERE conversation_seq = 4",), {"lost: cat/phone"}),
    "duplicate": ((COPY,), {"duplicated: cat/phone"}),
    "swap": (SWAP, {"misordered (device): cat/phone"}),
    "leak": ((LEAK,), {"leaked: cat/phone"}),
    "cursor regression": (
        ("UPDATE local_cursor SET last_applied_mailbox_seq = last_applied_mailbox_seq - 1",),
        {"cursor regression: cat/phone"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_fails(finished: RunDir, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    statements, wanted = PLANTED[name]
    plant(finished, *statements)
    assert main(["replay", "--check", str(finished.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {line.rpartition(": ")[0] for line in lines[:-1]} >= wanted
    assert lines[-1] == "FAILED"


def test_what_is_no_finished_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError, match="holds no finished run"):
        RunDir(tmp_path).load()
    assert main(["replay", "--check", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
