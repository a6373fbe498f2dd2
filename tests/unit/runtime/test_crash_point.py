from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from qim.runtime.crash_point import AFTER_COMMIT, AFTER_DISPATCH, DIRECTORY_VARIABLE

PASSES = f"""
from qim.runtime.crash_point import crash_point
crash_point("{AFTER_DISPATCH}")
crash_point("{AFTER_COMMIT}")
"""


def exit_code(directory: Path | None) -> int:
    environment = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
    if directory is not None:
        environment[DIRECTORY_VARIABLE] = str(directory)
    return subprocess.run([sys.executable, "-c", PASSES], env=environment, timeout=30, check=False).returncode


def test_an_armed_point_kills_once(tmp_path: Path) -> None:
    (tmp_path / AFTER_COMMIT).touch()
    assert exit_code(tmp_path) == -signal.SIGKILL
    assert not (tmp_path / AFTER_COMMIT).exists()
    assert exit_code(tmp_path) == 0


def test_nothing_is_armed_where_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / AFTER_COMMIT).touch()
    assert exit_code(None) == 0
    assert (tmp_path / AFTER_COMMIT).exists()
