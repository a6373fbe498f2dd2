"""What part `push` makes of its blocks."""

from __future__ import annotations

import pytest

from qim.app.bench.push import median_us, report_of
from qim.app.bench.push_driver import Block


def test_a_drift_of_the_machine_cancels() -> None:
    blocks = [Block(gateway_us=gateway, floor_us=floor) for gateway, floor in ((12, 10), (24, 20), (13, 11))]
    gateway_us, floor_us = median_us(blocks)
    assert floor_us == 11
    assert gateway_us == pytest.approx(11 * 1.2)


def test_coalesced_frames_stand_beside_the_single_write() -> None:
    single = [Block(gateway_us=12.0, floor_us=10.0)]
    coalesced = [Block(gateway_us=4.0, floor_us=3.0)]
    figures = report_of(single, coalesced, receivers=8, seconds=1.0).figures
    assert [figure.met for figure in figures] == [True, None, True, None, None]
    assert [round(figure.ratio or 0, 2) for figure in figures] == [1.2, 1.15, 0.4, 1.33, 0.38]
