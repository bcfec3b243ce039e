"""Map DataFrame columns to job options and payloads, and check their types."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from djqueue.codecs import MSGPACK, decode, get_encoder
from djqueue.core.errors import OptionError, PayloadTooLargeError, SerializationError
from djqueue.core.options import EnqueueOptions, check_text

from .options import DEPENDS_ON, WriteOptions, camel, dependencies, job_options, no_column, parse


class Columns:
    """The role of each column, checked on the driver and used in every task.

    Raises:
        OptionError: A column is missing, or options contradict each other.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        self.options = options
        _check_names(columns)
        named = options.named_columns()
        for option, column in named:
            if column not in columns:
                raise OptionError(f"{option}: {no_column(column, columns)}")
        self.payload = options.payload_column or _own("payload", columns)
        self.args = options.args_column or _own("args", columns)
        self.kwargs = options.kwargs_column or _own("kwargs", columns)
        if self.payload is not None and (options.args_column or options.kwargs_column):
            raise OptionError(
                "payloadColumn can't be combined with argsColumn or kwargsColumn: remove one of them"
            )
        _check_payload(options, self.payload, self.args, self.kwargs)
        taken = {column for _, column in named}
        self.others: tuple[str, ...] = ()
        if self.payload is None and self.args is None and self.kwargs is None:
            chosen = options.include if options.include is not None else columns
            self.others = tuple(
                name
                for name in chosen
                if name not in options.exclude and (options.include is not None or name not in taken)
            )
        self.all_others = self.others == tuple(columns)
        """Whether the whole row is its job's keyword arguments."""
        self.per_row = {name: column for name, column in options.columns.items() if name != "id"}
        self.id_column = options.columns.get("id")

    @property
    def payload_columns(self) -> tuple[str, ...]:
        """The columns that payloads are made from."""
        if self.payload is not None:
            return (self.payload,)
        return tuple(one for one in (self.args, self.kwargs) if one is not None) or self.others

    @property
    def option_columns(self) -> set[str]:
        """The columns with queues, jobs' names, ids and options."""
        options = self.options
        columns = {options.queue_column, options.job_column, self.id_column, *self.per_row.values()}
        return {column for column in columns if column is not None}

    @cached_property
    def needed(self) -> frozenset[str]:
        """The columns that are read."""
        return frozenset({*self.option_columns, *self.payload_columns})

    def queue_of(self, row: Mapping[str, Any]) -> str:
        """Return the queue of a row. Raises OptionError."""
        return self.options.queue or check_text("queue", row[self.options.queue_column or ""])

    def payload_reader(self) -> Callable[[Mapping[str, Any]], bytes]:
        """Return a function that encodes a row's payload."""
        encode, limit = get_encoder(MSGPACK, None, "payload"), self.options.max_payload
        read = self._payload_encoder(encode)

        def checked(row: Mapping[str, Any]) -> bytes:
            data = read(row)
            if len(data) > limit:
                sizes = {name: len(encode(row[name])) for name in self.payload_columns}
                raise PayloadTooLargeError(self._too_large(sizes, len(data)))
            return data

        return checked

    def _too_large(self, sizes: Mapping[str, int], size: int) -> str:
        """Return the error of a payload that is too large. It names the largest column."""
        column = max(sizes, key=sizes.__getitem__)
        largest = min(sizes[column], size)
        return (
            f"payload: column {column!r} has {largest} of {size} bytes, but maxPayloadBytes is "
            f"{self.options.max_payload}: raise it, or store large data elsewhere and pass a reference"
        )

    def _payload_encoder(self, encode: Callable[[Any], bytes]) -> Callable[[Mapping[str, Any]], bytes]:
        if self.payload is not None:
            return _column_encoder(self.payload, self.options.payload_format, encode)
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
    """The role of each column in rows that are enqueued as jobs."""

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        _check_dropped(self, columns)
        constants = dict(options.constants)
        self.depends_on = constants.pop(DEPENDS_ON, None)
        self.unique_ttl = constants.pop("unique_ttl", None) if "unique_key" in self.per_row else None
        """The `unique_ttl` of all jobs that have a unique key."""
        self.base = with_given_backoff(job_options(constants, EnqueueOptions()), constants)
        if self.depends_on is not None and options.queue is not None:
            depends_on = dependencies(options.queue, self.depends_on)
            self.base = replace(self.base, job=replace(self.base.job, depends_on=depends_on))
            self.depends_on = None

    def needs_key(self) -> bool:
        """Return whether neither an option nor a column sets a concurrency key."""
        return "concurrency_key" not in self.per_row and self.base.job.concurrency_key is None


def with_given_backoff(options: EnqueueOptions, given: Mapping[str, Any]) -> EnqueueOptions:
    """Mark an explicit backoff, which takes precedence over the job's backoff function."""
    return replace(options, job=replace(options.job, backoff_given=True)) if "backoff" in given else options


def _check_names(columns: Sequence[str]) -> None:
    """Raise OptionError for a DataFrame whose rows Spark does not pass on."""
    if not columns:
        raise OptionError(
            "columns: the DataFrame has none, and Spark does not pass on rows without columns: add one, such "
            "as lit(1).alias('n')"
        )
    for name, count in Counter(columns).items():
        if count > 1:
            raise OptionError(f"columns: {count} columns are named {name!r}: rename or drop all but one")


def _check_payload(options: WriteOptions, payload: str | None, *arguments: str | None) -> None:
    """Raise OptionError for an option that has no effect on where payloads come from."""
    if payload is None and options.payload_format != "value":
        raise OptionError(
            f"payloadFormat: {options.payload_format} requires a payload column: set payloadColumn, or "
            "remove payloadFormat"
        )
    source = next(filter(None, (payload, *arguments)), None)
    for name, chosen in (("includeColumns", options.include), ("excludeColumns", options.exclude or None)):
        if source is not None and chosen is not None:
            raise OptionError(
                f"{name}: has no effect, because jobs receive only column {source!r}: remove {name}, or "
                "rename or drop that column"
            )


def _check_dropped(plan: Columns, columns: Sequence[str]) -> None:
    """Raise OptionError if a column is the payload only because of its name, and others would be lost."""
    options = plan.options
    named = (options.payload_column, options.args_column, options.kwargs_column)
    if any(named) or options.payload_format != "value":
        return
    dropped = [name for name in columns if name not in plan.needed]
    for role, column in (("payload", plan.payload), ("args", plan.args), ("kwargs", plan.kwargs)):
        if column is not None and dropped:
            count = len(dropped) - 1
            more = f" and {count} more columns" if count > 1 else " and 1 more column" if count else ""
            raise OptionError(
                f"{role}: jobs would not receive column {dropped[0]!r}{more}, because column {column!r} "
                f"replaces the others: drop these, or set {role}Column to {column!r} if jobs need only that, "
                "or rename it to pass all columns as arguments"
            )


def _own(name: str, columns: Sequence[str]) -> str | None:
    return name if name in columns else None


def _column_encoder(
    column: str, form: str, encode: Callable[[Any], bytes]
) -> Callable[[Mapping[str, Any]], bytes]:
    if form == "value":
        return lambda row: encode(row[column])
    if form == "msgpack":

        def checked(row: Mapping[str, Any]) -> bytes:
            data = row[column]
            if not isinstance(data, bytes):
                raise OptionError(f"{column}: expected binary MessagePack, got {type(data).__name__}")
            try:
                decode(data, MSGPACK)
            except SerializationError as error:
                raise OptionError(f"{column}: not MessagePack that djqueue can decode: {error}") from error
            return data

        return checked

    def parsed(row: Mapping[str, Any]) -> bytes:
        text = row[column]
        if not isinstance(text, str | bytes):
            raise OptionError(f"{column}: expected JSON text, got {type(text).__name__}")
        try:
            return encode(json.loads(text))
        except (RecursionError, TypeError, ValueError) as error:
            raise OptionError(f"{column}: not JSON: {error}") from error

    return parsed


if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SAMPLES: dict[str, Any] = {
    **dict.fromkeys(("string", "char", "varchar"), "a"),
    "binary": b"a",
    "boolean": True,
    **dict.fromkeys(("byte", "short", "integer", "long"), 1),
    **dict.fromkeys(("float", "double"), 1.0),
    "decimal": Decimal(1),
    "date": date(2026, 1, 1),
    **dict.fromkeys(("timestamp", "timestamp_ntz"), datetime(2026, 1, 1, tzinfo=UTC)),
    "time": time(),
    "daytimeinterval": timedelta(seconds=1),
}
"""A sample value for each of Spark's type names."""
MONTHS = "yearmonthinterval"
REMEDIES = {
    MONTHS: "Python has no interval of months; cast it to a number of months, or to a string",
    **dict.fromkeys(
        ("interval", "calendarinterval"), "Python has no interval of months and days; cast it to a string"
    ),
}
"""Remedies for columns of Spark types without an equivalent in Python."""
TYPE_ERROR = "expected"
"""In messages of parsers that reject a type; the others reject a value."""


class UnknownType(Exception):
    """A type without a sample value, such as that of a column of nulls."""


def check_types(columns: Columns, schema: "StructType") -> None:
    """Raise OptionError, with option, column and type, if a column's type can't hold what it is used for."""
    for column in schema.fields:
        if column.dataType.typeName() == MONTHS:
            # PySpark fails to read any row of such a DataFrame.
            raise OptionError(
                f"{column.name}: a column of type {column.dataType.simpleString()} can't be written: "
                f"{REMEDIES[MONTHS]}, or drop it"
            )
    for column in columns.payload_columns:
        kind = schema[column].dataType
        problem = _problem(kind)
        if problem is not None:
            raise OptionError(
                f"{column}: a column of type {kind.simpleString()} can't be part of a payload: {problem}, or "
                "leave the column out with excludeColumns"
            )
    for option, column, check in _uses(columns.options, columns):
        kind = schema[column].dataType
        name = kind.typeName()
        if name in REMEDIES or (name == "timestamp_ntz" and option == "runAtColumn"):
            problem = REMEDIES.get(name, "it has no time zone; cast it to timestamp")
            raise OptionError(f"{option}: column {column!r} has type {kind.simpleString()}: {problem}")
        try:
            value = _sample(kind)
        except UnknownType:
            continue
        if option == "headersColumn" and isinstance(value, str):
            continue  # Each row has a JSON object, which is parsed with the row.
        try:
            check(value)
        except OptionError as error:
            is_plain = not isinstance(value, (str, list, dict))
            if is_plain or TYPE_ERROR in str(error):
                # What it got is a sample of the type, and in no row of the DataFrame.
                problem = str(error).partition(", got ")[0]
                if is_plain and _takes_text(check):
                    problem = f"{problem}: cast it to string, with col({column!r}).cast('string')"
                raise OptionError(
                    f"{option}: column {column!r} has type {kind.simpleString()}: {problem}"
                ) from None


def _takes_text(check: Callable[[Any], object]) -> bool:
    try:
        check("a")
    except OptionError:
        return False
    return True


def _problem(kind: Any) -> str | None:
    """Return why Python can't represent the values of a Spark type, with a remedy; None if it can."""
    name = kind.typeName()
    if name in REMEDIES:
        return REMEDIES[name]
    if name == "array":
        return _problem(kind.elementType)
    if name == "struct":
        return next(filter(None, (_problem(field.dataType) for field in kind.fields)), None)
    if name == "map":
        if kind.keyType.typeName() in ("array", "map", "struct", "variant"):
            return (
                f"keys of type {kind.keyType.simpleString()} can't be the keys of a dict; convert the map "
                "with map_entries"
            )
        return _problem(kind.keyType) or _problem(kind.valueType)
    return None


def _uses(options: WriteOptions, columns: Columns) -> Iterator[tuple[str, str, Callable[[Any], object]]]:
    if options.queue_column is not None:
        yield "queueColumn", options.queue_column, lambda value: check_text("queue", value)
    if options.job_column is not None:
        yield "jobColumn", options.job_column, lambda value: check_text("job", value)
    if columns.id_column is not None:
        yield "idColumn", columns.id_column, lambda value: check_text("id", value)
    for name, column in columns.per_row.items():
        yield f"{camel(name)}Column", column, _parser(name)
    if columns.args is not None:
        yield "argsColumn", columns.args, _instance(list, "an array")
    if columns.kwargs is not None:
        yield "kwargsColumn", columns.kwargs, _named
    if columns.payload is not None and options.payload_format == "msgpack":
        yield "payloadColumn", columns.payload, _instance(bytes, "binary MessagePack")
    if columns.payload is not None and options.payload_format == "json":
        yield "payloadColumn", columns.payload, _instance((str, bytes), "JSON text")


def _parser(name: str) -> Callable[[Any], object]:
    if name == DEPENDS_ON:
        return lambda value: dependencies("a", value)
    return lambda value: parse(name, value)


def _instance(kinds: type | tuple[type, ...], expected: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, kinds):
            raise OptionError(f"expected {expected}")

    return check


def _named(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise OptionError("expected a map with keys of type string, or a struct")


def _sample(kind: Any) -> Any:
    """Return a sample value of a Spark type. Raises UnknownType."""
    name = kind.typeName()
    if name == "array":
        return [_sample(kind.elementType)]
    if name == "map":
        return {_sample(kind.keyType): _sample(kind.valueType)}
    if name == "struct":
        return {field.name: _sample(field.dataType) for field in kind.fields}
    try:
        return SAMPLES[name]
    except KeyError:
        raise UnknownType(name) from None
