from __future__ import annotations

import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from qim.config.parameters import Parameters, default_parameters, load_parameters, parameter_names
from qim.config.shapes import RateTier, Watermark
from qim.errors import StartupError


def _load(text: str = "", tmp_path: Path | None = None, **environ: str) -> Parameters:
    if tmp_path is None:
        return load_parameters(None, environ)
    path = tmp_path / "qim.toml"
    path.write_text(text)
    return load_parameters(path, environ)


def test_defaults_are_those_of_the_contract() -> None:
    parameters = _load()
    assert parameters.shard_lease_ttl == 15_000
    assert parameters.conn_send_soft_watermark == Watermark(bytes=1 << 20, items=2000)
    assert parameters.per_conversation_msg_rate == (
        RateTier(max_members=1000, msgs_per_second=20),
        RateTier(max_members=10_000, msgs_per_second=5),
        RateTier(msgs_per_second=2),
    )
    assert parameters.tenant_fanout_quota is None
    assert parameters.idle_timeout.timeout_ms(60_000) == 130_000


def test_the_table_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        _load().lane_count = 1  # type: ignore[misc]


@pytest.mark.parametrize(("members", "rate"), [(1, 20), (1000, 20), (1001, 5), (10_000, 5), (10_001, 2)])
def test_conversation_rate_by_size(members: int, rate: int) -> None:
    assert _load().conversation_msg_rate(members) == rate


def test_a_file_overrides_with_or_without_sections(tmp_path: Path) -> None:
    text = "per_user_msg_rate = 7\n[b5_flow_control_and_quotas]\nmax_devices_per_user = 3\n"
    parameters = _load(text, tmp_path)
    assert (parameters.per_user_msg_rate, parameters.max_devices_per_user) == (7, 3)


def test_a_table_in_a_file_is_a_value(tmp_path: Path) -> None:
    parameters = _load("[conn_send_soft_watermark]\nbytes = 500_000\nitems = 9\n", tmp_path)
    assert parameters.conn_send_soft_watermark == Watermark(bytes=500_000, items=9)


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    parameters = _load("per_user_msg_rate = 7\n", tmp_path, QIM_PER_USER_MSG_RATE="8", HOME="/root")
    assert parameters.per_user_msg_rate == 8


def test_environment_values_are_toml_and_bare_texts() -> None:
    parameters = _load(QIM_TAKEOVER_ADMIT_RATE="1", QIM_AT_ALL_MIN_ROLE="OWNER", QIM_INCLUDE_MUTED_IN_BADGE="true")
    assert parameters.takeover_admit_rate == 1.0
    assert parameters.at_all_min_role == "OWNER"
    assert parameters.include_muted_in_badge is True


def test_names_the_contract_gives_besides() -> None:
    assert _load(QIM_HISTORY_HOT_WINDOW_MS="7200000").history_hot_window == 7_200_000
    assert _load(QIM_ARCHIVER_BATCH_MAX="64").history_archive_batch_max == 64


def test_variables_of_other_parts_are_left_alone() -> None:
    environ = {"QIM_DATA_DIR": "/x", "QIM_TEST_LOCALE": "C"}
    assert load_parameters(None, environ, reserved_env=["QIM_DATA_DIR"]) == _load()


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"QIM_LANES": "64"}, "QIM_LANES: there is no such parameter"),
        ({"QIM_STORE_BACKEND": ""}, "QIM_STORE_BACKEND selects two stores"),
        ({"QIM_LANE_COUNT": "many"}, "lane_count: 'many' is not a whole number"),
        ({"QIM_LANE_COUNT": "64.0"}, "lane_count: 64.0 is not a whole number"),
        ({"QIM_LANE_COUNT": "true"}, "lane_count: True is not a whole number"),
        ({"QIM_RECONNECT_BACKOFF": "{ initial_ms = 1 }"}, "reconnect_backoff: factor is missing"),
        ({"QIM_CONN_SEND_SOFT_WATERMARK": "{ kilobytes = 1 }"}, "there is no part kilobytes"),
        ({"QIM_CONN_SEND_SOFT_WATERMARK": "5"}, "is not a table of bytes, items"),
        ({"QIM_FRAME_PRIORITY": "5"}, "frame_priority: 5 is not a list"),
    ],
)
def test_bad_environment(environ: dict[str, str], told: str) -> None:
    with pytest.raises(StartupError, match=told):
        load_parameters(None, environ)


@pytest.mark.parametrize(
    ("text", "told"), [("lanes = 1", "there is no parameter lanes"), ("lane_count =", "is not TOML")]
)
def test_bad_files(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=told):
        _load(text, tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read .*none\.toml: No such file"):
        load_parameters(tmp_path / "none.toml", {})


def test_overrides_in_code_are_checked_too() -> None:
    assert default_parameters(lane_count=32).lane_count == 32
    with pytest.raises(StartupError, match="no parameter lanes"):
        default_parameters(lanes=1)


def test_defaults_name_every_field() -> None:
    text = (Path(__file__).parents[3] / "qim/config/defaults.toml").read_text()
    declared = {name for section in tomllib.loads(text).values() for name in section}
    assert declared == parameter_names() == {field.name for field in fields(Parameters)}
