"""The supervisor with real processes: restart, drain, kill, death of the supervisor itself, exit codes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from qim.errors import StartupError
from qim.runtime.prefork import NotifyReady, ProcessSpec, Supervisor, SupervisorOptions
from qim.runtime.redis_server import RedisServer, default_binary
from tests.support.run_dir import short_run_dir
from tests.support.supervised import is_alive, supervised, wait_until_gone
from tests.support.waiting import wait_for


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with short_run_dir() as path:
        yield path


def _serve(notify_ready: NotifyReady) -> int:
    """A worker that drains at once."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    notify_ready()
    while not stopped:
        time.sleep(0.005)
    return 0


def _serve_deaf(notify_ready: NotifyReady) -> int:
    """A worker that ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    notify_ready()
    while True:
        time.sleep(1)


def _refuse(_: NotifyReady) -> int:
    raise StartupError("no such thing")


def _crash(_: NotifyReady) -> int:
    os._exit(7)


def _node(
    run_dir: Path,
    *targets: Callable[[NotifyReady], int],
    servers: tuple[RedisServer, ...] = (),
    drain_timeout_ms: int = 5000,
    on_ready: Callable[[], None] = lambda: None,
    on_worker_died: Callable[[str, float], None] = lambda name, delay_ms: None,
) -> Callable[[], Supervisor]:
    def build() -> Supervisor:
        return Supervisor(
            processes=[ProcessSpec(name=f"worker-{i}", target=target) for i, target in enumerate(targets)],
            servers=servers,
            options=SupervisorOptions(state_file=run_dir / "state.json", drain_timeout_ms=drain_timeout_ms),
            on_ready=on_ready,
            on_worker_died=on_worker_died,
        )

    return build


def _server(run_dir: Path) -> RedisServer:
    return RedisServer(
        name="message",
        binary=default_binary(),
        data_dir=run_dir / "data",
        socket_path=run_dir / "m.sock",
        fsync="always",
        maxmemory_bytes=1 << 28,
    )


def test_workers_run_drain_and_stop_with_code_0(run_dir: Path) -> None:
    with supervised(_node(run_dir, _serve, _serve), run_dir / "state.json") as node:
        node.wait_ready()
        pids = [node.process(name)["pid"] for name in ("worker-0", "worker-1")]
        assert all(is_alive(pid) for pid in pids)
        assert [os.sched_getscheduler(pid) for pid in pids] == [os.SCHED_BATCH] * 2
        assert node.stop() == 0
        assert not any(is_alive(pid) for pid in pids)
        assert node.state()["processes"]["worker-0"]["pid"] == 0


def test_ready_is_announced_once_all_serve(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(run_dir / "notify"))
        systemd.settimeout(5)
        os.environ["NOTIFY_SOCKET"] = str(run_dir / "notify")
        try:
            with supervised(_node(run_dir, _serve, on_ready=(run_dir / "told").touch), run_dir / "state.json") as node:
                assert systemd.recv(64) == b"READY=1"
                wait_for((run_dir / "told").exists)
                assert node.stop() == 0
                assert systemd.recv(64) == b"STOPPING=1"
        finally:
            del os.environ["NOTIFY_SOCKET"]


def test_a_killed_worker_is_replaced(run_dir: Path) -> None:
    with supervised(_node(run_dir, _serve, _serve), run_dir / "state.json") as node:
        node.wait_ready()
        other = node.process("worker-1")["pid"]
        node.kill("worker-0")
        node.wait_ready()
        assert node.process("worker-0")["restarts"] == 1
        assert node.process("worker-1")["pid"] == other
        assert node.stop() == 0


def test_a_death_is_told_when_it_is_proven_and_before_the_restart(run_dir: Path) -> None:
    told = run_dir / "told"

    def died(name: str, delay_ms: float) -> None:
        told.write_text(f"{name} {delay_ms < 1000}")

    with supervised(_node(run_dir, _serve, on_worker_died=died), run_dir / "state.json") as node:
        node.wait_ready()
        node.kill("worker-0")
        assert told.read_text() == "worker-0 True"
        told.unlink()
        node.wait_ready()
        assert node.stop() == 0
        assert not told.exists(), "a stop is no death"


def test_a_crashing_worker_is_retried_with_backoff(run_dir: Path) -> None:
    with supervised(_node(run_dir, _crash), run_dir / "state.json") as node:
        started = time.monotonic()
        wait_for(lambda: node.process("worker-0")["restarts"] >= 3)
        # 50 + 100 + 200 ms, each at least 80 % of it
        assert time.monotonic() - started >= 0.8 * 0.350 - 0.05
        assert node.stop() == 0


def test_a_worker_that_cannot_start_stops_the_node_with_code_2(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with supervised(_node(run_dir, _serve, _refuse), run_dir / "state.json") as node:
        assert node.wait() == 2
    assert capfd.readouterr().err == "qim: worker-1: no such thing\n"


def test_a_worker_that_cannot_start_again_for_a_while_is_retried(run_dir: Path) -> None:
    starts = run_dir / "starts"
    starts.touch()

    def refuse_the_second_time(notify_ready: NotifyReady) -> int:
        with starts.open("a") as file:
            file.write("x")
        return _refuse(notify_ready) if starts.stat().st_size == 2 else _serve(notify_ready)

    with supervised(_node(run_dir, refuse_the_second_time), run_dir / "state.json") as node:
        node.wait_ready()
        node.kill("worker-0")
        node.wait_ready()
        assert node.process("worker-0")["restarts"] == 2
        assert node.stop() == 0


def test_a_deaf_worker_is_killed_after_the_drain_timeout(run_dir: Path) -> None:
    with supervised(_node(run_dir, _serve_deaf, drain_timeout_ms=200), run_dir / "state.json") as node:
        node.wait_ready()
        pid = node.process("worker-0")["pid"]
        assert node.stop() == 1
        assert not is_alive(pid)


def test_a_second_request_to_stop_does_not_wait(run_dir: Path) -> None:
    with supervised(_node(run_dir, _serve_deaf, drain_timeout_ms=60_000), run_dir / "state.json") as node:
        node.wait_ready()
        os.kill(node.pid, signal.SIGINT)
        wait_for(lambda: is_alive(node.pid))
        time.sleep(0.1)
        assert node.stop(signal.SIGINT) == 1


def test_everything_dies_with_the_supervisor(run_dir: Path) -> None:
    with supervised(_node(run_dir, _serve_deaf, servers=(_server(run_dir),)), run_dir / "state.json") as node:
        node.wait_ready()
        pids = [node.process(name)["pid"] for name in ("worker-0", "message")]
        node.stop(signal.SIGKILL)
        wait_until_gone(pids)


def test_servers_start_first_come_back_with_their_data_and_stop_last(run_dir: Path) -> None:
    server = _server(run_dir)
    with supervised(_node(run_dir, _serve, servers=(server,)), run_dir / "state.json") as node:
        node.wait_ready()
        with redis.Redis.from_url(server.address) as client:
            client.set("kept", "yes")
            killed = node.kill("message")
            assert not is_alive(killed)
        with redis.Redis.from_url(server.address, retry=None) as client:
            wait_for(lambda: _value(client) == b"yes")
        pid = node.process("message")["pid"]
        assert node.stop() == 0
        assert not is_alive(pid)


def test_a_server_that_cannot_start_is_one_line_and_code_2(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run_dir / "data").mkdir()
    (run_dir / "data" / "engine.json").write_text('{"engine": "redis", "version": [7, 0, 15]}')
    with supervised(_node(run_dir, _serve, servers=(_server(run_dir),)), run_dir / "state.json") as node:
        assert node.wait() == 2
    assert "was written by redis 7.0.15" in capfd.readouterr().err


def _value(client: redis.Redis) -> object:
    try:
        return client.get("kept")
    except redis.ConnectionError:
        return None
