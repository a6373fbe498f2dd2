"""The HTTP plane with a fake writer: answers are JSON, refusals say what is wrong, nobody gets in without the token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.admin.http import USERS_PER_CALL_MAX, AdminPlane
from qim.admin.tokens import TokenIssuer
from qim.backplane.api import Backplane, PeerUnavailable
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import PERMISSION_DENIED, Error, GroupReply, SubmitGroupChange
from qim.registry.api import LeaseKind, Route, ShardRegistry

HEADERS = {"Authorization": "Bearer sesame"}
CHANGE = {"tenant": "t", "add": ["a", "b"]}


class OneWriter:
    """Registry and backplane of a node with one writer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, SubmitGroupChange]] = []
        self.answer: Callable[[], bytes] = GroupReply(conversation_seq=5, membership_version=2).SerializeToString
        self.route: Route | None = Route("writer-0", 1)

    async def current(self, kind: LeaseKind, shard_id: int) -> Route | None:
        assert kind is LeaseKind.CONVERSATION_BUCKET
        return self.route

    async def request(self, peer: str, opcode: int, body: bytes, *, timeout_ms: int) -> bytes:
        self.asked.append((peer, opcode, SubmitGroupChange.FromString(body)))
        return self.answer()


class Status:
    def __init__(self) -> None:
        self.found: list[str] = []

    async def problems(self) -> list[str]:
        return self.found

    def metrics_endpoints(self) -> list[dict[str, str]]:
        return [{"process": "core-0", "address": "unix:///run/core-0.metrics"}]


class FixedClock:
    def unix_ms(self) -> int:
        return 1_800_000_000_000

    def monotonic_ms(self) -> float:
        return 0.0


@pytest.fixture
def writer() -> OneWriter:
    return OneWriter()


@pytest.fixture
def status() -> Status:
    return Status()


@pytest.fixture
async def client(writer: OneWriter, status: Status) -> AsyncIterator[TestClient[Any, Any]]:
    plane = AdminPlane(
        admin_token="sesame",
        tokens=TokenIssuer(Ed25519PrivateKey.generate()),
        registry=cast(ShardRegistry, writer),
        backplane=cast(Backplane, writer),
        status=status,
        clock=FixedClock(),
        conversation_bucket_count=64,
        submit_timeout_ms=2000,
    )
    async with TestClient(TestServer(plane.application())) as running:
        yield running


async def answer_of(response: aiohttp.ClientResponse) -> tuple[int, dict[str, Any]]:
    return response.status, await response.json()


async def test_a_token_is_issued_to_who_holds_the_admin_token(client: TestClient[Any, Any]) -> None:
    body = {"tenant": "t", "user": "u", "device": "d", "ttl_s": 60}
    status, answer = await answer_of(await client.post("/v1/tokens", json=body, headers=HEADERS))
    assert status == 200
    assert answer["token"].count(".") == 2
    assert answer["expires_in_s"] == 60


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}])
async def test_nobody_else_gets_one(client: TestClient[Any, Any], headers: dict[str, str]) -> None:
    status, answer = await answer_of(await client.post("/v1/tokens", json={}, headers=headers))
    assert (status, answer["code"]) == (401, "UNAUTHORIZED")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokens", b"{"),
        ("/v1/tokens", b"[]"),
        ("/v1/tokens", b'{"tenant": "t", "user": "u"}'),
        ("/v1/tokens", b'{"tenant": "t", "user": "a b", "device": "d"}'),
        ("/v1/tokens", b'{"tenant": "t", "user": "u", "device": "d", "ttl_s": 0}'),
        ("/v1/tokens", b'{"tenant": "t", "user": "u", "device": "d", "ttl_s": true}'),
        ("/v1/tokens", b'{"tenant": "t", "user": "u", "device": "d", "ttl_s": "1"}'),
        ("/v1/groups/g/members", b'{"tenant": "t"}'),
        ("/v1/groups/g/members", b'{"tenant": "t", "add": ["a"], "remove": ["a"]}'),
        ("/v1/groups/g/members", b'{"tenant": "t", "add": []}'),
        ("/v1/groups/g/members", b'{"tenant": "t", "add": [1]}'),
        ("/v1/groups/g/members", b'{"tenant": "t", "add": ["a b"]}'),
        ("/v1/groups/g/members", b'{"add": ["a"]}'),
        ("/v1/groups/g/members", b'{"tenant": "t", "add": ["a"], "operator": 5}'),
        ("/v1/groups/g!/members", b'{"tenant": "t", "add": ["a"]}'),
    ],
)
async def test_bad_input_is_one_line_and_400(
    client: TestClient[Any, Any], writer: OneWriter, path: str, body: bytes
) -> None:
    status, answer = await answer_of(await client.post(path, data=body, headers=HEADERS))
    assert (status, answer["code"]) == (400, "BAD_REQUEST")
    assert answer["detail"]
    assert "\n" not in answer["detail"]
    assert writer.asked == []


async def test_more_users_than_a_call_takes(client: TestClient[Any, Any]) -> None:
    body = {"tenant": "t", "add": [f"u{n}" for n in range(USERS_PER_CALL_MAX + 1)]}
    status, answer = await answer_of(await client.post("/v1/groups/g/members", json=body, headers=HEADERS))
    assert status == 400
    assert str(USERS_PER_CALL_MAX) in answer["detail"]


@pytest.mark.parametrize(
    ("verb", "opcode"), [("add", InternalOpcode.SUBMIT_GROUP_ADD), ("remove", InternalOpcode.SUBMIT_GROUP_REMOVE)]
)
async def test_a_change_goes_to_the_owner_of_the_bucket(
    client: TestClient[Any, Any], writer: OneWriter, verb: str, opcode: int
) -> None:
    body = {"tenant": "t", verb: ["a", "b"], "operator": "root"}
    status, answer = await answer_of(await client.post("/v1/groups/day/members", json=body, headers=HEADERS))
    assert (status, answer) == (200, {"conversation_seq": 5, "membership_version": 2})
    wanted = SubmitGroupChange(tenant_id="t", group_id="day", user_ids=["a", "b"], operator="root")
    assert writer.asked == [("writer-0", opcode, wanted)]


async def test_a_refusal_of_the_writer_is_passed_on(client: TestClient[Any, Any], writer: OneWriter) -> None:
    error = Error(code=PERMISSION_DENIED, detail="group_member_limit")
    writer.answer = GroupReply(error=error).SerializeToString
    status, answer = await answer_of(await client.post("/v1/groups/day/members", json=CHANGE, headers=HEADERS))
    assert (status, answer) == (403, {"code": "PERMISSION_DENIED", "detail": "group_member_limit"})


async def test_a_writer_that_does_not_answer_means_try_again(client: TestClient[Any, Any], writer: OneWriter) -> None:
    def silent() -> bytes:
        raise PeerUnavailable("no answer")

    writer.answer = silent
    status, answer = await answer_of(await client.post("/v1/groups/day/members", json=CHANGE, headers=HEADERS))
    assert (status, answer["code"], answer["retry_after_ms"]) == (503, "REGION_FAILOVER", 2000)
    writer.route = None
    status, answer = await answer_of(await client.post("/v1/groups/day/members", json=CHANGE, headers=HEADERS))
    assert status == 503


async def test_an_unexpected_failure_tells_the_peer_nothing(client: TestClient[Any, Any], writer: OneWriter) -> None:
    def broken() -> bytes:
        raise RuntimeError("secret detail")

    writer.answer = broken
    response = await client.post("/v1/groups/day/members", json=CHANGE, headers=HEADERS)
    assert response.status == 500
    assert "secret" not in await response.text()


async def test_health_readiness_and_endpoints(client: TestClient[Any, Any], status: Status) -> None:
    assert (await answer_of(await client.get("/healthz"))) == (200, {"ok": True})
    assert (await answer_of(await client.get("/readyz"))) == (200, {"ready": True, "problems": []})
    status.found = ["writer-0 is not ready"]
    assert (await answer_of(await client.get("/readyz")))[0] == 503
    _, endpoints = await answer_of(await client.get("/metrics-endpoints"))
    assert endpoints["endpoints"][0]["process"] == "core-0"


async def test_an_unknown_path_is_json_too(client: TestClient[Any, Any]) -> None:
    status, answer = await answer_of(await client.get("/nothing"))
    assert (status, answer["code"]) == (404, "HTTP_ERROR")
