"""A real Apache Kafka, KRaft nodes on private ports; its jars come by Maven once and are kept between runs.

Where Java is absent, or Maven while the jars are not there yet, tests marked `kafka` are left out and the summary says
so in one line; with QIM_TEST_KAFKA=required the run is refused instead.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from qim.runtime.parent_death import die_with_parent
from tests.support.ports import free_port
from tests.support.waiting import wait_for

REQUIRED_VARIABLE: Final = "QIM_TEST_KAFKA"
CACHE_VARIABLE: Final = "QIM_TEST_CACHE"
START_TIMEOUT_S: Final = 60.0
"""About 3 s on an idle machine, several times that on two busy cores."""
_RECIPE: Final = Path(__file__).parent / "kafka"
_POM: Final = _RECIPE / "pom.xml"


def jar_directory() -> Path:
    """Where the jars of this pom are kept: another pom is another directory."""
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qim-tests" / f"kafka-{hashlib.sha256(_POM.read_bytes()).hexdigest()[:16]}"


def what_is_missing() -> str:
    """Program that has to be installed before Kafka can run here, "" if none."""
    if shutil.which("java") is None:
        return "java"
    return "" if jar_directory().is_dir() or shutil.which("mvn") else "mvn"


def is_required() -> bool:
    return os.environ.get(REQUIRED_VARIABLE) == "required"


def fetch_jars() -> Path:
    """The directory of the jars, filled by Maven at the first call. CalledProcessError when it cannot."""
    directory = jar_directory()
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=directory.parent))
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={staged}"]
        subprocess.run(["mvn", "-q", "-B", "-f", str(_POM), *goal], check=True, stdin=subprocess.DEVNULL)
        try:
            staged.rename(directory)
        except OSError:  # another run was faster
            shutil.rmtree(staged)
    return directory


class KafkaServer:
    """A broker that a test may kill, stop and start again on the same data."""

    def __init__(
        self,
        directory: Path,
        *,
        node_id: int = 1,
        cluster_id: str | None = None,
        controllers: Mapping[int, int] | None = None,
        session_timeout_ms: int = 9_000,
    ) -> None:
        """A cluster of its own, or one more of `cluster_id`, whose controllers are these (node id -> port).

        `session_timeout_ms`: how long a broker that was killed counts as there, Kafka's own default.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.node_id: int = node_id
        self.cluster_id: str = cluster_id or new_cluster_id()
        self._port = free_port()
        self.controllers: Mapping[int, int] = controllers or {node_id: free_port()}
        self._session_timeout_ms = session_timeout_ms
        self._classpath = f"{fetch_jars()}/*"
        self._process: subprocess.Popen[bytes] | None = None
        self.servers = f"127.0.0.1:{self._port}"

    def url(self, prefix: str) -> str:
        """Address for a node whose topics begin with `prefix`."""
        return f"kafka://{self.servers}/{prefix}?replicas=1"

    def start(self) -> None:
        """Return when it answers."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Not in a thread that ends before the broker: it dies with its parent, and that is the thread."""
        properties = self._directory / "server.properties"
        if not properties.exists():
            properties.write_text(self._properties())
            self._java(
                "kafka.tools.StorageTool", "format", f"--cluster-id={self.cluster_id}", "-c", str(properties)
            ).wait(60)
        self._process = self._java("kafka.Kafka", str(properties))

    def wait_until_ready(self) -> None:
        wait_for(self._answers, timeout_s=START_TIMEOUT_S, every_s=0.2)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the process and reap it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for the time of the block: connected, but silent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.servers, "log_level": 0})

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "kafka.log").read_text()[-2000:]
        try:
            return self.node_id in self.admin().list_topics(timeout=2).brokers
        except KafkaException:
            return False

    def _java(self, main: str, *arguments: str) -> subprocess.Popen[bytes]:
        options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options.append(f"-Dlog4j2.configurationFile={_RECIPE / 'log4j2.properties'}")
        command = ["java", *options, "-cp", self._classpath, main, *arguments]
        with (self._directory / "kafka.log").open("ab") as log:
            die = partial(die_with_parent, os.getpid())
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die)

    def _properties(self) -> str:
        listeners = [f"PLAINTEXT://127.0.0.1:{self._port}"]
        if own_port := self.controllers.get(self.node_id):
            listeners.append(f"CONTROLLER://127.0.0.1:{own_port}")
        voters = ",".join(f"{node_id}@127.0.0.1:{port}" for node_id, port in self.controllers.items())
        lines = [
            f"process.roles={'broker,controller' if own_port else 'broker'}",
            f"node.id={self.node_id}",
            f"controller.quorum.voters={voters}",
            f"listeners={','.join(listeners)}",
            f"advertised.listeners={listeners[0]}",
            "controller.listener.names=CONTROLLER",
            f"log.dirs={self._directory / 'data'}",
            f"broker.session.timeout.ms={self._session_timeout_ms}",
            f"broker.heartbeat.interval.ms={self._session_timeout_ms // 4}",
            "offsets.topic.replication.factor=1",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
            "auto.create.topics.enable=false",
        ]
        return "\n".join(lines) + "\n"


def new_cluster_id() -> str:
    """May begin with a dash, so it must not stand alone in a command line."""
    return base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")


@contextmanager
def running_kafka() -> Iterator[KafkaServer]:
    """A started broker in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="qim-kafka-") as directory:
        server = KafkaServer(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.kill()
