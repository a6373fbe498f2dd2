"""Which logs a node uses: the embedded ones in its own servers, or topics of a Kafka or Redpanda cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from qim.commit_log.api import CommitLog, LogIdentity, LogReader
from qim.commit_log.embedded import EmbeddedCommitLog, Partition
from qim.config.parameters import Parameters
from qim.errors import StartupError
from qim.registry.api import ShardRegistry
from qim.runtime.clock import Clock
from qim.runtime.tasks import FailureHandler, TaskSet
from qim.shard_workers.conversation.relay import OutboxRelay
from qim.stores.redis import keys
from qim.stores.redis.resp import RespClient

if TYPE_CHECKING:  # librdkafka is loaded by nodes that use a broker
    from qim.commit_log.kafka import KafkaConnection

COMMIT_LOG_ENV: Final = "QIM_COMMIT_LOG"
EMBEDDED: Final = "embedded"
FACT: Final = "commit_log"
"""Name of the registry's fact: every stored position counts in these logs and no others."""
OUTBOX: Final = "outbox"
DISPATCH: Final = "dispatch"
_DAY_MS: Final = 86_400_000


class CommitLogs(Protocol):
    """The logs of one process."""

    @property
    def outbox(self) -> LogReader: ...

    @property
    def dispatch(self) -> CommitLog: ...

    async def open(self, registry: ShardRegistry, tasks: TaskSet) -> None:
        """Make sure that these are the logs of the cluster and stay so. StartupError when they are not."""
        ...

    def relay(self, clock: Clock, on_failure: FailureHandler, poll_interval_ms: float) -> OutboxRelay | None:
        """What the writer has to copy its outbox with; None when the outbox is read where commits write it."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPartitions:
    """Partitions of the two logs; those of the outbox are streams that commits write, wherever it is read."""

    cluster_id: str
    outbox: int
    dispatch: int
    outbox_client: RespClient
    dispatch_client: RespClient

    def stream(self) -> EmbeddedCommitLog:
        client = self.outbox_client
        return EmbeddedCommitLog(
            OUTBOX, self.cluster_id, self.outbox, lambda n: Partition(client, keys.outbox(n), keys.outbox_next(n))
        )


def commit_logs(url: str, partitions: LogPartitions) -> CommitLogs:
    """`url` "" is the embedded log. Made after the fork. StartupError for an address that is none."""
    return KafkaLogs(url, partitions) if url else EmbeddedLogs(partitions)


class EmbeddedLogs:
    """Streams of the node's own servers."""

    def __init__(self, partitions: LogPartitions) -> None:
        client = partitions.dispatch_client
        self.outbox = partitions.stream()
        self.dispatch = EmbeddedCommitLog(
            DISPATCH,
            partitions.cluster_id,
            partitions.dispatch,
            lambda n: Partition(client, keys.dispatch(n), keys.dispatch_next(n)),
        )

    async def open(self, registry: ShardRegistry, tasks: TaskSet) -> None:
        """The supervisor has compared the fact, and the streams carry identities of their own."""

    def relay(self, clock: Clock, on_failure: FailureHandler, poll_interval_ms: float) -> OutboxRelay | None:
        return None

    async def close(self) -> None:
        """Their connections belong to the caller."""


class KafkaLogs:
    """Topics; the outbox stream is copied to its topic by a relay."""

    def __init__(self, url: str, partitions: LogPartitions) -> None:
        from qim.commit_log.kafka import KafkaCommitLog, KafkaConnection
        from qim.commit_log.kafka_address import KafkaAddress
        from qim.commit_log.kafka_outbox import KafkaOutbox

        self._connection: KafkaConnection = KafkaConnection(KafkaAddress.parse(url))
        self._stream = partitions.stream()
        self.outbox = KafkaOutbox(KafkaCommitLog(self._connection, OUTBOX, partitions.outbox))
        self.dispatch = KafkaCommitLog(self._connection, DISPATCH, partitions.dispatch)

    async def open(self, registry: ShardRegistry, tasks: TaskSet) -> None:
        found = await self._connection.identities((OUTBOX, DISPATCH))
        check_fact((await registry.cluster_map({})).get(FACT, ""), kafka_fact(found))
        tasks.start("commit log identity", self._connection.watch(found))

    def relay(self, clock: Clock, on_failure: FailureHandler, poll_interval_ms: float) -> OutboxRelay | None:
        return OutboxRelay(
            self._stream, self.outbox, clock=clock, on_failure=on_failure, poll_interval_ms=poll_interval_ms
        )

    async def close(self) -> None:
        await self._connection.close()


def log_fact(url: str, parameters: Parameters, *, first_start: bool) -> str:
    """What the registry has to say of the logs at `url`; probes a broker, and makes its topics at the first start.

    StartupError, one line, when the broker does not answer or is unfit. Leaves no thread behind.
    """
    if not url:
        return EMBEDDED
    from qim.commit_log.kafka_topics import prepare_topics

    counts = {OUTBOX: parameters.conversation_bucket_count, DISPATCH: parameters.mailbox_shard_count}
    retention_ms = parameters.log_retention_days * _DAY_MS
    return kafka_fact(prepare_topics(url, counts, first_start=first_start, retention_ms=retention_ms))


def kafka_fact(identities: dict[str, LogIdentity]) -> str:
    """`kafka outbox=<cluster>/<topic id>/<partitions> dispatch=…`."""
    from qim.commit_log.kafka import identity_text

    return " ".join(["kafka", *(f"{name}={identity_text(identities[name])}" for name in (OUTBOX, DISPATCH))])


def check_fact(stored: str, found: str) -> None:
    """StartupError, one line, when stored positions belong to other logs."""
    if stored != found:
        raise StartupError(
            f"the positions of this cluster belong to the commit log [{stored}], found [{found}]: correct the address, "
            "or bring the old topics back if they were made anew"
        )


def broker_ends(url: str, shards: int) -> Callable[[], list[int]]:
    """A look from outside a node: the offset the next dispatch of each shard gets. StoreError when a broker is away."""
    from qim.commit_log.kafka_address import KafkaAddress
    from qim.commit_log.kafka_topics import TopicEnds

    address = KafkaAddress.parse(url)
    return TopicEnds(address, address.topic(DISPATCH), shards).read
