"""Convert rows of Arrow record batches to jobs, without depending on Spark."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from djqueue.codecs import MSGPACK, encode
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError, SerializationError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch
from djqueue.core.options import EnqueueOptions, JobKey, check_text, parse_options
from djqueue.storage.staging import CHUNK

from .columns import Columns, JobColumns, with_given_backoff
from .options import DEAD, DEPENDS_ON, FAIL, dependencies, parse, value_of_text

CACHED_OPTIONS = 10_000
"""Maximum number of parsed combinations of options to cache."""
UNKNOWN_NAME = "rejected"
"""Job name of dead letters whose row has none."""
MAX_ERROR = 1_000
"""Maximum length of a dead letter's error, in characters."""
NUMBER_TYPES = frozenset({"int8", "int16", "int32", "int64", "float", "double", "bool"})
"""Arrow types that NumPy converts to Python values at once, unless a value is null."""
TEXT_TYPES = frozenset({"string", "large_string", "binary", "large_binary"})
"""Arrow types that NumPy converts at once, with or without nulls."""
MIN_SALVAGED = 64 * 1024
"""Minimum size limit of a dead letter's payload, in bytes."""
MAX_TEXT = 200
"""Maximum length of a value stored as text, in characters."""

States = Callable[[str, Sequence[str]], Sequence[Any]]
"""Return the states of a queue's jobs by their ids; None for a job that does not exist."""


class RowError(DjqueueError):
    """An invalid row, with its number and the reason."""


class RowJob(NamedTuple):
    """A row converted to a job."""

    job_id: str
    payload: bytes
    options: EnqueueOptions


class Chunk(NamedTuple):
    """Jobs with the same queue and name, in the order of their rows."""

    queue: str
    name: str
    batches: list[Batch]
    size: int


class RowReader:
    """Read rows one by one, and count the invalid ones."""

    def __init__(self, plan: Columns) -> None:
        self.read = 0
        """Rows read so far."""
        self.rejected: Counter[str] = Counter()
        """Invalid rows, by reason."""
        self._on_error = plan.options.on_error

    def rows(self, batch: Any) -> Iterator[dict[str, Any]]:
        """Return the rows of a record batch."""
        for row in rows_of(batch):
            self.read += 1
            yield row

    def reject(self, error: DjqueueError) -> None:
        """Count the last row as invalid. Raises RowError if `onError` is `fail`."""
        if self._on_error == FAIL:
            raise RowError(f"row {self.read} of its partition: {error}") from error
        self.rejected[_reason(error)] += 1


class JobReader(RowReader):
    """Read rows and collect them in chunks of jobs. Invalid rows are rejected, or become dead letters.

    Args:
        plan: The columns.
        size: Jobs in a chunk.
        ids: The source of ids for jobs without one.
        is_keyed: Returns whether all jobs of a queue require a group.
        states: Looks up dependencies; None to skip checking that they exist.
    """

    def __init__(
        self,
        plan: JobColumns,
        size: int = CHUNK,
        ids: IdSource | None = None,
        is_keyed: Callable[[str], bool] | None = None,
        states: States | None = None,
    ) -> None:
        super().__init__(plan)
        self._plan = plan
        self._size = min(size, CHUNK)
        self._ids = ids or IdSource()
        self._is_keyed = is_keyed
        self._states = states
        self._missing: set[JobKey] = set()
        """Missing dependencies of jobs of the current record batch."""
        self._known: dict[tuple[Hashable, ...], EnqueueOptions] = {}
        self._open: dict[tuple[str, str], list[RowJob]] = {}
        self._payload = plan.payload_reader()

    def chunks(self, batches: Iterable[Any]) -> Iterator[Chunk]:
        """Return the chunks of record batches: each once it is full, the rest at the end."""
        for batch in batches:
            fresh = None
            if self._plan.id_column is None:
                fresh = iter(self._ids.many(batch.num_rows, SYSTEM_CLOCK.now()))
            self._missing = self._missing_dependencies(batch)
            for row in self.rows(batch):
                found = self._job_or_none(row, next(fresh) if fresh is not None else None)
                if found is None:
                    continue
                key, entry = found
                entries = self._open.setdefault(key, [])
                entries.append(entry)
                if len(entries) == self._size:
                    yield self._chunk(key, self._open.pop(key))
        for key, entries in self._open.items():
            yield self._chunk(key, entries)
        self._open = {}

    def _missing_dependencies(self, batch: Any) -> set[JobKey]:
        """Find missing dependencies, one call for each queue, as each call is a round trip."""
        plan, wanted = self._plan, dict[str, dict[str, None]]()
        column = plan.per_row.get(DEPENDS_ON)
        if self._states is None or (column is None and plan.depends_on is None):
            return set()
        count = batch.num_rows
        values = batch.column(column).to_pylist() if column is not None else [None] * count
        queues = [plan.options.queue] * count
        if plan.options.queue is None:
            queues = batch.column(plan.options.queue_column).to_pylist()
        for queue, one in zip(queues, values, strict=True):
            given = one if one is not None else plan.depends_on
            try:
                keys = dependencies(queue or "", given) if given is not None else ()
            except OptionError:
                continue  # Reported later, as the error of its row.
            for key in keys:
                wanted.setdefault(key[0], {})[key[1]] = None
        return {
            (queue, job_id)
            for queue, ids in wanted.items()
            for job_id, state in zip(ids, self._states(queue, list(ids)), strict=True)
            if state is None
        }

    def _job_or_none(
        self, row: Mapping[str, Any], fresh: str | None
    ) -> tuple[tuple[str, str], RowJob] | None:
        try:
            return self._job(row, fresh)
        except DjqueueError as error:
            self.reject(error)
            return self._dead_letter(row, error) if self._on_error == DEAD else None

    def _job(self, row: Mapping[str, Any], fresh: str | None) -> tuple[tuple[str, str], RowJob]:
        queue, name = self._plan.queue_of(row), self._name_of(row)
        job_id = fresh
        if job_id is None:
            job_id = check_text("id", row[self._plan.id_column or ""])
        return (queue, name), RowJob(job_id, self._payload(row), self._options(queue, row))

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
        cause = type(error)
        failure = (f"{cause.__module__}.{cause.__qualname__}", str(error)[:MAX_ERROR])
        job = replace(self._plan.base.job, rejected=failure, unique_key=None, unique_ttl=None, depends_on=())
        [job_id] = self._ids.many(1, SYSTEM_CLOCK.now())
        payload = salvage_payload(row, self._plan.options.max_payload)
        return (queue, name), RowJob(job_id, payload, EnqueueOptions(job=job))

    def _options(self, queue: str, row: Mapping[str, Any]) -> EnqueueOptions:
        values = [row[column] for column in self._plan.per_row.values()]
        cache_key = (queue, *map(_frozen, values))
        found = self._known.get(cache_key)
        if found is None:
            found = self._parse_options(queue, dict(zip(self._plan.per_row, values, strict=True)))
            if len(self._known) >= CACHED_OPTIONS:
                self._known.clear()
            self._known[cache_key] = found
        if found.job.depends_on and self._missing:
            for key in found.job.depends_on:
                if key in self._missing:
                    raise OptionError(f"dependsOn: queue {key[0]!r} has no job {key[1]!r}")
        return found

    def _parse_options(self, queue: str, values: Mapping[str, Any]) -> EnqueueOptions:
        given = {name: _without_nulls(value) for name, value in values.items() if value is not None}
        if isinstance(headers := given.get("headers"), str):
            given["headers"] = value_of_text("headers", headers)
        depends_on = given.pop(DEPENDS_ON, self._plan.depends_on)
        for name, value in given.items():
            parse(name, value)
        if depends_on is not None:
            given[DEPENDS_ON] = dependencies(queue, depends_on)
        found = with_given_backoff(parse_options(given, self._plan.base), given)
        if found.job.group is None and self._is_keyed is not None and self._is_keyed(queue):
            raise OptionError(f"group: jobs of queue {queue!r} require a group")
        return found

    def _chunk(self, key: tuple[str, str], entries: Sequence[RowJob]) -> Chunk:
        """Combine adjacent jobs with the same options into one batch."""
        queue, name = key
        batches: list[Batch] = []
        last: EnqueueOptions | None = None
        for job_id, payload, options in entries:
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
        return Chunk(queue, name, batches, len(entries))


class UniformJobReader(JobReader):
    """Read rows that differ only in their payloads, which is faster than `JobReader`.

    The jobs have the same queue, name and options, and new ids.
    """

    def chunks(self, batches: Iterable[Any]) -> Iterator[Chunk]:
        """Return the chunks of record batches: each once it is full, the rest at the end."""
        payloads: list[bytes] = []
        for batch in batches:
            for first in range(0, batch.num_rows, self._size):
                part = batch.slice(first, self._size)
                try:
                    found = self._payloads(part)
                except DjqueueError:  # Read one by one to find the invalid row.
                    if payloads:
                        yield self._chunk_of(payloads)
                        payloads = []
                    yield from super().chunks([part])
                    continue
                self.read += len(found)
                payloads += found
                if len(payloads) >= self._size:
                    yield self._chunk_of(payloads[: self._size])
                    payloads = payloads[self._size :]
        if payloads:
            yield self._chunk_of(payloads)

    def _payloads(self, part: Any) -> list[bytes]:
        return list(map(self._payload, rows_of(part)))

    def _chunk_of(self, payloads: list[bytes]) -> Chunk:
        queue, name, options = self._plan.options.queue, self._plan.options.job, self._plan.base
        assert queue is not None
        assert name is not None
        ids = self._ids.many(len(payloads), SYSTEM_CLOCK.now())
        batch = Batch(queue, name, options.job, payloads, ids, options.delay, options.run_at, True)
        return Chunk(queue, name, [batch], len(payloads))


def job_reader(
    plan: JobColumns, size: int, is_keyed: Callable[[str], bool], states: States | None = None
) -> JobReader:
    """Return the fastest reader that supports the columns."""
    queue = plan.options.queue
    are_alike = queue and plan.options.job and plan.id_column is None and not plan.per_row
    if are_alike and (plan.base.job.group is not None or not is_keyed(queue or "")):
        return UniformJobReader(plan, size, is_keyed=is_keyed)
    return JobReader(plan, size, is_keyed=is_keyed, states=states)


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Return the rows of a record batch. A map becomes a dict."""
    if not batch.num_columns:
        return iter([{} for _ in range(batch.num_rows)])
    names = batch.schema.names
    return (dict(zip(names, row, strict=True)) for row in zip(*map(_values, batch.columns), strict=True))


def _values(column: Any) -> list[Any]:
    # `to_pylist` first creates an Arrow object for each value, which takes ten times as long.
    kind = str(column.type)
    values: list[Any]
    if kind in TEXT_TYPES or (kind in NUMBER_TYPES and not column.null_count):
        values = column.to_numpy(zero_copy_only=False).tolist()
    else:
        values = column.to_pylist(maps_as_pydicts="strict")
    return values


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
    frozen: Hashable = value
    return frozen


def _without_nulls(value: Any) -> Any:
    """Remove the null fields of a struct, which has all of its fields in every row."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return value


def _reason(error: DjqueueError) -> str:
    """Return the part of an error that is the same for all rows: the option, or the class of the error."""
    return str(error).partition(":")[0] if ":" in str(error) else type(error).__name__
