"""Loading and calling scripts on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from qim.stores.redis.resp import RespClient, RespError
from qim.stores.redis.scripts import Script


@pytest.fixture
async def client(message_redis: str) -> AsyncIterator[RespClient]:
    client = RespClient(message_redis, name="message")
    await client.connect()
    yield client
    await client.close()


async def test_a_script_is_sent_once_and_then_called_by_its_digest(client: RespClient) -> None:
    script = Script("message_open")
    for _ in range(2):
        assert await script(client, ["f", "h", "o"], [1, "grant"]) == [None, None]
    assert await client.call("SCRIPT", "EXISTS", script.sha) == [1]


async def test_a_loaded_script_needs_no_second_try(client: RespClient) -> None:
    script = Script("message_open")
    await script.load(client)
    assert await client.call("EVALSHA", script.sha, 3, "f", "h", "o", 1, "grant") == [None, None]


async def test_an_error_of_the_script_is_not_tried_again(client: RespClient) -> None:
    script = Script("message_open")
    await script(client, ["f", "h", "o"], [2, "grant"])
    with pytest.raises(RespError) as caught:
        await script(client, ["f", "h", "o"], [1, "grant"])
    assert caught.value.code == "FENCED"


def test_an_unknown_script_is_found_at_import() -> None:
    with pytest.raises(FileNotFoundError):
        Script("no_such_script")
