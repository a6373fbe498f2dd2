from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from qim.core.secret import Secret
from qim.obs import metrics
from qim.obs.logs import configure_logs, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    buffer = io.StringIO()
    configure_logs(level="info", stream=buffer, process="gateway-0")
    yield buffer
    configure_logs()
    root.handlers, root.level = handlers, level


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_the_fields_given(stream: io.StringIO) -> None:
    get_logger("qim.x").info("lease_granted", shard=3, epoch=2, message_id=b"\x01\xff", reason=None)
    (line,) = _lines(stream)
    assert line.pop("at_ms") > 1_700_000_000_000
    assert line == {
        "level": "info",
        "logger": "qim.x",
        "event": "lease_granted",
        "process": "gateway-0",
        "shard": 3,
        "epoch": 2,
        "message_id": "01ff",
        "reason": None,
    }


def test_fields_off_the_list_are_dropped_and_counted(stream: io.StringIO) -> None:
    before = metrics.LOG_FIELDS_DROPPED_TOTAL._value.get()
    get_logger("qim.x").warning("bad", payload_or_ciphertext=b"secret", access_token="ey...", user_id="u")
    (line,) = _lines(stream)
    assert line["dropped_fields"] == ["payload_or_ciphertext", "access_token"]
    assert line["user_id"] == "u"
    assert "secret" not in stream.getvalue()
    assert "ey..." not in stream.getvalue()
    assert metrics.LOG_FIELDS_DROPPED_TOTAL._value.get() == before + 2


def test_secrets_are_redacted_under_any_name(stream: io.StringIO) -> None:
    get_logger("qim.x").error("bad", key=Secret(b"hunter2"), reason=[Secret("hunter2")])
    assert "hunter2" not in stream.getvalue()
    assert _lines(stream)[0]["key"] == "<redacted>"


def test_an_exception_is_its_type_text_and_place(stream: io.StringIO) -> None:
    try:
        raise ValueError("no such shard")
    except ValueError as error:
        get_logger("qim.x").error("failed", error=error)
    assert _lines(stream)[0]["error"].startswith("ValueError: no such shard [test_logs.py:")


def test_the_level_holds(stream: io.StringIO) -> None:
    get_logger("qim.x").debug("detail")
    assert stream.getvalue() == ""


def test_large_numbers_and_long_texts_are_written(stream: io.StringIO) -> None:
    get_logger("qim.x").info("big", count=1 << 90, reason="x" * 5000)
    (line,) = _lines(stream)
    assert line["count"] == str(1 << 90)
    assert len(line["reason"]) == 2000


def test_lines_of_libraries_appear_without_their_arguments(stream: io.StringIO) -> None:
    logging.getLogger("asyncio").error("Task %s failed", "with a payload")
    logging.getLogger("asyncio").info("chatter")
    (line,) = _lines(stream)
    assert (line["event"], line["name"], line["reason"]) == ("library_log", "asyncio", "Task %s failed")
    assert "payload" not in stream.getvalue()
