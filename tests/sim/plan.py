"""What a seed means: a cluster, what its users do and what goes wrong; plain values, so that a plan can be shortened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final

WORK_S: Final = 12.0
"""Sends and faults happen before this virtual time."""
FAULTS_END_S: Final = 14.0
"""From here on everything works again."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens at a virtual time: the users' or the world's doing."""

    at_s: float
    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.at_s:8.3f} s  {self.kind} {' '.join(map(str, self.args))}"


@dataclass(slots=True)
class Plan:
    seed: int
    buckets: int
    shards: int
    lanes: int
    apart: bool
    """Each role has a process of its own; otherwise writer, fan-out and mailbox share one."""
    pools: dict[str, int]
    broker: bool
    """The dispatch log is one of a broker."""
    fold_save_records: int
    entries_max: int
    tight_rate: bool
    """A sender is refused in the middle of its pipelined messages."""
    users: list[str]
    devices: list[tuple[str, str]]
    """(user, device)."""
    groups: dict[str, list[str]]
    work: list[Step] = field(default_factory=list)
    faults: list[Step] = field(default_factory=list)

    def workers(self) -> list[tuple[str, tuple[str, ...]]]:
        """(process, role slots)."""
        found = []
        kinds = ("writer", "fanout", "mailbox")
        if self.apart:
            for kind in kinds:
                found += [(f"{kind}-{i}", (f"{kind}-{i}",)) for i in range(self.pools[kind])]
        else:
            for i in range(max(self.pools[kind] for kind in kinds)):
                found.append((f"core-{i}", tuple(f"{kind}-{i}" for kind in kinds if i < self.pools[kind])))
        return found + [(f"gateway-{i}", (f"gateway-{i}",)) for i in range(self.pools["gateway"])]


CALLS: Final = (
    "message.commit", "log.append", "log.save", "mailbox.append", "mailbox.open_shard", "mailbox.load_shard",
    "mailbox.user_status", "mailbox.range_scan", "registry.grant", "registry.write_boundary", "message.open_bucket",
)  # fmt: skip
"""Calls at whose execution something may be timed."""


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"{seed}/plan")
    users = [f"u{i}" for i in range(rng.randint(3, 8))]
    devices = [(user, f"{user}-d{k}") for user in users for k in range(1 + (rng.random() < 0.3))]
    plan = Plan(
        seed=seed,
        buckets=rng.choice((1, 2, 4)),
        shards=rng.choice((1, 2)),
        lanes=rng.choice((1, 2, 4)),
        apart=rng.random() < 0.7,
        pools={
            "writer": rng.choice((1, 1, 2)),
            "fanout": rng.choice((1, 1, 2)),
            "mailbox": rng.choice((1, 1, 2)),
            "gateway": rng.choice((1, 2)),
        },
        broker=rng.random() < 0.3,
        fold_save_records=rng.choice((2, 4, 8)),
        entries_max=rng.choice((1, 2, 3, 8)),
        tight_rate=rng.random() < 0.3,
        users=users,
        devices=devices,
        groups={f"grp{i}": users[: rng.randint(2, len(users))] for i in range(rng.randint(1, 2))},
    )
    plan.work = _work(plan, rng)
    plan.faults = _faults(plan, random.Random(f"{seed}/faults"))
    return plan


def _work(plan: Plan, rng: random.Random) -> list[Step]:
    steps = [Step(rng.choice((0.3, 0.3, 0.5 + rng.random() * 3)), "login", (device,)) for _, device in plan.devices]
    for group, members in plan.groups.items():
        creator = next(device for user, device in plan.devices if user == members[0])
        steps.append(Step(0.8 + rng.random(), "create_group", (creator, group, tuple(members))))
    message = 0
    for _ in range(rng.randint(15, 40)):
        at_s = 1.0 + rng.random() * (WORK_S - 1.0)
        user, device = rng.choice(plan.devices)
        if plan.groups and rng.random() < 0.5:
            conversation = "g:" + rng.choice(sorted(plan.groups))
        else:
            other = rng.choice([found for found in plan.users if found != user])
            conversation = "dm:" + ":".join(sorted((user, other)))
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            message += 1
            steps.append(Step(at_s, "send", (device, conversation, f"m{message}")))
            at_s += rng.choice((0.0, 0.001, 0.01, 0.02, 0.3)) * rng.random()
    for group in plan.groups:
        for _ in range(rng.randint(0, 2)):
            kind = rng.choice(("group_add", "group_remove", "group_remove"))
            steps.append(Step(2.5 + rng.random() * (WORK_S - 3), kind, (group, rng.choice(plan.users[1:]))))
    return sorted(steps, key=lambda step: step.at_s)


def _faults(plan: Plan, rng: random.Random) -> list[Step]:
    steps: list[Step] = []
    for _ in range(rng.randint(2, 14)):
        steps += _fault(plan, rng, 0.6 + rng.random() * (FAULTS_END_S - 1.6))
    return sorted(steps, key=lambda step: step.at_s)


def _fault(plan: Plan, rng: random.Random, at_s: float) -> list[Step]:
    workers = [name for name, _ in plan.workers()]
    backs = [name for name in workers if not name.startswith("gateway")]
    roles = [role for _, found in plan.workers() for role in found]
    worker, back = rng.choice(workers), rng.choice(backs)
    purpose = rng.choice(("message", "log", "registry", "mailbox", "mailbox"))
    short_s = rng.choice((0.02, 0.2, 1.0)) * (0.5 + rng.random())
    long_s = rng.choice((0.3, 1.5, 5.0)) * (0.5 + rng.random())
    device = rng.choice(plan.devices)[1]
    kind = rng.choices(
        ("crash", "crash_at", "break_at", "takeover", "takeover_at", "split", "pause", "clock", "break", "slow",
         "server_freeze", "mailbox_lost", "mailbox_lost_at", "core_crash", "cut", "lag", "pipe", "hold", "device",
         "mailbox_lost_twin", "blackout"),
        (14, 14, 12, 5, 6, 8, 5, 7, 6, 8, 4, 8, 8, 2, 12, 4, 5, 3, 6, 4, 2),
    )[0]  # fmt: skip
    steps = [Step(at_s, kind, ())]
    if kind == "crash":
        steps = [Step(at_s, kind, (worker, rng.randint(0, 60), short_s))]
    elif kind in ("crash_at", "break_at", "takeover_at", "mailbox_lost_at"):
        call = rng.choice([found for found in CALLS if kind != "mailbox_lost_at" or found.startswith("mailbox")])
        steps = [Step(at_s, kind, (call, rng.randint(1, 4), short_s))]
    elif kind == "takeover":
        steps = [Step(at_s, kind, (back, rng.random() < 0.5))]
    elif kind == "split":
        wake_s = min(at_s + long_s, FAULTS_END_S - 0.1)
        steps = [
            Step(at_s, "pause", (back, wake_s - at_s)),
            Step(at_s + rng.random() * 0.8 * (wake_s - at_s), "takeover", (back, rng.random() < 0.5)),
        ]
    elif kind == "pause":
        steps = [Step(at_s, kind, (worker, min(long_s, FAULTS_END_S - at_s)))]
    elif kind == "clock":
        steps = [Step(at_s, kind, (worker, -rng.choice((50, 900, 3_000, 6_000, 30_000)), long_s))]
    elif kind == "break":
        steps = [Step(at_s, kind, (back, purpose))]
    elif kind == "slow":
        steps = [Step(at_s, kind, (back, purpose, rng.choice((0.01, 0.1, 0.5)), long_s))]
    elif kind == "server_freeze":
        steps = [Step(at_s, kind, (rng.choice(("core", "mailbox")), long_s))]
    elif kind == "mailbox_lost":
        steps = [Step(at_s, kind, (rng.random() * 2.0, short_s))]
    elif kind == "mailbox_lost_twin":
        steps = [Step(at_s, "crash", (back, 0, short_s)), Step(at_s, "mailbox_lost", (rng.random() * 2.0, short_s))]
    elif kind == "blackout":
        steps = [Step(at_s, kind, (rng.random() * 2.0, short_s))]
    elif kind == "core_crash":
        steps = [Step(at_s, kind, (short_s,))]
    elif kind == "cut":
        steps = [Step(at_s, kind, (worker, rng.choice(roles), short_s))]
    elif kind == "lag":
        steps = [Step(at_s, kind, (worker, rng.choice(roles), rng.choice((0.02, 0.3)), long_s))]
    elif kind in ("pipe", "hold", "device"):
        steps = [Step(at_s, kind, (device, long_s))]
    return steps
