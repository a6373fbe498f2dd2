"""What a seed means: a cluster, what its users do, what goes wrong; plain values, so that a plan can be shortened."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

WORK_S: Final = 12.0
"""Sends happen before this virtual time."""
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
    profile: str
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
    far_mailboxes: bool
    """Calls to the mailbox instance take 10 to 20 ms, so that there is always one on the way."""
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
        found: list[tuple[str, tuple[str, ...]]] = []
        kinds = ("writer", "fanout", "mailbox")
        if self.apart:
            for kind in kinds:
                found += [(f"{kind}-{i}", (f"{kind}-{i}",)) for i in range(self.pools[kind])]
        else:
            for i in range(max(self.pools[kind] for kind in kinds)):
                found.append((f"core-{i}", tuple(f"{kind}-{i}" for kind in kinds if i < self.pools[kind])))
        return found + [(f"gateway-{i}", (f"gateway-{i}",)) for i in range(self.pools["gateway"])]

    def workers_with(self, kind: str) -> list[str]:
        """Processes that host a role of a kind."""
        return [name for name, roles in self.workers() if any(role.startswith(kind) for role in roles)]


_ANY: Final = ("writer", "fanout", "mailbox", "gateway")
_OWNERS: Final = ("writer", "fanout", "mailbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """What a seed dwells on."""

    weights: Mapping[str, int]
    roles: tuple[str, ...] = _ANY
    """Of the processes that crash, stop and are cut off."""
    calls: tuple[str, ...]
    """At whose execution something is timed."""
    purposes: tuple[str, ...]
    """Connections that break or are slow."""
    peers: tuple[str, ...] = _ANY
    """At the far end of links that are cut or slow."""
    count: tuple[int, int] = (2, 14)
    """Faults of a seed."""
    bursts: tuple[int, int] = (15, 40)
    """Times somebody has something to say, one to eight lines each."""
    narrow: bool = False
    """One shard with one lane: every member of a group in the same chunks."""


_CALLS: Final = (
    "message.commit", "log.append", "log.save", "mailbox.append", "mailbox.append", "mailbox.open_shard",
    "mailbox.load_shard", "mailbox.user_status", "mailbox.range_scan", "registry.grant", "registry.write_boundary",
    "message.open_bucket",
)  # fmt: skip
_ALL: Final = {
    "crash": 14, "crash_at": 14, "break_at": 12, "takeover": 5, "takeover_at": 6, "split": 8, "pause": 5, "clock": 7,
    "break": 6, "slow": 8, "server_freeze": 4, "mailbox_lost": 8, "mailbox_lost_at": 8, "core_crash": 2, "cut": 12,
    "lag": 4, "pipe": 5, "hold": 3, "device": 6, "mailbox_lost_twin": 4, "blackout": 2,
}  # fmt: skip
PROFILES: Final[Mapping[str, _Profile]] = {
    "everything": _Profile(weights=_ALL, calls=_CALLS, purposes=("message", "log", "registry", "mailbox", "mailbox")),
    "append": _Profile(
        weights={"slow": 8, "break": 12, "break_at": 14, "crash_at": 6, "mailbox_lost_at": 1, "takeover_at": 2},
        count=(10, 40),
        bursts=(30, 70),
        roles=("mailbox",),
        calls=("mailbox.append",),
        purposes=("mailbox",),
        narrow=True,
    ),
    "fanout": _Profile(
        weights={"crash_at": 8, "break_at": 8, "takeover_at": 3, "split": 3, "slow": 5, "crash": 4},
        roles=("fanout",),
        calls=("log.append", "log.save"),
        purposes=("log",),
    ),
    "writer": _Profile(
        weights={"clock": 8, "crash": 5, "crash_at": 6, "takeover": 4, "takeover_at": 3, "split": 3, "break_at": 5},
        roles=("writer",),
        calls=("message.commit", "message.open_bucket"),
        purposes=("message",),
    ),
    "links": _Profile(
        weights={"cut": 14, "lag": 6, "pipe": 3, "device": 6, "crash": 3, "hold": 2},
        roles=("mailbox", "gateway"),
        calls=_CALLS,
        purposes=("mailbox",),
        peers=("gateway", "gateway", "mailbox"),
    ),
    "quiet": _Profile(
        weights={"mailbox_lost": 6, "mailbox_lost_at": 3, "takeover": 2, "device": 3, "break": 2},
        bursts=(5, 12),
        roles=_OWNERS,
        calls=_CALLS,
        purposes=("mailbox",),
    ),
}
_MIX: Final = {"everything": 8, "append": 4, "fanout": 2, "writer": 2, "links": 3, "quiet": 1}


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"{seed}/plan")
    name = rng.choices(tuple(_MIX), tuple(_MIX.values()))[0]
    narrow = PROFILES[name].narrow
    users = [f"u{i}" for i in range(rng.randint(5 if narrow else 3, 8))]
    devices = [(user, f"{user}-d{k}") for user in users for k in range(1 + (rng.random() < 0.3))]
    plan = Plan(
        seed=seed,
        profile=name,
        buckets=rng.choice((1, 2, 4)),
        shards=1 if narrow else rng.choice((1, 2)),
        lanes=rng.choice((1, 2)) if narrow else rng.choice((1, 2, 4)),
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
        far_mailboxes=narrow and rng.random() < 0.7,
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
    for _ in range(rng.randint(*PROFILES[plan.profile].bursts)):
        at_s = 1.0 + rng.random() * (WORK_S - 1.0)
        user, device = rng.choice(plan.devices)
        if rng.random() < 0.5:
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
    least, most = PROFILES[plan.profile].count
    for _ in range(rng.randint(least, most)):
        steps += _fault(plan, rng, 0.6 + rng.random() * (FAULTS_END_S - 1.6))
    return sorted(steps, key=lambda step: step.at_s)


def _fault(plan: Plan, rng: random.Random, at_s: float) -> list[Step]:
    profile = PROFILES[plan.profile]
    kind = rng.choices(tuple(profile.weights), tuple(profile.weights.values()))[0]
    worker = rng.choice(plan.workers_with(rng.choice(profile.roles)))
    owner = rng.choice(plan.workers_with(rng.choice([role for role in profile.roles if role in _OWNERS])))
    peer = rng.choice(profile.peers)
    role = f"{peer}-{rng.randrange(plan.pools[peer])}"
    call = rng.choice(profile.calls)
    device = rng.choice(plan.devices)[1]
    short_s = rng.choice((0.02, 0.2, 1.0)) * (0.5 + rng.random())
    long_s = rng.choice((0.3, 1.5, 5.0)) * (0.5 + rng.random())
    lost_s = rng.random() * 2.0
    wake_s = min(at_s + long_s, FAULTS_END_S - 0.1)
    renamed = rng.random() < 0.5
    if kind == "mailbox_lost_at" and not call.startswith("mailbox"):
        call = "mailbox.append"
    steps: dict[str, list[Step]] = {
        "crash": [Step(at_s, "crash", (worker, rng.randint(0, 60), short_s))],
        "takeover": [Step(at_s, "takeover", (owner, renamed))],
        "split": [
            Step(at_s, "pause", (owner, wake_s - at_s)),
            Step(at_s + rng.random() * 0.8 * (wake_s - at_s), "takeover", (owner, renamed)),
        ],
        "pause": [Step(at_s, "pause", (worker, wake_s - at_s))],
        "clock": [Step(at_s, "clock", (worker, -rng.choice((50, 900, 3_000, 6_000, 30_000)), long_s))],
        "break": [Step(at_s, "break", (owner, rng.choice(profile.purposes)))],
        "slow": [Step(at_s, "slow", (owner, rng.choice(profile.purposes), rng.choice((0.01, 0.1, 0.5)), long_s))],
        "server_freeze": [Step(at_s, "server_freeze", (rng.choice(("core", "mailbox")), long_s))],
        "mailbox_lost": [Step(at_s, "mailbox_lost", (lost_s, short_s))],
        "mailbox_lost_twin": [Step(at_s, "crash", (owner, 0, short_s)), Step(at_s, "mailbox_lost", (lost_s, short_s))],
        "blackout": [Step(at_s, "blackout", (lost_s, short_s))],
        "core_crash": [Step(at_s, "core_crash", (short_s,))],
        "cut": [Step(at_s, "cut", (worker, role, short_s))],
        "lag": [Step(at_s, "lag", (worker, role, rng.choice((0.02, 0.3)), long_s))],
    }
    for timed in ("crash_at", "break_at", "takeover_at", "mailbox_lost_at"):
        steps[timed] = [Step(at_s, timed, (call, rng.randint(1, 4), short_s))]
    for of_device in ("pipe", "hold", "device"):
        steps[of_device] = [Step(at_s, of_device, (device, long_s))]
    return steps[kind]
