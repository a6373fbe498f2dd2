"""Where a Kafka or Redpanda cluster is and which topics of it are ours: `kafka://HOST:PORT[,…][/PREFIX][?replicas=1]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from qim.core.ids import is_name
from qim.errors import StartupError

SCHEME: Final = "kafka"
DEFAULT_PREFIX: Final = "qim"
DEFAULT_REPLICAS: Final = 3
_USAGE: Final = "kafka://HOST:PORT[,HOST:PORT…][/PREFIX][?replicas=1][&client=FILE]"

# Local waits end long before a person's patience, reconnects come as fast as a broker restarts.
_COMMON: Final[dict[str, Any]] = {
    "socket.nagle.disable": True,
    "socket.connection.setup.timeout.ms": 5000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
    "retry.backoff.max.ms": 1000,
    # its own lines would not be JSON; `error_cb` says what matters
    "log_level": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaAddress:
    servers: str
    """host:port, separated by commas."""
    prefix: str = DEFAULT_PREFIX
    """Topics are `<prefix>.outbox` and `<prefix>.dispatch`."""
    replicas: int = DEFAULT_REPLICAS
    """Of topics made here, and the least that is accepted; 1 only where it was asked for: one box, tests."""
    client_file: str = ""
    """Properties of librdkafka, `name=value` a line: TLS and SASL."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """StartupError, one line, for anything that is not such an address."""
        parts = urlsplit(url)
        query = parse_qs(parts.query, keep_blank_values=True)
        prefix = parts.path.removeprefix("/") or DEFAULT_PREFIX
        servers = parts.netloc.split(",")
        replicas = query.pop("replicas", [str(DEFAULT_REPLICAS)])[-1]
        client_file = query.pop("client", [""])[-1]
        if parts.scheme != SCHEME or query or parts.fragment or not all(map(_is_server, servers)):
            raise StartupError(f"{url!r} is not the address of a commit log: write {_USAGE}")
        if not is_name(prefix) or "@" in prefix:
            raise StartupError(f"{url!r}: the prefix of the topics must match [A-Za-z0-9._-]{{1,64}}")
        if replicas != "1" and not (replicas.isdecimal() and int(replicas) >= DEFAULT_REPLICAS):
            raise StartupError(f"{url!r}: replicas is 1 (one box, tests) or at least {DEFAULT_REPLICAS}")
        return cls(servers=parts.netloc, prefix=prefix, replicas=int(replicas), client_file=client_file)

    def topic(self, name: str) -> str:
        """Full name of the topic `outbox` or `dispatch`."""
        return f"{self.prefix}.{name}"

    def client_settings(self) -> dict[str, Any]:
        """What every librdkafka object of ours starts from. StartupError when the properties cannot be read."""
        return {**self._client_properties(), **_COMMON, "bootstrap.servers": self.servers, "client.id": "qim"}

    def _client_properties(self) -> dict[str, str]:
        if not self.client_file:
            return {}
        try:
            lines = Path(self.client_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"cannot read the Kafka client properties {self.client_file}: {error}") from None
        properties = [line.partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return {name.strip(): value.strip() for name, _, value in properties}


def _is_server(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
