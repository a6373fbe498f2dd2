"""The floor and the lone gateway of part `push` start, and end with their parent."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.app.bench.child import Child, Server
from qim.app.bench.push_server import FLOOR, GATEWAY, Serve, serve_floor, serve_gateway, sockets
from qim.app.tls import ensure_certificates
from tests.support.run_dir import short_run_dir

TIMEOUT_S = 30.0


@pytest.mark.parametrize(("role", "main"), [(GATEWAY, serve_gateway), (FLOOR, serve_floor)])
def test_it_listens_on_its_port_and_on_the_backplane(role: str, main: Server) -> None:
    with short_run_dir() as directory:
        command = Serve(
            run_dir=Path(directory),
            tls=ensure_certificates(Path(directory) / "tls", "127.0.0.1", time.time_ns() // 1_000_000),
            token_key=Ed25519PrivateKey.generate().private_bytes_raw(),
        )
        with Child(role, main) as child:
            port = child.call(command, TIMEOUT_S)
            with socket.create_connection(("127.0.0.1", port), TIMEOUT_S):
                assert sockets(Path(directory))[role].exists()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
