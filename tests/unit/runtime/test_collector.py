"""In a process of its own: the collector is one for all tests."""

from __future__ import annotations

import subprocess
import sys

_SETTLED = """
import gc
from qim.runtime.collector import THRESHOLDS, settle

class Kept:
    pass

kept = Kept()
kept.self = kept
settle()
assert gc.get_threshold() == THRESHOLDS
assert gc.get_freeze_count() > 1000
assert not any(found is kept for found in gc.get_objects()), "it is looked at again"
"""


def test_what_was_made_before_is_not_looked_at_again() -> None:
    subprocess.run([sys.executable, "-c", _SETTLED], check=True)
