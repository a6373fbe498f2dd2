"""Probe of a Kafka or Redpanda cluster before a node uses it, and creation of its topics at the first start.

Runs as a process of its own (`python -m qim.commit_log.kafka_topics`), because a supervisor may create no thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec

from qim.commit_log.api import LogIdentity
from qim.commit_log.kafka import CALL_TIMEOUT_S, RECORD_BYTES_MAX, describe, store_error
from qim.commit_log.kafka_address import KafkaAddress
from qim.errors import StartupError, StoreError, StoreUnavailable
from qim.runtime.clock import SystemClock

OUTBOX: Final = "outbox"
DISPATCH: Final = "dispatch"
REACH_TIMEOUT_S: Final = 30.0
"""A broker that starts together with the node is waited for so long."""
_CREATE_TIMEOUT_S: Final = 30.0
_PROCESS_TIMEOUT_S: Final = 120.0
_RETRY_S: Final = 0.2
_IN_SYNC_MIN: Final = 2


def prepare_topics(
    url: str, partitions: Mapping[str, int], *, first_start: bool, retention_ms: int
) -> dict[str, LogIdentity]:
    """Identities of the topics, by short name. StartupError, one line, when they are missing, unfit or not ours.

    At the first start they are made if they do not exist, and must be empty. Blocks for seconds; leaves no thread.
    """
    KafkaAddress.parse(url)
    asked = json.dumps({"partitions": dict(partitions), "first_start": first_start, "retention_ms": retention_ms})
    command = [sys.executable, "-m", __name__, url, asked]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_PROCESS_TIMEOUT_S, check=True)
        answer = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise StartupError(f"cannot probe the commit log {url}: {error}") from None
    if "problem" in answer:
        raise StartupError(answer["problem"])
    return {name: LogIdentity(**identity) for name, identity in answer["identities"].items()}


class _Probe:
    """One look at a cluster."""

    def __init__(self, address: KafkaAddress, partitions: Mapping[str, int], retention_ms: int) -> None:
        self._address = address
        self._partitions = partitions
        self._retention_ms = retention_ms
        self._clock = SystemClock()
        self._admin = AdminClient(address.client_settings())

    def run(self, *, first_start: bool) -> dict[str, LogIdentity]:
        self._reach()
        if first_start:
            self._create_missing()
        failure: StoreError | None = None
        for _ in self._tries(REACH_TIMEOUT_S):
            try:
                return self._inspect(first_start=first_start)
            except StoreUnavailable as error:
                failure = error
            except KafkaException as error:
                failure = store_error(f"Kafka at {self._address.servers}", error)
            except TimeoutError:
                failure = StoreUnavailable(f"Kafka at {self._address.servers} did not answer")
            # Answers about topics that are being made are remembered by a client.
            self._admin = AdminClient(self._address.client_settings())
        raise StartupError(str(failure))

    def _inspect(self, *, first_start: bool) -> dict[str, LogIdentity]:
        try:
            found = describe(self._admin, self._address, list(self._partitions))
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StartupError(
                f"{error}: a node that has run before finds its log or does not start; correct the address of the "
                "commit log or bring its topics back"
            ) from None
        for name, count in self._partitions.items():
            if found[name].partition_count != count:
                raise StartupError(
                    f"topic {self._address.topic(name)} has {found[name].partition_count} partitions, the node needs "
                    f"exactly {count}: name another prefix"
                )
            self._check_replicas(name)
            self._check_settings(name)
            if first_start and self._holds_records(name, count):
                raise StartupError(
                    f"topic {self._address.topic(name)} holds records of another node, this one is new: name another "
                    "prefix, or restore the data directory they belong to"
                )
        return found

    def _reach(self) -> None:
        for _ in self._tries(REACH_TIMEOUT_S):
            try:
                self._admin.describe_cluster(request_timeout=CALL_TIMEOUT_S).result(CALL_TIMEOUT_S + 1)
            except (KafkaException, TimeoutError):
                continue
            return
        raise StartupError(
            f"no Kafka answers at {self._address.servers}: start it or correct the address of the commit log"
        )

    def _tries(self, timeout_s: float) -> Iterator[None]:
        """One now, then one each moment until the time is over."""
        deadline_ms = self._clock.monotonic_ms() + timeout_s * 1000
        yield
        while self._clock.monotonic_ms() < deadline_ms:
            time.sleep(_RETRY_S)
            yield

    def _create_missing(self) -> None:
        wanted = [
            NewTopic(self._address.topic(name), count, self._address.replicas, config=self._settings())
            for name, count in self._partitions.items()
        ]
        for topic, made in self._admin.create_topics(wanted, operation_timeout=_CREATE_TIMEOUT_S).items():
            try:
                made.result(_CREATE_TIMEOUT_S + CALL_TIMEOUT_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise StartupError(f"cannot make the topic {topic}: {error.args[0].str()}") from None
        self._wait_until_known()

    def _wait_until_known(self) -> None:
        """A broker tells of a topic some time after the controller has made it."""
        for _ in self._tries(_CREATE_TIMEOUT_S):
            try:
                describe(self._admin, self._address, list(self._partitions))
            except StoreError:
                continue
            return
        raise StartupError(
            f"Kafka at {self._address.servers} made the topics {self._address.prefix}.* and does not know them"
        )

    def _settings(self) -> dict[str, str]:
        settings = {
            "cleanup.policy": "delete",
            "unclean.leader.election.enable": "false",
            "message.timestamp.type": "LogAppendTime",
            "retention.ms": str(self._retention_ms),
            "min.insync.replicas": str(_IN_SYNC_MIN if self._address.replicas > 1 else 1),
        }
        if self._address.replicas == 1:
            settings["flush.messages"] = "1"
        return settings

    def _check_replicas(self, name: str) -> None:
        topic = self._address.topic(name)
        metadata = self._admin.list_topics(topic, timeout=CALL_TIMEOUT_S).topics[topic]
        least = min(len(partition.replicas) for partition in metadata.partitions.values())
        if least < self._address.replicas:
            raise StartupError(
                f"topic {topic} has {least} replicas, {self._address.replicas} are needed; a single box may say "
                "?replicas=1 in the address"
            )

    def _check_settings(self, name: str) -> None:
        """A setting a broker does not have is its own guarantee: Redpanda elects no unclean leader and commits by
        majority."""
        topic = self._address.topic(name)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        described = self._admin.describe_configs([resource], request_timeout=CALL_TIMEOUT_S)[resource]
        found = {key: entry.value for key, entry in described.result(CALL_TIMEOUT_S + 1).items()}
        single = self._address.replicas == 1
        rules: dict[str, tuple[str, Callable[[str], bool]]] = {
            "cleanup.policy": ("delete", lambda text: text == "delete"),
            "unclean.leader.election.enable": ("false", lambda text: single or text == "false"),
            "min.insync.replicas": (f"{_IN_SYNC_MIN}", lambda text: single or int(text) >= _IN_SYNC_MIN),
            "flush.messages": ("1, as it has one replica", lambda text: not single or text == "1"),
            "max.message.bytes": (f"at least {RECORD_BYTES_MAX + 1024}", lambda t: int(t) >= RECORD_BYTES_MAX + 1024),
            "retention.ms": (
                f"at least {self._retention_ms}", lambda t: int(t) < 0 or int(t) >= self._retention_ms
            ),
        }  # fmt: skip
        for key, (wanted, is_fit) in rules.items():
            if key in found and not is_fit(found[key]):
                raise StartupError(f"topic {topic} has {key} {found[key]}: set it to {wanted}")

    def _holds_records(self, name: str, count: int) -> bool:
        return any(TopicEnds(self._address, self._address.topic(name), count, admin=self._admin).read())


class TopicEnds:
    """High watermarks of all partitions of a topic, by one question."""

    def __init__(self, address: KafkaAddress, topic: str, partitions: int, *, admin: AdminClient | None = None) -> None:
        self._admin = admin or AdminClient(address.client_settings())
        self._asked = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(partitions)}
        self._topic = topic

    def read(self) -> list[int]:
        """By partition. StoreError when the broker does not answer or does not lead them."""
        try:
            answers = self._admin.list_offsets(self._asked, request_timeout=CALL_TIMEOUT_S)
            ends = {asked.partition: answer.result(CALL_TIMEOUT_S + 1).offset for asked, answer in answers.items()}
        except KafkaException as error:
            raise store_error(f"ends of {self._topic}", error) from None
        except TimeoutError:
            raise StoreUnavailable(f"no answer about {self._topic}") from None
        return [ends[partition] for partition in sorted(ends)]


def main(arguments: Sequence[str]) -> int:
    """Print `{"identities": …}` or `{"problem": one line}`."""
    url, asked = arguments[0], json.loads(arguments[1])
    address = KafkaAddress.parse(url)
    answer: dict[str, object]
    try:
        probe = _Probe(address, asked["partitions"], asked["retention_ms"])
        identities = probe.run(first_start=asked["first_start"])
        answer = {"identities": {name: asdict(identity) for name, identity in identities.items()}}
    except (StartupError, StoreError) as error:
        answer = {"problem": str(error)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
