"""From rows to jobs: plain Python over Arrow's record batches, without Spark."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from djqueue.codecs import MSGPACK, get_encoder
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch
from djqueue.core.options import EnqueueOptions, check_text, parse_options
from djqueue.core.suggest import nearest
from djqueue.storage.staging import CHUNK

from .options import FAIL, WriteOptions, parse

REMEMBERED = 10_000
"""Combinations of options whose checked form is kept."""


class RowError(DjqueueError):
    """A row that is no job: where it is, and why."""


class Entry(NamedTuple):
    """One row as a job."""

    job_id: str
    payload: bytes
    options: EnqueueOptions


class Plan:
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
            **{f"{name}Column": column for name, column in options.columns.items()},
        }
        for said, column in wanted.items():
            if column is not None and column not in columns:
                raise OptionError(f"{said}: there is no column {column!r}{nearest(column, columns)}")
        for said, names in (("includeColumns", options.include or ()), ("excludeColumns", options.exclude)):
            for column in names:
                if column not in columns:
                    raise OptionError(f"{said}: there is no column {column!r}{nearest(column, columns)}")
        self.payload = options.payload_column or _own("payload", columns)
        self.args = options.args_column or _own("args", columns)
        self.kwargs = options.kwargs_column or _own("kwargs", columns)
        if self.payload is not None and (options.args_column or options.kwargs_column):
            raise OptionError("payloadColumn: the payload is one column, or argsColumn and kwargsColumn")
        taken = {column for column in wanted.values() if column is not None}
        self.others: tuple[str, ...] = ()
        if self.payload is None and self.args is None and self.kwargs is None:
            chosen = options.include if options.include is not None else columns
            self.others = tuple(
                name
                for name in chosen
                if name not in options.exclude and (options.include is not None or name not in taken)
            )
        self.base = parse_options(dict(options.constants), EnqueueOptions())
        self.per_row = {name: column for name, column in options.columns.items() if name != "id"}
        self.id_column = options.columns.get("id")

    def needs_group(self) -> bool:
        """Whether no job would have a group."""
        return "group" not in self.per_row and self.base.job.group is None


def _own(name: str, columns: Sequence[str]) -> str | None:
    return name if name in columns else None


class Chunk(NamedTuple):
    """Jobs of one queue and name, in the order of their rows."""

    queue: str
    name: str
    batches: list[Batch]
    many: int


class Rows:
    """Reads rows, and makes chunks of them; counts what is no job."""

    def __init__(self, plan: Plan, size: int = CHUNK, ids: IdSource | None = None) -> None:
        self._plan = plan
        self._size = min(size, CHUNK)
        self._ids = ids or IdSource()
        self._encode = get_encoder(MSGPACK, plan.options.max_payload, "payload")
        self._known: dict[tuple[Any, ...], EnqueueOptions] = {}
        self._open: dict[tuple[str, str], list[Entry]] = {}
        self.read = 0
        """Rows so far."""
        self.rejected: Counter[str] = Counter()
        """Rows that are no jobs, by reason."""
        self._payload = self._reader()

    def chunks(self, batches: Iterable[Any]) -> Iterator[Chunk]:
        """The chunks of record batches; each as soon as it is full, the others at the end."""
        for batch in batches:
            rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
            fresh = None
            if self._plan.id_column is None:
                fresh = iter(self._ids.many(len(rows), SYSTEM_CLOCK.now()))
            for row in rows:
                self.read += 1
                try:
                    key, entry = self._entry(row, next(fresh) if fresh is not None else None)
                except DjqueueError as error:
                    if self._plan.options.on_error == FAIL:
                        raise RowError(f"row {self.read} of its partition: {error}") from error
                    self.rejected[_kind(error)] += 1
                    continue
                entries = self._open.setdefault(key, [])
                entries.append(entry)
                if len(entries) == self._size:
                    yield self._chunk(key, self._open.pop(key))
        for key, entries in self._open.items():
            yield self._chunk(key, entries)
        self._open = {}

    def _entry(self, row: Mapping[str, Any], fresh: str | None) -> tuple[tuple[str, str], Entry]:
        options = self._plan.options
        queue, name = options.queue, options.job
        if queue is None:
            queue = check_text("queue", row[options.queue_column or ""])
        if name is None:
            name = check_text("job", row[options.job_column or ""])
        job_id = fresh
        if job_id is None:
            job_id = check_text("id", row[self._plan.id_column or ""])
        return (queue, name), Entry(job_id, self._payload(row), self._options(row))

    def _options(self, row: Mapping[str, Any]) -> EnqueueOptions:
        plan = self._plan
        if not plan.per_row:
            return plan.base
        said = tuple(_frozen(row[column]) for column in plan.per_row.values())
        found = self._known.get(said)
        if found is None:
            given = {name: value for name, value in zip(plan.per_row, said, strict=True) if value is not None}
            for name, value in given.items():
                parse(name, value)
            found = parse_options(given, plan.base)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[said] = found
        return found

    def _reader(self) -> Callable[[Mapping[str, Any]], bytes]:
        plan, encode = self._plan, self._encode
        if plan.payload is not None:
            return _payload_reader(plan.payload, plan.options.payload_format, encode)
        if plan.args is None and plan.kwargs is None:
            names = plan.others
            return lambda row: encode({"args": [], "kwargs": {name: row[name] for name in names}})
        args, kwargs = plan.args, plan.kwargs

        def call(row: Mapping[str, Any]) -> bytes:
            positional = [] if args is None else row[args]
            named = {} if kwargs is None else row[kwargs]
            if not isinstance(positional, list | type(None)):
                raise OptionError(f"{args}: expected an array, got {type(positional).__name__}")
            if not isinstance(named, dict | type(None)):
                raise OptionError(f"{kwargs}: expected a map or a struct, got {type(named).__name__}")
            return encode({"args": positional or [], "kwargs": named or {}})

        return call

    def _chunk(self, key: tuple[str, str], entries: Sequence[Entry]) -> Chunk:
        """Neighbours with the same options are one batch."""
        queue, name = key
        is_fresh = self._plan.id_column is None
        batches: list[Batch] = []
        last: EnqueueOptions | None = None
        for job_id, payload, options in entries:
            if options is not last:
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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _kind(error: DjqueueError) -> str:
    """The reason of a rejection without what is the row's own."""
    return str(error).partition(":")[0] if ":" in str(error) else type(error).__name__
