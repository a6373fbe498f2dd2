"""The local store: one transaction for a cursor and its messages, rows that meet again, what survives what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from qim.client.actions import Cursor
from qim.client.pending import Pending
from qim.client.store import LocalStore, StoreMismatch
from qim.client.timeline import row_from_ack, row_from_entry, row_from_history
from qim.protocol import qim_pb2 as pb
from tests.unit.client.scene import DM, NOW_MS, entry


@pytest.fixture
def store() -> Iterator[LocalStore]:
    made = LocalStore()
    yield made
    made.close()


def pending(name: str, text: str = "hi") -> Pending:
    request = pb.SendMessage(client_message_id=name, conversation_id=DM, payload=text.encode())
    return Pending(request, NOW_MS)


def test_rows_come_back_in_the_order_of_the_timeline(store: LocalStore) -> None:
    rows = [row_from_entry(entry(seq, conversation_seq=number)) for seq, number in ((10, 3), (20, 1), (30, 2))]
    assert store.apply(rows, [], None) == rows
    assert [row.conversation_seq for row in store.messages(DM)] == [1, 2, 3]
    assert [row.conversation_seq for row in store.messages(DM, newest=2)] == [2, 3]
    assert store.messages(DM)[2] == rows[0]


def test_only_new_rows_are_reported(store: LocalStore) -> None:
    row = row_from_entry(entry(10))
    store.apply([row], [], None)
    assert store.apply([row], [], None) == []
    assert store.message_count() == 1


def test_a_killed_process_loses_cursor_and_messages_together(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    store = LocalStore(path)
    store.apply([row_from_entry(entry(10))], [(10, 0, 1, b"a")], Cursor(b"t", 10, 3))
    store.commit()
    store.apply([row_from_entry(entry(20))], [(20, 0, 2, b"b")], Cursor(b"t", 20, 3))
    store.abandon()
    again = LocalStore(path)
    assert again.cursor() == Cursor(b"t", 10, 3)
    assert again.seqs(DM) == [10]
    assert again.dedup_rows() == [(10, 0, 1, b"a")]
    again.close()


def test_dedup_keys_use_all_64_bits(store: LocalStore) -> None:
    store.apply([], [(10, 0, 0xFFFF_FFFF_FFFF_FFFF, b"a"), (5, 1, 7, b"b")], None)
    store.commit()
    assert store.dedup_rows() == [(5, 1, 7, b"b"), (10, 0, 0xFFFF_FFFF_FFFF_FFFF, b"a")]
    store.forget_dedup_below(10)
    assert [row[0] for row in store.dedup_rows()] == [10]


def test_a_pending_message_becomes_its_row_in_place(store: LocalStore) -> None:
    store.add_pending(pending("mine"))
    assert [p.request.client_message_id for p in store.pending()] == ["mine"]
    made = entry(130, conversation_seq=4, own="mine", sender_id="alice")
    store.settle_pending("mine", row_from_ack(pending("mine").request, "alice", made.message_id, 4))
    assert store.pending() == []
    (acked,) = store.messages(DM)
    assert (acked.mailbox_seq, acked.payload) == (0, b"hi")
    assert store.apply([row_from_entry(made)], [], None) == [], "its entry is no second bubble"
    (located,) = store.messages(DM)
    assert (located.mailbox_seq, located.created_at_ms, located.event_id) == (
        130,
        NOW_MS,
        (130 * 7919).to_bytes(8, "big"),
    )


def test_pending_messages_keep_their_order_and_their_failure(store: LocalStore) -> None:
    for name in ("b", "a", "c"):
        store.add_pending(pending(name))
    store.fail_pending("a", 15, "detail")
    assert [p.request.client_message_id for p in store.pending()] == ["b", "c"]
    assert [p.request.client_message_id for p in store.pending(failed=True)] == ["a"]
    store.add_pending(pending("a"))
    assert [p.request.client_message_id for p in store.pending()] == ["b", "c", "a"], "sent again: last in line"


def test_history_overwrites_in_place_and_adds_what_is_missing(store: LocalStore) -> None:
    made = entry(130, conversation_seq=4, body_included=False)
    made.payload_or_ciphertext = b""
    store.apply([row_from_entry(made)], [], None)
    current = pb.HistoryMessage(
        conversation_seq=4, message_id=made.message_id, event_type=pb.EVENT_MESSAGE, body_included=True,
        payload_or_ciphertext=b"text", state=pb.EDITED,
    )  # fmt: skip
    older = pb.HistoryMessage(conversation_seq=3, message_id=b"3" * 16, event_type=pb.EVENT_MESSAGE, body_included=True)
    fresh = store.restate([row_from_history(DM, older), row_from_history(DM, current)])
    assert [row.conversation_seq for row in fresh] == [3]
    row = store.messages(DM)[1]
    assert (row.payload, row.body_included, row.state, row.mailbox_seq) == (b"text", 1, pb.EDITED, 130)


def test_conversations_are_listed_by_activity(store: LocalStore) -> None:
    store.apply([row_from_entry(entry(10, conversation_id="dm:a:b")), row_from_entry(entry(30))], [], None)
    store.apply([row_from_entry(entry(20, conversation_id="g:team"))], [], None)
    quiet = entry(40, conversation_id="g:quiet", flags=0)
    store.apply([row_from_entry(quiet)], [], None)
    store.commit()
    assert store.conversations() == [DM, "g:team", "dm:a:b"]


def test_a_file_of_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    store = LocalStore(path)
    store.bind("t", "alice", "phone")
    store.bind("t", "alice", "phone")
    with pytest.raises(StoreMismatch, match="t/alice/phone"):
        store.bind("t", "alice", "laptop")
    store.close()
    store.close()


def test_a_newer_schema_starts_over_but_keeps_what_was_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    store = LocalStore(path)
    store.apply([row_from_entry(entry(10))], [(10, 0, 1, b"a")], Cursor(b"t", 10, 3))
    store.add_pending(pending("mine"))
    store.set_meta("identity", "t/alice/phone")
    store.close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    again = LocalStore(path)
    assert again.cursor() == Cursor(), "a cursor without its messages would lose them in silence"
    assert (again.message_count(), again.dedup_rows(), again.meta("identity")) == (0, [], "")
    assert [p.request.client_message_id for p in again.pending()] == ["mine"]
    again.close()


def test_wipe_leaves_nothing(store: LocalStore) -> None:
    store.apply([row_from_entry(entry(10))], [], Cursor(b"t", 10, 3))
    store.add_pending(pending("mine"))
    store.wipe()
    assert (store.message_count(), store.cursor(), store.pending()) == (0, Cursor(), [])


def test_the_tables_of_the_contract_are_there(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    LocalStore(path, synchronous="off").close()
    with sqlite3.connect(path) as raw:
        names = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE name LIKE 'local%'")}
    raw.close()
    assert names == {
        "local_message", "local_pending", "local_conversation", "local_cursor", "local_dedup", "local_media_cache",
        "local_meta",
    }  # fmt: skip


def test_listed_sessions_add_and_never_remove() -> None:
    store = LocalStore()
    old, new = bytes(15) + b"\1", bytes(15) + b"\2"
    session = pb.Session(
        conversation_id="dm:a:b", latest_conversation_seq=5, last_activity_id=new, unread_count=5,
        preview_or_placeholder="newest",
    )  # fmt: skip
    store.list_sessions([session, pb.Session(conversation_id="g:g", unread_exact=True)])
    assert store.conversations() == ["dm:a:b", "g:g"]
    assert (store.unread("dm:a:b"), store.unread("g:g"), store.unread("dm:a:c")) == ((5, False), (0, True), None)
    stale = pb.Session(conversation_id="dm:a:b", latest_conversation_seq=3, last_activity_id=old, unread_count=1)
    store.list_sessions([stale])
    row = store._db.execute("SELECT latest_conversation_seq, last_activity_id, preview FROM local_conversation "
                            "WHERE conversation_id = 'dm:a:b'").fetchone()  # fmt: skip
    assert row == (5, new, b"newest")
    assert store.unread("dm:a:b") == (1, False)
    store.close()
