"""What a node cannot start with is one line that says what and how to mend it, and exit code 2."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qim.app.own_node import OwnNode
from tests.support.node import MERGED, running_node
from tests.support.run_dir import short_run_dir


@pytest.fixture(scope="module")
def node() -> Iterator[OwnNode]:
    with running_node(MERGED) as running:
        yield running


@pytest.fixture
def stopped() -> Iterator[OwnNode]:
    """A node that has run once."""
    with running_node(MERGED) as running:
        assert running.stop() == 0
        yield running


def up(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """The one line of a `qim up` that must not start."""
    done = subprocess.run(
        [sys.executable, "-m", "qim", "up", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | (environment or {}),
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("qim: ")
    return lines[0]


def restart(node: OwnNode) -> str:
    return up(*node.argv()[4:])


def test_a_second_node_on_the_same_directory(node: OwnNode) -> None:
    line = up("--data", str(node.data_dir), "--port", "1", "--admin-port", "2")
    assert "another node runs" in line


@pytest.mark.parametrize("which", ["--port", "--admin-port"])
def test_a_used_port(which: str) -> None:
    with short_run_dir() as directory, socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--port": "18471", "--admin-port": "18472", which: str(taken.getsockname()[1])}
        line = up("--data", str(directory / "data"), *(part for pair in ports.items() for part in pair))
        assert "cannot listen" in line
        assert which in line


def test_a_missing_key_file(stopped: OwnNode) -> None:
    (stopped.data_dir / "master.key").unlink()
    assert "key file" in restart(stopped)
    assert not (stopped.data_dir / "master.key").exists()


def test_the_servers_of_another_cluster(stopped: OwnNode) -> None:
    with running_node(MERGED) as other:
        assert other.stop() == 0
        shutil.rmtree(stopped.data_dir / "redis-mailbox")
        shutil.copytree(other.data_dir / "redis-mailbox", stopped.data_dir / "redis-mailbox")
        assert "of cluster" in restart(stopped)


@pytest.mark.parametrize("server", ["redis-core", "redis-mailbox"])
def test_a_server_that_lost_its_data(stopped: OwnNode, server: str) -> None:
    shutil.rmtree(stopped.data_dir / server)
    assert "has held data" in restart(stopped)


def test_an_immutable_fact_that_was_to_change(stopped: OwnNode) -> None:
    line = up(*stopped.argv()[4:], environment={"QIM_CONVERSATION_BUCKET_COUNT": "128"})
    assert "conversation_bucket_count of this cluster is 64" in line
    line = up(*stopped.argv()[4:], environment={"QIM_SINGLE_HOST_MAILBOX_SHARD_COUNT": "16"})
    assert "mailbox_shard_count of this cluster is 8 for ever, not 16: correct single_host_mailbox_shard_count" in line


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--gateways", "0"], {}, "gateway workers"),
        (["--port", "99999"], {}, "port 99999"),
        (["--redis-server", "/nonexistent"], {}, "not an executable"),
        (["--redis-server", "/bin/true"], {}, "not a Redis-compatible server"),
        (["--parameters", "/nonexistent.toml"], {}, "cannot read"),
        ([], {"QIM_NO_SUCH_PARAMETER": "1"}, "QIM_NO_SUCH_PARAMETER"),
        ([], {"QIM_LANE_COUNT": "many"}, "lane_count"),
        ([], {"QIM_LANE_COUNT": "63"}, "lane_count"),
    ],
)
def test_a_value_that_cannot_be(arguments: list[str], environment: dict[str, str], complaint: str) -> None:
    with short_run_dir() as directory:
        assert complaint in up("--data", str(directory / "data"), *arguments, environment=environment)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot use the data directory" in up("--data", str(tmp_path / "file" / "data"))


@pytest.mark.parametrize("command", [["token", "ann", "phone"], ["group", "add", "g", "ann"], ["demo"]])
def test_a_command_without_a_node(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qim", *command, "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no node runs" in done.stderr
    assert done.stderr.count("\n") == 1
