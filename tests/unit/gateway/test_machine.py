"""States of a client connection."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.gateway.machine import (
    FRAME_OF,
    ON_FRAME,
    TRANSITIONS,
    ConnectionMachine,
    Event,
    Expiry,
    Frame,
    State,
    Step,
)
from qim.protocol.opcodes import STREAM_OF, UPSTREAM, InternalOpcode, Opcode

WRITES = {Frame.SEND_MESSAGE: Step.SUBMIT_SEND, Frame.CHANGE_GROUP: Step.SUBMIT_GROUP}
READS = {
    Frame.AUTH: Step.RENEW,
    Frame.PING: Step.PONG,
    Frame.PULL_MAILBOX: Step.PULL_MAILBOX,
    Frame.PULL_HISTORY: Step.PULL_HISTORY,
}


def machine(now_ms: float = 0.0) -> ConnectionMachine:
    return ConnectionMachine(
        now_ms=now_ms, unauthenticated_timeout_ms=10_000, idle_timeout_ms=130_000, token_grace_ms=300_000
    )


def ready(*, token_until_ms: float = 1e9) -> ConnectionMachine:
    made = machine()
    made.on_frame(Frame.AUTH, 0)
    made.token_valid_until(token_until_ms)
    made.on_event(Event.SESSION_OPENED)
    made.on_event(Event.BARRIER_LIFTED)
    return made


def test_every_state_has_a_step_for_every_frame() -> None:
    for state, frame in itertools.product(State, Frame):
        assert isinstance(ON_FRAME[state][frame], Step)


def test_opcodes_a_client_may_not_send_are_unknown() -> None:
    for opcode in UPSTREAM:
        assert FRAME_OF[opcode] is not Frame.UNKNOWN
    for foreign in (*(set(STREAM_OF) - UPSTREAM), *InternalOpcode):
        assert foreign not in FRAME_OF


def test_login() -> None:
    made = machine()
    assert made.on_frame(Frame.AUTH, 5) is Step.AUTHENTICATE
    assert made.state is State.AUTHENTICATING
    assert not made.online
    made.token_valid_until(1e9)
    made.on_event(Event.SESSION_OPENED)
    assert made.online
    assert made.on_frame(Frame.SYNC_COMPLETE, 6) is Step.COMPLETE_SYNC
    made.on_event(Event.BARRIER_LIFTED)
    assert made.state is State.READY
    assert made.on_frame(Frame.SYNC_COMPLETE, 7) is Step.REPEAT_READY
    assert made.on_frame(Frame.AUTH, 8) is Step.RENEW
    assert made.state is State.READY


def test_refused_session_may_auth_again() -> None:
    made = machine()
    made.on_frame(Frame.AUTH, 0)
    made.on_event(Event.SESSION_REFUSED)
    assert made.on_frame(Frame.AUTH, 1) is Step.AUTHENTICATE


@pytest.mark.parametrize("frame", sorted(set(Frame) - {Frame.AUTH, Frame.UNKNOWN}, key=str))
def test_frames_before_auth_end_the_connection(frame: Frame) -> None:
    assert machine().on_frame(frame, 0) is Step.REFUSE_UNAUTHENTICATED


def test_unknown_frames_never_disconnect() -> None:
    made = machine()
    assert made.on_frame(Frame.UNKNOWN, 0) is Step.REFUSE_UNSERVED
    made.on_frame(Frame.AUTH, 0)
    assert made.on_frame(Frame.UNKNOWN, 0) is Step.REFUSE_UNSERVED
    assert ready().on_frame(Frame.UNKNOWN, 0) is Step.REFUSE_UNSERVED


def test_while_authenticating_only_ping_is_served() -> None:
    made = machine()
    made.on_frame(Frame.AUTH, 0)
    assert made.on_frame(Frame.AUTH, 0) is Step.REFUSE_BUSY
    assert made.on_frame(Frame.PING, 0) is Step.PONG
    assert made.on_frame(Frame.SEND_MESSAGE, 0) is Step.REFUSE_UNAUTHENTICATED


def test_grace_is_read_only() -> None:
    made = ready(token_until_ms=1000)
    for frame, step in (WRITES | READS).items():
        assert made.on_frame(frame, 999) is step
    for frame, step in READS.items():
        assert made.on_frame(frame, 1000) is step
    for frame in WRITES:
        assert made.on_frame(frame, 1000) is Step.REFUSE_EXPIRED
    assert made.on_frame(Frame.UNSERVED, 1000) is Step.REFUSE_UNSERVED
    made.token_valid_until(5000)
    assert made.on_frame(Frame.SEND_MESSAGE, 1001) is Step.SUBMIT_SEND


def test_after_the_grace_only_a_new_token_helps() -> None:
    made = ready(token_until_ms=1000)
    for frame in set(Frame) - {Frame.AUTH}:
        assert made.on_frame(frame, 301_000) is Step.CLOSE_EXPIRED
    assert made.on_frame(Frame.AUTH, 301_000) is Step.RENEW
    assert made.due(301_000) is Expiry.TOKEN


def test_unauthenticated_timeout_does_not_move_with_frames() -> None:
    made = machine(now_ms=100)
    made.on_frame(Frame.UNKNOWN, 9000)
    assert made.next_check_ms() == 10_100
    assert made.due(10_099) is None
    assert made.due(10_100) is Expiry.UNAUTHENTICATED
    made.on_frame(Frame.AUTH, 10_050)
    assert made.due(10_100) is Expiry.UNAUTHENTICATED


def test_idle_timeout_moves_with_frames() -> None:
    made = ready()
    made.on_frame(Frame.PING, 50_000)
    assert made.next_check_ms() == 180_000
    assert made.due(179_999) is None
    assert made.due(180_000) is Expiry.IDLE


def test_closing_ignores_everything() -> None:
    for made in (machine(), ready()):
        made.on_event(Event.CLOSE)
        assert all(made.on_frame(frame, 1e12) is Step.IGNORE for frame in Frame)
        assert made.due(1e12) is None


@given(st.lists(st.sampled_from([*Frame, *Event]), max_size=30))
def test_any_sequence_keeps_the_laws(inputs: list[Frame | Event]) -> None:
    made = machine()
    made.token_valid_until(1e9)
    for given_input in inputs:
        before = made.state
        if isinstance(given_input, Frame):
            step = made.on_frame(given_input, 1.0)
            authenticates = step is Step.AUTHENTICATE
            assert authenticates == (before is State.UNAUTHENTICATED and given_input is Frame.AUTH)
            assert made.state is (State.AUTHENTICATING if authenticates else before)
            if step in {
                Step.SUBMIT_SEND,
                Step.SUBMIT_GROUP,
                Step.PULL_MAILBOX,
                Step.PULL_HISTORY,
                Step.PULL_SESSION_LIST,
            }:
                assert made.online
        elif (before, given_input) in TRANSITIONS:
            made.on_event(given_input)
        else:
            with pytest.raises(KeyError):
                made.on_event(given_input)
            assert made.state is before


def test_every_upstream_opcode_of_a_service_is_named() -> None:
    served = {opcode for opcode in UPSTREAM if FRAME_OF[opcode] is not Frame.UNSERVED}
    assert served == {
        Opcode.AUTH, Opcode.PING, Opcode.PULL_MAILBOX, Opcode.SYNC_COMPLETE, Opcode.SEND_MESSAGE, Opcode.PULL_HISTORY,
        Opcode.CREATE_GROUP, Opcode.LEAVE_GROUP, Opcode.PULL_SESSION_LIST,
    }  # fmt: skip
