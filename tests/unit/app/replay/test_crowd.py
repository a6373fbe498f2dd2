"""The senders' own log: what is waiting, what was acknowledged, how long it took."""

from __future__ import annotations

from qim.app.replay.crowd import Ledger, Sighting


def test_a_message_waits_until_its_ack() -> None:
    ledger = Ledger()
    ledger.leaves("ann", "phone", "m1", "hello", 100.0)
    ledger.leaves("ann", "phone", "m2", "again", 110.0)
    assert ledger.unacknowledged() == {"m1", "m2"}
    ledger.acked("m1", b"\x01", 7, 130.0)
    assert ledger.unacknowledged() == {"m2"}
    assert [(line.client_message_id, line.conversation_seq, line.message_id) for line in ledger.sent] == [
        ("m1", 7, "01"),
        ("m2", 0, ""),
    ]
    assert ledger.ack_latencies_ms() == [30.0]


def test_deliveries_count_for_others_that_were_online() -> None:
    ledger = Ledger()
    ledger.leaves("ann", "phone", "m1", "hello", 100.0)
    seen = Sighting(b"\x01", at_ms=150.0, live_since_ms=50.0)
    assert ledger.delivery_of("bob", seen) is None
    ledger.acked("m1", b"\x01", 7, 130.0)
    delivery = ledger.delivery_of("bob", seen)
    assert delivery is not None
    assert (delivery.latency_ms, delivery.client_message_id) == (50.0, "m1")
    assert ledger.delivery_of("ann", seen) is None
    assert ledger.delivery_of("bob", Sighting(b"\x01", at_ms=150.0, live_since_ms=120.0)) is None
