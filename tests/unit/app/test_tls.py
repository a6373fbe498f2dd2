"""The node's own certificates: made once, kept, and good for every name a client may use."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from qim.app.tls import TlsFiles, client_context, ensure_certificates, server_context
from qim.errors import StartupError

NOW_MS = 1_790_000_000_000


def handshake(files: TlsFiles, server_name: str) -> ssl.SSLObject:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(files.ca_path).wrap_bio(to_client, to_server, server_hostname=server_name)
    server = server_context(files).wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    import time

    return ensure_certificates(tmp_path / "tls", "127.0.0.1", time.time_ns() // 1_000_000)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "b00ff.im.local", "im.local"])
def test_a_client_that_trusts_the_authority_connects(files: TlsFiles, name: str) -> None:
    connection = handshake(files, name)
    assert connection.version() == "TLSv1.3"
    assert connection.selected_alpn_protocol() == "qim/1"


def test_a_name_that_is_not_the_nodes_is_refused(files: TlsFiles) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(files, "example.org")


def test_the_second_start_finds_the_same_files(files: TlsFiles) -> None:
    before = files.certificate_path.read_bytes()
    assert ensure_certificates(files.ca_path.parent, "127.0.0.1", NOW_MS) == files
    assert files.certificate_path.read_bytes() == before
    assert files.key_path.stat().st_mode & 0o077 == 0


def test_half_a_set_is_refused(files: TlsFiles) -> None:
    files.key_path.unlink()
    with pytest.raises(StartupError, match="incomplete"):
        ensure_certificates(files.ca_path.parent, "127.0.0.1", NOW_MS)
