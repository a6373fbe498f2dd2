from __future__ import annotations

from pathlib import Path

import pytest

from qim.app.cli import EXIT_CANNOT_START, build_parser, main


def test_a_directory_without_a_node_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "dispatch", "--data", str(tmp_path)]) == EXIT_CANNOT_START
    assert capsys.readouterr().err.startswith(f"qim: no node runs in {tmp_path}")


def test_options() -> None:
    options = build_parser().parse_args(["audit", "dispatch", "--json", "--timeout-s", "3"])
    assert (options.what, options.json, options.timeout_s) == ("dispatch", True, 3.0)
