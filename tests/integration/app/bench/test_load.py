"""The load generator without its process, at a gateway with a fake node behind it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from qim.app.bench.child import ChildFailed
from qim.app.bench.load import Generator, LogIn, MakeGroup, Run, RunResult, SendOne
from tests.support.gateway_fixture import TENANT, Gateway, running_gateway, token

USERS = ["ann", "bob"]


def log_in(gateway: Gateway) -> LogIn:
    return LogIn(
        host="127.0.0.1",
        port=gateway.role.port,
        ca_path=Path(gateway.run_dir) / "tls" / "ca.pem",
        tenant_id=TENANT,
        users=[(user, token(user, "bench")) for user in USERS],
    )


async def test_an_open_loop_run_sends_what_is_due_in_turn() -> None:
    async with running_gateway(settings={"lifted_tenants": frozenset((TENANT,))}) as gateway:
        generator = Generator()
        assert await generator.handle(log_in(gateway)) == len(USERS)
        run = Run(
            rate_per_s=200.0,
            start_s=time.monotonic(),
            warmup_s=0.1,
            seconds=0.5,
            targets=["dm:ann:bob"] * 2,
            payload_bytes=100,
            run_id="run1",
            seed=1,
        )
        result: RunResult = await generator.handle(run)
        assert result.samples.sent == len(result.samples.ack_ms) > 50
        assert len(gateway.node.sent) > result.samples.sent, "the warm-up is sent, too"
        assert [sent.user_id for sent in gateway.node.sent[:4]] == ["ann", "bob", "ann", "bob"]
        assert (result.unanswered, result.closed) == (0, 0)
        assert await generator.handle(
            SendOne(conversation_id="dm:ann:bob", payload_bytes=100, run_id="run2")
        ) == pytest.approx(time.monotonic(), abs=5)
        await generator.handle(MakeGroup(group_id="friends", member_ids=USERS))
        generator.close()


async def test_a_command_nobody_knows() -> None:
    with pytest.raises(ChildFailed, match="unknown command int"):
        await Generator().handle(7)
