"""Which processes a node consists of, and what it refuses to be told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qim.app.settings import RUN_DIR_BYTES_MAX, NodeSettings, PoolSizes, default_pools, topology
from qim.errors import StartupError

SETTINGS = NodeSettings(data_dir=Path("/tmp/qim-test"))


def test_small_hosts_share_one_core_process() -> None:
    plan = topology(default_pools(2), apart=False)
    assert [process.name for process in plan] == ["core-0", "gateway-0", "gateway-1", "admin-0"]
    assert plan[0].roles == ("writer-0", "fanout-0", "mailbox-0")


def test_unequal_pools_share_as_far_as_they_go() -> None:
    plan = topology(PoolSizes(gateway=1, writer=1, fanout=2, mailbox=3), apart=False)
    assert [process.roles for process in plan[:3]] == [
        ("writer-0", "fanout-0", "mailbox-0"),
        ("fanout-1", "mailbox-1"),
        ("mailbox-2",),
    ]


def test_apart_every_instance_is_a_process() -> None:
    plan = topology(PoolSizes(gateway=2, writer=2, fanout=2, mailbox=2), apart=True)
    assert len(plan) == 9
    assert all(process.roles == (process.name,) for process in plan)


def test_every_role_instance_runs_exactly_once() -> None:
    for apart in (True, False):
        roles = [role for process in topology(PoolSizes(2, 3, 1, 4), apart=apart) for role in process.roles]
        assert len(roles) == len(set(roles)) == 11


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 16, 64, 128])
def test_default_pools_are_valid(cores: int) -> None:
    replace(SETTINGS, pools=default_pools(cores)).checked()


def test_a_long_data_directory_gets_a_short_run_directory() -> None:
    deep = replace(SETTINGS, data_dir=Path("/tmp") / ("x" * 100))
    assert len(str(deep.run_dir)) <= RUN_DIR_BYTES_MAX
    assert deep.run_dir == deep.run_dir
    assert SETTINGS.run_dir == Path("/tmp/qim-test/run")


@pytest.mark.parametrize(
    "bad",
    [
        {"port": 0},
        {"port": 70000},
        {"admin_port": -1},
        {"port": 7480},
        {"pools": PoolSizes(0, 1, 1, 1)},
        {"pools": PoolSizes(1, 1, 1, 65)},
        {"unlimited_tenant": "a b"},
        {"login_spread_ms": -1},
        {"redis_server": Path("/nonexistent/redis-server")},
    ],
)
def test_what_cannot_be_is_refused_in_one_line(bad: dict[str, object]) -> None:
    with pytest.raises(StartupError) as caught:
        replace(SETTINGS, **bad).checked()  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_workers_that_join_have_numbers_of_their_own_and_no_admin_plane(tmp_path: Path) -> None:
    joined = NodeSettings(data_dir=tmp_path, pools=PoolSizes(0, 2, 1, 1), apart=False, first_index=64)
    assert [process.name for process in joined.processes()] == ["core-64", "core-65"]
    assert joined.processes()[0].roles == ("writer-64", "fanout-64", "mailbox-64")
    assert [joined.is_ours(owner) for owner in ("writer-63", "writer-64", "mailbox-127", "fanout-128")] == [
        False, True, True, False,
    ]  # fmt: skip
