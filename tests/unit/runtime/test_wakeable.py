"""Rest, news and the poll that covers silence."""

from __future__ import annotations

import asyncio

from qim.runtime.wakeable import Wakeable

LONG_MS = 60_000.0


async def test_news_ends_the_rest() -> None:
    worker = Wakeable()
    resting = asyncio.ensure_future(worker.wait(LONG_MS))
    await asyncio.sleep(0)
    assert worker.idle.is_set()
    worker.wake()
    worker.wake()
    await resting
    assert not worker.idle.is_set()


async def test_silence_ends_it_too() -> None:
    worker = Wakeable()
    await worker.wait(0)
    assert not worker.idle.is_set()


async def test_news_while_at_work_only_says_so() -> None:
    worker = Wakeable()
    worker.wake()
    assert not worker.idle.is_set()
