"""A broker that stops, one partition that nobody leads, and brokers that are lost of three."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from confluent_kafka.admin import NewTopic

from qim.commit_log.kafka_address import KafkaAddress
from tests.support.kafka_server import KafkaServer, new_cluster_id
from tests.support.ports import free_port
from tests.support.waiting import wait_for

BROKERS: Final = 3
SESSION_TIMEOUT_MS: Final = 1_500
"""A sixth of Kafka's: after it the partitions of a killed broker have other leaders."""
_KNOWN_TIMEOUT_S: Final = 30.0
_IN_SYNC_TIMEOUT_S: Final = 60.0


@contextmanager
def broker_stopped(server: KafkaServer) -> Iterator[None]:
    """The broker ends as by `systemctl stop`, and is back when the block is left."""
    server.kill(signal.SIGTERM)
    try:
        yield
    finally:
        server.start()


@contextmanager
def broker_silent(server: KafkaServer) -> Iterator[None]:
    """The broker is stopped where it stands: connections stay open and nothing is answered."""
    with server.stopped():
        yield


class SplitCluster:
    """Two brokers: the second one alone holds some partitions, everything else is on the first."""

    def __init__(self, directory: Path) -> None:
        self.first = KafkaServer(directory / "first")
        self.second = KafkaServer(
            directory / "second", node_id=2, cluster_id=self.first.cluster_id, controllers=self.first.controllers
        )
        self._on_second: dict[str, set[int]] = {}

    def start(self) -> None:
        self.first.start()
        self.second.start()

    def stop(self) -> None:
        self.second.kill()
        self.first.kill()

    def make_topics(self, prefix: str, partitions: Mapping[str, int], on_second: Mapping[str, Collection[int]]) -> str:
        """Make the topics of a node before its first start; the address for it."""
        url = self.first.url(prefix)
        address = KafkaAddress.parse(url)
        admin = self.first.admin()
        topics = [
            NewTopic(
                address.topic(name),
                num_partitions=count,
                replica_assignment=[
                    [(self.second if number in on_second.get(name, ()) else self.first).node_id]
                    for number in range(count)
                ],
                config={"flush.messages": "1", "message.timestamp.type": "LogAppendTime"},
            )
            for name, count in partitions.items()
        ]
        for made in admin.create_topics(topics).values():
            made.result(30)
        self._on_second = {address.topic(name): set(numbers) for name, numbers in on_second.items()}
        names = [address.topic(name) for name in partitions]
        wait_for(lambda: not any(self.unled(name) for name in names), timeout_s=_KNOWN_TIMEOUT_S)
        return url

    def unled(self, topic: str) -> set[int]:
        """Partitions of a topic that have no leader now; all of a topic that is not known yet are {-1}."""
        found = self.first.admin().list_topics(topic, timeout=10).topics[topic]
        if found.error or not found.partitions:
            return {-1}
        return {number for number, partition in found.partitions.items() if partition.leader < 0}

    @contextmanager
    def partitions_down(self) -> Iterator[None]:
        """What is on the second broker has no leader for the time of the block."""
        # not by SIGKILL: that would be missed after its session's 9 s only, and it is not let in again before
        self.second.kill(signal.SIGTERM)
        wait_for(
            lambda: all(self.unled(topic) == numbers for topic, numbers in self._on_second.items()),
            timeout_s=_KNOWN_TIMEOUT_S,
            every_s=0.1,
        )
        try:
            yield
        finally:
            self.second.start()

    @contextmanager
    def partitions_silent(self) -> Iterator[None]:
        """Whoever leads what is on the second broker answers nothing for the time of the block."""
        with self.second.stopped():
            yield


class ReplicatedCluster:
    """Three brokers that are controllers too, and every partition on all of them, two in sync: as production runs."""

    def __init__(self, directory: Path) -> None:
        cluster_id, controllers = new_cluster_id(), {number + 1: free_port() for number in range(BROKERS)}
        self._servers = [
            KafkaServer(
                directory / f"broker-{node_id}",
                node_id=node_id,
                cluster_id=cluster_id,
                controllers=controllers,
                session_timeout_ms=SESSION_TIMEOUT_MS,
            )
            for node_id in controllers
        ]

    def start(self) -> None:
        for server in self._servers:
            server.launch()
        for server in self._servers:
            server.wait_until_ready()

    def stop(self) -> None:
        for server in self._servers:
            server.kill()

    def url(self, prefix: str) -> str:
        """Address for a node whose topics begin with `prefix`; three replicas, as nothing else is said."""
        return f"kafka://{','.join(server.servers for server in self._servers)}/{prefix}"

    def out_of_sync(self) -> int:
        """Partitions of all topics that are not in sync on every broker they belong on."""
        topics = self._servers[0].admin().list_topics(timeout=10).topics.values()
        return sum(len(one.isrs) < len(one.replicas) for topic in topics for one in topic.partitions.values())

    @contextmanager
    def lost(self, *numbers: int) -> Iterator[None]:
        """kill -9 of these brokers, from 0 on; they are back and in sync when the block is left."""
        lost = [self._servers[number] for number in numbers]
        for server in lost:
            server.kill()
        try:
            yield
        finally:
            for server in lost:
                server.launch()
            for server in lost:
                server.wait_until_ready()
            wait_for(lambda: not self.out_of_sync(), timeout_s=_IN_SYNC_TIMEOUT_S, every_s=0.1)


ClusterKind = TypeVar("ClusterKind", SplitCluster, ReplicatedCluster)


@contextmanager
def _running(kind: Callable[[Path], ClusterKind]) -> Iterator[ClusterKind]:
    with tempfile.TemporaryDirectory(prefix="qim-kafka-") as directory:
        cluster = kind(Path(directory))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def running_split_cluster() -> AbstractContextManager[SplitCluster]:
    """Both brokers, started."""
    return _running(SplitCluster)


def running_replicated_cluster() -> AbstractContextManager[ReplicatedCluster]:
    """All three brokers, started."""
    return _running(ReplicatedCluster)
