from __future__ import annotations

import pytest

from tests.chaos.faults import FAULTS, selected


def test_names_differ() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_any_beginning_selects() -> None:
    assert selected("") == list(FAULTS)
    assert {fault.name for fault in selected("pause-writer,older")} == {"pause-writer", "pause-writer-30s", "older-aof"}


def test_a_word_that_selects_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault begins with earthquake"):
        selected("kill,earthquake")
