"""What is not as it should be, sent to a whole node: never a traceback, never a dead worker.

Each input gets exactly the answer Appendix A, §20.1, §27.1.2 and DESIGN-data §3 name, is counted once, and the next
client is served as if nothing had happened. How the gateway alone treats frames is in tests/integration/gateway.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.errors import Detail, ErrorCode
from qim.obs.logs import configure_logs
from qim.obs.metrics import REGISTRY
from qim.protocol import qim_pb2 as pb
from qim.protocol.header import encode_frame, encode_header
from qim.protocol.opcodes import Opcode
from tests.acceptance.devices import direct
from tests.acceptance.harness import TENANT, Node, running_node
from tests.support.raw_client import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUEST = 77
"""request_id of every bad frame."""
UNAUTHENTICATED_MS = 1500
FAILURES = ("qim_runtime_task_failed_total", "qim_obs_log_fields_dropped_total")
"""Counters no input may move."""
FOREIGN_TENANT = "other"
TEAM = "g:team"
"""A group of ann and bob."""
KNOWN = "known"
"""client_message_id of a message of eve that is committed."""


class Scene:
    """A node with a few people, and what was seen of tracebacks in it."""

    def __init__(self, node: Node, log: io.StringIO) -> None:
        self.node = node
        self.log = log
        self.crashes: list[dict[str, Any]] = []
        self._numbers = iter(range(1, 10_000))
        self._failures = [counted(metric, {}) for metric in FAILURES]

    async def prepare(self) -> None:
        """A group eve is not in, and a message eve may not use again."""
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.crashes.append(context))
        await self.node.create_group("team", "ann", ["bob"])
        await self.node.delivered()
        self.witness = await self.log_in("ann", "witness")
        eve = await self.log_in("eve")
        eve.send(Opcode.SEND_MESSAGE, text(direct("bob", "eve"), KNOWN))
        await eve.expect(Opcode.SEND_ACK)
        await eve.close()
        await self.node.delivered()

    async def auth(self, user: str = "eve", device_id: str = "phone", **fields: Any) -> pb.Auth:
        """A good AUTH but for what `fields` change."""
        values = {"access_token": await self.node.token(user, device_id), "device_id": device_id, **fields}
        return pb.Auth(client_version="1.0.0", **values)

    async def log_in(self, user: str = "eve", device_id: str = "phone", tenant: str = TENANT) -> RawClient:
        """A connection that is online."""
        client = await self.node.raw_client()
        token = await self.node.token(user, device_id, tenant)
        client.send(Opcode.AUTH, await self.auth(user, device_id, access_token=token))
        welcome: pb.AuthOk = await client.expect(Opcode.AUTH_OK)
        if welcome.has_offline:
            client.send(Opcode.PULL_MAILBOX, pb.PullMailbox(up_to_seq=welcome.sync_to_seq))
            await client.expect(Opcode.MAILBOX_BATCH)
        client.send(Opcode.SYNC_COMPLETE, pb.SyncComplete(sync_to_seq=welcome.sync_to_seq))
        await client.expect(Opcode.ONLINE_READY)
        return client

    async def cursor_of(self, user: str, device_id: str = "phone") -> bytes:
        """A signed cursor token."""
        client = await self.node.raw_client()
        client.send(Opcode.AUTH, await self.auth(user, device_id))
        token: bytes = (await client.expect(Opcode.AUTH_OK)).mailbox_cursor.token
        await client.close()
        return token

    async def others_are_served(self) -> None:
        """One that was there all the time, and one that comes now: login, send, answer, push."""
        number = next(self._numbers)
        chat = direct("ann", "zoe")
        late = await self.log_in("zoe", f"late{number % 8}")
        late.send(Opcode.SEND_MESSAGE, text(chat, f"after-{number}"))
        await late.expect(Opcode.SEND_ACK)
        pushed = await self.witness.expect(Opcode.PUSH_EVENTS)
        assert [entry.sender_id for entry in pushed.events] == ["zoe"]
        await late.close()

    def assert_no_traceback(self) -> None:
        assert self.crashes == []
        assert [line for line in self.log.getvalue().splitlines() if '"level":"error"' in line] == []
        assert [counted(metric, {}) for metric in FAILURES] == self._failures


def text(conversation_id: str, client_message_id: str, payload: bytes = b"hi", **fields: Any) -> pb.SendMessage:
    values: dict[str, Any] = {"message_type": pb.MESSAGE_TYPE_TEXT, **fields}
    return pb.SendMessage(
        client_message_id=client_message_id, conversation_id=conversation_id, payload=payload, **values
    )


def counted(metric: str, labels: dict[str, str]) -> float:
    return REGISTRY.get_sample_value(metric, labels) or 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    log = io.StringIO()
    configure_logs(stream=log)
    try:
        async with running_node(unauth_connection_timeout=UNAUTHENTICATED_MS) as node:
            made = Scene(node, log)
            await made.prepare()
            yield made
    finally:
        configure_logs()


Bytes = Callable[[Scene], Awaitable[bytes]]


class Case(NamedTuple):
    """One bad input of eve and all that happens."""

    name: str
    data: Bytes
    answer: ErrorCode | None
    detail: str
    closes: bool
    metric: str
    labels: dict[str, str]


def fixed(data: bytes) -> Bytes:
    async def made(_: Scene) -> bytes:
        return data

    return made


def frame(opcode: int, body: pb.SendMessage | Any = b"", request_id: int = REQUEST) -> Bytes:
    raw = body if isinstance(body, bytes) else body.SerializeToString()
    return fixed(encode_frame(opcode, raw, request_id=request_id))


def broken_crc() -> bytes:
    header = bytearray(encode_header(Opcode.AUTH, 5, request_id=REQUEST))
    header[-1] ^= 1
    return bytes(header)


def authenticating(**changes: Callable[[Scene], Awaitable[Any]]) -> Bytes:
    """AUTH of eve with some fields replaced."""

    async def made(scene: Scene) -> bytes:
        fields = {name: await value(scene) for name, value in changes.items()}
        return encode_frame(Opcode.AUTH, (await scene.auth(**fields)).SerializeToString(), request_id=REQUEST)

    return made


async def foreign_key_token(scene: Scene) -> str:
    """All claims are right, the signature is another issuer's."""
    claims = jwt.decode(await scene.node.token("eve", "phone"), options={"verify_signature": False})
    return jwt.encode(claims, Ed25519PrivateKey.generate(), algorithm="EdDSA")


async def unsigned_token(scene: Scene) -> str:
    claims = jwt.decode(await scene.node.token("eve", "phone"), options={"verify_signature": False})
    return jwt.encode(claims, "", algorithm="none")


async def other_device_token(scene: Scene) -> str:
    return await scene.node.token("eve", "tablet")


def cursor(token: Callable[[Scene], Awaitable[bytes]], last_applied: int = 0) -> Bytes:
    async def made(scene: Scene) -> pb.MailboxCursorToken:
        return pb.MailboxCursorToken(token=await token(scene), last_applied_mailbox_seq=last_applied)

    return authenticating(mailbox_cursor=made)


async def own_cursor(scene: Scene) -> bytes:
    return await scene.cursor_of("eve")


async def flipped_cursor(scene: Scene) -> bytes:
    token = bytearray(await own_cursor(scene))
    token[-1] ^= 1
    return bytes(token)


async def widened_cursor(scene: Scene) -> bytes:
    """The signed shard changed, the signature kept."""
    token = bytearray(await own_cursor(scene))
    token[4] ^= 1
    return bytes(token)


async def stolen_cursor(scene: Scene) -> bytes:
    return await scene.cursor_of("zoe", "thief")


async def no_cursor(_: Scene) -> bytes:
    return b""


GARBAGE = random.Random(5).randbytes(4096)
INVALID: tuple[ErrorCode, str, bool, str, dict[str, str]] = (
    ErrorCode.CURSOR_INVALID,
    "",
    False,
    "cursor_invalid_total",
    {},
)
REFUSED = (ErrorCode.PERMISSION_DENIED, Detail.NOT_AUTHENTICATED, True)
CLOSED_AT_LOGIN = ("connections_closed_total", {"reason": "auth_refused"})

BEFORE_LOGIN = [
    Case("another protocol", fixed(b"GET / HTTP/1.1\r\n\r\n"), None, "", True, "qim_gateway_framing_error_total",
         {"kind": "magic"}),
    Case("garbage", fixed(GARBAGE), None, "", True, "qim_gateway_framing_error_total", {"kind": "magic"}),
    Case("wrong crc", fixed(broken_crc()), None, "", True, "qim_gateway_framing_error_total", {"kind": "crc"}),
    Case("half a header", fixed(encode_header(Opcode.AUTH, 100)[:9]), None, "", True, "connections_closed_total",
         {"reason": "unauthenticated_timeout"}),
    Case("half a body", fixed(encode_header(Opcode.AUTH, 100) + b"half"), None, "", True, "connections_closed_total",
         {"reason": "unauthenticated_timeout"}),
    Case("oversized", fixed(encode_header(Opcode.AUTH, 8193, request_id=REQUEST)), ErrorCode.PAYLOAD_TOO_LARGE, "",
         True, "qim_gateway_framing_error_total", {"kind": "too_large"}),
    Case("length of 4 GiB", fixed(encode_header(Opcode.AUTH, 0xFFFFFFFF, request_id=REQUEST)),
         ErrorCode.PAYLOAD_TOO_LARGE, "", True, "qim_gateway_framing_error_total", {"kind": "too_large"}),
    Case("a send before AUTH", frame(Opcode.SEND_MESSAGE, text(direct("bob", "eve"), "early")), *REFUSED,
         "qim_gateway_framing_error_total", {"kind": "before_auth"}),
    Case("a pull before AUTH", frame(Opcode.PULL_MAILBOX), *REFUSED, "qim_gateway_framing_error_total",
         {"kind": "before_auth"}),
    Case("unknown opcode", frame(0x0999, b"?"), ErrorCode.UPGRADE_REQUIRED, "", False, "unknown_opcode_dropped", {}),
    Case("unknown opcode, no request", frame(0x0999, b"?", 0), None, "", False, "unknown_opcode_dropped", {}),
    Case("AUTH that does not parse", frame(Opcode.AUTH, b"\xff\xff"), ErrorCode.PERMISSION_DENIED, Detail.BAD_REQUEST,
         True, *CLOSED_AT_LOGIN),
    Case("token of another issuer", authenticating(access_token=foreign_key_token), *REFUSED, *CLOSED_AT_LOGIN),
    Case("unsigned token", authenticating(access_token=unsigned_token), *REFUSED, *CLOSED_AT_LOGIN),
    Case("token of another device", authenticating(access_token=other_device_token), ErrorCode.PERMISSION_DENIED,
         Detail.DEVICE_MISMATCH, True, *CLOSED_AT_LOGIN),
    Case("cursor with a flipped bit", cursor(flipped_cursor), *INVALID),
    Case("cursor of another shard", cursor(widened_cursor), *INVALID),
    Case("cursor of another user", cursor(stolen_cursor), *INVALID),
    Case("cursor beyond W", cursor(own_cursor, 1 << 60), *INVALID),
    Case("position without a token", cursor(no_cursor, 1), *INVALID),
]  # fmt: skip


def denied_send(name: str, message: pb.SendMessage, detail: str = "") -> Case:
    return Case(name, frame(Opcode.SEND_MESSAGE, message), ErrorCode.PERMISSION_DENIED, detail, False,
                "send_reject_total", {"code": "PERMISSION_DENIED"})  # fmt: skip


def nonsense(name: str, opcode: Opcode, body: Any) -> Case:
    return Case(name, frame(opcode, body), ErrorCode.PERMISSION_DENIED, Detail.BAD_REQUEST, False,
                "qim_gateway_bad_request_total", {"opcode": opcode.name})  # fmt: skip


CHAT = direct("bob", "eve")
UNKNOWN_ENUM = pb.SendMessage(
    client_message_id="m",
    conversation_id=CHAT,
    payload=b"x",
    message_type=99,  # type: ignore[arg-type]
)
ONLINE = [
    Case("garbage", fixed(GARBAGE), None, "", True, "qim_gateway_framing_error_total", {"kind": "magic"}),
    Case("oversized send", fixed(encode_header(Opcode.SEND_MESSAGE, 100_000, request_id=REQUEST)),
         ErrorCode.PAYLOAD_TOO_LARGE, "", True, "qim_gateway_framing_error_total", {"kind": "too_large"}),
    Case("unknown opcode", frame(0x0A99, b"?"), ErrorCode.UPGRADE_REQUIRED, "", False, "unknown_opcode_dropped", {}),
    Case("unknown opcode, no request", frame(0x0A99, b"?", 0), None, "", False, "unknown_opcode_dropped", {}),
    Case("internal opcode", frame(0xF001, b"?"), ErrorCode.UPGRADE_REQUIRED, "", False, "unknown_opcode_dropped", {}),
    Case("downstream opcode", frame(Opcode.PUSH_EVENTS, b""), ErrorCode.UPGRADE_REQUIRED, "", False,
         "unknown_opcode_dropped", {}),
    Case("33 KiB payload", frame(Opcode.SEND_MESSAGE, text(CHAT, "big", b"x" * (33 << 10))),
         ErrorCode.PAYLOAD_TOO_LARGE, "", False, "send_reject_total", {"code": "PAYLOAD_TOO_LARGE"}),
    nonsense("unknown message type", Opcode.SEND_MESSAGE, UNKNOWN_ENUM),
    nonsense("control message", Opcode.SEND_MESSAGE, text(CHAT, "m", message_type=pb.MESSAGE_TYPE_CONTROL)),
    nonsense("unknown direction", Opcode.PULL_HISTORY, pb.PullHistory(conversation_id=CHAT, direction=9)),  # type: ignore[arg-type]
    nonsense("no client_message_id", Opcode.SEND_MESSAGE, text(CHAT, "")),
    nonsense("body that does not parse", Opcode.SEND_MESSAGE, b"\xff\xff\xff"),
    nonsense("empty range", Opcode.PULL_MAILBOX, pb.PullMailbox(after_seq=5, up_to_seq=4)),
    denied_send("chat of others", text(direct("ann", "bob"), "m")),
    denied_send("group of others", text(TEAM, "m")),
    denied_send("group that does not exist", text("g:nowhere", "m")),
    denied_send("no conversation id", text("ann and bob", "m")),
    denied_send("reused id, another body", text(CHAT, KNOWN, b"other"), Detail.CLIENT_MESSAGE_ID_REUSED),
    Case("pull beyond W", frame(Opcode.PULL_MAILBOX, pb.PullMailbox(after_seq=1 << 60, up_to_seq=(1 << 60) + 1)),
         *INVALID),
    Case("acknowledged beyond W", frame(Opcode.PULL_MAILBOX, pb.PullMailbox(acked_seq=1 << 60)), *INVALID),
]  # fmt: skip


async def check(scene: Scene, client: RawClient, case: Case, next_request: Opcode, its_answer: Opcode) -> None:
    """Send it: its answer comes and nothing else, it is counted once, and everybody is served."""
    before = counted(case.metric, case.labels)
    client.send_bytes(await case.data(scene))
    if case.answer is not None:
        error = await client.expect_error(case.answer, REQUEST)
        assert error.detail == case.detail
    if case.closes:
        await client.expect_closed()
    else:
        body = await scene.auth() if next_request is Opcode.AUTH else b""
        await client.expect(its_answer, client.send(next_request, body))
    assert counted(case.metric, case.labels) == before + 1
    await scene.others_are_served()
    scene.assert_no_traceback()


@pytest.mark.parametrize("case", BEFORE_LOGIN, ids=lambda case: case.name)
async def test_before_login(scene: Scene, case: Case) -> None:
    await check(scene, await scene.node.raw_client(), case, Opcode.AUTH, Opcode.AUTH_OK)


@pytest.mark.parametrize("case", ONLINE, ids=lambda case: case.name)
async def test_online(scene: Scene, case: Case) -> None:
    await check(scene, await scene.log_in(), case, Opcode.PING, Opcode.PONG)


async def test_another_tenant_sees_nothing(scene: Scene) -> None:
    """The same names, a token of another tenant: what exists and what does not look alike."""
    client = await scene.log_in("ann", tenant=FOREIGN_TENANT)
    for conversation_id in (TEAM, "g:nowhere"):
        message = text(conversation_id, "m")
        error = await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.SEND_MESSAGE, message))
        assert (error.detail, error.retry_after_ms) == ("", 0)
        pull = pb.PullHistory(conversation_id=conversation_id, direction=pb.OLDER)
        error = await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.PULL_HISTORY, pull))
        assert (error.detail, error.retry_after_ms) == ("", 0)
    pull = pb.PullHistory(conversation_id=direct("ann", "zoe"), direction=pb.OLDER)
    history = await client.expect(Opcode.HISTORY_BATCH, client.send(Opcode.PULL_HISTORY, pull))
    assert (len(history.messages), history.latest_conversation_seq) == (0, 0)
    stolen = await scene.cursor_of("ann", "phone")
    thief = await scene.node.raw_client()
    auth = pb.Auth(
        access_token=await scene.node.token("ann", "phone", FOREIGN_TENANT), device_id="phone",
        mailbox_cursor=pb.MailboxCursorToken(token=stolen),
    )  # fmt: skip
    await thief.expect_error(ErrorCode.CURSOR_INVALID, thief.send(Opcode.AUTH, auth))
    await scene.others_are_served()
    scene.assert_no_traceback()


async def test_a_repeated_send_is_answered_as_the_first(scene: Scene) -> None:
    client = await scene.log_in()
    acks = [await client.expect(Opcode.SEND_ACK, client.send(Opcode.SEND_MESSAGE, text(CHAT, KNOWN))) for _ in range(2)]
    assert acks[0].conversation_seq == acks[1].conversation_seq == 1
    assert acks[0].message_id == acks[1].message_id
