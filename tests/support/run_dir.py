"""Temporary run directories short enough for unix socket paths (107 bytes)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_run_dir() -> Iterator[Path]:
    """`/tmp/qimXXXXXXXX`, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="qim", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
