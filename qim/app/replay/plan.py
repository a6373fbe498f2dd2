"""From a recorded day to a script: who logs in when, who sends what, who joins, leaves and is cut off.

Pure: the same file and seed give the same script. The recorded order of events is the order of the steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3

from qim.errors import StartupError

FIRST_DEVICE: Final = "phone"
SECOND_DEVICE: Final = "tablet"
_OFFLINE_SHARE: Final = 3
"""Every third person starts offline."""
_SECOND_DEVICE_SHARE: Final = 4
_CUT_SHARE: Final = 6


class DayEvent(NamedTuple):
    """One line of a day file; `kind` is "message", "join" or "leave"."""

    t_ms: int
    kind: str
    user: str
    text: str


class Act(Enum):
    SEND = "send"
    ADD = "add"
    """GroupAdd of the person by the trusted plane."""
    LEAVE = "leave"
    LOGIN = "login"
    CUT = "cut"
    """The device's connection dies without FIN; the device reconnects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One act. `t_ms` is the recorded time of day it belongs to."""

    act: Act
    t_ms: int
    user: str
    device: str = FIRST_DEVICE
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    user: str
    devices: tuple[str, ...]
    online_devices: tuple[str, ...]
    """Logged in before the first step; the others follow by a LOGIN step."""
    initial_member: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DayPlan:
    name: str
    people: tuple[Person, ...]
    steps: tuple[Step, ...]

    def count(self, act: Act) -> int:
        return sum(step.act is act for step in self.steps)


def read_day(path: Path) -> list[DayEvent]:
    """Events of a day file in order; StartupError, one line, if it is not one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the day file {path}: {error}") from error
    events: list[DayEvent] = []
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            event = DayEvent(int(raw["t_ms"]), str(raw["type"]), str(raw["user"]), str(raw.get("text", "")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(f"{path}:{number} is not an event of a day file: {error!r}") from error
        if event.kind not in ("message", "join", "leave"):
            raise StartupError(f"{path}:{number} has the unknown type {event.kind!r}; known: message, join, leave")
        events.append(event)
    if not any(event.kind == "message" for event in events):
        raise StartupError(f"{path} holds no message; nothing to play")
    return events


def plan_day(name: str, events: Sequence[DayEvent], seed: int) -> DayPlan:
    """The script of a day. A message of somebody who is not a member at that moment is preceded by an ADD: nobody
    could have written it from outside. Joins of members and leaves of strangers change nothing and are dropped."""
    users = list(dict.fromkeys(event.user for event in events))
    first_kind = {event.user: event.kind for event in reversed(events)}
    initial = {user for user in users if first_kind[user] != "join"}
    acts = list(_acts(events, initial))
    first_act = {user: len(acts) for user in users}
    for index, step in reversed(list(enumerate(acts))):
        if step.act is not Act.ADD:
            first_act[step.user] = index
    sleepers = _sleepers(users, first_act)
    people = tuple(_person(user, user in initial, user in sleepers, seed) for user in users)
    inserted = _logins(people, first_act, len(acts), seed) + _cuts(people, len(acts), seed)
    return DayPlan(name=name, people=people, steps=tuple(_merge(acts, inserted)))


def _acts(events: Sequence[DayEvent], initial: set[str]) -> Iterable[Step]:
    members = set(initial)
    for event in events:
        if event.kind == "leave":
            if event.user in members:
                members.discard(event.user)
                yield Step(act=Act.LEAVE, t_ms=event.t_ms, user=event.user)
            continue
        if event.user not in members:
            members.add(event.user)
            yield Step(act=Act.ADD, t_ms=event.t_ms, user=event.user)
        if event.kind == "message":
            yield Step(act=Act.SEND, t_ms=event.t_ms, user=event.user, text=event.text)


def _sleepers(users: Sequence[str], first_act: dict[str, int]) -> set[str]:
    """The third that acts last: they can stay away longest, and nobody can write while being offline."""
    by_first_act = sorted(users, key=lambda user: first_act[user])
    return set(by_first_act[len(users) - len(users) // _OFFLINE_SHARE :])


def _person(user: str, initial: bool, sleeps: bool, seed: int) -> Person:
    two = _draw(seed, "devices", user, _SECOND_DEVICE_SHARE) == 0
    devices = (FIRST_DEVICE, SECOND_DEVICE) if two else (FIRST_DEVICE,)
    online = () if sleeps else devices
    if two and online and _draw(seed, "second device late", user, 2) == 0:
        online = (FIRST_DEVICE,)
    return Person(user=user, devices=devices, online_devices=online, initial_member=initial)


def _logins(people: Sequence[Person], first_act: dict[str, int], end: int, seed: int) -> list[tuple[int, Step]]:
    """LOGIN steps as (index they come before, step): between half way to the person's first act and that act."""
    found: list[tuple[int, Step]] = []
    for person in people:
        latest = first_act[person.user]
        for device in person.devices:
            if device in person.online_devices:
                continue
            if device != FIRST_DEVICE:
                index = end
            elif latest == end:
                index = end - _draw(seed, "login", person.user, max(end // 2, 1))
            else:
                index = latest - _draw(seed, "login", person.user, latest // 2 + 1)
            found.append((index, Step(act=Act.LOGIN, t_ms=0, user=person.user, device=device)))
    return found


def _cuts(people: Sequence[Person], end: int, seed: int) -> list[tuple[int, Step]]:
    """CUT steps of devices that are online from the start, in the middle of the day."""
    middle = max(end * 3 // 4, 1)
    return [
        (end // 8 + _draw(seed, "cut at", person.user, middle), Step(act=Act.CUT, t_ms=0, user=person.user))
        for person in people
        if FIRST_DEVICE in person.online_devices and _draw(seed, "cut", person.user, _CUT_SHARE) == 0
    ]


def _merge(acts: Sequence[Step], inserted: list[tuple[int, Step]]) -> Iterable[Step]:
    """`acts` with each inserted step before the index it names and at that act's time of day."""
    inserted = sorted(inserted, key=lambda item: (item[0], item[1].user, item[1].device))
    at = 0
    for index, step in enumerate(acts):
        while at < len(inserted) and inserted[at][0] <= index:
            yield _timed(inserted[at][1], step.t_ms)
            at += 1
        yield step
    for _, step in inserted[at:]:
        yield _timed(step, acts[-1].t_ms)


def _timed(step: Step, t_ms: int) -> Step:
    return Step(act=step.act, t_ms=t_ms, user=step.user, device=step.device, text=step.text)


def _draw(seed: int, purpose: str, user: str, bound: int) -> int:
    """A number in [0, bound) that depends on its arguments only, on every Python version."""
    digest = blake3(f"{seed}\x00{purpose}\x00{user}".encode()).digest(8)
    return int.from_bytes(digest, "big") % bound
