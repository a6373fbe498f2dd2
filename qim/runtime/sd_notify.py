"""systemd's readiness protocol: one datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"


def sd_notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell systemd; False when nobody asked for it or it does not listen."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.sendto(state.encode(), address)
        except OSError:
            return False
    return True
