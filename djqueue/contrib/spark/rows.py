"""Convert rows of Arrow record batches to jobs, without depending on Spark."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from djqueue.codecs import MSGPACK, encode
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError, SerializationError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch
from djqueue.core.options import EnqueueOptions, JobKey, check_text
from djqueue.core.policies import KEYED
from djqueue.storage.staging import CHUNK

from .arrow import rows_of, slices_of
from .columns import Columns, JobColumns, with_given_backoff
from .options import DEAD, DEPENDS_ON, FAIL, dependencies, job_options, parse, value_of_text

CHUNK_BYTES = 1024 * 1024
"""Encoded bytes of a chunk, unless a single job has more."""
OPEN_BYTES = 24 * 1024 * 1024
"""Maximum memory of jobs that wait for their chunks to fill, in bytes: many queues have many open chunks."""
CACHED_BYTES = 4 * 1024 * 1024
"""Maximum memory of the cache of parsed options, in bytes."""
JOB_BYTES = 64
"""Encoded bytes that each job has in addition to its id, payload and options."""
NEW_ID_BYTES = 36
"""Bytes of a new id."""
JOB_MEMORY = 300
"""Bytes of memory that each job of an open chunk takes in addition to its encoded bytes."""
LONGEST_ID = 100
"""Maximum length of an id in an error, in characters."""
UNKNOWN_NAME = "rejected"
"""Job name of dead letters whose row has none."""
MAX_ERROR = 1_000
"""Maximum length of a dead letter's error, in characters."""
MIN_SALVAGED = 64 * 1024
"""Minimum size limit of a dead letter's payload, in bytes."""
MAX_TEXT = 200
"""Maximum length of a value stored as text, in characters."""

OBJECTS = ("headers", "backoff")
"""Options that may be a JSON object as text."""

Row = tuple[dict[str, Any], SerializationError | None]
"""A row by column name, and why it can't be converted."""
States = Callable[[str, Sequence[str]], Sequence[Any]]
"""Return the states of a queue's jobs by their ids; None for a job that does not exist."""


class RowError(DjqueueError):
    """An invalid row, with its number and the reason."""


class RowJob(NamedTuple):
    """A row converted to a job."""

    job_id: str
    payload: bytes
    options: EnqueueOptions
    size: int
    """Its encoded bytes, approximately."""


class Chunk(NamedTuple):
    """Jobs with the same queue and name, in the order of their rows."""

    queue: str
    name: str
    batches: list[Batch]
    size: int
    """Number of jobs."""
    encoded: int
    """Their encoded bytes with options, approximately."""


class OpenChunk:
    """Jobs that wait for their chunk to fill."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: list[RowJob] = []
        self.size = 0
        """Encoded bytes."""

    @property
    def memory(self) -> int:
        """Bytes of memory, approximately."""
        return self.size + JOB_MEMORY * len(self.entries)


class RowReader:
    """Read rows one by one, and count the invalid ones.

    Args:
        plan: The columns.
        partition: The number of the partition, for errors.
    """

    def __init__(self, plan: Columns, partition: int = 0) -> None:
        self.read = 0
        """Rows read so far."""
        self.rejected: Counter[str] = Counter()
        """Invalid rows, by reason."""
        self._plan = plan
        self._partition = partition
        self._on_error = plan.options.on_error

    def rows(self, part: Any) -> list[Row]:
        """Return the rows of a slice of a record batch, with the error of each that can't be converted."""
        converted = rows_of(part, self._plan.needed, keep_all=self._on_error == DEAD)
        return [(row, converted.errors.get(index)) for index, row in enumerate(converted.values)]

    def reject(self, row: Mapping[str, Any], error: DjqueueError) -> None:
        """Count the last row as invalid. Raises RowError if `onError` is `fail`."""
        if self._on_error == FAIL:
            place = f"row {self.read} of partition {self._partition}"
            job_id = row.get(self._plan.id_column or "id")
            if isinstance(job_id, (str, int)):
                place += f" (id {str(job_id)[:LONGEST_ID]!r})"
            raise RowError(f"{place}: {error}") from error
        self.rejected[_reason(error)] += 1


class KeyedQueues:
    """Knows the queues all of whose jobs require a concurrency key.

    Args:
        modes: Looks up the key modes of queues.
    """

    def __init__(self, modes: Callable[[Sequence[str]], Mapping[str, str]]) -> None:
        self._modes = modes
        self._known: dict[str, bool] = {}

    def look_up(self, queues: Iterable[str]) -> None:
        """Look up the queues that are not known, in one call."""
        unknown = [queue for queue in dict.fromkeys(queues) if queue not in self._known]
        if unknown:
            self._known.update((queue, mode == KEYED) for queue, mode in self._modes(unknown).items())

    def __contains__(self, queue: str) -> bool:
        """Return whether all jobs of a queue require a concurrency key."""
        self.look_up([queue])
        return self._known[queue]


class JobReader(RowReader):
    """Read rows and collect them in chunks of jobs. Invalid rows are rejected, or become dead letters.

    Args:
        plan: The columns.
        size: Jobs in a chunk.
        ids: The source of ids for jobs without one.
        keyed: The queues all of whose jobs require a concurrency key; None to skip checking.
        states: Looks up dependencies; None to skip checking that they exist.
    """

    def __init__(
        self,
        plan: JobColumns,
        size: int = CHUNK,
        ids: IdSource | None = None,
        keyed: KeyedQueues | None = None,
        states: States | None = None,
        partition: int = 0,
    ) -> None:
        super().__init__(plan, partition)
        self._plan: JobColumns = plan
        self._size = size
        self._ids = ids or IdSource()
        self._keyed = keyed
        self._states = states
        self._missing: set[JobKey] = set()
        """Missing dependencies of jobs of the current slice."""
        self._known: dict[tuple[Hashable, ...], tuple[EnqueueOptions, int]] = {}
        self._known_bytes = 0
        self._open: dict[tuple[str, str], OpenChunk] = {}
        self._open_bytes = 0
        self._payload = plan.payload_reader()

    def chunks(self, batches: Iterable[Any]) -> Iterator[Chunk]:
        """Return the chunks of record batches: each once it is full, the rest at the end."""
        for batch in batches:
            for part in slices_of(batch, CHUNK):
                yield from self._chunks(part)
        yield from self._close(0)

    def _chunks(self, part: Any) -> Iterator[Chunk]:
        """Return the chunks that a slice of a record batch fills."""
        fresh = None
        if self._plan.id_column is None:
            fresh = iter(self._ids.many(part.num_rows, SYSTEM_CLOCK.now()))
        rows = self.rows(part)
        if self._states is not None and (DEPENDS_ON in self._plan.per_row or self._plan.depends_on):
            self._missing = self._missing_dependencies([row for row, _ in rows], self._states)
        if self._keyed is not None and self._plan.options.queue is None:
            self._keyed.look_up(self._queues_without_key(row for row, _ in rows))
        for row, error in rows:
            self.read += 1
            keyed_job = self._job_or_none(row, next(fresh) if fresh is not None else None, error)
            if keyed_job is not None:
                yield from self._add(*keyed_job)

    def _add(self, key: tuple[str, str], job: RowJob) -> Iterator[Chunk]:
        """Add a job to its chunk. Return the chunks that are full, or that have to make room for it."""
        chunk = self._open.get(key)
        if chunk is not None and chunk.size + job.size > CHUNK_BYTES:
            yield self._closed(key)
            chunk = None
        if chunk is None:
            chunk = self._open[key] = OpenChunk()
        chunk.entries.append(job)
        chunk.size += job.size
        self._open_bytes += job.size + JOB_MEMORY
        if len(chunk.entries) == self._size or chunk.size >= CHUNK_BYTES:
            yield self._closed(key)
        elif self._open_bytes > OPEN_BYTES:
            yield from self._close(OPEN_BYTES // 2)

    def _close(self, limit: int) -> Iterator[Chunk]:
        """Close open chunks, the largest first, until those left take at most `limit` bytes of memory."""
        keys = list(self._open)
        if limit:
            keys.sort(key=lambda key: self._open[key].memory, reverse=True)
        for key in keys:
            if limit and self._open_bytes <= limit:
                return
            yield self._closed(key)

    def _closed(self, key: tuple[str, str]) -> Chunk:
        chunk = self._open.pop(key)
        self._open_bytes -= chunk.memory
        return self._chunk(key, chunk.entries)

    def _queues_without_key(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Return the queues of rows that have no concurrency key."""
        column = self._plan.per_row.get("concurrency_key")
        if self._plan.base.job.concurrency_key is not None:
            return
        for row in rows:
            if column is None or row[column] is None:
                try:
                    queue = self._plan.queue_of(row)
                except OptionError:
                    continue  # Reported later, as the error of its row.
                yield queue

    def _missing_dependencies(self, rows: Sequence[Mapping[str, Any]], states: States) -> set[JobKey]:
        """Find missing dependencies, one call for each queue, as each call is a round trip."""
        plan, wanted = self._plan, dict[str, dict[str, None]]()
        column = plan.per_row.get(DEPENDS_ON)
        for row in rows:
            value = row[column] if column is not None else None
            if value is None:
                value = plan.depends_on
            try:
                keys = dependencies(plan.queue_of(row), value) if value is not None else ()
            except OptionError:
                continue  # Reported later, as the error of its row.
            for key in keys:
                wanted.setdefault(key[0], {})[key[1]] = None
        return {
            (queue, job_id)
            for queue, ids in wanted.items()
            for job_id, state in zip(ids, states(queue, list(ids)), strict=True)
            if state is None
        }

    def _job_or_none(
        self, row: Mapping[str, Any], fresh: str | None, error: DjqueueError | None
    ) -> tuple[tuple[str, str], RowJob] | None:
        try:
            if error is not None:
                raise error
            return self._job(row, fresh)
        except DjqueueError as problem:
            self.reject(row, problem)
            return self._dead_letter(row, problem) if self._on_error == DEAD else None

    def _job(self, row: Mapping[str, Any], fresh: str | None) -> tuple[tuple[str, str], RowJob]:
        queue, name = self._plan.queue_of(row), self._name_of(row)
        job_id = fresh
        if job_id is None:
            job_id = check_text("id", row[self._plan.id_column or ""])
        payload = self._payload(row)
        options, size = self._options(queue, row)
        return (queue, name), RowJob(job_id, payload, options, size + len(job_id) + len(payload))

    def _name_of(self, row: Mapping[str, Any]) -> str:
        options = self._plan.options
        return options.job or check_text("job", row[options.job_column or ""])

    def _dead_letter(
        self, row: Mapping[str, Any], error: DjqueueError
    ) -> tuple[tuple[str, str], RowJob] | None:
        """Convert an invalid row to a dead letter, or return None if its queue is unknown."""
        try:
            queue = self._plan.queue_of(row)
        except DjqueueError:
            return None
        try:
            name = self._name_of(row)
        except DjqueueError:
            name = UNKNOWN_NAME
        job = self._plan.base.job.refused(error, MAX_ERROR)
        [job_id] = self._ids.many(1, SYSTEM_CLOCK.now())
        payload = salvage_payload(row, self._plan.options.max_payload)
        options = EnqueueOptions(job=job)
        return (queue, name), RowJob(job_id, payload, options, size_of(options) + len(job_id) + len(payload))

    def _options(self, queue: str, row: Mapping[str, Any]) -> tuple[EnqueueOptions, int]:
        """Return the options of a row's job, and their size."""
        values = [row[column] for column in self._plan.per_row.values()]
        cache_key = (queue, *map(_frozen, values))
        known = self._known.get(cache_key)
        if known is None:
            options = self._parse_options(queue, dict(zip(self._plan.per_row, values, strict=True)))
            known = options, size_of(options)
            if self._known_bytes > CACHED_BYTES:
                self._known.clear()
                self._known_bytes = 0
            self._known[cache_key] = known
            self._known_bytes += known[1] + JOB_MEMORY
        if known[0].job.depends_on and self._missing:
            for key in known[0].job.depends_on:
                if key in self._missing:
                    raise OptionError(f"dependsOn: queue {key[0]!r} has no job {key[1]!r}")
        return known

    def _parse_options(self, queue: str, values: Mapping[str, Any]) -> EnqueueOptions:
        given = {name: _without_nulls(value) for name, value in values.items() if value is not None}
        for name in OBJECTS:
            if isinstance(text := given.get(name), str):
                given[name] = value_of_text(name, text)
        depends_on = given.pop(DEPENDS_ON, self._plan.depends_on)
        for name, value in given.items():
            parse(name, value)
        if depends_on is not None:
            given[DEPENDS_ON] = dependencies(queue, depends_on)
        if self._plan.unique_ttl is not None and "unique_key" in given:
            given["unique_ttl"] = self._plan.unique_ttl
        options = with_given_backoff(job_options(given, self._plan.base), given)
        if options.job.concurrency_key is None and self._keyed is not None and queue in self._keyed:
            raise OptionError(f"concurrency_key: required for jobs of queue {queue!r}")
        return options

    def _chunk(self, key: tuple[str, str], entries: Sequence[RowJob]) -> Chunk:
        """Combine adjacent jobs with the same options into one batch."""
        queue, name = key
        batches: list[Batch] = []
        last: EnqueueOptions | None = None
        for job_id, payload, options, _ in entries:
            if options is not last:
                is_fresh = self._plan.id_column is None or options.job.rejected is not None
                batches.append(
                    Batch(queue, name, options.job, [], [], options.delay, options.run_at, is_fresh)
                )
                last = options
            batches[-1].payloads.append(payload)
            ids = batches[-1].ids
            assert ids is not None
            ids.append(job_id)
        return Chunk(queue, name, batches, len(entries), sum(job.size for job in entries))


class UniformJobReader(JobReader):
    """Read rows that differ only in their payloads, which is faster than `JobReader`.

    The jobs have the same queue, name and options, and new ids.
    """

    def chunks(self, batches: Iterable[Any]) -> Iterator[Chunk]:
        """Return the chunks of record batches: each once it is full, the rest at the end."""
        payloads: list[bytes] = []
        size, overhead = 0, size_of(self._plan.base) + NEW_ID_BYTES
        for batch in batches:
            for part in slices_of(batch, self._size):
                try:
                    encoded = self._payloads(part)
                except DjqueueError:  # Read one by one to find the invalid row.
                    if payloads:
                        yield self._chunk_of(payloads)
                        payloads, size = [], 0
                    yield from self._chunks(part)
                    yield from self._close(0)
                    continue
                self.read += len(encoded)
                total = sum(map(len, encoded)) + overhead * len(encoded)
                if len(payloads) + len(encoded) <= self._size and size + total <= CHUNK_BYTES:
                    payloads += encoded
                    size += total
                    continue
                for payload in encoded:
                    more = len(payload) + overhead
                    if payloads and (len(payloads) == self._size or size + more > CHUNK_BYTES):
                        yield self._chunk_of(payloads)
                        payloads, size = [], 0
                    payloads.append(payload)
                    size += more
        if payloads:
            yield self._chunk_of(payloads)

    def _payloads(self, part: Any) -> list[bytes]:
        rows = rows_of(part, self._plan.needed)
        for error in rows.errors.values():
            raise error
        return list(map(self._payload, rows.values))

    def _chunk_of(self, payloads: list[bytes]) -> Chunk:
        queue, name, options = self._plan.options.queue, self._plan.options.job, self._plan.base
        assert queue is not None
        assert name is not None
        ids = self._ids.many(len(payloads), SYSTEM_CLOCK.now())
        batch = Batch(queue, name, options.job, payloads, ids, options.delay, options.run_at, True)
        size = sum(map(len, payloads)) + (size_of(options) + NEW_ID_BYTES) * len(payloads)
        return Chunk(queue, name, [batch], len(payloads), size)


def job_reader(
    plan: JobColumns,
    size: int,
    keyed: KeyedQueues | None = None,
    states: States | None = None,
    partition: int = 0,
) -> JobReader:
    """Return the fastest reader that supports the columns."""
    queue, has_key = plan.options.queue, plan.base.job.concurrency_key is not None
    are_alike = plan.options.job and plan.id_column is None and not plan.per_row
    if queue and are_alike and (has_key or keyed is None or queue not in keyed):
        return UniformJobReader(plan, size, keyed=keyed, partition=partition)
    return JobReader(plan, size, keyed=keyed, states=states, partition=partition)


def size_of(options: EnqueueOptions) -> int:
    """Return the encoded bytes of a job besides its id and payload, approximately."""
    values = options.job.as_dict()
    return JOB_BYTES + (len(repr(values)) if values else 0)


def salvage_payload(row: Mapping[str, Any], limit: int) -> bytes:
    """Encode as much of an invalid row as fits in about `limit` bytes, as keyword arguments.

    Values that cannot be encoded are stored as text. The largest values are replaced by their size if the row
    is too large.
    """
    limit = max(limit, MIN_SALVAGED)
    kept: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, value in row.items():
        try:
            sizes[name], kept[name] = len(encode(value, MSGPACK)), value
        except SerializationError:
            kept[name] = repr(value)[:MAX_TEXT]
            sizes[name] = len(kept[name])
    total = sum(sizes.values())
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total <= limit:
            break
        kept[name] = f"({sizes[name]} bytes, omitted)"
        total -= sizes[name] - len(kept[name])
    return encode({"args": [], "kwargs": kept}, MSGPACK)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in value.items())
    if isinstance(value, (bool, float, Decimal)):
        return type(value), value  # Equal to whole numbers, which variants have, too.
    frozen: Hashable = value
    return frozen


def _without_nulls(value: Any) -> Any:
    """Remove the null fields of a struct, which has all of its fields in every row."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return value


def _reason(error: DjqueueError) -> str:
    """Return the part of an error that is the same for all rows: the option, or the class of the error."""
    reason, colon, _ = str(error).partition(":")
    if not colon:
        return type(error).__name__
    # The path of a part of a payload may have indexes and keys that differ from row to row.
    return "payload" if reason.startswith(("payload.", "payload[")) else reason
