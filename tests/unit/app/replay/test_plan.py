"""The script of a day: deterministic, in recorded order, and possible to play."""

from __future__ import annotations

from pathlib import Path

import pytest

from qim.app.replay.plan import Act, DayEvent, DayPlan, plan_day, read_day
from qim.errors import StartupError

DAYS = sorted((Path(__file__).parents[3] / "data" / "irc").glob("*.jsonl"))


def playable(plan: DayPlan) -> None:
    """Nobody acts while offline or outside the group; nobody logs in twice."""
    members = {person.user for person in plan.people if person.initial_member}
    online = {(person.user, device) for person in plan.people for device in person.online_devices}
    for step in plan.steps:
        device = (step.user, step.device)
        if step.act is Act.LOGIN:
            assert device not in online
            online.add(device)
        elif step.act is Act.ADD:
            assert step.user not in members
            members.add(step.user)
        else:
            assert device in online
            if step.act is Act.LEAVE:
                members.remove(step.user)
            elif step.act is Act.SEND:
                assert step.user in members
    assert online == {(person.user, device) for person in plan.people for device in person.devices}


@pytest.mark.parametrize("path", DAYS, ids=lambda path: path.stem)
def test_every_recorded_day_makes_a_playable_script(path: Path) -> None:
    events = read_day(path)
    plan = plan_day(path.stem, events, seed=7)
    playable(plan)
    sent = [(step.user, step.text) for step in plan.steps if step.act is Act.SEND]
    assert sent == [(event.user, event.text) for event in events if event.kind == "message"]
    asleep = [person for person in plan.people if not person.online_devices]
    assert len(asleep) == len(plan.people) // 3
    assert any(len(person.devices) == 2 for person in plan.people)
    assert plan.count(Act.CUT) > 0


def test_the_same_seed_gives_the_same_script_and_another_seed_another() -> None:
    events = read_day(DAYS[0])
    assert plan_day("day", events, seed=1) == plan_day("day", events, seed=1)
    assert plan_day("day", events, seed=1) != plan_day("day", events, seed=2)


def test_joins_and_leaves_become_membership_changes() -> None:
    events = [
        DayEvent(1, "message", "a", "hello"),
        DayEvent(2, "join", "b", ""),
        DayEvent(3, "join", "b", ""),
        DayEvent(4, "message", "b", "hi"),
        DayEvent(5, "leave", "b", ""),
        DayEvent(6, "leave", "b", ""),
        DayEvent(7, "message", "b", "forgot something"),
    ]
    plan = plan_day("day", events, seed=1)
    acts = [(step.act, step.user) for step in plan.steps if step.act in (Act.SEND, Act.ADD, Act.LEAVE)]
    assert acts == [
        (Act.SEND, "a"), (Act.ADD, "b"), (Act.SEND, "b"), (Act.LEAVE, "b"), (Act.ADD, "b"), (Act.SEND, "b"),
    ]  # fmt: skip
    assert {person.user: person.initial_member for person in plan.people} == {"a": True, "b": False}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json", "is not an event"),
        ('{"type": "message", "user": "a"}', "is not an event"),
        ('{"t_ms": 1, "type": "shout", "user": "a"}', "unknown type"),
        ('{"t_ms": 1, "type": "join", "user": "a"}', "holds no message"),
        ("", "holds no message"),
    ],
)
def test_a_file_that_is_no_day_is_refused_in_one_line(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "day.jsonl"
    path.write_text(content)
    with pytest.raises(StartupError, match=complaint) as caught:
        read_day(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(StartupError, match="cannot read"):
        read_day(Path("/nonexistent/day.jsonl"))
