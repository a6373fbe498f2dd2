"""The audit on the servers of a real node, in this process and by the command line."""

from __future__ import annotations

import orjson
import pytest
import redis

from qim.app.audit.command import audit_dispatch
from qim.app.demo import run_demo
from qim.app.own_node import OwnNode, OwnNodeOptions


@pytest.mark.timeout(120)
def test_a_node_that_talked_has_no_orphans_until_something_is_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    with OwnNode(OwnNodeOptions()) as node:
        assert run_demo(node.data_dir) == 0
        capsys.readouterr()
        assert audit_dispatch(node.data_dir, as_json=True) == 0
        report = orjson.loads(capsys.readouterr().out)
        assert report["passed"]
        assert report["examined"]["commits"] > 0
        assert report["examined"]["dispatches"] >= report["examined"]["commits"]
        assert report["examined"]["entries"] >= report["examined"]["commits"]

        with redis.Redis.from_url(node.address().mailbox_address) as mailbox:
            name = next(mailbox.scan_iter(match="mailbox:*"))
            (first, *_) = mailbox.zrange(name, 0, 0)
            mailbox.zrem(name, first)
        with redis.Redis.from_url(node.address().core_address) as core:
            name = next(core.scan_iter(match="rec:*"))
            core.delete(name)
        assert audit_dispatch(node.data_dir, as_json=True) == 1
        found = orjson.loads(capsys.readouterr().out)["found"]
        assert found["mailbox entry missing"] == 1
        assert found["committed without record"] > 0
        assert found["committed without dispatch"] == 0
        assert audit_dispatch(node.data_dir) == 1
        assert "FAILED" in capsys.readouterr().out
