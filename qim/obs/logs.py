"""JSON log lines from an allow-list of fields (§20.6, §24.2).

A line is `{"at_ms", "level", "logger", "event", …fields}` on standard error. Fields that are not on the list are
dropped and counted, so no payload, token, cursor signature or preview can reach a log by accident.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from typing import Final, TextIO

import orjson

from qim.core.secret import REDACTED, Secret
from qim.obs import metrics

ALLOWED_FIELDS: Final = frozenset(
    {
        # §20.6
        "trace_id", "tenant_id", "user_id", "device_id", "conversation_id", "message_id", "event_id", "dispatch_id",
        "mailbox_shard", "lane_id", "mailbox_seq", "conversation_seq", "connection_shard", "message_type",
        "custom_type", "body_bytes", "error_code",
        # §24.2
        "shard_epoch", "membership_version", "connection_node_id", "mailbox_node_id",
        # identifiers of our own parts
        "bucket", "partition", "shard", "lane", "epoch", "grant_id", "owner", "offset", "first_offset", "last_offset",
        "connection_id", "session_epoch", "group_id", "version", "instance", "generation", "chunk",
        # processes and links
        "role", "peer", "process", "pid", "cpu", "exit_code", "signal", "restarts", "task", "opcode", "request_id",
        "stream_id", "address", "port", "path", "script", "command", "url", "engine", "name", "key", "parameter",
        # quantities
        "count", "bytes", "items", "entries", "records", "elapsed_ms", "delay_ms", "timeout_ms", "lag_ms",
        "retry_after_ms", "limit", "attempt", "queued", "in_flight",
        # reasons: texts of our own exceptions, never of a peer
        "reason", "detail", "state", "error", "expected", "found",
    }
)  # fmt: skip

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
TEXT_CHARACTERS_MAX: Final = 2000


class Logger:
    """`log.info("event_name", field=value)`; values are numbers, texts, bytes (shown as hex) or exceptions."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: str, **fields: object) -> None:
        _write("debug", self._name, event, fields)

    def info(self, event: str, **fields: object) -> None:
        _write("info", self._name, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        _write("warning", self._name, event, fields)

    def error(self, event: str, **fields: object) -> None:
        _write("error", self._name, event, fields)


class _Output:
    """Where lines go; one per process."""

    __slots__ = ("level", "process", "stream")

    def __init__(self) -> None:
        self.stream: TextIO | None = None
        self.level = _LEVELS["info"]
        self.process = ""


_OUTPUT: Final = _Output()


def get_logger(name: str) -> Logger:
    """Logger of a module: `log = get_logger(__name__)`."""
    return Logger(name)


def configure_logs(*, level: str = "info", stream: TextIO | None = None, process: str = "") -> None:
    """Set the least level written, the stream (standard error by default) and the process name of every line.

    Also takes over the lines of libraries: warnings and errors of `logging` appear as event `library_log`.
    """
    _OUTPUT.level = _LEVELS[level]
    _OUTPUT.stream = stream
    _OUTPUT.process = process
    root = logging.getLogger()
    root.handlers = [_LibraryHandler()]
    root.setLevel(logging.WARNING)


def _write(level: str, logger: str, event: str, fields: dict[str, object]) -> None:
    if _LEVELS[level] < _OUTPUT.level:
        return
    line: dict[str, object] = {"at_ms": time.time_ns() // 1_000_000, "level": level, "logger": logger, "event": event}
    if _OUTPUT.process:
        line["process"] = _OUTPUT.process
    dropped = []
    for name, value in fields.items():
        if name in ALLOWED_FIELDS:
            line[name] = _plain(value)
        else:
            dropped.append(name)
    if dropped:
        line["dropped_fields"] = dropped
        metrics.LOG_FIELDS_DROPPED_TOTAL.inc(len(dropped))
    stream = _OUTPUT.stream or sys.stderr
    stream.write(orjson.dumps(line).decode() + os.linesep)
    stream.flush()


def _plain(value: object) -> object:
    if isinstance(value, Secret):
        return REDACTED
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, BaseException):
        return _exception_text(value)
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int) and value.bit_length() < 64:
        return value
    return str(value)[:TEXT_CHARACTERS_MAX].encode("utf-8", "replace").decode()


def _exception_text(error: BaseException) -> str:
    """Type, text and the frames of our own files: enough to find the line, nothing of any payload."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {error} [{where}]"[:TEXT_CHARACTERS_MAX]


class _LibraryHandler(logging.Handler):
    """Lines of asyncio, aiohttp and others: logger, level and the place, without their arguments."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        error = record.exc_info[1] if record.exc_info else None
        fields: dict[str, object] = {"name": record.name, "reason": str(record.msg)}
        if error is not None:
            fields["error"] = error
        _write(level, __name__, "library_log", fields)
