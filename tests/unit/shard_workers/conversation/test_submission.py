"""What waits in a writer."""

from __future__ import annotations

from qim.protocol.qim_pb2 import SendMessage
from qim.shard_workers.conversation.submission import Change, Create, Send


def test_a_send_takes_its_coordinates_from_the_message() -> None:
    message = SendMessage(client_message_id="m1", conversation_id="dm:ann:bob")
    send = Send("t", "ann", "phone", message, b"d" * 16, expires_at_ms=5)
    assert (send.tenant_id, send.conversation_id, send.sender_id, send.client_message_id) == (
        "t", "dm:ann:bob", "ann", "m1",
    )  # fmt: skip
    assert send.reply_to_user_id == "", "nothing to look up"
    reply = Send("t", "ann", "phone", SendMessage(reply_to_conversation_seq=3), b"", expires_at_ms=5)
    assert reply.reply_to_user_id is None


def test_group_operations_start_unplanned() -> None:
    change = Change(
        "t", "g:choir", "ann", "c1", b"", joining=False, user_ids=("ann",), by_subject=True, expires_at_ms=5
    )
    assert change.rewrite is None
    assert Create("t", "g:choir", "ann", ["ann", "bob"], expires_at_ms=5).sender_id == "ann"
