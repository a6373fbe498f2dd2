"""What one member of a pool does about its leases (§19.2.2, §5.3.7, DESIGN §4 "Leases and epochs"), pure.

One beat renews all leases of the member and tells who the members are. Everybody computes the same share from that:
id i belongs to member i mod n of the sorted list, unless an operator pinned it. What belongs to another is drained and
given back; what belongs here is asked for until it is granted. A member that was not renewed for the self-fence
deadline by its own clock drops everything at once, before the registry may grant it to anybody else, and joins again
under a new incarnation, so that nothing it still has under way can be taken for its later work.

    FREE -> ASKED -> OPENING -> HELD -> CLOSING -> RELEASING -> FREE
                        |        |         |
                        +--------+---------+--> BLOCKED (a store has a greater epoch) -> FREE once the registry says so

Every input returns actions; the runner does them and reports what became of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from qim.registry.api import EPOCH_MAX, READABLE_KINDS, Answer, Beat, LeaseKind

if TYPE_CHECKING:
    from qim.config.parameters import Parameters

RENEW_RETRY_PART: Final = 5
"""A failed renewal is repeated after a fifth of the renewal interval: 1 s of 5 (§19.2.2)."""
ASK_AGAIN_MS: Final = 100.0
"""A lease somebody else still has is asked for this often: its owner may give it back at any moment."""
EXHAUSTED_RETRY_MS: Final = 60_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """ms; relations: renew <= ttl / 3, self-fence < ttl < failover wait (§19.2.2)."""

    renew_ms: int
    self_fence_ms: int
    ttl_ms: int
    failover_wait_ms: int

    @classmethod
    def of(cls, parameters: Parameters) -> LeaseTimes:
        """The times of a node."""
        return cls(
            renew_ms=parameters.writer_lease_renew_interval,
            self_fence_ms=parameters.writer_self_fence_deadline,
            ttl_ms=parameters.shard_lease_ttl,
            failover_wait_ms=parameters.writer_failover_wait,
        )

    def wait_ms(self, kind: LeaseKind) -> int:
        """Age of an owner's last beat from which its lease may be taken (§19.2.3)."""
        return self.failover_wait_ms if kind is LeaseKind.CONVERSATION_BUCKET else self.ttl_ms


class State(Enum):
    """Of one id."""

    FREE = "free"
    ASKED = "asked"
    OPENING = "opening"
    HELD = "held"
    CLOSING = "closing"
    RELEASING = "releasing"
    BLOCKED = "blocked"
    """Ours by the registry, but a store holds a greater epoch: the registry is behind, nothing is served."""


class Event(Enum):
    """What happens to one id."""

    WANTED = "wanted"
    UNWANTED = "unwanted"
    GRANTED = "granted"
    DENIED = "denied"
    OPENED = "opened"
    CLOSED = "closed"
    RELEASED = "released"
    FENCED = "fenced"
    LOST = "lost"
    """The registry has another owner, or this member has fenced itself."""


class Act(Enum):
    """What the runner does for one id."""

    ASK = "ask"
    OPEN = "open"
    CLOSE = "close"
    """Finish what is in flight, take nothing new."""
    DROP = "drop"
    """Stop at once."""
    RELEASE = "release"


TABLE: Final[Mapping[tuple[State, Event], tuple[State, Act | None]]] = {
    (State.FREE, Event.WANTED): (State.ASKED, Act.ASK),
    (State.ASKED, Event.GRANTED): (State.OPENING, Act.OPEN),
    (State.ASKED, Event.DENIED): (State.FREE, None),
    (State.ASKED, Event.LOST): (State.FREE, None),
    (State.OPENING, Event.OPENED): (State.HELD, None),
    (State.OPENING, Event.FENCED): (State.BLOCKED, Act.DROP),
    (State.OPENING, Event.LOST): (State.FREE, Act.DROP),
    (State.HELD, Event.UNWANTED): (State.CLOSING, Act.CLOSE),
    (State.HELD, Event.FENCED): (State.BLOCKED, Act.DROP),
    (State.HELD, Event.LOST): (State.FREE, Act.DROP),
    (State.CLOSING, Event.CLOSED): (State.RELEASING, Act.RELEASE),
    (State.CLOSING, Event.FENCED): (State.BLOCKED, Act.DROP),
    (State.CLOSING, Event.LOST): (State.FREE, Act.DROP),
    (State.RELEASING, Event.RELEASED): (State.FREE, None),
    (State.RELEASING, Event.LOST): (State.FREE, None),
    (State.BLOCKED, Event.UNWANTED): (State.RELEASING, Act.RELEASE),
    (State.BLOCKED, Event.LOST): (State.FREE, None),
}
"""Every pair that is not here changes nothing."""

_LEASED: Final = frozenset({State.OPENING, State.HELD, State.CLOSING, State.BLOCKED})


class SendBeat(NamedTuple):
    """Renew -> `beaten` or `beat_failed`."""

    incarnation: int
    held: tuple[int, ...]


class Ask(NamedTuple):
    """Acquire -> `answered` or `ask_failed`."""

    incarnation: int
    shard_ids: tuple[int, ...]


class Open(NamedTuple):
    """-> `opened` or `fenced`; tried until one of them or Drop."""

    incarnation: int
    shard_id: int
    epoch: int


class Close(NamedTuple):
    """-> `closed` or `fenced`."""

    shard_id: int


class Drop(NamedTuple):
    shard_id: int


class Release(NamedTuple):
    """-> `released` or `release_failed`."""

    incarnation: int
    shard_ids: tuple[int, ...]


Action = SendBeat | Ask | Open | Close | Drop | Release


class LeaseMachine:
    """Leases of one kind of one member. Times are ms of the member's monotonic clock."""

    def __init__(self, kind: LeaseKind, count: int, owner: str, times: LeaseTimes) -> None:
        """`count` ids there are of this kind."""
        self.kind = kind
        self.incarnation = 1
        """Rises with every self-fence; each has a grant id of its own."""
        self._owner = owner
        self._times = times
        self._states = [State.FREE] * count
        self._epochs = [0] * count
        self._wanted = [False] * count
        self._ask_at_ms = [0.0] * count
        self._renewed_ms: float | None = None
        self._beat_at_ms = 0.0
        self._beat_sent: SendBeat | None = None
        self._beat_sent_ms = 0.0
        self._release_at_ms = 0.0
        self._to_release: set[int] = set()
        self._again = False
        self._leaving = False
        self._settled = False

    # ------------------------------------------------------------------------------------------------------- looking

    def state(self, shard_id: int) -> State:
        return self._states[shard_id]

    def held(self) -> list[int]:
        """Ids that are open here."""
        return [shard_id for shard_id, state in enumerate(self._states) if state is State.HELD]

    def joined(self) -> bool:
        """A member whose leases hold."""
        return self._renewed_ms is not None

    def settled(self) -> bool:
        """It is a member, has had its whole share once, and no store contradicts the registry."""
        return self.joined() and self._settled and State.BLOCKED not in self._states

    def empty(self) -> bool:
        """It has nothing, and nothing is under way."""
        return all(state is State.FREE for state in self._states)

    def due_ms(self) -> float:
        """When `tick` is due next; infinite while only an answer can change anything."""
        due = [self._release_at_ms] if self._to_release else []
        if self._beat_sent is None:
            due.append(self._beat_at_ms)
        if self._renewed_ms is not None:
            due.append(self._renewed_ms + self._times.self_fence_ms)
            due += (
                self._ask_at_ms[shard_id]
                for shard_id, state in enumerate(self._states)
                if state is State.FREE and self._wanted[shard_id]
            )
        return min(due, default=inf)

    # -------------------------------------------------------------------------------------------------------- events

    def tick(self, now_ms: float) -> list[Action]:
        """What time brings: the self-fence first, then beats, questions and releases that are due."""
        actions: list[Action] = []
        if self._renewed_ms is not None and now_ms - self._renewed_ms >= self._times.self_fence_ms:
            self._fence_self(now_ms, actions)
        if self._beat_sent is None and now_ms >= self._beat_at_ms:
            held = tuple(shard_id for shard_id, state in enumerate(self._states) if state in _LEASED)
            self._beat_sent = SendBeat(self.incarnation, held)
            self._beat_sent_ms = now_ms
            actions.append(self._beat_sent)
        if self._to_release and now_ms >= self._release_at_ms:
            actions.append(Release(self.incarnation, tuple(sorted(self._to_release))))
            self._to_release.clear()
        self._balance(now_ms, actions)
        return actions

    def poke(self, now_ms: float) -> list[Action]:
        """The route map has changed: look at once who the members are and what is free."""
        if self._beat_sent is not None:
            self._again = True
        else:
            self._beat_at_ms = now_ms
        self._ask_at_ms = [min(at_ms, now_ms) for at_ms in self._ask_at_ms]
        return self.tick(now_ms)

    def leave(self, now_ms: float) -> list[Action]:
        """Drain and give back everything; ends when `empty`."""
        self._leaving = True
        self._wanted = [False] * len(self._states)
        return self.tick(now_ms)

    def beaten(self, incarnation: int, beat: Beat, now_ms: float) -> list[Action]:
        """The registry took the beat. It counts from when it was sent."""
        sent, self._beat_sent = self._beat_sent, None
        if incarnation != self.incarnation or sent is None:
            return self.tick(now_ms)
        actions: list[Action] = []
        self._renewed_ms = self._beat_sent_ms
        self._beat_at_ms = now_ms if self._again else self._beat_sent_ms + self._times.renew_ms
        self._again = False
        for shard_id in beat.lost:
            self._apply(shard_id, Event.LOST, actions)
        if not self._leaving:
            self._wanted = [
                owner_of(shard_id, beat.owners, beat.pins) == self._owner for shard_id in range(len(self._states))
            ]
        # What it does not want it must not hold unknowingly: everybody else would wait for it for ever.
        unwanted = [n for n in sorted(beat.surplus) if self._states[n] is State.FREE and not self._wanted[n]]
        if unwanted:
            actions.append(Release(self.incarnation, tuple(unwanted)))
        return actions + self.tick(now_ms)

    def beat_failed(self, now_ms: float) -> list[Action]:
        """No answer: again soon."""
        self._beat_sent = None
        self._beat_at_ms = now_ms + self._times.renew_ms / RENEW_RETRY_PART
        return self.tick(now_ms)

    def answered(self, incarnation: int, answers: Mapping[int, Answer], now_ms: float) -> list[Action]:
        """What became of an Ask."""
        actions: list[Action] = []
        if incarnation == self.incarnation:
            for shard_id, answer in answers.items():
                epoch = answer.epoch
                if answer.wait_ms < 0 and self.kind in READABLE_KINDS:
                    epoch = EPOCH_MAX[self.kind]  # no grant: a store that knows this epoch lets it be read only
                if epoch:
                    self._epochs[shard_id] = epoch
                    self._apply(shard_id, Event.GRANTED, actions)
                else:
                    wait_ms = EXHAUSTED_RETRY_MS if answer.wait_ms < 0 else min(answer.wait_ms, ASK_AGAIN_MS)
                    self._ask_at_ms[shard_id] = now_ms + wait_ms
                    self._apply(shard_id, Event.DENIED, actions)
        return actions + self.tick(now_ms)

    def ask_failed(self, incarnation: int, shard_ids: Iterable[int], now_ms: float) -> list[Action]:
        """It may have been granted: the same grant is asked for again and recognised."""
        actions: list[Action] = []
        if incarnation == self.incarnation:
            for shard_id in shard_ids:
                self._ask_at_ms[shard_id] = now_ms + ASK_AGAIN_MS
                self._apply(shard_id, Event.DENIED, actions)
        return actions + self.tick(now_ms)

    def opened(self, shard_id: int, epoch: int, now_ms: float) -> list[Action]:
        """The role serves the id."""
        return self._happened(shard_id, epoch, Event.OPENED, now_ms)

    def closed(self, shard_id: int, epoch: int, now_ms: float) -> list[Action]:
        """The role has finished what was in flight and has let go of the id."""
        return self._happened(shard_id, epoch, Event.CLOSED, now_ms)

    def fenced(self, shard_id: int, epoch: int, now_ms: float) -> list[Action]:
        """A store refused this epoch of ours: the registry knows of another owner, or is behind."""
        if epoch == self._epochs[shard_id]:
            self._beat_at_ms = min(self._beat_at_ms, now_ms)
        return self._happened(shard_id, epoch, Event.FENCED, now_ms)

    def released(self, incarnation: int, shard_ids: Iterable[int], now_ms: float) -> list[Action]:
        """The registry took them back."""
        actions: list[Action] = []
        if incarnation == self.incarnation:
            for shard_id in shard_ids:
                self._apply(shard_id, Event.RELEASED, actions)
        return actions + self.tick(now_ms)

    def release_failed(self, incarnation: int, shard_ids: Iterable[int], now_ms: float) -> list[Action]:
        """No answer: again soon, a release is idempotent."""
        if incarnation == self.incarnation:
            self._to_release.update(shard_ids)
            self._release_at_ms = now_ms + self._times.renew_ms / RENEW_RETRY_PART
        return self.tick(now_ms)

    # -------------------------------------------------------------------------------------------------------- inside

    def _happened(self, shard_id: int, epoch: int, event: Event, now_ms: float) -> list[Action]:
        actions: list[Action] = []
        if epoch == self._epochs[shard_id]:
            self._apply(shard_id, event, actions)
        return actions + self.tick(now_ms)

    def _fence_self(self, now_ms: float, actions: list[Action]) -> None:
        self._renewed_ms = None
        self._settled = False
        self.incarnation += 1
        self._beat_at_ms = now_ms
        self._to_release.clear()
        for shard_id in range(len(self._states)):
            self._apply(shard_id, Event.LOST, actions)
        self._wanted = [False] * len(self._states)

    def _balance(self, now_ms: float, actions: list[Action]) -> None:
        """Ask for what is wanted, let go of what is not."""
        if self._renewed_ms is None:
            return
        whole = True
        for shard_id, wanted in enumerate(self._wanted):
            if not wanted:
                self._apply(shard_id, Event.UNWANTED, actions)
            elif self._states[shard_id] is not State.HELD:
                whole = False
                if now_ms >= self._ask_at_ms[shard_id]:
                    self._apply(shard_id, Event.WANTED, actions)
        self._settled = self._settled or whole
        self._join(actions)

    def _apply(self, shard_id: int, event: Event, actions: list[Action]) -> None:
        found = TABLE.get((self._states[shard_id], event))
        if found is None:
            return
        self._states[shard_id], act = found
        if act is Act.ASK:
            actions.append(Ask(self.incarnation, (shard_id,)))
        elif act is Act.OPEN:
            actions.append(Open(self.incarnation, shard_id, self._epochs[shard_id]))
        elif act is Act.CLOSE:
            actions.append(Close(shard_id))
        elif act is Act.DROP:
            actions.append(Drop(shard_id))
        elif act is Act.RELEASE:
            actions.append(Release(self.incarnation, (shard_id,)))

    def _join(self, actions: list[Action]) -> None:
        """One call for all questions, one for all releases."""
        asked = [shard_id for action in actions if isinstance(action, Ask) for shard_id in action.shard_ids]
        given = [shard_id for action in actions if isinstance(action, Release) for shard_id in action.shard_ids]
        if len(asked) > 1 or len(given) > 1:
            actions[:] = [action for action in actions if not isinstance(action, Ask | Release)]
            if asked:
                actions.append(Ask(self.incarnation, tuple(asked)))
            if given:
                actions.append(Release(self.incarnation, tuple(given)))


def owner_of(shard_id: int, owners: tuple[str, ...], pins: Mapping[int, str]) -> str:
    """Whose share the id is: the pinned member while it lives, else member id mod n of the sorted list."""
    pinned = pins.get(shard_id)
    return pinned if pinned in owners else owners[shard_id % len(owners)]
