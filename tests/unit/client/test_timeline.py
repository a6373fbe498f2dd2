"""Rows and their order (§6.9.1)."""

from __future__ import annotations

from qim.client.timeline import row_from_ack, row_from_entry, row_from_history, timeline_key
from qim.core.seq import MESSAGE_EPOCH_UNIX_MS, compose_message_id
from qim.protocol import qim_pb2 as pb
from tests.unit.client.scene import DM, entry


def test_an_entry_becomes_a_row_with_all_coordinates() -> None:
    row = row_from_entry(entry(130, conversation_seq=4, own="mine"))
    assert (row.conversation_id, row.conversation_seq, row.mailbox_seq, row.payload) == (DM, 4, 130, b"4")
    assert row.event_id == (130 * 7919).to_bytes(8, "big")
    assert (row.client_message_id, row.body_included, row.media) == ("mine", 1, b"")


def test_media_is_kept_encoded() -> None:
    made = entry(1)
    made.media_metadata.mime = "image/png"
    assert pb.MediaMetadata.FromString(row_from_entry(made).media).mime == "image/png"


def test_order_is_anchor_then_ordinal_then_event() -> None:
    late = row_from_entry(entry(10, conversation_seq=2))
    early = row_from_entry(entry(99, conversation_seq=1))
    mention = row_from_entry(entry(99, conversation_seq=1, event_ordinal=1))
    change = row_from_entry(entry(5, conversation_seq=9, event_ordinal=3, target_conversation_seq=1))
    assert sorted([late, change, mention, early], key=timeline_key) == [early, mention, change, late]


def test_event_ids_compare_as_numbers() -> None:
    low, high = entry(1), entry(1)
    low.event_id, high.event_id = 0xFF, 0x8000_0000_0000_0000
    assert timeline_key(row_from_entry(low)) < timeline_key(row_from_entry(high))


def test_history_and_ack_rows_share_the_key_of_the_entry() -> None:
    made = entry(130, conversation_seq=4, own="mine", sender_id="alice")
    history = row_from_history(
        DM, pb.HistoryMessage(conversation_seq=4, message_id=made.message_id, event_type=pb.EVENT_MESSAGE)
    )
    acked = row_from_ack(
        pb.SendMessage(conversation_id=DM, client_message_id="mine", payload=b"4"), "alice", made.message_id, 4
    )
    assert row_from_entry(made)[:4] == history[:4] == acked[:4]
    assert history.mailbox_seq == acked.mailbox_seq == 0
    assert acked.payload == b"4"


def test_an_acknowledged_row_takes_its_time_from_the_message_id() -> None:
    message_id = compose_message_id(5_000, 0, 1, 0)
    row = row_from_ack(pb.SendMessage(conversation_id=DM), "alice", message_id, 1)
    assert row.created_at_ms == MESSAGE_EPOCH_UNIX_MS + 5_000
