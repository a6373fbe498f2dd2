"""The command line: what options become, and which exit code an error gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qim.app.cli import LEASE_KINDS, build_parser, main, settings_of
from qim.app.join import JoinOptions
from qim.app.settings import PoolSizes
from qim.errors import QimError, StartupError
from qim.registry.api import LeaseKind


def settings(*arguments: str) -> object:
    return settings_of(build_parser().parse_args(["up", *arguments]))


def test_options_of_up_become_settings(tmp_path: Path) -> None:
    made = settings_of(
        build_parser().parse_args(
            ["up", "--data", str(tmp_path), "--port", "1234", "--gateways", "3", "--mailboxes", "2", "--apart"]
        )
    )
    assert made.data_dir == tmp_path
    assert made.port == 1234
    assert made.pools == PoolSizes(gateway=3, writer=made.pools.writer, fanout=made.pools.fanout, mailbox=2)
    assert made.apart


def test_a_relative_data_directory_is_made_absolute() -> None:
    assert settings_of(build_parser().parse_args(["up"])).data_dir == Path.cwd() / "qim-data"


@pytest.mark.parametrize(
    ("error", "code"), [(StartupError("no room"), 2), (QimError("not so"), 1), (KeyboardInterrupt(), 130)]
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("qim.app.cli._run_up", fail)
    assert main(["up"]) == code
    assert capsys.readouterr().err.count("\n") <= 1


def test_help_teaches_by_examples() -> None:
    for command in ([], ["up"], ["chat"], ["demo"], ["replay"], ["bench"], ["token"], ["group"], ["join"], ["shards"]):
        done = subprocess.run(
            [sys.executable, "-m", "qim", *command, "--help"], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0
        assert done.stdout.count("\n  qim") >= 1 or "  qim " in done.stdout


def test_help_imports_no_event_loop_and_no_store() -> None:
    heavy = ("asyncio", "redis", "uvloop", "google.protobuf")
    code = f"import sys, qim.app.cli as c; c.build_parser(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_the_kinds_of_leases_are_those_of_the_registry() -> None:
    assert set(LEASE_KINDS) == {kind.value for kind in LeaseKind}


def test_shards_lists_everything_unless_told_otherwise() -> None:
    parse = build_parser().parse_args
    listing = parse(["shards"])
    assert (listing.verb, listing.kind) == (None, None)
    assert parse(["shards", "list", "bucket"]).kind == "bucket"
    move = parse(["shards", "move", "mailbox", "3", "mailbox-1"])
    assert (move.kind, move.shard_id, move.owner) == ("mailbox", 3, "mailbox-1")


def test_options_of_join_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[JoinOptions] = []

    def run(options: JoinOptions) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr("qim.app.join.run_joined", run)
    assert main(["join", "--data", str(tmp_path), "--writers", "2", "--commit-log", "kafka://k:1"]) == 0
    assert asked == [
        JoinOptions(data_dir=tmp_path, pools=PoolSizes(0, 2, 0, 0), commit_log="kafka://k:1"),
    ]
