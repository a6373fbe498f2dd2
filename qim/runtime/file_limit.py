"""File descriptors of this process: one per connection, and the soft limit of a login shell is often 1,024."""

from __future__ import annotations

import resource


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one; the limit now in force. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # a container that forbids it
            return soft
    return hard
