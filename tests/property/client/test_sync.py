"""Any interleaving of batches, pushes, drops, reconnects and crashes: nothing lost, nothing doubled, and only a
contiguous batch moves the cursor."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qim.client.actions import Action, Apply, Cursor, Disconnect, Transmit
from qim.client.dedup import DedupRow, DedupWindow
from qim.client.state import ClientState, StateOptions
from qim.client.sync import Phase, SyncOptions
from qim.core.coverage import cut_page
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.unit.client.scene import NOW_MS, entry, push


class OneDevice(RuleBasedStateMachine):
    """A device, its store as a transaction log, and the mailbox it must end up holding."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.mailbox: list[pb.Entry] = []
        self.watermark = 50
        self.committed: list[int] = []
        self.dedup: list[DedupRow] = []
        self.cursor = Cursor()
        self.open_rows: list[int] = []
        self.open_dedup: list[DedupRow] = []
        self.pulls: list[tuple[int, pb.PullMailbox]] = []
        self.auth_id = 0
        self.waiting_ready = False
        self.server_live = False
        self.queued: list[pb.Entry] = []
        self.last_pushed = 0
        self.dropped = False
        self._boot()

    def _boot(self) -> None:
        window = DedupWindow()
        window.load(self.dedup, self.now_ms)
        options = SyncOptions(device_id="d", client_version="v", pull_max_items=3)
        self.state = ClientState(StateOptions(sync=options), self.cursor, window, lambda: 0.5)
        self._forget_connection()

    def _forget_connection(self) -> None:
        self.pulls = []
        self.auth_id = 0
        self.waiting_ready = False
        self.server_live = False
        self.queued = []
        self.dropped = False

    def _do(self, actions: list[Action], *, by_push: bool = False) -> None:
        for action in actions:
            if isinstance(action, Apply):
                assert not (by_push and action.cursor), "a push moved the cursor"
                self.open_rows += [row.conversation_seq for row in action.rows]
                self.open_dedup += action.dedup
                if action.cursor is not None:
                    assert action.cursor.last_applied_mailbox_seq >= self.cursor.last_applied_mailbox_seq
                    self.cursor = action.cursor
                if action.durable:
                    self._commit()
            elif isinstance(action, Disconnect):
                self._do(self.state.disconnected())
                self._forget_connection()
            elif isinstance(action, Transmit):
                self._sent(action)

    def _sent(self, action: Transmit) -> None:
        if action.opcode == Opcode.AUTH:
            self.auth_id = action.request_id
        elif action.opcode == Opcode.SYNC_COMPLETE:
            self.waiting_ready = True
        elif action.opcode == Opcode.PULL_MAILBOX:
            assert isinstance(action.message, pb.PullMailbox)
            self.pulls.append((action.request_id, action.message))

    def _commit(self) -> None:
        self.committed += self.open_rows
        self.dedup += self.open_dedup
        self.open_rows, self.open_dedup = [], []

    def _receive(
        self, opcode: Opcode, message: pb.PushEvents | pb.MailboxBatch | pb.Pong | pb.AuthOk, rid: int = 0
    ) -> None:
        self._do(
            self.state.receive(opcode, rid, message.SerializeToString(), self.now_ms),
            by_push=opcode == Opcode.PUSH_EVENTS,
        )

    # ------------------------------------------------------------------ the world

    @rule(gap=st.integers(1, 40), fate=st.sampled_from(["push", "push", "push", "drop", "twice"]))
    def message(self, gap: int, fate: str) -> None:
        self.watermark += gap
        made = entry(self.watermark, conversation_seq=len(self.mailbox) + 1)
        self.mailbox.append(made)
        if self.state.sync.phase is Phase.OFFLINE or not self.auth_id:
            return
        self.last_pushed = self.watermark
        if not self.server_live:
            self.queued.append(made)
        elif fate == "drop" or self.dropped:
            self.dropped = True
        else:
            for _ in range(2 if fate == "twice" else 1):
                self._receive(Opcode.PUSH_EVENTS, push(made))

    @rule(gap=st.integers(1, 100))
    def others(self, gap: int) -> None:
        """The watermark moves over other users' offsets."""
        self.watermark += gap

    @precondition(lambda self: self.state.sync.phase is Phase.OFFLINE)
    @rule(hint=st.sampled_from([0, 3, 100]))
    def login(self, hint: int) -> None:
        self._do(self.state.connected("t", self.now_ms))
        position = self.cursor.last_applied_mailbox_seq
        self.last_pushed = self.watermark
        ok = pb.AuthOk(
            sync_to_seq=self.watermark, has_offline=any(e.mailbox_seq > position for e in self.mailbox),
            pending_entry_count_hint=hint, mailbox_cursor=pb.MailboxCursorToken(token=b"s"),
        )  # fmt: skip
        self._receive(Opcode.AUTH_OK, ok, self.auth_id)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def answer_a_pull(self, data: st.DataObject) -> None:
        request_id, pull = self.pulls.pop(data.draw(st.integers(0, len(self.pulls) - 1)))
        up_to = pull.up_to_seq or self.watermark
        found = [e for e in self.mailbox if pull.after_seq < e.mailbox_seq <= up_to]
        cut = cut_page(
            [e.mailbox_seq for e in found], [e.ByteSize() for e in found], up_to_seq=up_to,
            max_items=pull.max_items, max_bytes=pull.max_bytes, exhausted=True,
        )  # fmt: skip
        answer = pb.MailboxBatch(
            entries=found[: cut.count], covered_through_seq=cut.covered_through_seq,
            has_more=cut.has_more, lane_watermark=self.watermark,
        )  # fmt: skip
        if not cut.has_more and not pull.up_to_seq:
            self.dropped = False
        self._receive(Opcode.MAILBOX_BATCH, answer, request_id)

    @precondition(lambda self: self.waiting_ready)
    @rule()
    def ready(self) -> None:
        self.waiting_ready = False
        self.server_live = True
        self._do(self.state.receive(Opcode.ONLINE_READY, 0, b"", self.now_ms))
        queued, self.queued = self.queued, []
        if queued:
            self._receive(Opcode.PUSH_EVENTS, push(*queued))

    @precondition(lambda self: self.server_live)
    @rule()
    def pong(self) -> None:
        self._receive(Opcode.PONG, pb.Pong(last_pushed_user_seq=self.last_pushed, mailbox_dirty=self.dropped))

    @rule(ms=st.sampled_from([1, 500, 6_000]))
    def time(self, ms: int) -> None:
        self.now_ms += ms
        self._do(self.state.tick(self.now_ms, self.now_ms))

    @precondition(lambda self: self.state.sync.phase is not Phase.OFFLINE)
    @rule()
    def lose_link(self) -> None:
        self._do(self.state.disconnected())
        self._forget_connection()

    @rule()
    def crash(self) -> None:
        self.open_rows, self.open_dedup = [], []
        self._boot()

    @rule()
    def commit(self) -> None:
        self._commit()

    # ------------------------------------------------------------------ the promise

    @invariant()
    def what_the_cursor_covers_is_there(self) -> None:
        covered = {e.conversation_seq for e in self.mailbox if e.mailbox_seq <= self.cursor.last_applied_mailbox_seq}
        assert covered <= set(self.committed)

    @invariant()
    def nothing_is_there_twice(self) -> None:
        rows = self.committed + self.open_rows
        assert len(rows) == len(set(rows))
        assert self.state.counters.cursor_moved_by_push == 0

    def teardown(self) -> None:
        """Left alone with an honest server, the device ends up with everything."""
        for _ in range(400):
            if self.state.sync.phase is Phase.OFFLINE:
                self.login(0)
            elif self.pulls:
                request_id = self.pulls[0][0]
                while self.pulls and self.pulls[0][0] == request_id:
                    self._answer_first()
            elif self.waiting_ready:
                self.ready()
            elif self.cursor.last_applied_mailbox_seq < self.last_pushed or self.dropped or self.state.sync.dirty:
                self.pong()
                self.time(6_000)
            else:
                break
        assert sorted(self.committed + self.open_rows) == [e.conversation_seq for e in self.mailbox if self._known(e)]
        self.nothing_is_there_twice()

    def _known(self, made: pb.Entry) -> bool:
        return made.mailbox_seq <= max(self.cursor.last_applied_mailbox_seq, self.last_pushed)

    def _answer_first(self) -> None:
        request_id, pull = self.pulls.pop(0)
        up_to = pull.up_to_seq or self.watermark
        found = [e for e in self.mailbox if pull.after_seq < e.mailbox_seq <= up_to]
        self.dropped = False if not pull.up_to_seq else self.dropped
        self._receive(
            Opcode.MAILBOX_BATCH,
            pb.MailboxBatch(entries=found, covered_through_seq=up_to, lane_watermark=self.watermark),
            request_id,
        )


TestOneDevice = OneDevice.TestCase
TestOneDevice.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
