"""A broker that stops, and one partition that nobody leads."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from confluent_kafka.admin import NewTopic

from qim.commit_log.kafka_address import KafkaAddress
from tests.support.kafka_server import KafkaServer
from tests.support.waiting import wait_for

_KNOWN_TIMEOUT_S: Final = 30.0


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
        self.second = KafkaServer(directory / "second", first=self.first)
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


@contextmanager
def running_split_cluster() -> Iterator[SplitCluster]:
    """Both brokers, started."""
    with tempfile.TemporaryDirectory(prefix="qim-kafka-") as directory:
        cluster = SplitCluster(Path(directory))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
