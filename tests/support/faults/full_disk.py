"""A file system of a few MiB that a test can fill to the last byte. Needs the right to mount."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_FILLER: Final = "filler"
_BLOCK_BYTES: Final = 4096


class SmallDisk:
    """A mounted directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def fill(self, *, leave_bytes: int = 0) -> int:
        """Take what is free but `leave_bytes`; bytes taken. Again and again, until nobody else got any."""
        taken = 0
        while (free := self.free_bytes() - leave_bytes) >= _BLOCK_BYTES:
            with (self.directory / _FILLER).open("ab") as file:
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), free)
                except OSError as error:  # somebody else was faster: what is left now is less
                    if error.errno != errno.ENOSPC:
                        raise
                    continue
            taken += free
        return taken

    def free_up(self) -> None:
        """Give back what `fill` took."""
        (self.directory / _FILLER).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        stats = os.statvfs(self.directory)
        return stats.f_bavail * stats.f_frsize


@contextmanager
def small_disk(directory: Path, *, size_mib: int) -> Iterator[SmallDisk]:
    """`directory` (made if it is missing, else it must be empty) on a file system of its own for the time of the block.

    Whoever uses it must have ended before the block does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=700", "tmpfs", str(directory)], check=True)
    try:
        yield SmallDisk(directory)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
