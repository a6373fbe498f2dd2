"""The floor of a large group on a real server."""

from __future__ import annotations

import redis

from qim.app.bench import zadd
from qim.app.bench.zadd import BareZadd


def test_every_set_gets_one_entry_a_round(mailbox_redis: str) -> None:
    count = 3 * zadd.COMMANDS_PER_WRITE + 7
    floor = BareZadd(mailbox_redis, count=count, entry_bytes=120)
    with redis.Redis.from_url(mailbox_redis) as client:
        assert floor.run() > 0
        floor.run()
        assert client.dbsize() == count
        name = next(client.scan_iter(match="mailbox:*"))
        assert [len(member) for member in client.zrange(name, 0, -1)] == [120, 120]
        floor.close()
        assert client.dbsize() == 0


def test_less_than_one_write(mailbox_redis: str) -> None:
    floor = BareZadd(mailbox_redis, count=3, entry_bytes=16)
    assert floor.run() > 0
    floor.close()
