"""From rows to jobs: plain Python over Arrow's record batches, without Spark."""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from djqueue.codecs import MSGPACK, get_encoder
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch
from djqueue.core.options import EnqueueOptions, JobKey, check_text, parse_options
from djqueue.core.suggest import nearest
from djqueue.storage.staging import CHUNK

from .columns import rows_of
from .options import DEAD, DEPENDS_ON, FAIL, WriteOptions, camel, dependencies, parse
from .salvage import salvaged

REMEMBERED = 10_000
"""Combinations of options whose checked form is kept."""
NAMELESS = "rejected"
"""The name of what has none, among the dead letters."""
SAID = 1_000
"""Characters of an error that a dead letter tells."""


States = Callable[[str, Sequence[str]], Sequence[Any]]
"""Answers the states of jobs of a queue, by their ids; None for one that is not there."""


class RowError(DjqueueError):
    """A row that is no job: where it is, and why."""


class RowJob(NamedTuple):
    """One row as a job."""

    job_id: str
    payload: bytes
    options: EnqueueOptions


class Columns:
    """What each column is for. Made on the driver, where it refuses what cannot be; used in every task.

    Raises OptionError naming the option, or the column.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        self.options = options
        wanted = {
            "queueColumn": options.queue_column,
            "jobColumn": options.job_column,
            "payloadColumn": options.payload_column,
            "argsColumn": options.args_column,
            "kwargsColumn": options.kwargs_column,
            **{f"{camel(name)}Column": column for name, column in options.columns.items()},
        }
        for said, column in wanted.items():
            if column is not None and column not in columns:
                raise OptionError(f"{said}: no column {column!r}{nearest(column, columns)}")
        for said, names in (("includeColumns", options.include or ()), ("excludeColumns", options.exclude)):
            for column in names:
                if column not in columns:
                    raise OptionError(f"{said}: no column {column!r}{nearest(column, columns)}")
        self.payload = options.payload_column or _own("payload", columns)
        self.args = options.args_column or _own("args", columns)
        self.kwargs = options.kwargs_column or _own("kwargs", columns)
        if self.payload is not None and (options.args_column or options.kwargs_column):
            raise OptionError(
                "payloadColumn can't be combined with argsColumn or kwargsColumn: remove one of them"
            )
        taken = {column for column in wanted.values() if column is not None}
        self.others: tuple[str, ...] = ()
        if self.payload is None and self.args is None and self.kwargs is None:
            chosen = options.include if options.include is not None else columns
            self.others = tuple(
                name
                for name in chosen
                if name not in options.exclude and (options.include is not None or name not in taken)
            )
        self.all_others = self.others == tuple(columns)
        """Whether a row is its job's arguments as it is."""
        self.per_row = {name: column for name, column in options.columns.items() if name != "id"}
        self.id_column = options.columns.get("id")

    def queue_of(self, row: Mapping[str, Any]) -> str:
        """The queue that a row is for. Raises OptionError."""
        return self.options.queue or check_text("queue", row[self.options.queue_column or ""])

    def payload_reader(self) -> Callable[[Mapping[str, Any]], bytes]:
        """How a row's payload is made."""
        encode = get_encoder(MSGPACK, self.options.max_payload, "payload")
        if self.payload is not None:
            return _payload_reader(self.payload, self.options.payload_format, encode)
        if self.args is None and self.kwargs is None:
            names = self.others
            if self.all_others:
                return lambda row: encode({"args": [], "kwargs": row})
            return lambda row: encode({"args": [], "kwargs": {name: row[name] for name in names}})
        args, kwargs = self.args, self.kwargs

        def call(row: Mapping[str, Any]) -> bytes:
            positional = [] if args is None else row[args]
            named = {} if kwargs is None else row[kwargs]
            if not isinstance(positional, list | type(None)):
                raise OptionError(f"{args}: expected an array, got {type(positional).__name__}")
            if not isinstance(named, dict | type(None)):
                raise OptionError(f"{kwargs}: expected a map or a struct, got {type(named).__name__}")
            return encode({"args": positional or [], "kwargs": named or {}})

        return call


class JobColumns(Columns):
    """What each column is for in jobs that are enqueued."""

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        constants = dict(options.constants)
        self.depends_on = constants.pop(DEPENDS_ON, None)
        self.base = _stated(parse_options(constants, EnqueueOptions()), constants)
        if self.depends_on is not None and options.queue is not None:
            depends_on = dependencies(options.queue, self.depends_on)
            self.base = replace(self.base, job=replace(self.base.job, depends_on=depends_on))
            self.depends_on = None

    def needs_group(self) -> bool:
        """Whether no job would have a group."""
        return "group" not in self.per_row and self.base.job.group is None


def _stated(options: EnqueueOptions, given: Mapping[str, Any]) -> EnqueueOptions:
    """A backoff that is said counts more than a function of the job's."""
    return replace(options, job=replace(options.job, backoff_given=True)) if "backoff" in given else options


def _own(name: str, columns: Sequence[str]) -> str | None:
    return name if name in columns else None


class Chunk(NamedTuple):
    """Jobs of one queue and name, in the order of their rows."""

    queue: str
    name: str
    batches: list[Batch]
    many: int


class RowReader:
    """Reads rows one by one, and counts what cannot be used."""

    def __init__(self, plan: Columns) -> None:
        self.read = 0
        """Rows so far."""
        self.rejected: Counter[str] = Counter()
        """Rows that cannot be used, by reason."""
        self._on_error = plan.options.on_error

    def rows(self, batch: Any) -> Iterator[dict[str, Any]]:
        """The rows of a record batch."""
        for row in rows_of(batch):
            self.read += 1
            yield row

    def refuse(self, error: DjqueueError) -> None:
        """Note that the last row cannot be used. Raises RowError if that is not to be."""
        if self._on_error == FAIL:
            raise RowError(f"row {self.read} of its partition: {error}") from error
        self.rejected[_kind(error)] += 1


class Rows(RowReader):
    """Reads rows, and makes chunks of them; what is no job is refused, or a dead letter.

    is_keyed: whether each job of a queue needs a group.
    states: with it, it is seen whether what jobs depend on is there.
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
        """What jobs of the present record batch are to depend on, and is not there."""
        self._known: dict[tuple[Hashable, ...], EnqueueOptions] = {}
        self._open: dict[tuple[str, str], list[RowJob]] = {}
        self._payload = plan.payload_reader()

    def chunks(self, batches: Iterable[Any]) -> Iterator[Chunk]:
        """The chunks of record batches; each as soon as it is full, the others at the end."""
        for batch in batches:
            fresh = None
            if self._plan.id_column is None:
                fresh = iter(self._ids.many(batch.num_rows, SYSTEM_CLOCK.now()))
            self._missing = self._not_there(batch)
            for row in self.rows(batch):
                found = self._found(row, next(fresh) if fresh is not None else None)
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

    def _not_there(self, batch: Any) -> set[JobKey]:
        """Looked for together, as each look is a round trip."""
        plan, wanted = self._plan, dict[str, dict[str, None]]()
        column = plan.per_row.get(DEPENDS_ON)
        if self._states is None or (column is None and plan.depends_on is None):
            return set()
        many = batch.num_rows
        said = batch.column(column).to_pylist() if column is not None else [None] * many
        queues = [plan.options.queue] * many
        if plan.options.queue is None:
            queues = batch.column(plan.options.queue_column).to_pylist()
        for queue, one in zip(queues, said, strict=True):
            given = one if one is not None else plan.depends_on
            try:
                keys = dependencies(queue or "", given) if given is not None else ()
            except OptionError:
                continue  # said of the row, when it is its turn
            for key in keys:
                wanted.setdefault(key[0], {})[key[1]] = None
        return {
            (queue, job_id)
            for queue, ids in wanted.items()
            for job_id, state in zip(ids, self._states(queue, list(ids)), strict=True)
            if state is None
        }

    def _found(self, row: Mapping[str, Any], fresh: str | None) -> tuple[tuple[str, str], RowJob] | None:
        try:
            return self._entry(row, fresh)
        except DjqueueError as error:
            self.refuse(error)
            return self._letter(row, error) if self._on_error == DEAD else None

    def _entry(self, row: Mapping[str, Any], fresh: str | None) -> tuple[tuple[str, str], RowJob]:
        queue, name = self._plan.queue_of(row), self._name_of(row)
        job_id = fresh
        if job_id is None:
            job_id = check_text("id", row[self._plan.id_column or ""])
        return (queue, name), RowJob(job_id, self._payload(row), self._options(queue, row))

    def _name_of(self, row: Mapping[str, Any]) -> str:
        options = self._plan.options
        return options.job or check_text("job", row[options.job_column or ""])

    def _letter(self, row: Mapping[str, Any], error: DjqueueError) -> tuple[tuple[str, str], RowJob] | None:
        """What is no job as a dead letter; nothing if it is not known of which queue."""
        try:
            queue = self._plan.queue_of(row)
        except DjqueueError:
            return None
        try:
            name = self._name_of(row)
        except DjqueueError:
            name = NAMELESS
        cause = type(error)
        said = (f"{cause.__module__}.{cause.__qualname__}", str(error)[:SAID])
        job = replace(self._plan.base.job, rejected=said, unique_key=None, unique_ttl=None, depends_on=())
        [job_id] = self._ids.many(1, SYSTEM_CLOCK.now())
        payload = salvaged(row, self._plan.options.max_payload)
        return (queue, name), RowJob(job_id, payload, EnqueueOptions(job=job))

    def _options(self, queue: str, row: Mapping[str, Any]) -> EnqueueOptions:
        values = [row[column] for column in self._plan.per_row.values()]
        said = (queue, *map(_frozen, values))
        found = self._known.get(said)
        if found is None:
            found = self._said(queue, dict(zip(self._plan.per_row, values, strict=True)))
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[said] = found
        if found.job.depends_on and self._missing:
            for key in found.job.depends_on:
                if key in self._missing:
                    raise OptionError(f"dependsOn: queue {key[0]!r} has no job {key[1]!r}")
        return found

    def _said(self, queue: str, values: Mapping[str, Any]) -> EnqueueOptions:
        given = {name: _without_nulls(value) for name, value in values.items() if value is not None}
        depends_on = given.pop(DEPENDS_ON, self._plan.depends_on)
        for name, value in given.items():
            parse(name, value)
        if depends_on is not None:
            given[DEPENDS_ON] = dependencies(queue, depends_on)
        found = _stated(parse_options(given, self._plan.base), given)
        if found.job.group is None and self._is_keyed is not None and self._is_keyed(queue):
            raise OptionError(f"group: jobs of queue {queue!r} require a group")
        return found

    def _chunk(self, key: tuple[str, str], entries: Sequence[RowJob]) -> Chunk:
        """Neighbours with the same options are one batch."""
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


def _payload_reader(
    column: str, form: str, encode: Callable[[Any], bytes]
) -> Callable[[Mapping[str, Any]], bytes]:
    if form == "value":
        return lambda row: encode(row[column])
    if form == "msgpack":

        def checked(row: Mapping[str, Any]) -> bytes:
            data = row[column]
            if not isinstance(data, bytes):
                raise OptionError(f"{column}: expected binary MessagePack, got {type(data).__name__}")
            return data

        return checked

    def parsed(row: Mapping[str, Any]) -> bytes:
        try:
            return encode(json.loads(row[column]))
        except (TypeError, ValueError) as error:
            raise OptionError(f"{column}: not JSON: {error}") from error

    return parsed


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in value.items())
    frozen: Hashable = value
    return frozen


def _without_nulls(value: Any) -> Any:
    """A struct has all of its fields in every row."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return value


def _kind(error: DjqueueError) -> str:
    """The reason of a rejection without what is the row's own."""
    return str(error).partition(":")[0] if ":" in str(error) else type(error).__name__
