"""What a run leaves behind: one directory that is enough to judge it again, long after its node is gone.

run.json               conversation, plan, seed, which device converged, what it announced twice
sent.jsonl             the senders' own log, in send order
records.jsonl          the scan of the store
intervals.json         membership intervals of every user, from the store
devices/<u>__<d>.db    the devices' own SQLite stores, as the SDK wrote them
clients.log            what the clients' libraries complained about
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from qim.app.replay.checker import CommittedRecord, DeviceEvidence, Evidence, SentMessage, ShownMessage
from qim.core.visibility import Interval
from qim.errors import StartupError

_DEVICES: Final = "devices"
_CURSOR_LOG: Final = """
CREATE TABLE IF NOT EXISTS replay_cursor_log (position INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS replay_cursor_insert AFTER INSERT ON local_cursor
  BEGIN INSERT INTO replay_cursor_log VALUES (NEW.last_applied_mailbox_seq); END;
CREATE TRIGGER IF NOT EXISTS replay_cursor_update AFTER UPDATE ON local_cursor
  BEGIN INSERT INTO replay_cursor_log VALUES (NEW.last_applied_mailbox_seq); END;
"""
_TIMELINE: Final = """
SELECT conversation_id, conversation_seq, hex(message_id), payload FROM local_message WHERE conversation_seq > 0
ORDER BY conversation_id, timeline_anchor_seq, event_ordinal, event_id
"""
"""The order of §6.9.1. A row without a sequence announces a group and is no message of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """What only the running device knew."""

    user: str
    device: str
    converged: bool
    shown_twice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    conversation_id: str
    plan: str
    seed: int
    control_reaches_all: bool
    devices: tuple[DeviceState, ...]


class RunDir:
    """A run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        (self.path / _DEVICES).mkdir(parents=True, exist_ok=True)

    def device_path(self, user: str, device: str) -> Path:
        return self.path / _DEVICES / f"{user}__{device}.db"

    def log_cursor(self, user: str, device: str) -> None:
        """Let the device's store keep every position its cursor ever had: a trigger, so that no code of the SDK can
        forget one, in the same transaction as the move. The store's tables must exist."""
        with closing(sqlite3.connect(self.device_path(user, device))) as connection:
            connection.executescript(_CURSOR_LOG)

    def save(
        self,
        facts: RunFacts,
        sent: Iterable[SentMessage],
        records: Iterable[CommittedRecord],
        intervals: Mapping[str, Sequence[Interval]],
    ) -> None:
        (self.path / "run.json").write_bytes(orjson.dumps(asdict(facts), option=orjson.OPT_INDENT_2))
        _write_lines(self.path / "sent.jsonl", (asdict(message) for message in sent))
        _write_lines(self.path / "records.jsonl", (asdict(record) for record in records))
        pairs = {user: [list(interval) for interval in found] for user, found in intervals.items()}
        (self.path / "intervals.json").write_bytes(orjson.dumps(pairs))

    def load(self) -> Evidence:
        """StartupError, one line, when this is not the directory of a finished run."""
        try:
            facts = orjson.loads((self.path / "run.json").read_bytes())
            return Evidence(
                conversation_id=facts["conversation_id"],
                sent=[SentMessage(**line) for line in _read_lines(self.path / "sent.jsonl")],
                records=[CommittedRecord(**line) for line in _read_lines(self.path / "records.jsonl")],
                intervals={
                    user: tuple(Interval(*pair) for pair in pairs)
                    for user, pairs in orjson.loads((self.path / "intervals.json").read_bytes()).items()
                },
                devices=[self._load_device(state) for state in facts["devices"]],
                control_reaches_all=facts["control_reaches_all"],
            )
        except (OSError, ValueError, KeyError, TypeError, sqlite3.Error) as error:
            raise StartupError(f"{self.path} holds no finished run: {error!r}") from None

    def _load_device(self, state: Mapping[str, Any]) -> DeviceEvidence:
        path = self.device_path(state["user"], state["device"])
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            shown = [
                ShownMessage(
                    conversation_id=conversation_id,
                    conversation_seq=seq,
                    message_id=message_id.lower(),
                    text=bytes(payload).decode(errors="replace"),
                )
                for conversation_id, seq, message_id, payload in connection.execute(_TIMELINE)
            ]
            cursors = [row[0] for row in connection.execute("SELECT position FROM replay_cursor_log ORDER BY rowid")]
            pending = [row[0] for row in connection.execute("SELECT client_message_id FROM local_pending")]
        return DeviceEvidence(
            user=state["user"],
            device=state["device"],
            shown=shown,
            cursor_positions=cursors,
            pending=pending,
            shown_twice=tuple(state["shown_twice"]),
            converged=state["converged"],
        )


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]
