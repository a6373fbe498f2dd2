"""Errors name their code; a handle nobody awaits raises no alarm."""

from __future__ import annotations

import asyncio

import pytest

from qim.client.events import RequestFailed, SendHandle, SendRefused, SendResult
from qim.errors import ErrorCode


def test_a_failure_names_its_code() -> None:
    assert str(RequestFailed(ErrorCode.RATE_LIMITED, "out_of_order")) == "RATE_LIMITED out_of_order"
    assert str(RequestFailed(0, "connection lost")) == "connection lost"
    assert str(RequestFailed(77, "")) == "error 77"


async def test_a_handle_gives_the_coordinates_or_raises() -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[SendResult] = loop.create_future()
    handle = SendHandle("id", future)
    future.set_result(SendResult(b"m", 4))
    assert await handle == SendResult(b"m", 4)
    refused: asyncio.Future[SendResult] = loop.create_future()
    handle = SendHandle("id", refused)
    refused.set_exception(SendRefused(15, ""))
    with pytest.raises(SendRefused):
        await handle
