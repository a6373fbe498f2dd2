from __future__ import annotations

import os
import socket

from qim.runtime.sd_notify import READY, sd_notify


def test_nobody_asked() -> None:
    assert not sd_notify(READY, {})


def test_nobody_listens() -> None:
    assert not sd_notify(READY, {"NOTIFY_SOCKET": "/nowhere/notify"})


def test_an_abstract_socket() -> None:
    name = f"qim-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name)
        systemd.settimeout(1)
        assert sd_notify(READY, {"NOTIFY_SOCKET": "@" + name})
        assert systemd.recv(64) == b"READY=1"
