"""One measured point of whatever version of Q-IM is first on PYTHONPATH; prints it as one JSON line.

Run as a script by `tests.bench.ab`, from the tree it measures: it uses only what every version since the bench has.
"""

from __future__ import annotations

import argparse
import json
import time

import redis

from qim.app.bench.node import WARMUP_S, BenchNode, Point
from qim.core.ids import direct_conversation_id, group_conversation_id

PEOPLE = 500
GROUP_MEMBERS = 100
GROUP_ID = "bench-100"
QUIET_S = 3.0
"""Everything has arrived and is stored by then."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("direct", "group"))
    parser.add_argument("rate", type=float, help="messages per second")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--commit-log", default="")
    options = parser.parse_args()
    made = BenchNode(commit_log=options.commit_log) if options.commit_log else BenchNode()
    with made as node:
        if options.part == "direct":
            users = [f"user{number:04d}" for number in range(PEOPLE)]
            generator = node.log_in(users)
            targets = [direct_conversation_id(user, users[number ^ 1]) for number, user in enumerate(users)]
            others = 1
        else:
            users = [f"member{number:03d}" for number in range(GROUP_MEMBERS)]
            generator = node.log_in(users)
            node.make_group(generator, GROUP_ID, users)
            targets, others = [group_conversation_id(GROUP_ID)] * GROUP_MEMBERS, GROUP_MEMBERS - 1
        # what is made once per conversation and connection is there before memory is looked at
        node.measure(generator, targets, options.rate, 2.0, others=others)
        before = _used_bytes(node)
        point = node.measure(generator, targets, options.rate, options.seconds, others=others)
        after = _used_bytes(node)
    print(json.dumps(_figures(point, after - before)))


def _figures(point: Point, grown_bytes: int) -> dict[str, float]:
    messages = point.acked / point.seconds * (point.seconds + WARMUP_S)
    return {
        "cpu_us": point.server_us,
        "ack_p99_ms": point.ack.p99_ms,
        "delivery_p99_ms": point.delivery.p99_ms,
        "redis_bytes": grown_bytes / messages,
        "acked": point.acked,
        "refused": sum(point.refused.values()),
        "missing": point.missing_deliveries,
    }


def _used_bytes(node: BenchNode) -> int:
    """Memory of both servers, without buffers of the moment."""
    time.sleep(QUIET_S)
    used = 0
    for address in (node.address.core_address, node.address.mailbox_address):
        with redis.Redis.from_url(address) as client:
            found = client.info("memory")
            used += found["used_memory"] - found["mem_aof_buffer"] - found["mem_clients_normal"]
    return used


if __name__ == "__main__":
    main()
