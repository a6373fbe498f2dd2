"""HTTP plane of a node: dev tokens, GroupAdd and GroupRemove, health, readiness and the list of metrics endpoints.

Every answer is JSON; a refusal is `{"code": …, "detail": …}` with one line that says what is wrong. Everything under
`/v1` needs the admin bearer token. An unexpected failure is logged here and tells the peer nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import orjson
from aiohttp import web

from qim.admin.tokens import TokenIssuer
from qim.backplane.api import Backplane, PeerUnavailable
from qim.core.ids import conversation_bucket, group_conversation_id, is_name
from qim.errors import ErrorCode, StoreError
from qim.obs.logs import get_logger
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import GroupReply, SubmitGroupChange
from qim.registry.api import LeaseKind, ShardRegistry
from qim.runtime.clock import Clock

log = get_logger(__name__)

BODY_BYTES_MAX: Final = 256 << 10
"""500 users of 64 characters and their punctuation fit several times."""
USERS_PER_CALL_MAX: Final = 500
"""DESIGN-data §8: GroupAdd takes at most 500 users a call."""
TOKEN_TTL_S: Final = 3600
"""`access_token_ttl` (B.4)."""

_HTTP_STATUS: Final[Mapping[int, int]] = {
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.FANOUT_QUOTA_EXCEEDED: 429,
    ErrorCode.REGION_FAILOVER: 503,
    ErrorCode.SHARD_MOVED: 503,
    ErrorCode.CLOCK_UNSAFE: 503,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.PAYLOAD_TOO_LARGE: 413,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NodeStatus(Protocol):
    """What the plane tells about the rest of the node."""

    async def problems(self) -> list[str]:
        """Why the node is not ready, one line each; empty = ready."""
        ...

    def metrics_endpoints(self) -> list[dict[str, str]]: ...


class Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str, detail: str, retry_after_ms: int = 0) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.retry_after_ms = retry_after_ms


class AdminPlane:
    """The handlers; `application()` gives them to aiohttp."""

    def __init__(
        self,
        *,
        admin_token: str,
        tokens: TokenIssuer,
        registry: ShardRegistry,
        backplane: Backplane,
        status: NodeStatus,
        clock: Clock,
        conversation_bucket_count: int,
        submit_timeout_ms: int,
    ) -> None:
        self._admin_token = admin_token.encode()
        self._tokens = tokens
        self._registry = registry
        self._backplane = backplane
        self._status = status
        self._clock = clock
        self._bucket_count = conversation_bucket_count
        self._submit_timeout_ms = submit_timeout_ms

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_refusals_as_json])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics-endpoints", self._metrics_endpoints)
        app.router.add_post("/v1/tokens", self._issue_token)
        app.router.add_post("/v1/groups/{group_id}/members", self._change_members)
        return app

    async def _healthz(self, _: web.Request) -> web.Response:
        return _json({"ok": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        problems = await self._status.problems()
        return _json({"ready": not problems, "problems": problems}, status=503 if problems else 200)

    async def _metrics_endpoints(self, _: web.Request) -> web.Response:
        return _json({"endpoints": self._status.metrics_endpoints()})

    async def _issue_token(self, request: web.Request) -> web.Response:
        body = await self._authorized_body(request)
        ttl_s = body.get("ttl_s", TOKEN_TTL_S)
        if not isinstance(ttl_s, int) or isinstance(ttl_s, bool):
            raise Refusal(400, "BAD_REQUEST", "ttl_s must be a whole number of seconds")
        try:
            token = self._tokens.issue(
                tenant_id=_text(body, "tenant"),
                user_id=_text(body, "user"),
                device_id=_text(body, "device"),
                now_ms=self._clock.unix_ms(),
                ttl_s=ttl_s,
            )
        except ValueError as error:
            raise Refusal(400, "BAD_REQUEST", str(error)) from error
        return _json({"token": token, "expires_in_s": ttl_s})

    async def _change_members(self, request: web.Request) -> web.Response:
        body = await self._authorized_body(request)
        group_id = request.match_info["group_id"]
        opcode, users = _change(body)
        change = SubmitGroupChange(
            tenant_id=_text(body, "tenant"),
            group_id=group_id,
            user_ids=users,
            operator=_text({"operator": "admin"} | body, "operator"),
        )
        for name in (group_id, change.tenant_id, change.operator, *users):
            if not is_name(name):
                raise Refusal(400, "BAD_REQUEST", "names must match [A-Za-z0-9._@-]{1,64}")
        reply = await self._submit(change, opcode)
        if reply.HasField("error"):
            error = reply.error
            code = ErrorCode(error.code).name if error.code else "REFUSED"
            status = _HTTP_STATUS.get(error.code, 400)
            raise Refusal(status, code, error.detail or "the writer refused it", error.retry_after_ms)
        return _json({"conversation_seq": reply.conversation_seq, "membership_version": reply.membership_version})

    async def _submit(self, change: SubmitGroupChange, opcode: InternalOpcode) -> GroupReply:
        """Ask the writer that owns the group's bucket; it is safe to repeat (DESIGN-data §8)."""
        conversation = group_conversation_id(change.group_id)
        bucket = conversation_bucket(change.tenant_id, conversation, self._bucket_count)
        try:
            route = await self._registry.current(LeaseKind.CONVERSATION_BUCKET, bucket)
            if route is None:
                raise PeerUnavailable(f"bucket {bucket} has no owner")
            answer = await self._backplane.request(
                route.owner, opcode, change.SerializeToString(), timeout_ms=self._submit_timeout_ms
            )
        except (PeerUnavailable, StoreError) as error:
            log.warning("group_change_unanswered", bucket=bucket, reason=str(error))
            raise Refusal(503, "REGION_FAILOVER", "the writer did not answer; try again", 2000) from error
        return GroupReply.FromString(answer)

    async def _authorized_body(self, request: web.Request) -> dict[str, Any]:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not hmac.compare_digest(given.strip().encode(), self._admin_token):
            raise Refusal(401, "UNAUTHORIZED", "send the admin token: Authorization: Bearer <token>")
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise Refusal(400, "BAD_REQUEST", "the body is not JSON") from error
        if not isinstance(body, dict):
            raise Refusal(400, "BAD_REQUEST", "the body is not a JSON object")
        return body


def _change(body: dict[str, Any]) -> tuple[InternalOpcode, list[str]]:
    if ("add" in body) == ("remove" in body):
        raise Refusal(400, "BAD_REQUEST", "give either add or remove, a list of users")
    name, opcode = (
        ("add", InternalOpcode.SUBMIT_GROUP_ADD) if "add" in body else ("remove", InternalOpcode.SUBMIT_GROUP_REMOVE)
    )
    users = body[name]
    if not isinstance(users, list) or not users or not all(isinstance(user, str) for user in users):
        raise Refusal(400, "BAD_REQUEST", f"{name} must be a list of users")
    if len(users) > USERS_PER_CALL_MAX:
        raise Refusal(400, "BAD_REQUEST", f"{name} takes at most {USERS_PER_CALL_MAX} users a call")
    return opcode, users


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise Refusal(400, "BAD_REQUEST", f"{field} is missing or not a string")
    return value


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


@web.middleware
async def _refusals_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        answer: dict[str, str | int] = {"code": refusal.code, "detail": str(refusal)}
        if refusal.retry_after_ms:
            answer["retry_after_ms"] = refusal.retry_after_ms
        return _json(answer, refusal.status)
    except web.HTTPException as error:
        return _json({"code": "HTTP_ERROR", "detail": error.reason}, error.status)
    except Exception as error:  # noqa: BLE001 - the border: whatever it is, the peer gets JSON and the log the reason
        log.error("admin_request_failed", path=request.path, error=error)
        return _json({"code": "INTERNAL", "detail": "internal error; the node's log tells more"}, 500)
