"""Two processes' backplanes over real sockets in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from qim.backplane.api import Answer, PeerUnavailable, Priority
from qim.backplane.link import BODY_BYTES_MAX
from qim.backplane.unix import UnixBackplane, socket_path
from qim.errors import StartupError
from qim.protocol.opcodes import InternalOpcode
from qim.runtime.clock import SystemClock
from tests.support.run_dir import short_run_dir

NOTICE = InternalOpcode.PUSH_BATCH
REQUEST = InternalOpcode.MAILBOX_PULL
PATIENT_MS = 30_000
"""Of requests that are not about their deadline: on a busy machine an answer takes what it takes."""
ROLES = {"core-0": ("writer-0", "mailbox-0"), "gateway-0": ("gateway-0",)}


def fail(task: str, error: BaseException) -> None:
    raise AssertionError(f"{task} failed") from error


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until `condition()` holds; the test's timeout ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.001)


class Node:
    """A backplane that records what its handlers and listener are told."""

    def __init__(self, process: str, run_dir: Path, *, queue_bytes_max: int = 1 << 24, in_flight_max: int = 8) -> None:
        sockets = {role: socket_path(run_dir, name) for name, roles in ROLES.items() for role in roles}
        self.plane = UnixBackplane(
            process, ROLES[process], sockets, run_dir=run_dir, clock=SystemClock(), on_failure=fail,
            queue_bytes_max=queue_bytes_max, in_flight_max=in_flight_max,
        )  # fmt: skip
        self.notices: list[tuple[str, bytes]] = []
        self.links: list[tuple[str, bool]] = []
        self.held: list[asyncio.Future[bytes]] = []
        self.plane.on_notice(NOTICE, lambda peer, body: self.notices.append((peer, body)))
        self.plane.on_link(lambda peer, up: self.links.append((peer, up)))
        self.plane.on_request(REQUEST, self._answer)

    async def _answer(self, peer: str, body: bytes) -> bytes:
        if body == b"raise":
            raise RuntimeError("a text no peer may see")
        if body == b"hold":
            self.held.append(asyncio.get_running_loop().create_future())
            return await self.held[-1]
        return peer.encode() + b"/" + body


class Pair:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.core = Node("core-0", run_dir)
        self.gateway = Node("gateway-0", run_dir)

    async def start(self) -> None:
        await self.core.plane.start()
        await self.gateway.plane.start()
        self.gateway.plane.connect("mailbox-0")
        await until(lambda: self.gateway.links)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    with short_run_dir() as run_dir:
        made = Pair(run_dir)
        await made.start()
        yield made
        await made.gateway.plane.close()
        await made.core.plane.close()


async def test_a_link_carries_notices_in_order_to_every_role_of_the_process(pair: Pair) -> None:
    assert pair.gateway.links == [("mailbox-0", True)]
    for index in range(500):
        assert pair.gateway.plane.notify(("writer-0", "mailbox-0")[index % 2], NOTICE, b"%d" % index)
    await until(lambda: len(pair.core.notices) == 500)
    assert pair.core.notices == [("gateway-0", b"%d" % index) for index in range(500)]


async def test_a_second_role_of_a_connected_process_is_up_at_once(pair: Pair) -> None:
    pair.gateway.plane.connect("writer-0")
    await until(lambda: ("writer-0", True) in pair.gateway.links)


async def test_requests_are_matched_and_answered_by_the_accepting_side(pair: Pair) -> None:
    bodies = [b"%d" % index for index in range(8)]
    request = pair.gateway.plane.request
    answers = await asyncio.gather(*(request("mailbox-0", REQUEST, body, timeout_ms=PATIENT_MS) for body in bodies))
    assert answers == [b"gateway-0/" + body for body in bodies]


@pytest.mark.parametrize("peer", ["mailbox-0", "gateway-0"])
async def test_a_handler_that_raises_says_no_more_than_that(pair: Pair, peer: str) -> None:
    with pytest.raises(PeerUnavailable, match="handler failed"):
        await pair.gateway.plane.request(peer, REQUEST, b"raise", timeout_ms=PATIENT_MS)
    with pytest.raises(PeerUnavailable, match="handler failed"):
        await pair.gateway.plane.request(peer, InternalOpcode.HISTORY_PULL, b"no handler", timeout_ms=PATIENT_MS)
    assert await pair.gateway.plane.request(peer, REQUEST, b"next", timeout_ms=PATIENT_MS) == b"gateway-0/next"


@pytest.mark.parametrize("peer", ["mailbox-0", "gateway-0"])
async def test_a_silent_handler_meets_the_deadline_and_its_late_answer_nobody(pair: Pair, peer: str) -> None:
    with pytest.raises(PeerUnavailable, match="in time"):
        await pair.gateway.plane.request(peer, REQUEST, b"hold", timeout_ms=30)
    node = pair.core if peer == "mailbox-0" else pair.gateway
    await until(lambda: node.held)  # the deadline may come before the request does
    node.held[0].set_result(b"late")
    assert await pair.gateway.plane.request(peer, REQUEST, b"next", timeout_ms=PATIENT_MS) == b"gateway-0/next"


@pytest.mark.parametrize("peer", ["writer-0", "gateway-0"])
async def test_a_handler_may_hand_back_an_answer(pair: Pair, peer: str) -> None:
    """Settled before it is handed back, or later; asked with and without a task."""
    at_once, later = Answer(), Answer()
    at_once.set_result(b"at once")
    node = pair.core if peer == "writer-0" else pair.gateway
    node.plane.on_request(InternalOpcode.SUBMIT_SEND, lambda _, body: at_once if body == b"1" else later)
    outcomes: list[bytes | PeerUnavailable] = []
    pair.gateway.plane.ask(peer, InternalOpcode.SUBMIT_SEND, b"2", outcomes.append, timeout_ms=PATIENT_MS)
    answer = await pair.gateway.plane.request(peer, InternalOpcode.SUBMIT_SEND, b"1", timeout_ms=PATIENT_MS)
    assert (answer, outcomes, at_once.done(), later.done()) == (b"at once", [], True, False)
    later.set_result(b"later")
    await until(lambda: outcomes)
    assert await at_once == b"at once"
    assert outcomes == [b"later"]


async def test_asking_tells_once_what_went_wrong(pair: Pair) -> None:
    outcomes: list[bytes | PeerUnavailable] = []

    def ask(peer: str, body: bytes, timeout_ms: int = PATIENT_MS) -> None:
        pair.gateway.plane.ask(peer, REQUEST, body, outcomes.append, timeout_ms=timeout_ms)

    ask("writer-9", b"")
    ask("mailbox-0", b"raise")
    ask("mailbox-0", b"hold", timeout_ms=30)
    await until(lambda: len(outcomes) == 3)
    for _ in range(9):
        ask("mailbox-0", b"hold")
    await until(lambda: len(pair.core.held) == 9)
    await pair.gateway.plane.close()
    await until(lambda: len(outcomes) == 12)
    reasons = [str(outcome) for outcome in outcomes]
    assert reasons == [
        "no link to writer-9", "core-0: the handler failed", "core-0: no answer in time",
        "8 requests to core-0 are in flight", *["core-0: link lost"] * 8,
    ]  # fmt: skip
    assert all(isinstance(outcome, PeerUnavailable) for outcome in outcomes)


async def test_a_handler_may_hand_back_a_future(pair: Pair) -> None:
    ready = asyncio.get_running_loop().create_future()
    pair.core.plane.on_request(InternalOpcode.SUBMIT_SEND, lambda peer, body: ready)
    asked = asyncio.create_task(
        pair.gateway.plane.request("writer-0", InternalOpcode.SUBMIT_SEND, b"", timeout_ms=PATIENT_MS)
    )
    await asyncio.sleep(0)
    ready.set_result(b"done")
    assert await asked == b"done"


async def test_a_full_window_is_refused(pair: Pair) -> None:
    request = pair.gateway.plane.request
    asked = [asyncio.create_task(request("mailbox-0", REQUEST, b"hold", timeout_ms=PATIENT_MS)) for _ in range(8)]
    await until(lambda: len(pair.core.held) == 8)
    with pytest.raises(PeerUnavailable, match="in flight"):
        await request("mailbox-0", REQUEST, b"one too many", timeout_ms=PATIENT_MS)
    for future in pair.core.held:
        future.set_result(b"")
    assert await asyncio.gather(*asked) == [b""] * 8


async def test_large_bodies_let_control_frames_pass(pair: Pair) -> None:
    large = bytes(2 << 20)
    for _ in range(6):
        assert pair.gateway.plane.notify("mailbox-0", NOTICE, large, Priority.LARGE_GROUP)
    await asyncio.sleep(0)
    assert pair.gateway.plane.notify("mailbox-0", NOTICE, b"control")
    await until(lambda: len(pair.core.notices) == 7)
    sizes = [len(body) for _, body in pair.core.notices]
    assert sizes.index(len(b"control")) < 3
    assert sorted(sizes) == [7] + [len(large)] * 6


async def test_the_largest_body_arrives_whole(pair: Pair) -> None:
    body = bytes(range(256)) * (BODY_BYTES_MAX // 256)
    assert pair.gateway.plane.notify("mailbox-0", NOTICE, body)
    await until(lambda: pair.core.notices)
    assert pair.core.notices[0][1] == body


async def test_a_full_queue_drops_and_says_so() -> None:
    with short_run_dir() as run_dir:
        core = Node("core-0", run_dir)
        gateway = Node("gateway-0", run_dir, queue_bytes_max=1000)
        await core.plane.start()
        await gateway.plane.start()
        gateway.plane.connect("mailbox-0")
        await until(lambda: gateway.links)
        sent = [gateway.plane.notify("mailbox-0", NOTICE, bytes(400)) for _ in range(4)]
        assert sent == [True, True, False, False]
        assert gateway.plane.notify("mailbox-0", NOTICE, bytes(400), Priority.ROOM)
        with pytest.raises(PeerUnavailable, match="queue is full"):
            await gateway.plane.request("mailbox-0", REQUEST, bytes(400), timeout_ms=PATIENT_MS)
        await until(lambda: len(core.notices) == 3)
        assert gateway.plane.notify("mailbox-0", NOTICE, bytes(400))
        await gateway.plane.close()
        await core.plane.close()


async def test_a_peer_that_goes_fails_requests_and_comes_back_with_an_event(pair: Pair) -> None:
    asked = asyncio.create_task(pair.gateway.plane.request("mailbox-0", REQUEST, b"hold", timeout_ms=5000))
    await until(lambda: pair.core.held)
    await pair.core.plane.close()
    with pytest.raises(PeerUnavailable):
        await asked
    await until(lambda: pair.gateway.links[-1] == ("mailbox-0", False))
    assert not pair.gateway.plane.notify("mailbox-0", NOTICE, b"nobody")
    with pytest.raises(PeerUnavailable, match="no link"):
        await pair.gateway.plane.request("mailbox-0", REQUEST, b"", timeout_ms=PATIENT_MS)
    pair.core = Node("core-0", pair.run_dir)
    await pair.core.plane.start()
    await until(lambda: pair.gateway.links[-1] == ("mailbox-0", True))
    assert pair.gateway.links == [("mailbox-0", True), ("mailbox-0", False), ("mailbox-0", True)]
    assert await pair.gateway.plane.request("mailbox-0", REQUEST, b"x", timeout_ms=PATIENT_MS) == b"gateway-0/x"


async def test_roles_of_one_process_talk_without_a_socket(pair: Pair) -> None:
    plane = pair.core.plane
    plane.connect("mailbox-0")
    plane.connect("mailbox-0")
    for index in range(10):
        assert plane.notify("mailbox-0", NOTICE, b"%d" % index, Priority(4 - index % 5))
    assert pair.core.notices == []
    await until(lambda: len(pair.core.notices) == 10)
    assert pair.core.notices == [("writer-0", b"%d" % index) for index in range(10)]
    assert pair.core.links == [("mailbox-0", True)]
    assert await plane.request("mailbox-0", REQUEST, b"x", timeout_ms=PATIENT_MS) == b"writer-0/x"


async def test_a_listener_or_notice_handler_that_raises_does_not_hurt_the_link(pair: Pair) -> None:
    def explode(peer: str, body: bytes) -> None:
        raise RuntimeError(peer)

    pair.core.plane.on_notice(InternalOpcode.MARK_DIRTY, explode)
    assert pair.gateway.plane.notify("mailbox-0", InternalOpcode.MARK_DIRTY, b"")
    assert pair.gateway.plane.notify("mailbox-0", InternalOpcode.LAG_REPORT, b"no handler")
    assert await pair.gateway.plane.request("mailbox-0", REQUEST, b"x", timeout_ms=PATIENT_MS) == b"gateway-0/x"


async def test_a_socket_that_hosts_another_process_is_not_taken_for_it() -> None:
    with short_run_dir() as run_dir:
        core = Node("core-0", run_dir)
        await core.plane.start()
        sockets = {"mailbox-7": socket_path(run_dir, "core-0")}
        links: list[tuple[str, bool]] = []
        other = UnixBackplane(
            "gateway-0", ("gateway-0",), sockets, run_dir=run_dir, clock=SystemClock(), on_failure=fail
        )
        other.on_link(lambda peer, up: links.append((peer, up)))
        await other.start()
        other.connect("mailbox-7")
        await asyncio.sleep(0.05)
        assert links == []
        other.connect("nobody-0")
        assert not other.notify("nobody-0", NOTICE, b"")
        await other.close()
        await core.plane.close()


async def test_a_directory_open_to_others_and_a_long_path_refuse_start() -> None:
    with short_run_dir() as run_dir:
        run_dir.chmod(0o755)
        with pytest.raises(StartupError, match="chmod 700"):
            await Node("core-0", run_dir).plane.start()
        with pytest.raises(StartupError, match="shorter run_dir"):
            await Node("core-0", run_dir / ("x" * 100)).plane.start()


async def test_one_handler_per_opcode(pair: Pair) -> None:
    with pytest.raises(ValueError, match="handler"):
        pair.core.plane.on_notice(NOTICE, lambda peer, body: None)
    with pytest.raises(ValueError, match="handler"):
        pair.core.plane.on_request(REQUEST, pair.core._answer)


async def test_a_role_that_joins_later_is_reached_once_its_process_is_known(pair: Pair) -> None:
    gateway = pair.gateway
    gateway.plane.connect("writer-64")
    assert not gateway.plane.notify("writer-64", NOTICE, b"early")
    late = UnixBackplane("core-64", ("writer-64",), {}, run_dir=pair.run_dir, clock=SystemClock(), on_failure=fail)
    heard: list[bytes] = []
    late.on_notice(NOTICE, lambda peer, body: heard.append(body))
    await late.start()
    gateway.plane.learn({"writer-64": "core-64", "writer-0": "elsewhere"})
    await until(lambda: ("writer-64", True) in gateway.links)
    assert gateway.plane.notify("writer-64", NOTICE, b"hello")
    await until(lambda: heard == [b"hello"])
    await late.close()
    assert gateway.plane.process_name == "gateway-0"
