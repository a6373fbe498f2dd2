"""The demo conversation on both topologies, and on a node of its own."""

from __future__ import annotations

import pytest

from qim.app.cli import main
from qim.app.own_node import OwnNodeOptions
from tests.support.node import APART, MERGED, running_node


@pytest.mark.parametrize("options", [pytest.param(MERGED, id="merged"), pytest.param(APART, id="apart")])
def test_the_conversation_on_a_running_node(options: OwnNodeOptions, capsys: pytest.CaptureFixture[str]) -> None:
    with running_node(options) as node:
        for _ in range(2):
            assert main(["demo", "--data", str(node.data_dir)]) == 0
    out = capsys.readouterr().out
    assert out.count("every line arrived") == 2
    assert "MISSING" not in out


def test_the_conversation_on_a_node_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--own-node"]) == 0
    out = capsys.readouterr().out
    assert "bob comes online and pulls what he missed" in out
    assert "the node has stopped, exit code 0" in out
