"""`qim up`: everything on this host. Files and servers first, then every pool under one supervisor (DESIGN §5)."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TextIO

from qim.app.commit_logs import COMMIT_LOG_ENV, log_fact
from qim.app.connect import CONNECT_FILE, NodeAddress
from qim.app.data_dir import claimed, mark_claimed, open_identity, write_durably
from qim.app.own_node import STATE_FILE
from qim.app.settings import NodeSettings, ProcessPlan
from qim.app.tls import ensure_certificates, server_context
from qim.app.wiring import CORE_INSTANCE, MAILBOX_INSTANCE, NodeContext, run_worker, settle_cluster_facts
from qim.config.parameters import Parameters, load_parameters
from qim.config.shapes import RangeMs
from qim.errors import StartupError, StoreUnavailable
from qim.obs.logs import configure_logs, get_logger
from qim.registry.reaped import lease_owners, release_reaped
from qim.runtime.affinity import usable_cpus
from qim.runtime.file_limit import raise_file_limit
from qim.runtime.prefork import ProcessSpec, Supervisor, SupervisorOptions
from qim.runtime.redis_server import MAILBOX_OPTIONS, Fsync, RedisServer, default_binary
from qim.stores.redis.instance import InstanceRole, Stamp, claim_instance, inspect_instance, join_roles

LOG_FILE: Final = "node.log"
SOON_MS: Final = 1000.0
"""A worker that is started again within this time gets its leases back; those of a slower one move."""

log = get_logger(__name__)


def run_node(settings: NodeSettings) -> int:
    """Run the node until it is told to stop; the exit code. StartupError, one line, when it cannot start."""
    raise_file_limit()
    parameters = load_parameters(settings.parameters_file, os.environ, reserved_env={COMMIT_LOG_ENV})
    spread = RangeMs(min_ms=0, max_ms=settings.login_spread_ms)
    parameters = replace(
        parameters,
        sync_delay_hint_ms=spread,
        mailbox_shard_count=parameters.single_host_mailbox_shard_count,
    )
    with claimed(settings):
        identity, keys = open_identity(settings)
        write_durably(settings.admin_token_file, keys.admin_token.reveal().encode() + b"\n")
        files = ensure_certificates(settings.tls_dir, settings.host, time.time_ns() // 1_000_000)
        for name, port in (("port", settings.port), ("admin port", settings.admin_port)):
            _require_free(settings.host, port, name)
        with log_stream(settings) as stream:
            configure_logs(stream=stream, process="supervisor")
            context = NodeContext(
                settings=settings,
                parameters=parameters,
                cluster_id=identity.cluster_id,
                keys=keys,
                client_tls=server_context(files),
                admin_tls=server_context(files, alpn=("http/1.1",)),
                log_stream=stream,
            )
            return _supervise(context, known=identity.servers_claimed)


def private_servers(settings: NodeSettings, parameters: Parameters) -> list[RedisServer]:
    """The two servers of a host: commits and registry with fsync always, mailboxes with everysec (DESIGN-data §1)."""
    binary = settings.redis_server or default_binary()
    policies: dict[str, Fsync] = {CORE_INSTANCE: "always", MAILBOX_INSTANCE: "everysec"}
    return [
        RedisServer(
            name=f"redis-{name}",
            binary=binary,
            data_dir=settings.data_dir / f"redis-{name}",
            socket_path=settings.server_socket(name),
            fsync=fsync,
            maxmemory_bytes=parameters.server_memory_bytes,
            options=MAILBOX_OPTIONS if name == MAILBOX_INSTANCE else {},
        )
        for name, fsync in policies.items()
    ]


def _supervise(context: NodeContext, *, known: bool) -> int:
    settings, parameters = context.settings, context.parameters
    connect_file = settings.data_dir / CONNECT_FILE
    connect_file.unlink(missing_ok=True)
    address = _address(context)

    def announce() -> None:
        address.write(connect_file)
        print(_welcome(address, context), flush=True)

    def before_workers() -> None:
        claim_servers(context, known=known)
        reset_leases(context)

    supervisor = Supervisor(
        processes=[worker_process(context, plan) for plan in settings.processes()],
        servers=private_servers(settings, parameters),
        options=supervisor_options(context, settings.run_dir / STATE_FILE),
        before_workers=before_workers,
        on_ready=announce,
        on_worker_died=partial(release_leases, context),
    )
    try:
        return supervisor.run()
    finally:
        connect_file.unlink(missing_ok=True)


def claim_servers(context: NodeContext, *, known: bool) -> None:
    """Each server is fit, ours, and not emptied since the node's first start; facts that never change are stored.

    StartupError, one line, otherwise. Runs between the start of the servers and the first fork, and leaves no loop and
    no thread behind.
    """
    roles = {
        CORE_INSTANCE: (InstanceRole.MESSAGE, InstanceRole.CORE),
        MAILBOX_INSTANCE: (InstanceRole.MAILBOX,),
    }
    for name, held in roles.items():
        address = f"unix://{context.settings.server_socket(name)}"
        inspect_instance(address, held)
        stamp = Stamp(cluster_id=context.cluster_id, roles=join_roles(held), instance_id=name)
        claim_instance(address, stamp, known=known)
    fact = log_fact(context.settings.commit_log, context.parameters, first_start=not known)
    asyncio.run(settle_cluster_facts(context, fact))
    if not known:
        mark_claimed(context.settings)


def supervisor_options(context: NodeContext, state_file: Path) -> SupervisorOptions:
    """Times of the parameters."""
    parameters = context.parameters
    return SupervisorOptions(
        state_file=state_file,
        drain_timeout_ms=parameters.drain_timeout_ms,
        restart_initial_ms=parameters.restart_backoff_initial_ms,
        restart_max_ms=parameters.restart_backoff_max_ms,
        restart_factor=parameters.restart_backoff_factor,
        restart_jitter_ratio=parameters.restart_backoff_jitter_ratio,
        restart_reset_ms=parameters.restart_backoff_reset_ms,
    )


def reset_leases(context: NodeContext) -> None:
    """Before the first fork: whoever ran here is dead, and everybody the node will start is expected, so that the first
    worker of a pool does not take all of it; shares of workers that join stay where they are until these are up.
    StartupError when the registry does not answer."""
    address, settings = _core_address(context), context.settings
    try:
        release_reaped(address, [owner for owner in lease_owners(address) if settings.is_ours(owner)])
        for process in settings.processes():
            release_reaped(address, process.roles, "" if settings.first_index else process.name)
    except StoreUnavailable as error:
        raise StartupError(f"the registry does not answer: {error}; see the log of the server redis-core") from None


def release_leases(context: NodeContext, process: str, delay_ms: float) -> None:
    """A worker was reaped: its leases are free at once (DESIGN-data §6). If it comes back soon they wait for it."""
    roles = next(plan.roles for plan in context.settings.processes() if plan.name == process)
    try:
        count = release_reaped(_core_address(context), roles, process if delay_ms <= SOON_MS else "")
    except StoreUnavailable as error:
        log.warning("leases_not_released", process=process, error=error)
    else:
        log.info("leases_released", process=process, count=count)


def _core_address(context: NodeContext) -> str:
    return f"unix://{context.settings.server_socket(CORE_INSTANCE)}"


def worker_process(context: NodeContext, plan: ProcessPlan) -> ProcessSpec:
    """Gateway worker i is pinned to core i; the others go where there is room."""
    cpu = None
    kind, _, index = plan.name.partition("-")
    cpus = usable_cpus()
    if kind == "gateway" and len(cpus) > 1:
        cpu = cpus[int(index) % len(cpus)]
    return ProcessSpec(name=plan.name, target=partial(run_worker, context, plan), cpu=cpu)


def _address(context: NodeContext) -> NodeAddress:
    settings, parameters = context.settings, context.parameters
    return NodeAddress(
        host=settings.host,
        port=settings.port,
        admin_port=settings.admin_port,
        ca_path=str(settings.tls_dir / "ca.pem"),
        admin_token_path=str(settings.admin_token_file),
        data_dir=str(settings.data_dir),
        run_dir=str(settings.run_dir),
        pid=os.getpid(),
        core_address=f"unix://{settings.server_socket(CORE_INSTANCE)}",
        mailbox_address=f"unix://{settings.server_socket(MAILBOX_INSTANCE)}",
        conversation_bucket_count=parameters.conversation_bucket_count,
        mailbox_shard_count=parameters.mailbox_shard_count,
        unlimited_tenant=settings.unlimited_tenant,
        commit_log=settings.commit_log,
    )


def _welcome(address: NodeAddress, context: NodeContext) -> str:
    settings = context.settings
    lines = [
        "qim: ready",
        f"  clients   {address.host}:{address.port}, TLS 1.3, ALPN qim/1; they trust {address.ca_path}",
        f"  admin     https://{address.client_host}:{address.admin_port}, bearer token in {address.admin_token_path}",
        f"  back up   {settings.data_dir} and, somewhere else, the key file {settings.key_file}",
        f"  talk      qim chat alice --to bob --data {settings.data_dir}",
        "  Ctrl-C    drains and stops; the next start resumes",
    ]
    if settings.commit_log:
        lines.insert(4, f"  log       {settings.commit_log}: its topics are data of this node, too")
    if context.log_stream is not sys.stderr:
        lines.insert(4, f"  log       {settings.data_dir / LOG_FILE}")
    if settings.unlimited_tenant:
        lines.append(f"  note      the rate limits of the tenant {settings.unlimited_tenant} are lifted")
    return "\n".join(lines)


@contextmanager
def log_stream(settings: NodeSettings) -> Iterator[TextIO]:
    """Standard error belongs to the operator when it is a terminal; a service manager gets the lines there."""
    if not sys.stderr.isatty():
        yield sys.stderr
        return
    with (settings.data_dir / LOG_FILE).open("a", encoding="utf-8") as stream:
        yield stream


def _require_free(host: str, port: int, name: str) -> None:
    """Workers share the port among themselves only: without this test they would share it with a stranger."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartupError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --{name.replace(' ', '-')}"
            ) from None
