"""What a seed means: a cluster, what its users do, what goes wrong; plain values, so that a plan can be shortened."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

LENGTH_S: Final = 14.0
"""From here on everything works again; seeds that dwell on leases go on LEASES_LENGTH_S."""
LEASES_LENGTH_S: Final = 75.0
REST_S: Final = 2.0
"""Nobody sends in the last seconds."""


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
    length_s: float
    """From here on everything works again."""
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
    length_s: float = LENGTH_S
    pools: tuple[int, ...] = (1, 1, 2)
    """Sizes of the pools of owners."""
    narrow: bool = False
    """One shard with one lane: every member of a group in the same chunks."""


_CALLS: Final = (
    "message.commit_each", "log.append_each", "log.save", "mailbox.append", "mailbox.append", "mailbox.open_shard",
    "mailbox.load_shard", "mailbox.user_status", "mailbox.range_scan", "registry.acquire", "registry.write_boundary",
   "registry.boundaries",
    "message.open_bucket",
)  # fmt: skip
_ALL: Final = {
    "crash": 14, "crash_at": 14, "break_at": 12, "takeover": 5, "takeover_at": 6, "split": 8, "pause": 5, "clock": 7,
    "break": 6, "slow": 8, "server_freeze": 4, "mailbox_lost": 8, "mailbox_lost_at": 8, "core_crash": 2, "cut": 12,
    "lag": 4, "pipe": 5, "hold": 3, "device": 6, "mailbox_lost_twin": 4, "blackout": 2, "drain": 3, "refuse": 3,
    "no_registry": 3, "split_at": 6,
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
        weights={"crash_at": 8, "break_at": 8, "takeover_at": 3, "split": 3, "slow": 5, "crash": 4, "refuse": 5},
        roles=("fanout",),
        calls=("log.append_each", "log.save"),
        purposes=("log",),
    ),
    "writer": _Profile(
        weights={"clock": 8, "crash": 5, "crash_at": 6, "takeover": 4, "takeover_at": 3, "split": 3, "break_at": 5},
        roles=("writer",),
        calls=("message.commit_each", "message.open_bucket"),
        purposes=("message",),
    ),
    "links": _Profile(
        weights={"cut": 14, "lag": 6, "pipe": 3, "device": 6, "crash": 3, "hold": 2},
        roles=("mailbox", "gateway"),
        calls=_CALLS,
        purposes=("mailbox",),
        peers=("gateway", "gateway", "mailbox"),
    ),
    "leases": _Profile(
        weights={
            "long_pause": 8,
            "long_split": 6,
            "no_registry": 8,
            "registry_gone": 3,
            "registry_clock": 4,
            "clock": 3,
            "unproven": 6,
            "crash": 4,
            "long_crash": 4,
            "drain": 5,
            "move": 4,
            "takeover": 3,
            "server_freeze": 1,
            "long_freeze": 2,
            "break": 6,
            "break_at": 6,
            "crash_at": 3,
            "takeover_at": 3,
            "slow": 3,
            "mailbox_lost": 3,
            "split_at": 8,
        },
        count=(4, 16),
        bursts=(15, 40),
        roles=_OWNERS,
        calls=(
            "registry.beat",
            "registry.acquire",
            "registry.acquire",
            "registry.release",
            "registry.write_boundary",
            "registry.boundaries",
            "registry.current",
            "message.open_bucket",
            "log.open_partition",
            "mailbox.open_shard",
            "message.commit_each",
            "mailbox.append",
        ),
        purposes=("registry", "registry", "message", "log", "mailbox"),
        length_s=LEASES_LENGTH_S,
        pools=(1, 2, 2, 3),
    ),
    "quiet": _Profile(
        weights={"mailbox_lost": 6, "mailbox_lost_at": 3, "takeover": 2, "device": 3, "break": 2},
        bursts=(5, 12),
        roles=_OWNERS,
        calls=_CALLS,
        purposes=("mailbox",),
    ),
}
_MIX: Final = {"everything": 8, "append": 4, "fanout": 2, "writer": 2, "links": 3, "quiet": 1, "leases": 4}


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
        length_s=PROFILES[name].length_s,
        buckets=rng.choice((1, 2, 4)),
        shards=1 if narrow else rng.choice((1, 2)),
        lanes=rng.choice((1, 2)) if narrow else rng.choice((1, 2, 4)),
        apart=rng.random() < 0.7,
        pools={
            "writer": rng.choice(PROFILES[name].pools),
            "fanout": rng.choice(PROFILES[name].pools),
            "mailbox": rng.choice(PROFILES[name].pools),
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
        at_s = 1.0 + rng.random() * (plan.length_s - REST_S - 1.0)
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
            steps.append(
                Step(2.5 + rng.random() * (plan.length_s - REST_S - 3), kind, (group, rng.choice(plan.users[1:])))
            )
    return sorted(steps, key=lambda step: step.at_s)


def _faults(plan: Plan, rng: random.Random) -> list[Step]:
    steps: list[Step] = []
    least, most = PROFILES[plan.profile].count
    for _ in range(rng.randint(least, most)):
        steps += _fault(plan, rng, 0.6 + rng.random() * (plan.length_s - 1.6))
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
    lease_s = rng.choice((6.0, 13.0, 16.0, 27.0)) * (0.9 + 0.4 * rng.random())
    wake_s = min(at_s + long_s, plan.length_s - 0.1)
    forced = rng.random() < 0.7
    if kind == "mailbox_lost_at" and not call.startswith("mailbox"):
        call = "mailbox.append"
    steps: dict[str, list[Step]] = {
        "crash": [Step(at_s, "crash", (worker, rng.randint(0, 60), short_s))],
        "takeover": [Step(at_s, "takeover", (owner, forced))],
        "split": [
            Step(at_s, "pause", (owner, wake_s - at_s)),
            Step(at_s + rng.random() * 0.8 * (wake_s - at_s), "takeover", (owner, forced)),
        ],
        "pause": [Step(at_s, "pause", (worker, wake_s - at_s))],
        "clock": [Step(at_s, "clock", (worker, -rng.choice((50, 900, 3_000, 6_000, 30_000)), long_s))],
        "break": [Step(at_s, "break", (owner, rng.choice(profile.purposes)))],
        "slow": [Step(at_s, "slow", (owner, rng.choice(profile.purposes), rng.choice((0.01, 0.1, 0.5)), long_s))],
        "server_freeze": [Step(at_s, "server_freeze", (rng.choice(("core", "mailbox")), long_s))],
        "mailbox_lost": [Step(at_s, "mailbox_lost", (lost_s, short_s))],
        "mailbox_lost_twin": [Step(at_s, "crash", (owner, 0, short_s)), Step(at_s, "mailbox_lost", (lost_s, short_s))],
        "blackout": [Step(at_s, "blackout", (lost_s, short_s))],
        "refuse": [Step(at_s, "refuse", (rng.randint(1, 3),))],
        "core_crash": [Step(at_s, "core_crash", (short_s,))],
        "cut": [Step(at_s, "cut", (worker, role, short_s))],
        "lag": [Step(at_s, "lag", (worker, role, rng.choice((0.02, 0.3)), long_s))],
    }
    steps |= _lease_faults(plan, rng, at_s, owner, lease_s)
    for timed in ("crash_at", "break_at", "takeover_at", "split_at", "mailbox_lost_at"):
        steps[timed] = [Step(at_s, timed, (call, rng.randint(1, 4), short_s))]
    for of_device in ("pipe", "hold", "device"):
        steps[of_device] = [Step(at_s, of_device, (device, long_s))]
    return steps[kind]


def _lease_faults(plan: Plan, rng: random.Random, at_s: float, owner: str, lease_s: float) -> dict[str, list[Step]]:
    """What lasts about as long as a lease, a self-fence or a failover wait."""
    wake_s = min(at_s + lease_s, plan.length_s - 0.1)
    forced = rng.random() < 0.3
    pool, kind, count = rng.choice(
        (("writer", "bucket", plan.buckets), ("fanout", "outbox", plan.buckets), ("mailbox", "mailbox", plan.shards))
    )
    member = f"{pool}-{rng.randrange(plan.pools[pool])}"
    step_ms = rng.choice((-30_000, -3_000, 3_000, 14_000, 30_000))
    return {
        "long_pause": [Step(at_s, "pause", (owner, wake_s - at_s))],
        "long_split": [
            Step(at_s, "pause", (owner, wake_s - at_s)),
            Step(at_s + rng.random() * 0.8 * (wake_s - at_s), "takeover", (owner, forced)),
        ],
        "no_registry": [Step(at_s, "no_registry", (owner, lease_s))],
        "registry_gone": [Step(at_s, "registry_gone", (lease_s,))],
        "registry_clock": [Step(at_s, "registry_clock", (step_ms, lease_s))],
        "unproven": [Step(at_s, "unproven", (owner, lease_s))],
        "long_crash": [Step(at_s, "crash", (owner, rng.randint(0, 60), lease_s))],
        "long_freeze": [Step(at_s, "server_freeze", ("core", lease_s))],
        "drain": [Step(at_s, "drain", (owner, rng.choice((0.05, 2.0, lease_s))))],
        "move": [Step(at_s, "move", (kind, rng.randrange(count), member, lease_s))],
    }
