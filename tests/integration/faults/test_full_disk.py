"""The disk that is full really is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults.full_disk import small_disk


def test_nothing_can_be_written_until_it_is_freed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size_mib=4) as disk:
        kept = disk.directory / "kept"
        kept.write_bytes(b"x")
        assert disk.fill() > 3 << 20
        with kept.open("ab", buffering=0) as file:
            file.write(b"y" * 4096)  # what its own last page holds, no more
            with pytest.raises(OSError, match="No space"):
                file.write(b"y")
        disk.free_up()
        with kept.open("ab") as file:
            file.write(b"z" * 8192)
    assert not kept.exists(), "it was on the small disk"


def test_room_can_be_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size_mib=4) as disk:
        disk.fill(leave_bytes=1 << 20)
        assert (1 << 20) - 4096 <= disk.free_bytes() <= (1 << 20) + 4096
