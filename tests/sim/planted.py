"""Rules taken out one at a time, each as it would be forgotten in the product; the simulation must notice.

`PLANTED` must be found; `TRIPWIRES` are rules that another one covers, so that taking out one alone is not noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from qim.client.sync import SyncState
from qim.commit_log.memory import MemoryCheckpointStore, _Position
from qim.config.parameters import Parameters
from qim.core.hlc import HybridClock
from qim.core.seq import mailbox_seq, shard_epoch_of
from qim.errors import StoreError
from qim.protocol import qim_pb2 as pb
from qim.registry.api import LeaseKind
from qim.registry.lease import LeaseTimes
from qim.registry.memory import MemoryShardRegistry
from qim.shard_workers.conversation.runner import WriterRole
from qim.shard_workers.fanout.runner import FanoutRole
from qim.shard_workers.mailbox.dirty import DirtySpreader
from qim.shard_workers.mailbox.expand import Dispatch
from qim.shard_workers.mailbox.fold import AdmissionFold, Verdict
from qim.shard_workers.mailbox.lanes import Work
from qim.shard_workers.mailbox.machine import PlannedCall, ShardMachine
from qim.shard_workers.mailbox.requests import GatewayRequests
from qim.stores.api import AppendCall, CommitRequest
from qim.stores.memory_mailbox import MemoryMailboxStore
from qim.stores.memory_message import MemoryMessageStore
from tests.sim import cluster, servers

Planting = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _with(*patches: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def checkpoint_before_durable() -> contextlib.AbstractContextManager[None]:
    """The fan-out checkpoint covers records whose dispatches are not durable yet."""

    async def append(self: FanoutRole, calls: Any) -> None:
        for partition, _ in calls:
            machine = partition.machine
            ahead = machine.feed.next_offset
            if ahead > machine.saved:
                with contextlib.suppress(StoreError):  # as the product: a save that fails is made again
                    await self._checkpoints.save(partition.number, partition.epoch, ahead)
                    machine.checkpoint_saved(ahead, self._clock.monotonic_ms())
        await original(self, calls)

    original = FanoutRole._append
    return _with(mock.patch.object(FanoutRole, "_append", append))


def checkpoint_goes_back() -> contextlib.AbstractContextManager[None]:
    """A late save of an older fan-out instance is taken as it comes."""

    async def save(self: MemoryCheckpointStore, partition: int, fanout_epoch: int, next_offset: int) -> None:
        self._positions.setdefault(partition, _Position()).next_offset = next_offset

    return _with(mock.patch.object(MemoryCheckpointStore, "save", save))


def offset_before_entries() -> contextlib.AbstractContextManager[None]:
    """C is stored as soon as a record is read, and the next owner starts behind it."""

    def next_call(self: ShardMachine, *args: Any) -> PlannedCall | None:
        call = original(self, *args)
        if call is not None and call.append.watermarks is not None:
            call.append = replace(call.append, fold=self._fold.encode(), fold_offset=self._fold.next_offset - 1)
        return call

    original = ShardMachine.next_call
    return _with(
        mock.patch.object(ShardMachine, "next_call", next_call),
        mock.patch("qim.stores.memory_mailbox.check_append"),
    )


def bits_not_checked() -> contextlib.AbstractContextManager[None]:
    """W moves on the word of the call, whether the chunks below it are stored or not."""

    async def append(self: MemoryMailboxStore, call: AppendCall) -> Any:
        if call.watermarks is not None:
            call = replace(call, watermarks=replace(call.watermarks, required=()))
        return await original(self, call)

    original = MemoryMailboxStore.append
    return _with(mock.patch.object(MemoryMailboxStore, "append", append))


def no_reopen() -> contextlib.AbstractContextManager[None]:
    """What was opened on one connection counts as open on the next."""

    def refresh(self: servers.SimMailboxStore) -> None:
        self._generation = self._connection.generation

    return _with(mock.patch.object(servers.SimMailboxStore, "_refresh", refresh))


def registry_epoch_compared() -> contextlib.AbstractContextManager[None]:
    """What a writer acknowledged before the next grant is dropped as stale."""
    made: list[cluster.Cluster] = []

    def make(self: cluster.Cluster, plan: Any) -> None:
        original_make(self, plan)
        made.append(self)

    def admit(
        self: AdmissionFold, log_offset: int, bucket: int, source: tuple[int, int], epoch: int, *rest: Any
    ) -> Verdict:
        verdict = original(self, log_offset, bucket, source, epoch, *rest)
        held = made[-1].registry._leases[LeaseKind.CONVERSATION_BUCKET].get(bucket)
        return Verdict.STALE if held is not None and epoch < held.epoch else verdict

    original_make = cluster.Cluster.__init__
    original = AdmissionFold.admit
    return _with(mock.patch.object(cluster.Cluster, "__init__", make), mock.patch.object(AdmissionFold, "admit", admit))


def no_source_high() -> contextlib.AbstractContextManager[None]:
    """What a restarted fan-out produces again is materialized again."""

    def admit(
        self: AdmissionFold, log_offset: int, bucket: int, source: tuple[int, int], epoch: int, *rest: Any
    ) -> Verdict:
        verdict = original(self, log_offset, bucket, source, epoch, *rest)
        return Verdict.ADMITTED if verdict is Verdict.DUPLICATE else verdict

    original = AdmissionFold.admit
    return _with(mock.patch.object(AdmissionFold, "admit", admit))


def refused_not_missed() -> contextlib.AbstractContextManager[None]:
    """A dispatch counts although the broker refused the one before it in its call."""

    def admit(
        self: AdmissionFold, log_offset: int, bucket: int, source: tuple[int, int], epoch: int, *_: Any
    ) -> Verdict:
        return original(self, log_offset, bucket, source, epoch)

    original = AdmissionFold.admit
    return _with(mock.patch.object(AdmissionFold, "admit", admit))


def rows_not_of_c() -> contextlib.AbstractContextManager[None]:
    """The rows saved with C are those of the newest record, not of C."""

    def next_call(self: ShardMachine, *args: Any) -> PlannedCall | None:
        call = original(self, *args)
        if call is not None and call.append.fold is not None:
            rows = AdmissionFold.decode(self._fold.encode())
            rows.next_offset = AdmissionFold.decode(call.append.fold).next_offset
            call.append = replace(call.append, fold=rows.encode())
        return call

    original = ShardMachine.next_call
    return _with(mock.patch.object(ShardMachine, "next_call", next_call))


def trimmed_to_newest_c() -> contextlib.AbstractContextManager[None]:
    """The dispatch log is trimmed up to a C that the instance can still lose."""

    def make(self: cluster.Cluster, plan: Any) -> None:
        original(self, plan)
        self.trim_after_s = 0.0

    original = cluster.Cluster.__init__
    return _with(mock.patch.object(cluster.Cluster, "__init__", make), mock.patch.object(cluster, "TRIM_EVERY_S", 0.1))


def chunk_size_changed() -> contextlib.AbstractContextManager[None]:
    """A replay cuts a dispatch into chunks of today's size and believes the bits of yesterday's."""

    def replayed(self: ShardMachine, dispatch: Dispatch) -> Work | None:
        work = original(self, dispatch)
        if work is not None and work.stored:
            work.stored = {lane: replace(row, chunk_size=self._chunk_size) for lane, row in work.stored.items()}
        return work

    async def append(self: MemoryMailboxStore, call: AppendCall) -> Any:
        held = self._held.shards.get(call.shard)
        for item in call.tenant_items if held is not None else ():
            assert held is not None
            lanes = {lane for lane, _ in item.lanes}
            for (offset, lane), row in list(held.progress.items()):
                if offset == item.log_offset:
                    count = item.chunk_count if lane in lanes else row.chunk_count
                    held.progress[offset, lane] = replace(row, chunk_size=item.chunk_size, chunk_count=count)
        return await append_original(self, call)

    original = ShardMachine._replayed
    append_original = MemoryMailboxStore.append
    return _with(
        mock.patch.object(ShardMachine, "_replayed", replayed),
        mock.patch.object(MemoryMailboxStore, "append", append),
    )


def cursor_moved_by_push() -> contextlib.AbstractContextManager[None]:
    """A push advances the device's cursor."""

    def on_push(self: SyncState, push: pb.PushEvents, now_ms: int) -> None:
        original(self, push, now_ms)
        newest = max((entry.mailbox_seq for entry in push.events), default=0)
        if self.phase.value == "live" and not self.dirty and newest > self.cursor.last_applied_mailbox_seq:
            self.cursor = self.cursor._replace(last_applied_mailbox_seq=newest)
            self._save_cursor()

    original = SyncState.on_push
    return _with(mock.patch.object(SyncState, "on_push", on_push))


def message_id_reissued() -> contextlib.AbstractContextManager[None]:
    """A new writer starts from its own clock, and the store takes any id."""

    async def open_bucket(self: WriterRole, grant: Any) -> None:
        with mock.patch.object(HybridClock, "observe"):
            await original(self, grant)

    def refusal(self: MemoryMessageStore, state: Any, request: CommitRequest) -> Any:
        kept, state.hlc = state.hlc, bytes(16)
        try:
            return judge(self, state, request)
        finally:
            state.hlc = kept

    original = WriterRole.open_shard
    judge = MemoryMessageStore._refusal
    return _with(
        mock.patch.object(WriterRole, "open_shard", open_bucket),
        mock.patch.object(MemoryMessageStore, "_refusal", refusal),
    )


def watermark_before_index() -> contextlib.AbstractContextManager[None]:
    """A login reads W first and enters the online index a moment later, as by a second message."""

    async def open_session(self: GatewayRequests, peer: str, body: bytes) -> bytes:
        answer = await original(self, peer, body)
        request = pb.OpenSession.FromString(body)
        target = request.device
        if not request.reopen and not pb.OpenSessionReply.FromString(answer).HasField("error"):
            where = (target.tenant_id, target.user_id)
            found = [
                device for device in self._index.devices_of(*where) if device.connection_id == target.connection_id
            ]
            self._index.close(*where, request.gateway, target.connection_id)
            for device in found:
                asyncio.get_running_loop().call_later(0.01, self._index.open, device)
        return answer

    original = GatewayRequests.open_session
    return _with(mock.patch.object(GatewayRequests, "open_session", open_session))


def dirty_before_link() -> contextlib.AbstractContextManager[None]:
    """Connections are told when the link breaks, into the dead link, not when its replacement is up."""

    def link_changed(self: DirtySpreader, gateway: str, up: bool, now_ms: float) -> None:
        (self._links_down.discard if up else self._links_down.add)(gateway)

    return _with(mock.patch.object(DirtySpreader, "link_changed", link_changed))


def reload_without_push() -> contextlib.AbstractContextManager[None]:
    """A reload that finds W ahead of what was acknowledged tells nobody."""

    def restore(self: ShardMachine, *args: Any) -> list[int]:
        original(self, *args)
        return []

    original = ShardMachine.restore
    return _with(mock.patch.object(ShardMachine, "restore", restore))


def no_predecessor_check() -> contextlib.AbstractContextManager[None]:
    """A pipelined send is committed whether the one before it is or not."""

    def refusal(self: MemoryMessageStore, state: Any, request: CommitRequest) -> Any:
        return original(self, state, replace(request, after_client_message_id=""))

    original = MemoryMessageStore._refusal
    return _with(mock.patch.object(MemoryMessageStore, "_refusal", refusal))


def served_by_epoch() -> contextlib.AbstractContextManager[None]:
    """A lane is served once its W carries the new epoch."""

    def serves(self: ShardMachine, lane: int) -> bool:
        return original(self, lane) and (
            not self._takeover_high or shard_epoch_of(self.acked[lane]) == self.shard_epoch
        )

    original = ShardMachine.serves
    return _with(mock.patch.object(ShardMachine, "serves", serves))


def replayed_under_own_epoch() -> contextlib.AbstractContextManager[None]:
    """A replay writes old offsets under the epoch of today."""

    def seq_of(self: ShardMachine, log_offset: int) -> int:
        return mailbox_seq(self.shard_epoch, log_offset) if log_offset >= 0 else 0

    return _with(mock.patch.object(ShardMachine, "seq_of", seq_of))


def no_stale_verdict() -> contextlib.AbstractContextManager[None]:
    """Check point 2 is left out."""

    def admit(
        self: AdmissionFold, log_offset: int, bucket: int, source: tuple[int, int], epoch: int, *rest: Any
    ) -> Verdict:
        row = self._rows.get(bucket)
        return original(self, log_offset, bucket, source, max(epoch, row[2]) if row else epoch, *rest)

    original = AdmissionFold.admit
    return _with(mock.patch.object(AdmissionFold, "admit", admit))


def watermark_not_compared() -> contextlib.AbstractContextManager[None]:
    """An append moves W whatever is stored."""

    async def append(self: MemoryMailboxStore, call: AppendCall) -> Any:
        held = self._held.shards.get(call.shard)
        if call.watermarks is not None and held is not None:
            new = tuple(map(max, call.watermarks.new.values, held.watermarks.values))
            moves = replace(call.watermarks, previous=held.watermarks, new=type(held.watermarks)(new))
            call = replace(call, watermarks=moves)
        return await original(self, call)

    original = MemoryMailboxStore.append
    return _with(mock.patch.object(MemoryMailboxStore, "append", append))


def commit_not_fenced() -> contextlib.AbstractContextManager[None]:
    """A writer that was replaced goes on committing."""
    return _with(mock.patch.object(MemoryMessageStore, "_check_fence"))


def append_not_fenced() -> contextlib.AbstractContextManager[None]:
    """A MailboxNode that was replaced goes on appending."""

    async def append(self: MemoryMailboxStore, call: AppendCall) -> Any:
        held = self._held.shards.get(call.shard)
        return await original(self, replace(call, shard_epoch=held.epoch) if held is not None else call)

    original = MemoryMailboxStore.append
    return _with(mock.patch.object(MemoryMailboxStore, "append", append))


def idle_instance_forgotten() -> contextlib.AbstractContextManager[None]:
    """A new connection is noticed by the next call only."""
    return _with(mock.patch.object(servers.SimMailboxStore, "is_loaded", return_value=True))


def self_fence_left_out() -> contextlib.AbstractContextManager[None]:
    """Whoever cannot renew keeps its leases until somebody tells it."""

    def of(parameters: Parameters) -> LeaseTimes:
        return replace(original(parameters), self_fence_ms=10**9)

    original = LeaseTimes.of
    return _with(mock.patch.object(LeaseTimes, "of", of))


def lease_taken_early() -> contextlib.AbstractContextManager[None]:
    """A lease is granted whatever the age of its owner's last beat."""

    async def acquire(self: MemoryShardRegistry, *args: Any, wait_ms: int) -> Any:
        return await original(self, *args, wait_ms=0)

    original = MemoryShardRegistry.acquire
    return _with(mock.patch.object(MemoryShardRegistry, "acquire", acquire))


def beat_not_compared() -> contextlib.AbstractContextManager[None]:
    """A beat does not tell its member which leases are another's by now."""

    async def beat(self: MemoryShardRegistry, *args: Any, **kwargs: Any) -> Any:
        return (await original(self, *args, **kwargs))._replace(lost=frozenset())

    original = MemoryShardRegistry.beat
    return _with(mock.patch.object(MemoryShardRegistry, "beat", beat))


def release_not_compared() -> contextlib.AbstractContextManager[None]:
    """A release gives back what another member was granted since."""

    async def release(self: MemoryShardRegistry, kind: LeaseKind, shard_ids: Any, grant_id: str) -> None:
        for shard_id in shard_ids:
            held = self._leases[kind][shard_id]
            await original(self, kind, [shard_id], held.grant_id)

    original = MemoryShardRegistry.release
    return _with(mock.patch.object(MemoryShardRegistry, "release", release))


def boundary_not_fenced() -> contextlib.AbstractContextManager[None]:
    """A former owner still writes where its epoch began, when a later one has counted without it."""

    async def write(self: MemoryShardRegistry, shard_id: int, boundary: Any) -> None:
        self._boundaries.setdefault(shard_id, {}).setdefault(boundary.shard_epoch, boundary)

    return _with(mock.patch.object(MemoryShardRegistry, "write_boundary", write))


PLANTED: Final[Mapping[str, Planting]] = {
    made.__name__: made
    for made in (
        checkpoint_before_durable, offset_before_entries, bits_not_checked, no_reopen, registry_epoch_compared,
        no_source_high, rows_not_of_c, trimmed_to_newest_c, chunk_size_changed, cursor_moved_by_push,
        message_id_reissued, watermark_before_index, dirty_before_link, reload_without_push, no_predecessor_check,
        checkpoint_goes_back, served_by_epoch, idle_instance_forgotten, replayed_under_own_epoch,
        commit_not_fenced, append_not_fenced, self_fence_left_out, lease_taken_early,
        beat_not_compared, boundary_not_fenced, refused_not_missed, watermark_not_compared,
    )
}  # fmt: skip
TRIPWIRES: Final[Mapping[str, Planting]] = {made.__name__: made for made in (no_stale_verdict, release_not_compared)}
