"""The cases run on the loop the product runs on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.acceptance.clock_steps import ClockSteps, play_clock_steps
from tests.acceptance.full_store import FullStore, play_full_store
from tests.acceptance.link_loss import LinkLoss, play_link_loss
from tests.acceptance.log_outage import LogOutage, play_log_outages
from tests.acceptance.node_kills import NodeKills, play_node_kills


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def no_garbage_of_earlier_cases() -> None:
    """A hundred started nodes leave cycles whose collection holds the process up for two seconds: `submit_timeout_ms`
    in the middle of the next case, where a node shares it."""
    gc.collect()


# The runs of 26.8, each played once for its own file and for 26.6.5.


@pytest.fixture(scope="session")
def node_kills() -> NodeKills:
    return play_node_kills()


@pytest.fixture(scope="session")
def link_loss() -> LinkLoss:
    return play_link_loss()


@pytest.fixture(scope="session")
def full_store() -> FullStore:
    return play_full_store()


@pytest.fixture(scope="session")
def clock_steps() -> ClockSteps:
    return play_clock_steps()


@pytest.fixture(scope="session")
def log_outages() -> dict[str, LogOutage]:
    return play_log_outages()
