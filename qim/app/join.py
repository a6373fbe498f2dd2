"""`qim join`: more workers for a node that runs on this host, under a supervisor of their own (DESIGN §5).

They use the servers, keys and sockets of that node and take their share of its buckets, partitions and shards; when
they go, their share goes back.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from qim.app.commit_logs import COMMIT_LOG_ENV, log_fact
from qim.app.connect import NodeAddress
from qim.app.data_dir import open_identity
from qim.app.settings import POOL_SIZE_MAX, NodeSettings, PoolSizes
from qim.app.tls import ensure_certificates, server_context
from qim.app.up import log_stream, release_leases, reset_leases, supervisor_options, worker_process
from qim.app.wiring import NodeContext, settle_cluster_facts
from qim.config.parameters import load_parameters
from qim.errors import StartupError
from qim.obs.logs import configure_logs
from qim.runtime.clock import SystemClock
from qim.runtime.prefork import Supervisor

SUPERVISORS_MAX: Final = 16
"""Of one host, that of the node included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What is added to the node in `data_dir`."""

    data_dir: Path
    pools: PoolSizes
    """No gateways: the workers of the port belong to one supervisor."""
    apart: bool = False
    commit_log: str = ""
    """Another address of the node's brokers; "" = the node's own."""
    parameters_file: Path | None = None


def run_joined(options: JoinOptions) -> int:
    """Run the workers until they are told to stop; the exit code. StartupError, one line, when they cannot start."""
    if options.pools.gateway or not any(options.pools):
        raise StartupError("name how many writers, fan-outs or mailboxes to add, e.g. --writers 1")
    address = NodeAddress.read(options.data_dir)
    parameters = load_parameters(options.parameters_file, os.environ, reserved_env={COMMIT_LOG_ENV})
    parameters = replace(parameters, mailbox_shard_count=address.mailbox_shard_count)
    base = NodeSettings(
        data_dir=options.data_dir,
        host=address.host,
        port=address.port,
        admin_port=address.admin_port,
        pools=options.pools,
        apart=options.apart,
        commit_log=options.commit_log or address.commit_log,
        unlimited_tenant=address.unlimited_tenant,
    )
    with _place(base) as settings:
        identity, keys = open_identity(settings)
        files = ensure_certificates(settings.tls_dir, settings.host, SystemClock().unix_ms())
        with log_stream(settings) as stream:
            configure_logs(stream=stream, process=f"supervisor-{settings.first_index}")
            context = NodeContext(
                settings=settings,
                parameters=parameters,
                cluster_id=identity.cluster_id,
                keys=keys,
                client_tls=server_context(files),
                admin_tls=server_context(files, alpn=("http/1.1",)),
                log_stream=stream,
            )
            return Supervisor(
                processes=[worker_process(context, plan) for plan in settings.processes()],
                options=supervisor_options(context, state_file(settings)),
                before_workers=partial(_prepare, context),
                on_ready=lambda: print(f"qim: {len(settings.processes())} processes have joined", flush=True),
                on_worker_died=partial(release_leases, context),
            ).run()


def _prepare(context: NodeContext) -> None:
    """The same cluster facts as the node's, or StartupError; then what ran here before has no leases any more."""
    fact = log_fact(context.settings.commit_log, context.parameters, first_start=False)
    asyncio.run(settle_cluster_facts(context, fact))
    reset_leases(context)


def state_file(settings: NodeSettings) -> Path:
    """Of the supervisor whose first instance has this number."""
    return settings.run_dir / f"supervisor-{settings.first_index}.json"


@contextmanager
def _place(base: NodeSettings) -> Iterator[NodeSettings]:
    """The first free place among the supervisors of the host; its lock ends with this process."""
    for place in range(1, SUPERVISORS_MAX):
        settings = replace(base, first_index=place * POOL_SIZE_MAX)
        with state_file(settings).with_suffix(".lock").open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield settings
            return
    raise StartupError(f"{SUPERVISORS_MAX} supervisors run on this host already; stop one of them")
