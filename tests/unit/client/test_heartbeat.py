"""Adaptive heartbeat and probes (§15.1.2); case 26.5.7: a silent link is dead within a bound."""

from __future__ import annotations

from typing import Any

from qim.client.actions import Action, Disconnect, RequestIds, Transmit
from qim.client.heartbeat import NEVER_MS, Heartbeat, HeartbeatOptions
from qim.protocol import qim_pb2 as pb

NOW_MS = 1_000_000


class Beat:
    """A heartbeat on a hand-moved clock."""

    def __init__(self, server_interval_ms: int = 0) -> None:
        self.out: list[Action] = []
        self.now_ms = NOW_MS
        self.heard_ms = NOW_MS
        self.heartbeat = Heartbeat(HeartbeatOptions(), self.out, RequestIds())
        self.heartbeat.start(server_interval_ms, NOW_MS)
        self.ping: Any = None

    def wait(self, ms: int) -> list[str]:
        self.now_ms += ms
        self.heartbeat.tick(self.now_ms, self.heard_ms, 77)
        return self.words()

    def words(self) -> list[str]:
        words = []
        for action in self.out:
            if isinstance(action, Transmit):
                self.ping = action.message
                words.append("probe" if self.ping.probe else "ping")
            elif isinstance(action, Disconnect):
                words.append(action.reason)
        self.out.clear()
        return words

    def pong(self, interval_ms: int = 0) -> None:
        self.heard_ms = self.now_ms
        pong = pb.Pong(ping_id=self.ping.ping_id, next_ping_interval_ms=interval_ms)
        self.heartbeat.on_pong(pong, self.now_ms)


def test_pings_at_the_interval_and_carries_the_position() -> None:
    beat = Beat()
    assert beat.wait(59_999) == []
    assert beat.wait(1) == ["ping"]
    assert beat.ping.last_applied_mailbox_seq == 77


def test_three_good_pongs_lengthen_the_interval_up_to_the_maximum() -> None:
    beat = Beat()
    lengths = []
    for _ in range(12):
        lengths.append(beat.heartbeat.interval_ms())
        assert beat.wait(lengths[-1]) == ["ping"]
        beat.pong()
    assert lengths == [60_000] * 3 + [90_000] * 3 + [120_000] * 6


def test_the_servers_interval_is_an_upper_bound() -> None:
    beat = Beat(server_interval_ms=5_000)
    assert beat.wait(5_000) == ["ping"]
    beat.pong(interval_ms=2_000)
    assert beat.heartbeat.next_deadline_ms() == beat.now_ms + 2_000


def test_a_receive_only_link_is_dead_within_interval_plus_probe() -> None:
    beat = Beat(server_interval_ms=60_000)
    assert beat.wait(60_000) == ["ping"]
    assert beat.wait(60_000) == ["probe"]
    assert beat.heartbeat.next_deadline_ms() == beat.now_ms + 3_000
    assert beat.wait(3_000) == ["link_dead"]
    assert beat.heartbeat.next_deadline_ms() == NEVER_MS


def test_any_frame_after_the_probe_proves_the_link() -> None:
    beat = Beat()
    beat.wait(60_000)
    assert beat.wait(60_000) == ["probe"]
    beat.heard_ms = beat.now_ms + 1
    assert beat.wait(3_000) == []


def test_a_missing_pong_shortens_the_interval_and_locks_it() -> None:
    beat = Beat()
    beat.wait(60_000)
    beat.wait(60_000)
    beat.pong()
    assert beat.heartbeat.interval_ms() == 48_000
    for _ in range(9):
        beat.wait(60_000)
        beat.pong()
    assert beat.heartbeat.interval_ms() == 48_000, "locked for 30 minutes"


def test_one_probe_at_a_time() -> None:
    beat = Beat()
    beat.heartbeat.probe(beat.now_ms, 1)
    beat.heartbeat.probe(beat.now_ms, 1)
    assert beat.words() == ["probe"]
    beat.pong()
    beat.heartbeat.probe(beat.now_ms, 1)
    assert beat.words() == ["probe"]


def test_no_probe_without_a_connection() -> None:
    beat = Beat()
    beat.heartbeat.stop()
    beat.heartbeat.probe(beat.now_ms, 1)
    assert beat.words() == []
