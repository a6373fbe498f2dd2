"""What a client of this host knows about a running node, and the calls to its admin plane."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from qim.app.tls import client_context
from qim.errors import QimError, StartupError

CONNECT_FILE: Final = "connect.json"
_CALL_TIMEOUT_S: Final = 10
"""Covers `submit_timeout` (2 s) and a worker that is being restarted."""
_CALLS_AT_ONCE: Final = 8


class AdminRefusal(QimError):
    """The admin plane answered no; the text is its reason."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Contents of `<data>/connect.json`."""

    host: str
    port: int
    admin_port: int
    ca_path: str
    admin_token_path: str
    data_dir: str
    run_dir: str
    pid: int
    core_address: str
    """Private server of commits, registry and logs, for programs that check what is stored."""
    mailbox_address: str
    conversation_bucket_count: int
    mailbox_shard_count: int
    unlimited_tenant: str = ""
    commit_log: str = ""
    """Address of the broker the logs are in, "" = embedded."""

    def write(self, path: Path) -> None:
        staged = path.with_suffix(".new")
        staged.write_bytes(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))
        staged.replace(path)

    @classmethod
    def read(cls, data_dir: Path) -> NodeAddress:
        """Of the node that runs in `data_dir`; StartupError if none ever did."""
        path = data_dir / CONNECT_FILE
        try:
            raw = orjson.loads(path.read_bytes())
            return cls(**{field.name: raw[field.name] for field in fields(cls)})
        except OSError:
            raise StartupError(f"no node runs in {data_dir}; start one with: qim up --data {data_dir}") from None
        except (ValueError, KeyError, TypeError):
            raise StartupError(f"{path} is damaged; start the node again: qim up --data {data_dir}") from None

    @property
    def client_host(self) -> str:
        """Where a client of this host connects: a wildcard is nobody's address."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104 - compared, not bound

    def admin_token(self) -> str:
        """StartupError when the file is not readable."""
        try:
            return Path(self.admin_token_path).read_text().strip()
        except OSError as error:
            raise StartupError(f"cannot read the admin token {self.admin_token_path}: {error.strerror}") from None

    def client_tls(self) -> ssl.SSLContext:
        return client_context(Path(self.ca_path))


class AdminClient:
    """Calls of the admin plane over one connection pool; use as `async with`."""

    def __init__(self, address: NodeAddress) -> None:
        self._address = address
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AdminClient:
        address = self._address
        admin_token = address.admin_token()
        context = client_context(Path(address.ca_path), alpn=("http/1.1",))
        self._session = aiohttp.ClientSession(
            base_url=f"https://{address.client_host}:{address.admin_port}",
            connector=aiohttp.TCPConnector(ssl=context, limit=_CALLS_AT_ONCE),
            headers={"Authorization": f"Bearer {admin_token}"},
            timeout=aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def token(self, tenant: str, user: str, device: str, ttl_s: int) -> str:
        """An access token of the device."""
        answer = await self._call("POST", "/v1/tokens", tenant=tenant, user=user, device=device, ttl_s=ttl_s)
        return str(answer["token"])

    async def add_members(self, tenant: str, group: str, users: Sequence[str]) -> int:
        """`conversation_seq` of the control message, 0 when all were members."""
        return await self._change_members(tenant, group, add=list(users))

    async def remove_members(self, tenant: str, group: str, users: Sequence[str]) -> int:
        """`conversation_seq` of the control message, 0 when none was a member."""
        return await self._change_members(tenant, group, remove=list(users))

    async def problems(self) -> list[str]:
        """Why the node is not ready; empty = it is."""
        try:
            await self._call("GET", "/readyz")
        except AdminRefusal as refusal:
            return [str(refusal)]
        return []

    async def metrics_endpoints(self) -> list[dict[str, str]]:
        answer = await self._call("GET", "/metrics-endpoints")
        return list(answer["endpoints"])

    async def _change_members(self, tenant: str, group: str, **change: list[str]) -> int:
        answer = await self._call("POST", f"/v1/groups/{group}/members", tenant=tenant, **change)
        return int(answer["conversation_seq"])

    async def _call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        if self._session is None:
            raise RuntimeError("AdminClient is used outside of `async with`")
        try:
            async with self._session.request(method, path, data=orjson.dumps(body) if body else None) as response:
                answer: dict[str, Any] = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AdminRefusal(503, "UNREACHABLE", f"the admin plane does not answer: {error!r}") from error
        if response.status >= 400:
            problems = "; ".join(answer.get("problems", []))
            raise AdminRefusal(response.status, answer.get("code", "NOT_READY"), answer.get("detail", problems))
        return answer


async def wait_until_ready(address: NodeAddress, timeout_s: float) -> None:
    """Return when the node is ready; StartupError, naming what is not, after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with AdminClient(address) as admin:
        while problems := await admin.problems():
            if asyncio.get_running_loop().time() >= deadline:
                raise StartupError(f"the node is not ready after {timeout_s:.0f} s: {problems[0]}")
            await asyncio.sleep(0.05)
