"""Leases between real processes: proven and unproven deaths, split brain, a registry that is lost."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from qim.app.own_node import OwnNode, pids_of
from qim.client.aio import Client
from qim.registry.api import KIND_OF_POOL, LeaseKind
from tests.support.faults.pause import paused
from tests.support.node import APART, devices_of, options_with, running_node
from tests.support.takeover import CONVERGE_S, POOLS, TENTH, Leases, conversation_with, talk_on

WRITERS = ("writer-0", "writer-1")


@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_worker_is_replaced_within_three_seconds(pool: str) -> None:
    """Lease times of the contract: the supervisor's proof of the death is what makes it quick."""

    async def run(node: OwnNode) -> None:
        async with devices_of(node) as devices, talk_on(devices) as talk:
            await talk.say("before")
            took_s = []
            for number in range(3):
                node.kill(f"{pool}-{number % 2}")
                took_s.append(await talk.served_in_s(f"after kill {number}"))
            await talk.check()
            assert max(took_s) < 3.0, took_s
            print(f"{pool}: recovery {sorted(round(s, 2) for s in took_s)}")

    with running_node(options_with(APART, region_failover_retry_after_ms="500")) as node:
        asyncio.run(run(node))


@pytest.mark.parametrize("pool", POOLS)
def test_a_stopped_worker_is_taken_over_and_fenced_when_it_goes_on(pool: str) -> None:
    """Split brain: nobody has proven its death, it lives on with everything it had in memory and in flight."""

    async def run(node: OwnNode) -> None:
        kind, leases = KIND_OF_POOL[pool], Leases(node)
        both = {f"{pool}-0", f"{pool}-1"}
        leases.wait_for_owners(kind, both)
        async with devices_of(node) as devices, talk_on(devices) as talk:
            await talk.say("before")
            traffic = asyncio.create_task(talk.go_on())
            await asyncio.sleep(0.3)
            pid = node.pid(f"{pool}-0")
            os.kill(pid, signal.SIGSTOP)
            try:
                took_s = await asyncio.to_thread(leases.wait_for_owners, kind, {f"{pool}-1"})
                await asyncio.sleep(0.5)
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_s = 2.5 if kind is LeaseKind.CONVERSATION_BUCKET else 1.5
            assert took_s < wait_s + 0.5 + 0.5, took_s
            print(f"{pool}: taken over {took_s:.2f} s after SIGSTOP")
            await asyncio.to_thread(leases.wait_for_owners, kind, both)
            await asyncio.sleep(0.5)
            talk.end()
            await traffic
            await talk.check()
            assert node.pid(f"{pool}-0") == pid, "it is fenced, not ended"

    with running_node(options_with(APART, **TENTH)) as node:
        asyncio.run(run(node))
        assert "lease_self_fenced" in log_of(node)


def log_of(node: OwnNode) -> str:
    return (node.directory / "node.log").read_text(errors="replace")


def test_a_thousand_unacknowledged_sends_keep_their_order_through_a_writer_kill() -> None:
    async def run(node: OwnNode) -> None:
        async with devices_of(node) as devices:
            ann, bob = await devices.add("ann"), await devices.add("peer0")
            texts = [f"{number}" for number in range(1000)]
            sends = ann.state.sends
            with paused(*map(node.pid, WRITERS)):
                handles = [await ann.send(conversation_with("peer0"), text) for text in texts]
                assert sends.total() == len(texts), "nothing is acknowledged"
            async with asyncio.timeout(CONVERGE_S):
                while sends.total() == len(texts):
                    await asyncio.sleep(0)
            assert sends.total() > 0, "the writers die in the middle of it"
            for writer in WRITERS:
                node.kill(writer)
            for handle in handles:
                await handle

            def shown(client: Client) -> list[str]:
                return [row.payload.decode() for row in client.store.messages(conversation_with("peer0"))]

            async with asyncio.timeout(CONVERGE_S):
                while min(len(shown(ann)), len(shown(bob))) < len(texts):
                    await asyncio.sleep(0.05)
            assert shown(ann) == shown(bob) == texts

    with running_node(options_with(APART, region_failover_retry_after_ms="500")) as node:
        asyncio.run(run(node))


def test_a_lost_registry_ends_service_and_its_return_brings_it_back() -> None:
    """The core server stopped for longer than the self-fence: every owner lets go, and takes up again afterwards."""

    async def run(node: OwnNode) -> None:
        async with devices_of(node) as devices, talk_on(devices) as talk:
            await talk.say("before")
            server = pids_of(node.address().run_dir)["redis-core"]
            traffic = asyncio.create_task(talk.go_on())
            os.kill(server, signal.SIGSTOP)
            try:
                await asyncio.sleep(3.0)
            finally:
                os.kill(server, signal.SIGCONT)
            await asyncio.sleep(1.0)
            talk.end()
            await traffic
            await talk.check()

    with running_node(options_with(APART, **TENTH)) as node:
        asyncio.run(run(node))
        assert log_of(node).count("lease_self_fenced") >= len(POOLS)
