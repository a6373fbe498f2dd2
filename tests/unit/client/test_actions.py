"""Request ids: never 0, which names server-initiated frames."""

from __future__ import annotations

from qim.client.actions import RequestIds


def test_request_ids_skip_zero() -> None:
    ids = RequestIds()
    assert [ids.next(), ids.next()] == [1, 2]
    ids._last = 0xFFFF_FFFE
    assert [ids.next(), ids.next()] == [0xFFFF_FFFF, 1]
