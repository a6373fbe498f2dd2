"""The local store of one device in SQLite (§27.3.1): a cursor and the messages it covers share one transaction.

Writes open a transaction that lasts until `commit`; a process that dies before it finds the state of the last commit,
whose cursor covers exactly the messages that are there. Used from one thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from qim.client.actions import Cursor
from qim.client.dedup import DEDUP_ITEMS_MAX, DedupRow
from qim.client.pending import Pending
from qim.client.timeline import MessageRow
from qim.errors import QimError
from qim.protocol import qim_pb2 as pb
from qim.protocol.entry import FLAG_AFFECTS_SESSION_ORDER

SCHEMA_VERSION: Final = 1
Durability = Literal["off", "normal", "full"]
STATUS_PENDING: Final = 0
STATUS_FAILED: Final = 1

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS local_message (
  conversation_id TEXT NOT NULL, conversation_seq INTEGER NOT NULL, event_ordinal INTEGER NOT NULL,
  message_id BLOB NOT NULL, timeline_anchor_seq INTEGER NOT NULL, event_id BLOB NOT NULL, mailbox_seq INTEGER NOT NULL,
  sender_id TEXT NOT NULL, created_at_ms INTEGER NOT NULL, last_activity_id BLOB NOT NULL, flags INTEGER NOT NULL,
  mention_type INTEGER NOT NULL, client_message_id TEXT NOT NULL, message_type INTEGER NOT NULL,
  custom_type TEXT NOT NULL, schema_version INTEGER NOT NULL, payload BLOB NOT NULL, media BLOB NOT NULL,
  body_included INTEGER NOT NULL, state INTEGER NOT NULL,
  PRIMARY KEY (conversation_id, conversation_seq, event_ordinal, message_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS local_pending (
  position INTEGER PRIMARY KEY AUTOINCREMENT, client_message_id TEXT NOT NULL UNIQUE, conversation_id TEXT NOT NULL,
  client_send_ts INTEGER NOT NULL, request BLOB NOT NULL, status INTEGER NOT NULL, error_code INTEGER NOT NULL,
  error_detail TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS local_conversation (
  conversation_id TEXT PRIMARY KEY, latest_conversation_seq INTEGER NOT NULL, last_activity_id BLOB NOT NULL,
  preview BLOB NOT NULL, unread_count INTEGER, unread_exact INTEGER, mention_count INTEGER,
  projection_mailbox_seq INTEGER, pin_rank INTEGER, muted INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS local_cursor (
  id INTEGER PRIMARY KEY CHECK (id = 1), token BLOB NOT NULL, last_applied_mailbox_seq INTEGER NOT NULL,
  lane_id INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS local_dedup (
  mailbox_seq INTEGER NOT NULL, event_ordinal INTEGER NOT NULL, event_id BLOB NOT NULL, message_id BLOB NOT NULL,
  PRIMARY KEY (mailbox_seq, event_ordinal, event_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS local_media_cache (
  object_id TEXT PRIMARY KEY, content BLOB NOT NULL, used_at_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS local_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
_REBUILT: Final = (
    "local_message", "local_conversation", "local_dedup", "local_cursor", "local_media_cache", "local_meta",
)  # fmt: skip
"""Dropped when the schema cannot be used; `local_pending` is the user's own data and stays (§27.3.3)."""

_COLUMNS: Final = ", ".join(MessageRow._fields)
_INSERT: Final = f"INSERT OR IGNORE INTO local_message ({_COLUMNS}) VALUES ({', '.join('?' * len(MessageRow._fields))})"  # noqa: S608
_SELECT: Final = f"SELECT {_COLUMNS} FROM local_message"  # noqa: S608
_ROW: Final = "conversation_id = ? AND conversation_seq = ? AND event_ordinal = ? AND message_id = ?"
_LOCATE: Final = (
    "UPDATE local_message SET event_id = ?, mailbox_seq = ?, created_at_ms = ?, last_activity_id = ?, flags = ?, "  # noqa: S608
    f"mention_type = ? WHERE {_ROW} AND mailbox_seq = 0"
)
_RESTATE: Final = (
    "UPDATE local_message SET state = ?, payload = ?, media = ?, message_type = ?, custom_type = ?, "  # noqa: S608
    f"schema_version = ?, body_included = ? WHERE {_ROW}"
)
_TOUCH: Final = """INSERT INTO local_conversation (conversation_id, latest_conversation_seq, last_activity_id, preview)
VALUES (?, ?, ?, ?) ON CONFLICT (conversation_id) DO UPDATE SET latest_conversation_seq =
max(latest_conversation_seq, excluded.latest_conversation_seq), preview = excluded.preview,
last_activity_id = excluded.last_activity_id WHERE excluded.last_activity_id > last_activity_id"""

_LIST: Final = """INSERT INTO local_conversation (conversation_id, latest_conversation_seq, last_activity_id, preview,
unread_count, unread_exact, mention_count, pin_rank, muted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (conversation_id) DO UPDATE SET
latest_conversation_seq = max(latest_conversation_seq, excluded.latest_conversation_seq),
preview = iif(excluded.last_activity_id > last_activity_id, excluded.preview, preview),
last_activity_id = max(last_activity_id, excluded.last_activity_id), unread_count = excluded.unread_count,
unread_exact = excluded.unread_exact, mention_count = excluded.mention_count, pin_rank = excluded.pin_rank,
muted = excluded.muted"""


class StoreMismatch(QimError):
    """The file belongs to another user or device; reusing it would inherit a foreign cursor (§27.3.4)."""


class LocalStore:
    """Tables of one device. `path` may be ":memory:".

    `synchronous` "normal" survives a killed process, "full" a power cut as well, "off" neither is promised.
    """

    __slots__ = ("_db", "_dedup", "_touched", "writing", "closed")

    def __init__(self, path: Path | str = ":memory:", *, synchronous: Durability = "normal") -> None:
        self._db = sqlite3.connect(str(path), isolation_level=None, cached_statements=64)
        self._dedup: list[tuple[int, int, bytes, bytes]] = []
        self._touched: dict[str, MessageRow] = {}
        self.writing = False
        """A transaction is open."""
        self.closed = False
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {synchronous}")
        self._migrate()

    def bind(self, tenant_id: str, user_id: str, device_id: str) -> None:
        """Tie the file to its device at first use; StoreMismatch when it is another's."""
        identity = f"{tenant_id}/{user_id}/{device_id}"
        stored = self.meta("identity")
        if stored and stored != identity:
            raise StoreMismatch(f"the local store belongs to {stored}, not to {identity}: name another file")
        self.set_meta("identity", identity)
        self.commit()

    def close(self) -> None:
        """Commit and close; closing twice is harmless."""
        if not self.closed:
            self.closed = True
            self.commit()
            self._db.close()

    def abandon(self) -> None:
        """Close as a killed process would: the open transaction is lost."""
        if not self.closed:
            self.closed = True
            if self.writing:
                self._db.execute("ROLLBACK")
            self._db.close()

    # ------------------------------------------------------------------ writing

    def apply(self, rows: Sequence[MessageRow], dedup: Iterable[DedupRow], cursor: Cursor | None) -> list[MessageRow]:
        """Store rows, their keys and the cursor that covers them; returns the rows that were not there yet."""
        self._begin()
        execute = self._db.execute
        fresh: list[MessageRow] = []
        for row in rows:
            if execute(_INSERT, row).rowcount == 1:
                fresh.append(row)
                self._touch(row)
            elif row.mailbox_seq:
                execute(
                    _LOCATE,
                    (row.event_id, row.mailbox_seq, row.created_at_ms, row.last_activity_id, row.flags,
                     row.mention_type, *row[:4]),
                )  # fmt: skip
        self._dedup.extend((seq, ordinal, event.to_bytes(8, "big"), message) for seq, ordinal, event, message in dedup)
        if cursor is not None:
            execute("INSERT OR REPLACE INTO local_cursor VALUES (1, ?, ?, ?)", cursor)
        return fresh

    def restate(self, rows: Sequence[MessageRow]) -> list[MessageRow]:
        """Rows of history in their current state: new ones are added, known ones overwritten in place (§27.3.2)."""
        fresh = self.apply(rows, (), None)
        for row in rows:
            self._db.execute(
                _RESTATE,
                (row.state, row.payload, row.media, row.message_type, row.custom_type, row.schema_version,
                 row.body_included, *row[:4]),
            )  # fmt: skip
        return fresh

    def list_sessions(self, sessions: Iterable[pb.Session]) -> None:
        """Conversations as the server lists them; none is removed, messages stay (§9.6.3)."""
        self._begin()
        self._db.executemany(
            _LIST,
            [
                (s.conversation_id, s.latest_conversation_seq, s.last_activity_id, s.preview_or_placeholder.encode(),
                 s.unread_count, s.unread_exact, s.mention_count, s.pin_rank, s.muted)
                for s in sessions
            ],
        )  # fmt: skip

    def add_pending(self, pending: Pending) -> None:
        """Store a message before it leaves."""
        self._begin()
        request = pending.request
        self._db.execute(
            "INSERT OR REPLACE INTO local_pending (client_message_id, conversation_id, client_send_ts, request, status,"
            " error_code, error_detail) VALUES (?, ?, ?, ?, ?, 0, '')",
            (
                request.client_message_id, request.conversation_id, pending.created_ms, request.SerializeToString(),
                STATUS_PENDING,
            ),
        )  # fmt: skip

    def fail_pending(self, client_message_id: str, code: int, detail: str) -> None:
        """Keep it, shown as failed."""
        self._begin()
        self._db.execute(
            "UPDATE local_pending SET status = ?, error_code = ?, error_detail = ? WHERE client_message_id = ?",
            (STATUS_FAILED, code, detail, client_message_id),
        )

    def settle_pending(self, client_message_id: str, row: MessageRow | None) -> None:
        """It is committed: the pending row becomes `row` in place (§8.4); None for a room message."""
        self._begin()
        self._db.execute("DELETE FROM local_pending WHERE client_message_id = ?", (client_message_id,))
        if row is not None and self._db.execute(_INSERT, row).rowcount == 1:
            self._touch(row)

    def forget_dedup_below(self, mailbox_seq: int) -> None:
        """Keys that left the window."""
        self._begin()
        self._db.execute("DELETE FROM local_dedup WHERE mailbox_seq < ?", (mailbox_seq,))

    def set_meta(self, key: str, value: str) -> None:
        self._begin()
        self._db.execute("INSERT OR REPLACE INTO local_meta VALUES (?, ?)", (key, value))

    def wipe(self) -> None:
        """The device was revoked: messages, cursor and drafts go (§15.3.2)."""
        self.commit()
        for table in (*_REBUILT, "local_pending"):
            self._db.execute(f"DROP TABLE {table}")
        self._migrate()

    def commit(self) -> None:
        """End the transaction, if one is open."""
        if not self.writing:
            return
        if self._dedup:
            self._db.executemany("INSERT OR IGNORE INTO local_dedup VALUES (?, ?, ?, ?)", self._dedup)
            self._dedup.clear()
        if self._touched:
            self._db.executemany(
                _TOUCH,
                [
                    (r.conversation_id, r.conversation_seq, r.last_activity_id, r.payload)
                    for r in self._touched.values()
                ],
            )
            self._touched.clear()
        self._db.execute("COMMIT")
        self.writing = False

    # ------------------------------------------------------------------ reading

    def cursor(self) -> Cursor:
        """The stored position; the empty cursor for a new device."""
        row = self._db.execute("SELECT token, last_applied_mailbox_seq, lane_id FROM local_cursor").fetchone()
        return Cursor(*row) if row else Cursor()

    def dedup_rows(self) -> list[DedupRow]:
        """The newest keys, ascending."""
        rows = self._db.execute(
            "SELECT mailbox_seq, event_ordinal, event_id, message_id FROM local_dedup "
            "ORDER BY mailbox_seq DESC LIMIT ?",
            (DEDUP_ITEMS_MAX,),
        ).fetchall()
        return [
            (seq, ordinal, int.from_bytes(event, "big"), message_id) for seq, ordinal, event, message_id in rows[::-1]
        ]

    def pending(self, *, failed: bool = False) -> list[Pending]:
        """Unacknowledged messages in send order, or those shown as failed."""
        rows = self._db.execute(
            "SELECT request, client_send_ts FROM local_pending WHERE status = ? ORDER BY position",
            (STATUS_FAILED if failed else STATUS_PENDING,),
        )
        return [Pending(pb.SendMessage.FromString(request), created_ms) for request, created_ms in rows]

    def messages(self, conversation_id: str, *, newest: int | None = None) -> list[MessageRow]:
        """Timeline of a conversation in its order (§6.9.1); `newest` limits it to the last rows."""
        order = "timeline_anchor_seq DESC, event_ordinal DESC, event_id DESC"
        rows = self._db.execute(
            f"{_SELECT} WHERE conversation_id = ? ORDER BY {order} LIMIT ?",
            (conversation_id, -1 if newest is None else newest),
        ).fetchall()
        return [MessageRow(*row) for row in reversed(rows)]

    def seqs(self, conversation_id: str) -> list[int]:
        """All `conversation_seq` of a conversation, ascending."""
        rows = self._db.execute(
            "SELECT DISTINCT conversation_seq FROM local_message WHERE conversation_id = ? ORDER BY conversation_seq",
            (conversation_id,),
        )
        return [seq for (seq,) in rows]

    def conversations(self) -> list[str]:
        """Conversation ids, the last active first (§6.9.3)."""
        rows = self._db.execute(
            "SELECT conversation_id FROM local_conversation ORDER BY last_activity_id DESC, conversation_id"
        )
        return [conversation_id for (conversation_id,) in rows]

    def unread(self, conversation_id: str) -> tuple[int, bool] | None:
        """Unread messages as the server counted them last and whether that is exact; None when it never did."""
        row = self._db.execute(
            "SELECT unread_count, unread_exact FROM local_conversation WHERE conversation_id = ?", (conversation_id,)
        ).fetchone()
        return None if row is None or row[0] is None else (row[0], bool(row[1]))

    def message_count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM local_message").fetchone()[0])

    def meta(self, key: str) -> str:
        """Value of a key, empty when it is not set."""
        row = self._db.execute("SELECT value FROM local_meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else ""

    # ------------------------------------------------------------------ inside

    def _begin(self) -> None:
        if not self.writing:
            self._db.execute("BEGIN IMMEDIATE")
            self.writing = True

    def _touch(self, row: MessageRow) -> None:
        if row.flags & FLAG_AFFECTS_SESSION_ORDER:
            last = self._touched.get(row.conversation_id)
            if last is None or row.last_activity_id > last.last_activity_id:
                self._touched[row.conversation_id] = row

    def _migrate(self) -> None:
        """Make the schema, or start over when the file's is not ours: without messages a cursor must not stay."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        self._db.execute("BEGIN IMMEDIATE")
        if version not in (0, SCHEMA_VERSION):
            for table in _REBUILT:
                self._db.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in _SCHEMA.split(";"):
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._db.execute("INSERT OR REPLACE INTO local_meta VALUES ('local_schema_version', ?)", (str(SCHEMA_VERSION),))
        self._db.execute("COMMIT")
