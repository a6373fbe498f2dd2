"""Where a running node is, and what its admin plane answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from qim.app.connect import CONNECT_FILE, AdminClient, AdminRefusal, NodeAddress
from qim.app.tls import ensure_certificates
from qim.errors import StartupError
from qim.runtime.clock import SystemClock


@pytest.fixture
def address(tmp_path: Path) -> NodeAddress:
    files = ensure_certificates(tmp_path / "tls", "127.0.0.1", SystemClock().unix_ms())
    (tmp_path / "admin.token").write_text("sesame\n")
    return NodeAddress(
        host="0.0.0.0",
        port=1,
        admin_port=1,
        ca_path=str(files.ca_path),
        admin_token_path=str(tmp_path / "admin.token"),
        data_dir=str(tmp_path),
        run_dir=str(tmp_path / "run"),
        pid=7,
        core_address="unix:///core",
        mailbox_address="unix:///mailbox",
        conversation_bucket_count=64,
        mailbox_shard_count=16,
    )


def test_what_is_written_is_read_back(address: NodeAddress, tmp_path: Path) -> None:
    address.write(tmp_path / CONNECT_FILE)
    assert NodeAddress.read(tmp_path) == address
    assert address.client_host == "127.0.0.1"
    assert address.admin_token() == "sesame"


@pytest.mark.parametrize(("content", "complaint"), [(None, "no node runs"), ("{", "damaged"), ("{}", "damaged")])
def test_no_node_is_one_line(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / CONNECT_FILE).write_text(content)
    with pytest.raises(StartupError, match=complaint) as caught:
        NodeAddress.read(tmp_path)
    assert "\n" not in str(caught.value)


async def test_a_plane_that_does_not_answer_is_a_refusal(address: NodeAddress) -> None:
    async with AdminClient(address) as admin:
        with pytest.raises(AdminRefusal, match="does not answer") as caught:
            await admin.token("t", "u", "d", 60)
        assert caught.value.status == 503
        assert len(await admin.problems()) == 1


async def test_an_unreadable_token_is_a_startup_error(address: NodeAddress, tmp_path: Path) -> None:
    (tmp_path / "admin.token").unlink()
    with pytest.raises(StartupError, match="admin token"):
        async with AdminClient(address):
            pass
