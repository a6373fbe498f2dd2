"""The scan reads records past the head and intervals of everybody who ever was a member."""

from __future__ import annotations

import redis

from qim.app.connect import NodeAddress
from qim.app.replay.scan import scan_group
from qim.core.ids import conversation_bucket
from qim.core.visibility import Interval, pack_intervals
from qim.protocol.qim_pb2 import MESSAGE_TYPE_CONTROL, MESSAGE_TYPE_TEXT, MessageRecord
from qim.stores.redis import keys


def test_everything_of_the_group_and_nothing_else(message_redis: str) -> None:
    node = NodeAddress(
        host="127.0.0.1",
        port=1,
        admin_port=2,
        ca_path="",
        admin_token_path="",
        data_dir="",
        run_dir="",
        pid=0,
        core_address=message_redis,
        mailbox_address="",
        conversation_bucket_count=64,
        mailbox_shard_count=16,
    )
    bucket = conversation_bucket("t", "g:day", 64)
    sent = MessageRecord(
        message_id=b"\x01" * 16, sender_id="ann", client_message_id="m1", message_type=MESSAGE_TYPE_TEXT
    )
    joined = MessageRecord(message_id=b"\x02" * 16, sender_id="root", message_type=MESSAGE_TYPE_CONTROL)
    with redis.Redis.from_url(message_redis) as core:
        core.hset(keys.records(bucket, "t", "g:day", 1), "4096", joined.SerializeToString())
        core.hset(keys.records(bucket, "t", "g:day", 0), "7", sent.SerializeToString())
        core.hset(keys.records(bucket, "t", "g:daylight", 0), "8", sent.SerializeToString())
        core.hset(keys.group_intervals(bucket, "t", "day"), "ann", pack_intervals((Interval(0, 9), Interval(12))))
    stored = scan_group(node, "t", "day")
    assert [(record.conversation_seq, record.sender, record.control) for record in stored.records] == [
        (7, "ann", False),
        (4096, "root", True),
    ]
    assert stored.records[0].message_id == "01" * 16
    assert stored.intervals == {"ann": (Interval(0, 9), Interval(12))}
