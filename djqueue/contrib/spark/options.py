"""The options of writes and reads, parsed and checked on the driver before any task.

`WRITE_OPTIONS` and `READ_OPTIONS` list them, each with its parser and what takes it. An option is a text, as
Spark passes it. Names are case-insensitive.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

from djqueue.core.errors import OptionError
from djqueue.core.messages import shown
from djqueue.core.options import DURATIONS, PARSERS, EnqueueOptions, check_text, parse_options
from djqueue.core.policies import KEY_MODES
from djqueue.core.states import TERMINAL, State
from djqueue.core.suggest import nearest
from djqueue.core.units import to_milliseconds
from djqueue.storage.export import ExportFilter
from djqueue.storage.staging import CHUNK

from .tables import (
    ATTEMPTS,
    BULK_WRITE,
    CONTENT_TYPE,
    EVENTS,
    JOBS,
    PAYLOAD,
    RESULT,
    RESULTS,
    TABLES,
    TAGS,
    Column,
    Table,
)
from .tables import DEAD as DEAD_LETTERS

FAIL, SKIP, DEAD = "fail", "skip", "dead"
ENQUEUE, RETRY, CANCEL, DELETE, UPDATE = "enqueue", "retry", "cancel", "delete", "update"
EARLIEST, LATEST = "earliest", "latest"
JSON, BINARY = "json", "binary"
MAX_KEY = 200
"""Maximum length of the names of a write, which storages extend."""
MAX_STAGE_TTL = 365 * 86_400
"""Maximum of `stageTtl`, in seconds."""
MAX_VALUES = 1_000
"""Maximum number of values of an option that filters rows."""
MAX_READ_BATCH = 3_000
"""Maximum of `batchSize` of a read, in rows. A larger call would block Redis for too long."""
LISTED_COLUMNS = 30
"""Maximum number of columns that an error lists."""
MAX_WHOLE = 2**63 - 1
"""Maximum of whole numbers, which databases store in 64 bits."""
UNLIMITED = float("inf")
PATH = "path"
"""The option that Spark sets for an argument of `save` or `load`."""
CHECKPOINT, QUERY_NAME = "checkpointlocation", "queryname"
"""Options of a stream that are meant for Spark itself; only a stream that writes has the second."""
UNAVAILABLE = {
    "contenttype": "because payloads are written as MessagePack",
    "durable": "because it only affects how a single enqueue is committed",
    "enqueueoncommit": "because Spark has no transaction to wait for",
    "deliverymode": "because all rows are staged, which is faster and enqueues all of them or none",
}
"""Why an option can't be set, by its normalized name."""
DEPENDS_ON = "depends_on"
"""Parsed separately, because ids refer to the row's queue."""
NOT_PER_JOB = frozenset({"queue", "content_type", "durable", "enqueue_on_commit"})
"""Job options that a write does not take.

The queue is the target of the write. Payloads are written as MessagePack. `durable` affects only how a single
enqueue is committed, and Spark has no transaction that `enqueue_on_commit` could wait for."""
PER_JOB = tuple(name for name in PARSERS if name not in NOT_PER_JOB)

ONE_TYPE = re.compile(r"\w+\s*([<(].*)?", re.DOTALL)
"""A schema that is a type, such as `double` or `array<int>`, not the fields of a struct."""

Parser = Callable[[str, str], Any]
"""Returns the value of an option by its name and text. Raises OptionError."""


# Parsers.


def _text(name: str, text: str) -> str:
    if not text:
        raise OptionError(f"{name}: is empty")
    return text


def _key(name: str, text: str) -> str:
    if not 1 <= len(text) <= MAX_KEY:
        raise OptionError(f"{name}: must have 1 to {MAX_KEY} characters; got {len(text)}")
    return check_text(name, text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise OptionError(f"{name}: must be true or false; got {text!r}")
    return text.lower() == "true"


def _choice(*choices: str, aliases: Mapping[str, str] | None = None) -> Parser:
    def parse(name: str, text: str) -> str:
        chosen = (aliases or {}).get(text.lower(), text.lower())
        if chosen not in choices:
            raise OptionError(f"{name}: {text!r} is not one of {', '.join(choices)}")
        return chosen

    return parse


def _converted(convert: Callable[[str], Any], kind: str) -> Parser:
    def parse(name: str, text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise OptionError(f"{name}: {shown(text)} is not a {kind}") from None

    return parse


MAX_TIMEOUT = 3_600.0
"""Maximum time limit of a call, in seconds. Redis has a lower one."""


def seconds(name: str, text: str) -> float:
    """Parse a time limit. Raises OptionError."""
    limit: float = _number(float, 0.001, MAX_TIMEOUT)(name, text)
    return limit


_whole = _converted(int, "whole number")
_seconds = _converted(float, "number of seconds")


def _number(
    convert: Callable[[str], Any], minimum: float, maximum: float = UNLIMITED, reason: str = ""
) -> Parser:
    read = _whole if convert is int else _converted(convert, "number")

    def parse(name: str, text: str) -> Any:
        number = read(name, text)
        if not minimum <= number < UNLIMITED:
            raise OptionError(f"{name}: must be a number of at least {minimum:g}; got {text}")
        if number > maximum:
            hint = f"{reason}; got {text}: lower it, or remove it" if reason else f"; got {text}"
            raise OptionError(f"{name}: must be at most {maximum:,}{hint}")
        return number

    return parse


def _count(maximum: int) -> Parser:
    def parse(name: str, text: str) -> Any:
        number = _whole(name, text)
        if not 1 <= number <= maximum:
            raise OptionError(f"{name}: must be from 1 to {maximum:,}; got {text}")
        return number

    return parse


def _list(_name: str, text: str) -> list[str]:
    return list_of_text(text)


def _names(_name: str, text: str) -> tuple[str, ...]:
    return tuple(list_of_text(text))


def _included(name: str, text: str) -> tuple[str, ...]:
    columns = _names(name, text)
    if not columns:
        raise OptionError(
            f"{name}: names no column: name at least one, or remove it to pass all columns; for jobs "
            "without arguments, name all columns with excludeColumns"
        )
    return columns


def _words(name: str, text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not words:
        raise OptionError(f"{name}: is empty")
    return words


def _queues(name: str, text: str) -> tuple[str, ...]:
    return tuple(check_text(name, queue) for queue in _words(name, text))


def _values(name: str, text: str) -> tuple[str, ...]:
    values = tuple(dict.fromkeys(list_of_text(text)))
    if not 1 <= len(values) <= MAX_VALUES:
        raise OptionError(
            f"{name}: must have 1 to {MAX_VALUES:,} values; got {len(values):,}: join the rows in Spark"
        )
    return tuple(check_text(name, value) for value in values)


def _table(name: str, text: str) -> Table:
    table = TABLES.get(text.lower())
    if table is None:
        raise OptionError(f"{name}: {text!r} is not one of {', '.join(TABLES)}{nearest(text, TABLES)}")
    return table


def _schema(name: str, text: str) -> str:
    """Convert a schema to a type in Spark's DDL: `total DOUBLE, lines INT` to a struct of these fields."""
    text = _text(name, text.strip())
    return text if ONE_TYPE.fullmatch(text) else f"struct<{text}>"


def _states(name: str, text: str) -> frozenset[State]:
    known = [state.value for state in State]
    words = [word.lower() for word in _words(name, text)]
    for word in words:
        if word not in known:
            raise OptionError(f"{name}: {word!r} is not one of {', '.join(known)}{nearest(word, known)}")
    return frozenset(map(State, words))


def _range_end(name: str, text: str) -> int:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise OptionError(
            f"{name}: {text!r} is neither a date, such as {date(2026, 1, 31)}, nor a time, such as "
            "2026-01-31T12:00:00+01:00"
        ) from None
    # Without a time zone, it is UTC, as are all times of the tables.
    return to_milliseconds(time if time.tzinfo else time.replace(tzinfo=UTC))


def _start(name: str, text: str) -> str:
    if text.lower() not in (EARLIEST, LATEST):
        raise OptionError(f"{name}: must be {EARLIEST} or {LATEST}; got {text!r}")
    return text.lower()


def _run_at(name: str, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(f"{name}: {text!r} is not a time, such as 2026-06-01T12:00:00Z") from None
    if time.utcoffset() is None:
        raise OptionError(f"{name}: {text!r} has no time zone: use a time such as 2026-06-01T12:00:00Z")
    return time


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name}: not JSON: {error}") from None


def _backoff(name: str, text: str) -> Any:
    """Convert a backoff: seconds, the name of a kind, or a JSON object."""
    try:
        return float(text)
    except ValueError:
        return _json(name, text) if text.lstrip().startswith("{") else text


JOB_PARSERS: Mapping[str, Parser] = {
    **dict.fromkeys(("priority", "max_attempts", "max_stalls", "weight"), _whole),
    **dict.fromkeys(DURATIONS, _seconds),
    **dict.fromkeys(("tags", DEPENDS_ON), _list),
    "lifo": _flag,
    "backoff": _backoff,
    "headers": _json,
    "run_at": _run_at,
}
"""Parsers that turn the text of a job option into the value that Python code would pass; others are texts."""


def value_of_text(option: str, text: str) -> Any:
    """Convert the text of a job option to its value. Raises OptionError."""
    parser = JOB_PARSERS.get(option)
    return text if parser is None else parser(camel(option), text)


def _constant(option: str) -> Parser:
    def parse_constant(_name: str, text: str) -> Any:
        value = value_of_text(option, text)
        if option != DEPENDS_ON:
            parse(option, value)
        return value

    return parse_constant


def _as_it_is(_name: str, text: str) -> str:
    return text


# Names.


def key_of(name: str) -> str:
    """Normalize an option's name: `maxAttempts`, `maxattempts` and `max_attempts` are the same option."""
    return name.replace("_", "").lower()


def camel(name: str) -> str:
    """Convert an option's name to camel case, as in Spark's options."""
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


# The tables.


class Option(NamedTuple):
    """An option of a write or a read."""

    name: str
    field: str
    """Field of `WriteOptions` or `ReadOptions`, or key of the mapping that `group` names."""
    parse: Parser
    uses: frozenset[str]
    """Operations of a write, or kinds of a read, that take it."""
    group: str = ""
    """Mapping of `WriteOptions` that has its value: `constants` or `columns`."""


NEW = frozenset({ENQUEUE})
PACED = frozenset({ENQUEUE, RETRY})
SCHEDULED = frozenset({ENQUEUE, UPDATE})
WITH_PAYLOAD = frozenset({ENQUEUE, RETRY, UPDATE})
OPERATIONS = frozenset({ENQUEUE, RETRY, CANCEL, DELETE, UPDATE})
BATCH, STREAM = frozenset({"batch"}), frozenset({"stream"})
READS = BATCH | STREAM


READ_OPTIONS = (
    Option("url", "url", _text, READS),
    Option("keyPrefix", "prefix", _text, READS),
    Option("table", "table", _table, READS),
    Option("queue", "queue", lambda name, text: (check_text(name, text),), READS),
    Option("queues", "queues", _queues, READS),
    Option("state", "states", _states, BATCH),
    Option("id", "ids", _values, BATCH),
    Option("name", "names", _values, BATCH),
    Option("tag", "tags", _values, BATCH),
    Option("uniqueKey", "unique_keys", _values, BATCH),
    Option("subject", "subjects", _values, BATCH),
    Option("since", "since", _range_end, BATCH),
    Option("until", "until", _range_end, BATCH),
    Option("columns", "columns", _words, READS),
    Option("includePayload", "payload", _flag, BATCH),
    Option("values", "values", _choice(JSON, BINARY), BATCH),
    Option("payloadSchema", "payload_schema", _schema, BATCH),
    Option("resultSchema", "result_schema", _schema, BATCH),
    Option("numPartitions", "partitions", _count(1_000), BATCH),
    Option("batchSize", "batch_size", _count(MAX_READ_BATCH), READS),
    Option("timeout", "timeout", seconds, READS),
    Option("socketTimeout", "socket_timeout", seconds, READS),
    Option("maxRetries", "max_retries", _number(int, 0), READS),
    Option("startingOffsets", "starting", _start, STREAM),
    Option("maxRowsPerTrigger", "max_rows", _count(2**31 - 1), STREAM),
    Option("failOnDataLoss", "fail_on_data_loss", _flag, STREAM),
)

OF_ROWS = frozenset({"job", "jobcolumn", "queuecolumn"})
"""Options that only a write has, and that nearly all writes have."""
OF_JOBS = frozenset({JOBS, RESULTS, ATTEMPTS, DEAD_LETTERS})
FILTERED: Mapping[str, frozenset[Table]] = {
    "ids": OF_JOBS,
    "names": OF_JOBS,
    **dict.fromkeys(("tags", "unique_keys", "subjects"), frozenset({JOBS, RESULTS})),
}
"""Tables whose rows these fields of `ReadOptions` filter."""

_READ_OPTIONS = {option.name.lower(): option for option in READ_OPTIONS}


def _unknown(name: str, options: Iterable[Option]) -> OptionError:
    if name.lower() == PATH:
        return OptionError(
            "path: save() and load() take no path, because the option url names the storage: call them "
            "without an argument"
        )
    known = [option.name for option in options]
    return OptionError(f"unknown option {name!r}{nearest(name, known) or ': remove it'}")


def _option(
    parse: Parser, uses: frozenset[str], default: Any = MISSING, *, name: str = "", is_secret: bool = False
) -> Any:
    """Return a field that is an option, whose name is by default the field's in camel case."""
    return field(default=default, repr=not is_secret, metadata={"parse": parse, "uses": uses, "name": name})


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The options of a write; docs/spark-reference.md describes them."""

    url: str = _option(_text, OPERATIONS, is_secret=True)
    """The storage's address. It may contain a password, so it is never shown."""
    prefix: str = _option(_text, OPERATIONS, "", name="keyPrefix")
    operation: str = _option(_choice(ENQUEUE, RETRY, CANCEL, DELETE, UPDATE), OPERATIONS, ENQUEUE)
    write: str | None = _option(_key, OPERATIONS, None, name="writeId")
    """The write's name, if the caller wants to know it."""
    key_mode: str | None = _option(_choice(*KEY_MODES), NEW, None)
    queue: str | None = _option(check_text, OPERATIONS, None)
    queue_column: str | None = _option(_text, OPERATIONS, None)
    job: str | None = _option(check_text, NEW, None)
    job_column: str | None = _option(_text, NEW, None)
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Options of all jobs, checked, with the values that Python code would pass: durations are in seconds.
    `depends_on` has only the ids."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column names by job option, or by `id`."""
    payload_column: str | None = _option(_text, WITH_PAYLOAD, None)
    payload_format: str = _option(_choice("value", "json", "msgpack"), WITH_PAYLOAD, "value")
    args_column: str | None = _option(_text, WITH_PAYLOAD, None)
    kwargs_column: str | None = _option(_text, WITH_PAYLOAD, None)
    include: tuple[str, ...] | None = _option(_included, WITH_PAYLOAD, None, name="includeColumns")
    exclude: tuple[str, ...] = _option(_names, WITH_PAYLOAD, (), name="excludeColumns")
    max_payload: int = _option(_number(int, 1), WITH_PAYLOAD, 1024 * 1024, name="maxPayloadBytes")
    app: str | None = _option(_key, NEW, None, name="txnAppId")
    version: int | None = _option(_number(int, 0, MAX_WHOLE), NEW, None, name="txnVersion")
    batch_size: int = _option(
        _number(int, 1, CHUNK, ", the jobs of one call to the storage"), OPERATIONS, CHUNK
    )
    max_queue_depth: int | None = _option(_number(int, 1, MAX_WHOLE), PACED, None)
    backpressure_timeout: float = _option(_number(float, 0), PACED, 600.0)
    rate_limit: float | None = _option(_number(float, 0.001), OPERATIONS, None)
    max_retries: int = _option(_number(int, 0), OPERATIONS, 5)
    stage_ttl: float = _option(_number(float, 1, MAX_STAGE_TTL), NEW, 86_400.0)
    on_error: str = _option(_choice(FAIL, SKIP, DEAD, aliases={"dlq": DEAD}), OPERATIONS, FAIL)
    dry_run: bool = _option(_flag, PACED, False)

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "WriteOptions":
        """Parse the options of a write. Raises OptionError for an invalid one."""
        values: dict[str, Any] = {"constants": {}, "columns": {}}
        spelled: dict[str, str] = {}
        for name, text in given.items():
            key = key_of(name)
            if key in (CHECKPOINT, QUERY_NAME):
                continue
            if key in UNAVAILABLE:
                raise OptionError(f"{name}: not available for Spark's writes, {UNAVAILABLE[key]}: remove it")
            option = _WRITE_OPTIONS.get(key)
            if option is None:
                raise _unknown(name, WRITE_OPTIONS)
            if key in spelled:
                raise OptionError(f"{name}: the option is set twice, also as {spelled[key]}")
            spelled[key] = name
            target = values[option.group] if option.group else values
            target[option.field] = option.parse(option.name, text)
        if "url" not in values:
            raise OptionError(
                "url: set the storage to write to: redis://…, postgresql://…, sqlite:///…, env:NAME or "
                "file:/path. Spark does not pass the options of CREATE TABLE, with or without AS SELECT: "
                "use INSERT INTO name WITH (url = 'env:NAME', queue = '…', job = '…') SELECT …"
            )
        _check_combinations(values)
        operation = values.get("operation", ENQUEUE)
        if operation != ENQUEUE:
            _check_change(operation, values, spelled)
            return cls(**values)
        for needed in ("queue", "job"):
            if needed not in values and f"{needed}_column" not in values:
                raise OptionError(f"{needed}: set the option, or name a column with {needed}Column")
        if ("app" in values) != ("version" in values):
            raise OptionError("txnAppId and txnVersion must be set together: they identify one write")
        for name in set(values["constants"]) & set(values["columns"]):
            raise OptionError(f"{camel(name)}: set as an option and as a column: remove one of them")
        return cls(**values)

    def named_columns(self) -> list[tuple[str, str]]:
        """Return the columns that options name, each with the name of its option."""
        named = []
        for option in WRITE_OPTIONS:
            if option.name.endswith(("Column", "Columns")):
                value = self.columns.get(option.field) if option.group else getattr(self, option.field)
                columns = (value,) if isinstance(value, str) else value or ()
                named += [(option.name, column) for column in columns]
        return named


def _write_options() -> Iterator[Option]:
    """Return the options of a write: its fields, ids, and each job option for all rows and from a column."""
    for each in fields(WriteOptions):
        if given := each.metadata:
            yield Option(given["name"] or camel(each.name), each.name, given["parse"], given["uses"])
    yield Option("idColumn", "id", _as_it_is, OPERATIONS, "columns")
    for name in PER_JOB:
        uses = SCHEDULED if name in ("priority", "run_at") else NEW
        yield Option(camel(name), name, _constant(name), uses, "constants")
        yield Option(f"{camel(name)}Column", name, _as_it_is, uses, "columns")


WRITE_OPTIONS = tuple(_write_options())
_WRITE_OPTIONS = {key_of(option.name): option for option in WRITE_OPTIONS}


def _check_combinations(values: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that would have no effect beside the others."""
    for name in ("queue", "job"):
        if name in values and f"{name}_column" in values:
            raise OptionError(
                f"{name} and {name}Column can't be combined: remove {name} to take it from column "
                f"{values[f'{name}_column']!r}, or remove {name}Column"
            )
    if "key_mode" in values and "queue" not in values:
        raise OptionError(
            "keyMode: sets the mode of one queue, so it requires the option queue: give each queue a "
            "write of its own, or remove keyMode"
        )
    keyed = {*values["constants"], *values["columns"]}
    if "unique_ttl" in keyed and "unique_key" not in keyed:
        raise OptionError("uniqueTtl: requires uniqueKey or uniqueKeyColumn: set one of them, or remove it")
    if "include" in values and values.get("exclude"):
        raise OptionError(
            "excludeColumns can't be combined with includeColumns, which names all columns to pass: remove "
            "one of them"
        )
    is_change = values.get("operation", ENQUEUE) != ENQUEUE
    if is_change and "backpressure_timeout" in values and "max_queue_depth" not in values:
        raise OptionError("backpressureTimeout: requires maxQueueDepth: set both, or remove it")


def _check_change(operation: str, values: dict[str, Any], spelled: Mapping[str, str]) -> None:
    """Raise OptionError for an option that an operation on existing jobs does not take."""
    for key, name in spelled.items():
        if operation not in _WRITE_OPTIONS[key].uses:
            raise OptionError(f"{name}: not supported by the operation {operation}; remove the option")
    if values.get("on_error") == DEAD:
        raise OptionError(f"onError: dead is supported only by the operation {ENQUEUE}; use {FAIL} or {SKIP}")
    if "queue" not in values:
        values.setdefault("queue_column", "queue")
    values["columns"].setdefault("id", "id")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of a read; docs/spark-reference.md describes them."""

    url: str = field(repr=False)
    """The storage's address, which may contain a password."""
    prefix: str = ""
    table: Table = JOBS
    queues: tuple[str, ...] | None = None
    states: frozenset[State] | None = None
    since: int | None = None
    """Start of the time range, in UTC milliseconds."""
    until: int | None = None
    """End of the time range, in UTC milliseconds; exclusive."""
    ids: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    unique_keys: tuple[str, ...] | None = None
    subjects: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    payload: bool = False
    values: str | None = None
    payload_schema: str | None = None
    """The type of the payloads in Spark's DDL; None for JSON or binary."""
    result_schema: str | None = None
    partitions: int = 8
    batch_size: int = 1_000
    timeout: float | None = None
    socket_timeout: float | None = None
    max_retries: int = 5
    starting: str = LATEST
    max_rows: int | None = None
    fail_on_data_loss: bool = True

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "ReadOptions":
        """Parse the options of a read, or of a stream of events.

        Raises:
            OptionError: An option is unknown, invalid, or not supported for the table.
        """
        values: dict[str, Any] = {}
        options: list[Option] = []
        for name, text in given.items():
            if name.lower() == CHECKPOINT:
                continue
            option = _READ_OPTIONS.get(name.lower())
            if option is None and key_of(name) in OF_ROWS:
                raise OptionError(
                    f"{name}: not an option of reads: remove it. To enqueue rows in SQL, list their columns "
                    "in CREATE TEMPORARY VIEW name (customer STRING) USING djqueue OPTIONS (…), and add rows "
                    "with INSERT INTO name SELECT …; this view cannot be read"
                )
            if option is None:
                raise _unknown(name, READ_OPTIONS)
            options.append(option)
            values[option.field] = option.parse(option.name, text)
        if "url" not in values:
            raise OptionError(
                "url: set the storage to read from: redis://…, postgresql://…, sqlite:///…, env:NAME or "
                "file:/path. Spark does not pass the options of a table in its catalog: name them in the "
                "query, with SELECT … FROM name WITH (url = 'env:NAME'), or use a temporary view"
            )
        if "queue" in values and "queues" in values:
            raise OptionError("queue and queues can't be combined: remove one of them")
        if "queue" in values:
            values["queues"] = values.pop("queue")
        if "payload_schema" in values:
            values.setdefault("payload", True)
        read = cls(**values)
        use = STREAM if read.table is EVENTS else BATCH
        for name in sorted(option.name for option in options if not use & option.uses):
            raise OptionError(f"{name}: not an option for reading {read.table.name}")
        read._check()
        return read

    def _check(self) -> None:
        table = self.table
        if self.queues is not None and not table.is_by_queue:
            raise OptionError(f"queue: rows of {table.name} have no queue")
        if self.states is not None and not table.is_by_state:
            raise OptionError(f"state: rows of {table.name} cannot be filtered by state")
        if self.states is not None and table is RESULTS and self.states - TERMINAL:
            raise OptionError("state: results exist only for completed, failed and cancelled jobs")
        if (self.since, self.until) != (None, None) and table.time is None:
            raise OptionError(f"since, until: rows of {table.name} cannot be filtered by time")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise OptionError("until: must be later than since")
        for option in READ_OPTIONS:
            tables = FILTERED.get(option.field)
            if tables is not None and getattr(self, option.field) is not None and table not in tables:
                raise OptionError(f"{option.name}: rows of {table.name} cannot be filtered by {option.name}")
        option_name = "includePayload" if self.payload_schema is None else "payloadSchema"
        if self.payload and table is not JOBS:
            raise OptionError(f"{option_name}: supported only by the table jobs, not {table.name}")
        if self.payload and self.columns is not None and PAYLOAD not in self.columns:
            raise OptionError(
                f"{option_name}: has no effect, because columns does not name payload: add it to columns, "
                f"or remove {option_name}"
            )
        self._check_values({column.name for column in self.schema()})

    def _check_values(self, columns: set[str]) -> None:
        for name, option in ((PAYLOAD, "payloadSchema"), (RESULT, "resultSchema")):
            if name in self.schemas and (name not in columns or self.values is not None):
                problem = (
                    "can't be combined with values: remove one of them"
                    if name in columns
                    else f"has no effect, because the column {name} is not read: read it, or remove {option}"
                )
                raise OptionError(f"{option}: {problem}")
        if self.values is not None and not columns & {PAYLOAD, RESULT}:
            raise OptionError(
                "values: has no effect, because no payloads and no results are read: set includePayload, or "
                "remove values"
            )

    @property
    def schemas(self) -> dict[str, str]:
        """Types in Spark's DDL that the user gave, by column."""
        given = {PAYLOAD: self.payload_schema, RESULT: self.result_schema}
        return {name: kind for name, kind in given.items() if kind is not None}

    def schema(self) -> list[Column]:
        """Return the columns to read. Raises OptionError for an unknown one."""
        kinds = dict(self.schemas)
        if self.values == BINARY:
            kinds |= {PAYLOAD: BINARY, RESULT: BINARY}
        return [column._replace(type=kinds.get(column.name, column.type)) for column in self._chosen()]

    def _chosen(self) -> list[Column]:
        try:
            return self.table.chosen(self.columns, payload=self.payload)
        except KeyError as error:
            name = str(error.args[0])
            if name == PAYLOAD and self.table is JOBS:
                raise OptionError("columns: payload requires includePayload=true") from None
            known = self.table.names(payload=self.payload)
            raise OptionError(f"columns: {self.table.name} has {no_column(name, known)}") from None

    def wanted(self) -> ExportFilter:
        """Return the filter to pass to the storage."""
        columns = {column.name for column in self.schema()}
        if columns & {PAYLOAD, RESULT}:
            columns.add(CONTENT_TYPE)
        if BULK_WRITE in columns:
            columns = columns - {BULK_WRITE} | {TAGS}
        return ExportFilter(
            self.table.name,
            frozenset(columns),
            self.queues,
            self.states,
            self.since,
            self.until,
            self.ids,
            self.names,
            self.tags,
            self.unique_keys,
            self.subjects,
        )


def no_column(name: str, columns: Collection[str]) -> str:
    """Return the end of an error about a column that does not exist, which lists the columns."""
    listed = list(columns)[:LISTED_COLUMNS]
    more = f" and {len(columns) - len(listed)} more" if len(columns) > len(listed) else ""
    hint = nearest(name, columns) or "."
    return f"no column {name!r}{hint} The columns are {', '.join(listed)}{more}"


# Values of job options, of all rows or in a column.


def list_of_text(text: str) -> list[str]:
    """Split a list of strings: separated by commas, or a JSON array, in which strings may have commas."""
    if text.lstrip().startswith("["):
        try:
            strings = json.loads(text)
        except (ValueError, RecursionError):
            strings = None
        if isinstance(strings, list) and all(isinstance(string, str) for string in strings):
            return strings
    return [part.strip() for part in text.split(",") if part.strip()]


def text_of_list(strings: Iterable[str]) -> str:
    """Convert strings to the text of an option, which `list_of_text` converts back."""
    strings = list(strings)
    text = ",".join(strings)
    return text if list_of_text(text) == strings else json.dumps(strings)


def parse(option: str, value: Any) -> Any:
    """Check a job option's value. Raises OptionError, with the name in Spark's spelling."""
    try:
        return PARSERS[option](option, value)
    except OptionError as error:
        raise OptionError(str(error).replace(option, camel(option), 1)) from None


def job_options(given: Mapping[str, Any], base: EnqueueOptions) -> EnqueueOptions:
    """Like `parse_options`, with the names in Spark's spelling in errors."""
    try:
        return parse_options(given, base)
    except OptionError as error:
        raise OptionError(_SNAKE.sub(lambda name: camel(name[0]), str(error))) from None


_SNAKE = re.compile(rf"\b({'|'.join(name for name in PER_JOB if '_' in name)})\b")


def dependencies(queue: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Return the keys of a job's dependencies: ids in its queue, or structs of queue and id.

    Raises:
        OptionError: A dependency is neither.
    """
    keys = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, Mapping) and set(item) == {"queue", "id"}:
            keys.append((item["queue"], item["id"]))
        elif isinstance(item, str):
            keys.append((queue, item))
        else:
            raise OptionError(f"dependsOn: expected an id, or a struct of queue and id, got {item!r}")
    checked: tuple[tuple[str, str], ...] = parse(DEPENDS_ON, keys)
    return checked
