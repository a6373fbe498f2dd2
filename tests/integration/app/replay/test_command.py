"""The beginning of a recorded day on a node of its own, with and without kills; faults planted in what it leaves."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from qim.app.cli import main
from qim.app.own_node import OwnNode
from tests.support.node import MERGED, running_node

DAYS = Path(__file__).parents[3] / "data" / "irc"
WITH_JOINS = DAYS / "2006-06-01.jsonl"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished run that passed."""
    reports = tmp_path_factory.mktemp("replay")
    assert main(["replay", str(WITH_JOINS), "--limit", "250", "--report", str(reports)]) == 0
    return reports / WITH_JOINS.stem


def test_a_played_day_leaves_a_report_that_passed(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert report["failures"] == []
    assert report["messages"] > 100
    assert report["deliveries"] > report["messages"]
    assert any("lifted" in note for note in report["notes"])


def test_a_finished_run_can_be_judged_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--check", str(finished)]) == 0
    assert "PASSED" in capsys.readouterr().out


def a_device(finished: Path) -> Path:
    """Store of the device that holds most."""
    return max((finished / "devices").glob("*.db"), key=lambda path: path.stat().st_size)


MIDDLE = """(SELECT conversation_seq FROM local_message WHERE message_type = 1 ORDER BY conversation_seq
LIMIT 1 OFFSET (SELECT count(*) / 2 FROM local_message))"""
COLUMNS = """event_ordinal, message_id, {anchor}, event_id, mailbox_seq, sender_id, created_at_ms, last_activity_id,
flags, mention_type, client_message_id, message_type, custom_type, schema_version, payload, media, body_included,
state"""
PLANTED = {
    "lost": [f"DELETE FROM local_message WHERE conversation_seq = {MIDDLE}"],
    "duplicated": [
        f"""INSERT INTO local_message SELECT conversation_id, 1000000, {COLUMNS.format(anchor=1000000)}
        FROM local_message WHERE conversation_seq = {MIDDLE}"""
    ],
    "misordered (device)": [
        f"UPDATE local_message SET timeline_anchor_seq = timeline_anchor_seq + 20 WHERE conversation_seq = {MIDDLE}"
    ],
    "leaked": [
        f"""INSERT INTO local_message SELECT 'g:another', conversation_seq, {COLUMNS.format(anchor="conversation_seq")}
        FROM local_message WHERE conversation_seq = {MIDDLE}"""
    ],
    "cursor regression": ["UPDATE local_cursor SET last_applied_mailbox_seq = last_applied_mailbox_seq - 1"],
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_planted_in_a_finished_run_is_named(
    finished: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_device(finished)
    before = path.read_bytes()
    try:
        plant(path, PLANTED[fault])
        assert main(["replay", "--check", str(finished)]) == 1
        assert f"{fault}: " in capsys.readouterr().out
    finally:
        path.write_bytes(before)


def plant(path: Path, statements: Sequence[str]) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        for statement in statements:
            assert connection.execute(statement).rowcount == 1
        connection.commit()


def test_a_day_on_a_node_that_runs_already(capsys: pytest.CaptureFixture[str]) -> None:
    node: OwnNode
    with running_node(MERGED) as node:
        assert main(["replay", str(WITH_JOINS), "--limit", "60", "--connect", str(node.data_dir)]) == 0
    assert "PASSED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["/nonexistent.jsonl"],
        [str(WITH_JOINS), "--chaos", "--connect", "somewhere"],
        [str(WITH_JOINS), "--speed", "-1"],
        [str(WITH_JOINS), "--connect", "/nonexistent"],
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
