"""Back-off of reconnects (§15.2.1)."""

from __future__ import annotations

import pytest

from qim.client.reconnect import Reconnect, jittered_ms


def test_delays_grow_to_the_cap() -> None:
    reconnect = Reconnect(lambda: 0.5)
    delays = [reconnect.delay_ms() for _ in range(12)]
    assert delays[:4] == pytest.approx([1000, 1800, 3240, 5832])
    assert delays[-1] == 120_000


def test_jitter_is_thirty_percent_both_ways() -> None:
    assert (jittered_ms(1000, lambda: 0.0), jittered_ms(1000, lambda: 1.0)) == (700, 1300)


def test_a_login_starts_over() -> None:
    reconnect = Reconnect(lambda: 0.5)
    for _ in range(5):
        reconnect.delay_ms()
    reconnect.logged_in()
    assert reconnect.delay_ms() == 1000


def test_the_servers_order_goes_first() -> None:
    reconnect = Reconnect(lambda: 0.5)
    assert reconnect.delay_ms(retry_after_ms=30_000) == 30_000
    assert reconnect.delay_ms(retry_after_ms=0) == 1000


def test_a_network_event_allows_one_attempt_at_once() -> None:
    reconnect = Reconnect(lambda: 0.5)
    reconnect.network_changed()
    assert reconnect.delay_ms() == 0
    assert reconnect.delay_ms() == 1000


def test_rate_limited_forbids_it_until_the_next_login() -> None:
    reconnect = Reconnect(lambda: 0.5)
    reconnect.rate_limited()
    reconnect.network_changed()
    assert reconnect.delay_ms() == 1000
    reconnect.logged_in()
    reconnect.network_changed()
    assert reconnect.delay_ms() == 0


def test_scale_shrinks_everything() -> None:
    reconnect = Reconnect(lambda: 0.5, scale=0.01)
    assert reconnect.delay_ms() == 10
    assert reconnect.delay_ms(retry_after_ms=2000) == 20
