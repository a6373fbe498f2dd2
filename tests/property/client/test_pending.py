"""One sender's order and exactly-once through refusals, lost answers and reconnects, against the commit rules of the
server (DESIGN-data §3.5)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qim.client.actions import Action, Cursor, SendFailed, Sent, Transmit
from qim.client.dedup import DedupWindow
from qim.client.pending import Pending
from qim.client.state import ClientState, StateOptions
from qim.client.sync import SyncOptions
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.unit.client.scene import NOW_MS, entry

CONVERSATIONS = ("dm:alice:bob", "g:team")
FINAL = "final"
REFUSALS = {
    "limited": (ErrorCode.RATE_LIMITED, ""),
    "failover": (ErrorCode.REGION_FAILOVER, ""),
    FINAL: (ErrorCode.PERMISSION_DENIED, ""),
}


class OneSender(RuleBasedStateMachine):
    """The server takes frames of a connection in any order across conversations and may refuse any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.state = ClientState(
            StateOptions(sync=SyncOptions(device_id="d", client_version="v")), Cursor(), DedupWindow(), lambda: 0.5
        )
        self.order: dict[str, list[str]] = {c: [] for c in CONVERSATIONS}
        self.log: dict[str, list[str]] = {c: [] for c in CONVERSATIONS}
        self.settled: set[str] = set()
        self.failed: set[str] = set()
        self.inbox: list[tuple[int, pb.SendMessage]] = []
        self.answers: list[tuple[Opcode, int, bytes]] = []
        self.online = False
        self.count = 0
        self._connect()

    def _connect(self) -> None:
        self.inbox, self.answers = [], []
        self._do(self.state.connected("t", self.now_ms))
        ok = pb.AuthOk(sync_to_seq=1)
        self._do(self.state.receive(Opcode.AUTH_OK, self.auth_id, ok.SerializeToString(), self.now_ms))
        for conversation_id, names in self.log.items():
            for name in names:
                self._own_entry(conversation_id, name)
        self._do(self.state.receive(Opcode.ONLINE_READY, 0, b"", self.now_ms))
        self.online = True

    def _own_entry(self, conversation_id: str, name: str) -> None:
        """Sync brings the own entries before anything is sent again."""
        made = entry(1, own=name, conversation_id=conversation_id)
        self._do_sends(lambda: self.state.sends.own_entry(name, made.message_id, 1, self.now_ms))

    def _do_sends(self, call: object) -> None:
        assert callable(call)
        call()
        self._do(self.state._drain())

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Sent):
                self.settled.add(action.request.client_message_id)
                self.failed.discard(action.request.client_message_id)
            elif isinstance(action, SendFailed):
                self.failed.add(action.client_message_id)
            elif isinstance(action, Transmit) and action.opcode == Opcode.AUTH:
                self.auth_id = action.request_id
            elif isinstance(action, Transmit) and action.opcode == Opcode.SEND_MESSAGE:
                assert isinstance(action.message, pb.SendMessage)
                self.inbox.append((action.request_id, action.message))

    @rule(conversation_id=st.sampled_from(CONVERSATIONS))
    def send(self, conversation_id: str) -> None:
        self.count += 1
        name = f"m{self.count}"
        self.order[conversation_id].append(name)
        request = pb.SendMessage(client_message_id=name, conversation_id=conversation_id)
        self._do(self.state.send(Pending(request, self.now_ms), self.now_ms))

    @precondition(lambda self: self.inbox)
    @rule(data=st.data(), fate=st.sampled_from(["commit", "commit", "commit", "lost", "limited", "failover", FINAL]))
    def judge(self, data: st.DataObject, fate: str) -> None:
        """`lost`: the frame never reaches a writer, its answer is the gateway's REGION_FAILOVER."""
        request_id, request = self.inbox.pop(data.draw(st.integers(0, len(self.inbox) - 1)))
        log = self.log[request.conversation_id]
        name, after = request.client_message_id, request.after_client_message_id
        if name in log:
            self._answer_ack(request_id, name)
        elif fate in REFUSALS or fate == "lost":
            code, detail = REFUSALS.get(fate, REFUSALS["failover"])
            self._answer_error(request_id, code, detail)
        elif after and after not in log:
            self._answer_error(request_id, ErrorCode.RATE_LIMITED, "out_of_order")
        else:
            log.append(name)
            self._answer_ack(request_id, name)

    def _answer_ack(self, request_id: int, name: str) -> None:
        ack = pb.SendAck(client_message_id=name, message_id=bytes(16), conversation_seq=1, request_id=request_id)
        self.answers.append((Opcode.SEND_ACK, request_id, ack.SerializeToString()))

    def _answer_error(self, request_id: int, code: ErrorCode, detail: str) -> None:
        error = pb.Error(code=int(code), detail=detail, retry_after_ms=300, request_id=request_id)  # type: ignore[arg-type]
        self.answers.append((Opcode.ERROR, request_id, error.SerializeToString()))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        opcode, request_id, body = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        self._do(self.state.receive(opcode, request_id, body, self.now_ms))

    @rule(ms=st.sampled_from([100, 1_000, 12_000]))
    def time(self, ms: int) -> None:
        self.now_ms += ms
        self._do(self.state.tick(self.now_ms, self.now_ms))

    @rule()
    def lose_link(self) -> None:
        self._do(self.state.disconnected())
        self._connect()

    @invariant()
    def committed_once_and_in_order(self) -> None:
        for conversation_id, log in self.log.items():
            assert len(log) == len(set(log))
            assert log == [name for name in self.order[conversation_id] if name in log]

    @invariant()
    def what_is_shown_as_sent_is_committed(self) -> None:
        assert self.settled <= {name for log in self.log.values() for name in log}

    def teardown(self) -> None:
        """Left alone, everything is settled or finally refused."""
        for _ in range(300):
            if self.answers:
                opcode, request_id, body = self.answers.pop(0)
                self._do(self.state.receive(opcode, request_id, body, self.now_ms))
            elif self.inbox:
                request_id, request = self.inbox.pop(0)
                log, after = self.log[request.conversation_id], request.after_client_message_id
                if request.client_message_id not in log and after and after not in log:
                    self._answer_error(request_id, ErrorCode.RATE_LIMITED, "out_of_order")
                    continue
                if request.client_message_id not in log:
                    log.append(request.client_message_id)
                self._answer_ack(request_id, request.client_message_id)
            elif self.state.sends.total():
                self.time(1_000)
            else:
                break
        assert self.state.sends.total() == 0
        assert self.settled | self.failed == {name for names in self.order.values() for name in names}
        self.committed_once_and_in_order()


TestOneSender = OneSender.TestCase
TestOneSender.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
