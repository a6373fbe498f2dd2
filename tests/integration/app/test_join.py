"""A second supervisor on the host: its workers take their share under load, give it back, or die with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from qim.app.audit.command import audit_dispatch
from qim.app.join import JoinOptions, run_joined
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.app.settings import PoolSizes
from qim.errors import StartupError
from qim.registry.api import KIND_OF_POOL
from tests.contract.kafka_fixtures import new_prefix
from tests.support.kafka_server import KafkaServer
from tests.support.node import APART, devices_of, options_with, running_node
from tests.support.takeover import POOLS, TENTH, Leases, talk_on


@contextmanager
def joined(node: OwnNode, options: OwnNodeOptions) -> Iterator[subprocess.Popen[bytes]]:
    """A second supervisor with a worker of each pool."""
    argv = [sys.executable, "-m", "qim", "join", "--data", str(node.data_dir)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("QIM_")}
    with (node.directory / "join.log").open("ab") as log:
        process = subprocess.Popen(
            [*argv, "--writers", "1", "--fanouts", "1", "--mailboxes", "1"],
            stdout=log, stderr=log, env=inherited | dict(options.parameters), start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)


def check_a_share_taken_and_given_back(options: OwnNodeOptions) -> None:
    async def run(node: OwnNode) -> None:
        leases = Leases(node)
        async with devices_of(node) as devices, talk_on(devices) as talk:
            await talk.say("before")
            traffic = asyncio.create_task(talk.go_on())
            with joined(node, options) as process:
                for pool in POOLS:
                    three = {f"{pool}-{number}" for number in (0, 1, 64)}
                    await asyncio.to_thread(leases.wait_for_owners, KIND_OF_POOL[pool], three)
                    counts = leases.owners(KIND_OF_POOL[pool])
                    assert max(counts.values()) - min(counts.values()) <= 1, counts
                await asyncio.sleep(0.5)
                process.send_signal(signal.SIGINT)
                assert await asyncio.to_thread(process.wait, 30) == 0
            for pool in POOLS:
                await asyncio.to_thread(leases.wait_for_owners, KIND_OF_POOL[pool], {f"{pool}-0", f"{pool}-1"})
            talk.end()
            await traffic
            await talk.check()

    with running_node(options) as node:
        asyncio.run(run(node))
        assert audit_dispatch(node.data_dir) == 0


def test_a_second_supervisor_takes_its_share_under_load_and_gives_it_back() -> None:
    check_a_share_taken_and_given_back(options_with(APART, **TENTH))


@pytest.mark.kafka
@pytest.mark.timeout(180)
def test_a_second_supervisor_finds_the_broker_of_its_node(kafka_server: KafkaServer) -> None:
    """The same command as for any node: nothing about the log is said."""
    check_a_share_taken_and_given_back(replace(options_with(APART, **TENTH), commit_log=kafka_server.url(new_prefix())))


def test_a_second_supervisor_that_dies_with_all_its_workers_loses_its_share_after_the_wait() -> None:
    options = options_with(APART, **TENTH)

    async def run(node: OwnNode) -> None:
        leases = Leases(node)
        async with devices_of(node) as devices, talk_on(devices) as talk:
            with joined(node, options) as process:
                for pool in POOLS:
                    three = {f"{pool}-{number}" for number in (0, 1, 64)}
                    await asyncio.to_thread(leases.wait_for_owners, KIND_OF_POOL[pool], three)
                await talk.say("before")
                traffic = asyncio.create_task(talk.go_on())
                await asyncio.sleep(0.3)
                process.kill()
            for pool in POOLS:
                await asyncio.to_thread(leases.wait_for_owners, KIND_OF_POOL[pool], {f"{pool}-0", f"{pool}-1"})
            talk.end()
            await traffic
            await talk.check()

    with running_node(options) as node:
        asyncio.run(run(node))


def test_a_node_that_does_not_run_cannot_be_joined(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no node runs"):
        run_joined(JoinOptions(data_dir=tmp_path, pools=PoolSizes(gateway=0, writer=1, fanout=0, mailbox=0)))


def test_joining_with_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="how many"):
        run_joined(JoinOptions(data_dir=tmp_path, pools=PoolSizes(gateway=0, writer=0, fanout=0, mailbox=0)))
