"""`qim bench` as a command; the parts themselves run in the integration suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qim.app.bench import command
from qim.app.bench.figures import Figure, PartReport
from qim.app.cli import main


def part(name: str, *failures: str) -> command.Part:
    def run(seconds: float, progress: Callable[[str], None]) -> PartReport:
        progress(f"{seconds:.0f} s")
        return PartReport(
            part=name, conditions=[], figures=[Figure(name="x", value=1.0, unit="ms", at_most=0.5)], failures=failures
        )

    return run


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PARTS", {"push": part("push"), "direct": part("direct", "a message is missing")})


@pytest.mark.usefixtures("parts")
def test_a_missed_aim_does_not_fail_but_a_lost_message_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    assert main(["bench", "--only", "push", "--seconds", "3", "--out", str(out)]) == 0
    assert main(["bench", "--seconds", "3", "--out", str(out)]) == 1
    assert {path.name for path in out.iterdir()} == {"push.json", "direct.json"}
    shown = capsys.readouterr()
    assert "missed" in shown.out
    assert "FAILED: a message is missing" in shown.out
    assert "bench: push: 3 s" in shown.err


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    ("arguments", "said"), [(["--only", "pull"], "there is no part pull"), (["--seconds", "0"], "at least 1")]
)
def test_what_makes_no_sense_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("parts")
def test_a_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--out", str(tmp_path / "file" / "results")]) == 2
    assert "cannot write results" in capsys.readouterr().err


def test_every_part_of_the_help_exists() -> None:
    assert list(command.PARTS) == ["push", "direct", "group", "large"]
