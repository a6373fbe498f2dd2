"""CommitLog on Kafka or Redpanda (DESIGN §4, DESIGN-data §4, ADR-0012, ADR-0017).

Producers: acks=all, idempotence off, explicit partitions. Where the order of one call's records matters a producer has
one request in flight and retries for ever, so of each partition a prefix of the call is in the log at any time, unless
the broker refuses a record for good (permission, a limit that was lowered) and takes a later one before this is known.
Then the call fails, its caller repeats it, and readers tell the later record from its repetition by what it follows
(ADR 0013). Topics are probed for their limits at start, every size is checked here, a batch stays below the limit.

**Fence.** A broker cannot make an append depend on an epoch, so `append` does not look at its fence: what a replaced
fan-out still appends repeats records of the outbox in order, and the admission fold of every MailboxNode drops it by
source, or by epoch when the conversation moved on (DESIGN-data §5). The replaced one ends at its next checkpoint, which
is a compare-and-set on the epoch. Nothing of it relies on this module.

Consumers `assign`, never `subscribe`; a position outside the watermarks is an error and never reset. Offsets are dense:
no transactions, no compaction; every read proves it.

One KafkaConnection serves a process and is made after the fork: librdkafka's threads do not survive one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from qim.commit_log.api import AppendRun, Fence, LogIdentity, LogRecord, Watermarks
from qim.commit_log.kafka_address import KafkaAddress
from qim.errors import StoreError, StoreUnavailable
from qim.obs.logs import get_logger
from qim.runtime.clock import SystemClock

log = get_logger(__name__)

RECORD_BYTES_MAX: Final = 900_000
"""Below the broker's own default (1,048,588 with its framing): a record is never refused for its size alone."""
CONSUME_MESSAGES: Final = 500
SENDERS: Final = 4
"""Producers of a process: one request in flight each, and a broker works on one request of a connection at a time."""
CALL_TIMEOUT_S: Final = 3.0
"""Of one question to the broker; a healthy one answers in milliseconds."""
READ_TIMEOUT_S: Final = 1.0
"""Of a read that others wait behind; a broker that is slower is asked by the patient reader from then on."""
IDENTITY_CHECK_S: Final = 2.0
ZERO_TOPIC_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"
"""What a broker without KIP-516 answers."""
_MISSING_CHECKS: Final = 5
"""A broker that has just started may not know a topic yet."""
_POLL_S: Final = 0.2
_CONSUME_WAIT_S: Final = 0.1
_COMPLAIN_AGAIN_MS: Final = 30_000.0
_PRODUCER_SETTINGS: Final[dict[str, str | int | bool]] = {
    "acks": "all",
    "enable.idempotence": False,
    # a second request may overtake one that is tried again
    "max.in.flight.requests.per.connection": 1,
    # for ever: giving a record up while a later one arrives would break the prefix
    "message.timeout.ms": 0,
    "linger.ms": 0,
    "request.timeout.ms": 10_000,
    "queue.buffering.max.kbytes": 262_144,
    "message.max.bytes": 1_000_000,
    # the limit of a topic is one of batches
    "batch.size": RECORD_BYTES_MAX,
}
_CONSUMER_SETTINGS: Final[dict[str, str | int | bool]] = {
    # assign only: the group is a name librdkafka insists on
    "group.id": "qim",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_uncommitted",
    # a read asks for what is there: a long poll of the previous partition would only delay it
    "fetch.wait.max.ms": 10,
    "check.crcs": True,
}
_WRONG_PLACE: Final = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 - the library's name of a local error
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)

Result = TypeVar("Result")


class _Batch:
    """Records of one append on their way; touched by the poll thread until `remaining` is 0, then by the loop."""

    __slots__ = ("done", "error", "offsets", "remaining", "topic")

    def __init__(self, topic: str, records: int, done: asyncio.Future[list[int]]) -> None:
        self.topic = topic
        self.offsets = [-1] * records
        self.remaining = records
        self.error: KafkaError | None = None
        self.done = done


class _Sender:
    """A producer and the thread that serves its callbacks; used from one event loop."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._producer = Producer({**settings, **_PRODUCER_SETTINGS})
        self._finished: deque[_Batch] = deque()
        self._waking = False
        self._closed = False
        self._thread = threading.Thread(target=self._poll, name="kafka-producer", daemon=True)
        self._thread.start()

    def append(self, topic: str, records: Sequence[tuple[int, bytes]]) -> asyncio.Future[list[int]]:
        """Offsets in the order given, however long the broker is away."""
        batch = _Batch(topic, len(records), self._loop.create_future())
        produce = self._producer.produce
        try:
            for i, (partition, value) in enumerate(records):
                produce(topic, value, partition=partition, on_delivery=partial(self._delivered, batch, i))
        except BufferError:
            raise StoreUnavailable(f"log {topic}: the producer's queue is full") from None
        except KafkaException as error:
            raise store_error(f"append to {topic}", error) from None
        return batch.done

    def _delivered(self, batch: _Batch, index: int, error: KafkaError | None, message: Message) -> None:
        """In the poll thread: one wake-up of the loop for all batches that one poll finishes."""
        if error is None:
            batch.offsets[index] = message.offset()  # type: ignore[assignment]  # delivered: it has one
        elif batch.error is None:
            batch.error = error
        batch.remaining -= 1
        if batch.remaining == 0:
            self._finished.append(batch)
            if not self._waking:
                self._waking = True
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self._waking = False
        while self._finished:
            batch = self._finished.popleft()
            if batch.error is not None:
                log.error("kafka_record_refused", name=batch.topic, reason=batch.error.str())
            if batch.done.done():
                continue
            if batch.error is None:
                batch.done.set_result(batch.offsets)
            else:
                refused = f"log {batch.topic}: the broker refused a record: {batch.error.str()}"
                batch.done.set_exception(StoreError(refused))

    def _poll(self) -> None:
        while not self._closed:
            self._producer.poll(_POLL_S)

    def stop(self) -> None:
        """What is under way is the caller's to repeat."""
        self._closed = True

    def join(self) -> None:
        """After `stop`; blocks for a moment. Nothing calls back afterwards."""
        self._thread.join()
        self._producer.purge()


class _Reader:
    """One consumer; every method runs in the connection's reader thread."""

    def __init__(self, settings: Mapping[str, Any], timeout_s: float) -> None:
        self._consumer = Consumer({**settings, **_CONSUMER_SETTINGS})
        self._timeout_s = timeout_s
        self._position: tuple[str, int, int] | None = None
        """Topic, partition and offset the assigned consumer goes on at; None = nothing is assigned."""
        self._ahead: deque[Message] = deque()
        """Consumed, not yet returned."""
        self._leaders: dict[str, dict[int, int]] = {}
        """Topic -> partition -> broker, as it was told last: a silent one may be asked who leads what, too."""

    def watermarks(self, topic: str, partition: int) -> Watermarks:
        try:
            low, high = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=self._timeout_s)
        except KafkaException as error:
            raise store_error(f"watermarks of {topic}/{partition}", error) from None
        if topic not in self._leaders:
            self._look(topic)
        return Watermarks(low, high)

    def read(self, topic: str, partition: int, offset: int, end: int, high: int, max_bytes: int) -> list[LogRecord]:
        """Records from `offset` up to `end`, which exist, or fewer when `max_bytes` are reached."""
        resumed = self._position == (topic, partition, offset)
        self._position = None
        try:
            if not resumed:
                self._ahead.clear()
                self._consumer.assign([TopicPartition(topic, partition, offset)])
            found = self._take(topic, partition, offset, end, max_bytes)
            at = offset + len(found)
            if at < high:
                self._position = (topic, partition, at)
            else:
                # Caught up: the next records come as hints, so nothing is fetched meanwhile.
                self._consumer.unassign()
        except KafkaException as error:
            raise store_error(f"read {topic}/{partition} at {offset}", error) from None
        return found

    def led_with(self, topic: str, partition: int) -> set[int]:
        """Partitions that the broker of this one leads, which did not answer, as far as any broker has told."""
        self._look(topic)
        leaders = self._leaders.get(topic, {})
        leader = leaders.get(partition)
        return {partition, *(number for number, one in leaders.items() if one == leader)}

    def _look(self, topic: str) -> None:
        """Ask who leads what. Needed after a failure anyway: a broker that was just starting may have told of a topic
        without any partition, and librdkafka believes that until its next regular question, minutes later."""
        with contextlib.suppress(KafkaException):
            found = self._consumer.list_topics(topic, timeout=self._timeout_s).topics[topic].partitions
            self._leaders[topic] = {number: one.leader for number, one in found.items()}

    def _take(self, topic: str, partition: int, offset: int, end: int, max_bytes: int) -> list[LogRecord]:
        found: list[LogRecord] = []
        taken_bytes, at = 0, offset
        waits_left = int(self._timeout_s / _CONSUME_WAIT_S)
        while at < end and taken_bytes < max_bytes:
            if not self._ahead:
                self._ahead.extend(self._consumer.consume(min(end - at, CONSUME_MESSAGES), _CONSUME_WAIT_S))
                waits_left -= not self._ahead
                if waits_left < 0:
                    raise StoreUnavailable(f"log {topic}/{partition}: nothing came from offset {at} on")
                continue
            message = self._ahead.popleft()
            error = message.error()
            if error is not None:
                raise store_error(f"read {topic}/{partition} at {at}", KafkaException(error))
            if message.offset() != at:
                raise StoreError(f"log {topic}/{partition}: no record at offset {at}, found {message.offset()}")
            value = message.value() or b""
            found.append(LogRecord(at, value))
            taken_bytes += len(value)
            at += 1
        return found

    def close(self) -> None:
        self._consumer.close()


class _ReaderThread:
    """A reader, made at its first use, and the thread it lives in."""

    def __init__(self, settings: Mapping[str, Any], name: str, timeout_s: float) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._reader: _Reader | None = None

    async def run(self, work: Callable[[_Reader], Result]) -> Result:
        return await self.call(self._with_reader, work)

    async def call(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Something else that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    async def close(self) -> None:
        await self.call(self._close)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _with_reader(self, work: Callable[[_Reader], Result]) -> Result:
        if self._reader is None:
            self._reader = _Reader(self._settings, self._timeout_s)
        return work(self._reader)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class KafkaConnection:
    """Everything of librdkafka in one process; made where it runs, never before a fork.

    A question about a partition that nobody leads blocks for seconds, and so does one about the cluster while a broker
    is away. These have a thread of their own, a partition until it answers again, so that no other read waits behind.
    With the first partition of a broker that does not answer go all that it leads.
    """

    def __init__(self, address: KafkaAddress) -> None:
        self.address = address
        self._settings: dict[str, Any] = {**address.client_settings(), "error_cb": _Complaints()}
        self._senders: dict[int, _Sender] = {}
        """By partition modulo SENDERS."""
        self._reading = _ReaderThread(self._settings, "kafka-reader", READ_TIMEOUT_S)
        self._patient = _ReaderThread(self._settings, "kafka-patient", CALL_TIMEOUT_S)
        self._away: set[tuple[str, int]] = set()
        """(topic, partition) that did not answer the last time; touched in the readers' threads, one step at a time."""
        self._admin: AdminClient | None = None

    async def append(self, topic: str, records: Sequence[tuple[int, bytes]]) -> list[int]:
        """Offsets in the order given. A partition belongs to one sender, so its records stay in order."""
        shares: dict[int, list[int]] = {}
        for i, (partition, _) in enumerate(records):
            shares.setdefault(partition % SENDERS, []).append(i)
        appended = await asyncio.gather(
            *(self._sender(n).append(topic, [records[i] for i in share]) for n, share in shares.items())
        )
        offsets = [-1] * len(records)
        for share, found in zip(shares.values(), appended, strict=True):
            for i, offset in zip(share, found, strict=True):
                offsets[i] = offset
        return offsets

    def _sender(self, number: int) -> _Sender:
        sender = self._senders.get(number)
        if sender is None:
            sender = self._senders[number] = _Sender(self._settings)
        return sender

    async def reading(self, topic: str, partition: int, work: Callable[[_Reader], Result]) -> Result:
        """Run `work`, which asks for this partition, in a reader's thread."""
        place = (topic, partition)
        patient = place in self._away
        thread = self._patient if patient else self._reading
        return await thread.run(lambda reader: self._ask(reader, place, work, patient=patient))

    def _ask(
        self, reader: _Reader, place: tuple[str, int], work: Callable[[_Reader], Result], *, patient: bool
    ) -> Result:
        topic, partition = place
        if not patient and place in self._away:
            # its broker failed to answer another one while this one waited for its turn
            raise StoreUnavailable(f"log {topic}/{partition}: its broker does not answer")
        try:
            found = work(reader)
        except StoreError as error:
            led_with = reader.led_with(topic, partition)
            if isinstance(error, StoreUnavailable):
                self._away.update((topic, one) for one in led_with)
            raise
        self._away.discard(place)
        return found

    async def identities(self, names: Sequence[str]) -> dict[str, LogIdentity]:
        """Of topics by their short names, as the broker tells them now. StoreError when one is missing."""
        return await self._patient.call(self._identities, names)

    async def watch(self, expected: Mapping[str, LogIdentity]) -> None:
        """Returns never; StoreError, one line, once a topic is gone or not the one it was. A supervised task."""
        missing = 0
        while True:
            await asyncio.sleep(IDENTITY_CHECK_S)
            try:
                found = await self.identities(list(expected))
            except StoreUnavailable:
                continue
            except StoreError:
                missing += 1
                if missing >= _MISSING_CHECKS:
                    raise
                continue
            missing = 0
            check_identities(self.address, expected, found)

    async def close(self) -> None:
        """Everything has to be over by then: appends and reads under way are not waited for."""
        await self._reading.call(self._stop_senders)
        await asyncio.gather(self._reading.close(), self._patient.close())

    def _identities(self, names: Sequence[str]) -> dict[str, LogIdentity]:
        if self._admin is None:
            self._admin = AdminClient(self._settings)
        try:
            return describe(self._admin, self.address, names)
        except StoreUnavailable:
            # it goes on asking the broker it once took for the controller; a new one looks around
            self._admin = None
            raise

    def _stop_senders(self) -> None:
        for sender in self._senders.values():
            sender.stop()
        for sender in self._senders.values():
            sender.join()


class KafkaCommitLog:
    """See `qim.commit_log.api.CommitLog`; the offsets are the broker's."""

    ends_together: Final = False

    def __init__(self, connection: KafkaConnection, name: str, partition_count: int) -> None:
        self._connection = connection
        self._name = name
        self._topic = connection.address.topic(name)
        self._ends = [0] * partition_count
        """Per partition: there were that many records once, so a log that ends before has lost some."""

    async def append(self, records: Sequence[tuple[int, bytes]], fence: Fence | None = None) -> list[int]:
        """The fence is not looked at, see the module. Waits, without an end, for a broker that is away."""
        if not records:
            return []
        if (longest := max(len(value) for _, value in records)) > RECORD_BYTES_MAX:
            raise StoreError(f"log {self._topic}: a record of {longest} bytes exceeds {RECORD_BYTES_MAX}")
        ends = {partition: self._ends[partition] for partition, _ in records}
        offsets = await self._connection.append(self._topic, records)
        for (partition, _), offset in zip(records, offsets, strict=True):
            if offset < ends[partition]:
                raise StoreError(self._shrunk(partition, offset, ends[partition]))
            if offset >= self._ends[partition]:
                self._ends[partition] = offset + 1
        return offsets

    async def append_each(self, runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        return await asyncio.gather(*(self._appended(run) for run in runs))

    async def _appended(self, run: AppendRun) -> list[int] | StoreError:
        try:
            return await self.append(run.records)
        except StoreError as error:
            return error

    async def read(
        self, partition: int, offset: int, *, max_records: int = 500, max_bytes: int = 4 << 20
    ) -> list[LogRecord]:
        low, high = await self.watermarks(partition)
        if not low <= offset <= high:
            raise StoreError(f"log {self._topic}/{partition}: no record at offset {offset}, it has {low} to {high}")
        if offset == high:
            return []
        end = min(high, offset + max_records)
        return await self._connection.reading(
            self._topic, partition, lambda reader: reader.read(self._topic, partition, offset, end, high, max_bytes)
        )

    async def watermarks(self, partition: int) -> Watermarks:
        end = self._ends[partition]
        found = await self._connection.reading(
            self._topic, partition, lambda reader: reader.watermarks(self._topic, partition)
        )
        if found.high < end:
            raise StoreError(self._shrunk(partition, found.high, end))
        self._ends[partition] = max(self._ends[partition], found.high)
        return found

    async def identity(self) -> LogIdentity:
        return (await self._connection.identities([self._name]))[self._name]

    def _shrunk(self, partition: int, high: int, end: int) -> str:
        return f"log {self._topic}/{partition} goes on at {high} and had {end} records: it lost some or was made anew"


class _Complaints:
    """Errors of librdkafka's background work, once per kind and interval."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._said_ms: dict[int, float] = {}

    def __call__(self, error: KafkaError) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._said_ms.get(error.code(), -_COMPLAIN_AGAIN_MS) >= _COMPLAIN_AGAIN_MS:
            self._said_ms[error.code()] = now_ms
            log.warning("kafka_trouble", reason=error.str())


def describe(admin: AdminClient, address: KafkaAddress, names: Sequence[str]) -> dict[str, LogIdentity]:
    """Identities of topics by their short names. StoreError for a missing topic and for a broker without topic ids."""
    found = {}
    try:
        cluster = admin.describe_cluster(request_timeout=CALL_TIMEOUT_S).result(CALL_TIMEOUT_S + 1)
        topics = TopicCollection([address.topic(name) for name in names])
        described = admin.describe_topics(topics, request_timeout=CALL_TIMEOUT_S)
        for name in names:
            topic = described[address.topic(name)].result(CALL_TIMEOUT_S + 1)
            found[name] = LogIdentity(
                cluster_id=cluster.cluster_id or "", topic_id=str(topic.topic_id), partition_count=len(topic.partitions)
            )
    except KafkaException as error:
        raise store_error(f"topics {address.prefix}.*", error) from None
    except TimeoutError:
        raise StoreUnavailable(f"Kafka at {address.servers} did not answer") from None
    if any(one.topic_id == ZERO_TOPIC_ID or not one.cluster_id for one in found.values()):
        raise StoreError(f"Kafka at {address.servers} has no topic ids: use Kafka >= 3.1 or Redpanda >= 26.2")
    return found


def check_identities(
    address: KafkaAddress, expected: Mapping[str, LogIdentity], found: Mapping[str, LogIdentity]
) -> None:
    """StoreError, one line, for the first difference: every stored position counts in the topic it was made for."""
    for name, identity in expected.items():
        if found[name] != identity:
            raise StoreError(
                f"topic {address.topic(name)} is {identity_text(found[name])}, but the positions stored belong to "
                f"{identity_text(identity)}: it was made anew or this is another cluster; bring the old one back"
            )


def identity_text(identity: LogIdentity) -> str:
    """For messages and for the registry's fact."""
    return f"{identity.cluster_id}/{identity.topic_id}/{identity.partition_count}"


def store_error(what: str, error: KafkaException) -> StoreError:
    """Unavailable unless the log does not hold what was asked for."""
    cause: KafkaError = error.args[0]
    text = f"{what}: {cause.str()}"
    return StoreError(text) if cause.code() in _WRONG_PLACE else StoreUnavailable(text)
