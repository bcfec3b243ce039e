"""Parse and check the options of a write, on the driver before any task."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.messages import shown
from djqueue.core.options import PARSERS, EnqueueOptions, check_text, parse_options
from djqueue.core.policies import GROUP_MODES
from djqueue.core.suggest import nearest
from djqueue.storage.staging import CHUNK

STAGED, DIRECT = "staged", "direct"
FAIL, SKIP, DEAD = "fail", "skip", "dead"
ENQUEUE, RETRY, CANCEL, DELETE, UPDATE = "enqueue", "retry", "cancel", "delete", "update"
MAX_KEY = 200
"""Maximum length of the names of a write, which storages extend."""
LONGEST_STAGE = 365 * 86_400
"""Maximum of `stageTtl`, in seconds."""
SPARK_OPTIONS = frozenset({"checkpointlocation", "queryname"})
"""Options of a stream that are meant for Spark itself."""
PATH = "path"
"""The option that Spark sets for an argument of `save` or `load`."""
UNAVAILABLE = {
    "contenttype": "because payloads are written as MessagePack",
    "durable": "because it only affects how a single enqueue is committed",
    "enqueueoncommit": "because Spark has no transaction to wait for",
}
"""Why a job option can't be set, by its normalized name."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The options of a write; docs/spark.md describes them."""

    url: str = field(repr=False)
    """The storage's address. It may contain a password, so it is never shown."""
    prefix: str = ""
    operation: str = ENQUEUE
    write: str | None = None
    """The write's name, if the caller wants to know it."""
    queue: str | None = None
    queue_column: str | None = None
    job: str | None = None
    job_column: str | None = None
    group_mode: str | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Options of all jobs, checked, with the values that Python code would pass: durations are in seconds.
    `depends_on` has only the ids."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column names by job option, or by `id`."""
    payload_column: str | None = None
    payload_format: str = "value"
    args_column: str | None = None
    kwargs_column: str | None = None
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    max_payload: int = 1024 * 1024
    app: str | None = None
    version: int | None = None
    delivery: str = STAGED
    batch_size: int = CHUNK
    max_queue_depth: int | None = None
    backpressure_timeout: float = 600.0
    rate_limit: float | None = None
    max_retries: int = 5
    stage_ttl: float = 86_400.0
    on_error: str = FAIL
    dry_run: bool = False

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "WriteOptions":
        """Parse the options of a write. Names are case-insensitive. Raises OptionError for an invalid one."""
        values: dict[str, Any] = {"constants": {}, "columns": {}}
        spelled: dict[str, str] = {}
        for name, text in given.items():
            plain = key_of(name)
            if plain in SPARK_OPTIONS:
                continue
            known = _KNOWN.get(plain)
            if plain in UNAVAILABLE:
                raise OptionError(
                    f"{name}: not available for Spark's writes, {UNAVAILABLE[plain]}: remove it"
                )
            if known is None:
                raise unknown(name, _SPELLED)
            if plain in spelled:
                raise OptionError(f"{name}: the option is set twice, also as {spelled[plain]}")
            spelled[plain] = name
            known(values, text)
        if "url" not in values:
            raise OptionError(
                "url: set the storage to write to: redis://…, postgresql://…, sqlite:///…, env:NAME or "
                "file:/path. Tables and views of SQL can only be read: to enqueue rows, use df.write or "
                "enqueue(spark.sql('SELECT …'), …)"
            )
        _check_combinations(values, spelled)
        operation = values.get("operation", ENQUEUE)
        if operation != ENQUEUE:
            _check_change(operation, values, spelled)
            return cls(**values)
        for needed, instead in (("queue", "queue_column"), ("job", "job_column")):
            if needed not in values and instead not in values:
                raise OptionError(f"{needed}: set the option, or name a column with {needed}Column")
        if ("app" in values) != ("version" in values):
            raise OptionError("txnAppId and txnVersion must be set together: they identify one write")
        for name in set(values["constants"]) & set(values["columns"]):
            raise OptionError(f"{camel(name)}: set as an option and as a column: remove one of them")
        return cls(**values)


def unknown(name: str, known: Iterable[str]) -> OptionError:
    """Return the error for an unknown option of a write or a read."""
    if name.lower() == PATH:
        return OptionError(
            "path: save() and load() take no path, because the option url names the storage: call them "
            "without an argument"
        )
    return OptionError(f"unknown option {name!r}{nearest(name, known) or ': remove it'}")


ALTERNATIVES = (("queue", "queueColumn"), ("job", "jobColumn"))
"""Options that give the same thing, for all rows or from a column."""


def _check_combinations(values: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
    """Raise OptionError for an option that would have no effect beside the others."""
    for constant, column in ALTERNATIVES:
        if constant in spelled and key_of(column) in spelled:
            raise OptionError(
                f"{constant} and {column} can't be combined: remove {constant} to take it from column "
                f"{values[constant + '_column']!r}, or remove {column}"
            )
    if "group_mode" in values and "queue" not in values:
        raise OptionError(
            "groupMode: sets the mode of one queue, so it requires the option queue: give each queue a "
            "write of its own, or remove groupMode"
        )
    keyed = {*values["constants"], *values["columns"]}
    if "unique_ttl" in keyed and "unique_key" not in keyed:
        raise OptionError("uniqueTtl: requires uniqueKey or uniqueKeyColumn: set one of them, or remove it")
    if "include" in values and values.get("exclude"):
        raise OptionError(
            "excludeColumns can't be combined with includeColumns, which names all columns to pass: remove "
            "one of them"
        )
    is_direct = values.get("delivery") == DIRECT
    if is_direct and "stage_ttl" in values:
        raise OptionError(
            "stageTtl can't be combined with deliveryMode=direct, which stages no rows: remove one of them"
        )
    is_staged = not is_direct and values.get("operation", ENQUEUE) == ENQUEUE
    if "backpressure_timeout" in values and "max_queue_depth" not in values and not is_staged:
        raise OptionError("backpressureTimeout: requires maxQueueDepth: set both, or remove it")


CHANGE_OPTIONS = frozenset(
    {
        "url",
        "keyPrefix",
        "operation",
        "writeId",
        "queue",
        "queueColumn",
        "idColumn",
        "batchSize",
        "rateLimit",
        "maxRetries",
        "onError",
    }
)
"""Options of all operations on existing jobs."""
PAYLOAD = frozenset(
    {
        "payloadColumn",
        "payloadFormat",
        "argsColumn",
        "kwargsColumn",
        "includeColumns",
        "excludeColumns",
        "maxPayloadBytes",
    }
)
CHANGES: Mapping[str, frozenset[str]] = {
    RETRY: CHANGE_OPTIONS | PAYLOAD | {"maxQueueDepth", "backpressureTimeout", "dryRun"},
    CANCEL: CHANGE_OPTIONS,
    DELETE: CHANGE_OPTIONS,
    UPDATE: CHANGE_OPTIONS | PAYLOAD | {"priority", "priorityColumn", "runAt", "runAtColumn"},
}
"""The options of each operation on existing jobs."""


def _check_change(operation: str, values: dict[str, Any], spelled: Mapping[str, str]) -> None:
    """Raise OptionError for an option that an operation on existing jobs does not take."""
    takes = {key_of(name) for name in CHANGES[operation]}
    for plain, name in spelled.items():
        if plain not in takes:
            raise OptionError(f"{name}: not supported by the operation {operation}; remove the option")
    if values.get("on_error") == DEAD:
        raise OptionError(f"onError: dead is supported only by the operation {ENQUEUE}; use {FAIL} or {SKIP}")
    if "queue" not in values:
        values.setdefault("queue_column", "queue")
    values["columns"].setdefault("id", "id")


def key_of(name: str) -> str:
    """Normalize an option's name: `maxAttempts`, `maxattempts` and `max_attempts` are the same option."""
    return name.replace("_", "").lower()


def _text(field_name: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        if not text:
            raise OptionError(f"{camel(field_name)}: is empty")
        values[field_name] = text

    return read


def _named(field_name: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        values[field_name] = check_text(field_name, text)

    return read


def _key(field_name: str, name: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        if not 1 <= len(text) <= MAX_KEY:
            raise OptionError(f"{name}: must have 1 to {MAX_KEY} characters; got {len(text)}")
        values[field_name] = check_text(name, text)

    return read


def _names(field_name: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        values[field_name] = tuple(list_of_text(text))

    return read


def _include(values: dict[str, Any], text: str) -> None:
    _names("include")(values, text)
    if not values["include"]:
        raise OptionError(
            "includeColumns: names no column: name at least one, or remove it to pass all columns; for jobs "
            "without arguments, name all columns with excludeColumns"
        )


def _batch_size(values: dict[str, Any], text: str) -> None:
    _number("batch_size", "batchSize", int, 1)(values, text)
    if values["batch_size"] > CHUNK:
        raise OptionError(
            f"batchSize: must be at most {CHUNK:,}, the jobs of one call to the storage; got {text}: lower "
            "it, or remove it"
        )


def _number(
    field_name: str,
    spelled: str,
    convert: Callable[[str], Any],
    minimum: float,
    maximum: float = float("inf"),
) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        try:
            number = convert(text)
        except ValueError:
            kind = "whole number" if convert is int else "number"
            raise OptionError(f"{spelled}: {shown(text)} is not a {kind}") from None
        if not minimum <= number < float("inf"):
            raise OptionError(f"{spelled}: must be a number of at least {minimum:g}; got {text}")
        if number > maximum:
            raise OptionError(f"{spelled}: must be at most {maximum:,}; got {text}")
        values[field_name] = number

    return read


def _choice(
    field_name: str, spelled: str, *choices: str, alias: Mapping[str, str] | None = None
) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        chosen = (alias or {}).get(text.lower(), text.lower())
        if chosen not in choices:
            raise OptionError(f"{spelled}: {text!r} is not one of {', '.join(choices)}")
        values[field_name] = chosen

    return read


def _flag(field_name: str, spelled: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        if text.lower() not in ("true", "false"):
            raise OptionError(f"{spelled}: must be true or false; got {text!r}")
        values[field_name] = text.lower() == "true"

    return read


def _constant(option: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        value = value_of_text(option, text)
        if option != DEPENDS_ON:
            parse(option, value)
        values["constants"][option] = value

    return read


def _column(option: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        values["columns"][option] = text

    return read


DEPENDS_ON = "depends_on"
"""Parsed separately, because ids refer to the row's queue."""
DURATIONS = frozenset({"delay", "timeout", "ttl", "unique_ttl", "result_ttl", "retention"})
WHOLE = frozenset({"priority", "max_attempts", "max_stalls", "weight"})
NOT_PER_JOB = frozenset({"queue", "content_type", "durable", "enqueue_on_commit"})
"""Job options that a write does not take.

The queue is the target of the write. Payloads are written as MessagePack. `durable` affects only how a single
enqueue is committed, and Spark has no transaction that `enqueue_on_commit` could wait for."""
PER_JOB = tuple(name for name in PARSERS if name not in NOT_PER_JOB)
_SNAKE = re.compile(rf"\b({'|'.join(name for name in PER_JOB if '_' in name)})\b")


def value_of_text(option: str, text: str) -> Any:
    """Convert the text of an option to its value: seconds, an integer, a boolean or a list."""
    try:
        if option in WHOLE:
            return int(text)
        if option in DURATIONS:
            return float(text)
    except ValueError:
        kind = "number of seconds" if option in DURATIONS else "whole number"
        raise OptionError(f"{camel(option)}: {shown(text)} is not a {kind}") from None
    if option == "lifo":
        if text.lower() not in ("true", "false"):
            raise OptionError(f"lifo: must be true or false; got {text!r}")
        return text.lower() == "true"
    if option in ("tags", DEPENDS_ON):
        return list_of_text(text)
    if option == "backoff":
        return _backoff(text)
    if option == "headers":
        return _json(option, text)
    if option == "run_at":
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise OptionError(f"runAt: {text!r} is not a time, such as 2026-06-01T12:00:00Z") from None
        if time.utcoffset() is None:
            raise OptionError(f"runAt: {text!r} has no time zone: use a time such as 2026-06-01T12:00:00Z")
        return time
    return text


def list_of_text(text: str) -> list[str]:
    """Split a list of strings: separated by commas, or a JSON array, in which strings may have commas."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            return found
    return [part.strip() for part in text.split(",") if part.strip()]


def text_of_list(strings: Iterable[str]) -> str:
    """Convert strings to the text of an option, which `list_of_text` converts back."""
    given = list(strings)
    text = ",".join(given)
    return text if list_of_text(text) == given else json.dumps(given)


def _backoff(text: str) -> Any:
    """Convert a backoff: seconds, the name of a kind, or a JSON object."""
    try:
        return float(text)
    except ValueError:
        pass
    if not text.lstrip().startswith("{"):
        return text
    return _json("backoff", text)


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{option}: not JSON: {error}") from None


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


def dependencies(queue: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Return the keys of a job's dependencies: ids in its queue, or structs of queue and id.

    Raises:
        OptionError: A dependency is neither.
    """
    found = []
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Mapping) and set(one) == {"queue", "id"}:
            found.append((one["queue"], one["id"]))
        elif isinstance(one, str):
            found.append((queue, one))
        else:
            raise OptionError(f"dependsOn: expected an id, or a struct of queue and id, got {one!r}")
    keys: tuple[tuple[str, str], ...] = parse(DEPENDS_ON, found)
    return keys


def camel(name: str) -> str:
    """Convert an option's name to camel case, as in Spark's options."""
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


_SPELLED: list[str] = []
_KNOWN: dict[str, Callable[[dict[str, Any], str], None]] = {}


def _add(spelled: str, reader: Callable[[dict[str, Any], str], None]) -> None:
    _SPELLED.append(spelled)
    _KNOWN[key_of(spelled)] = reader


_add("url", _text("url"))
_add("keyPrefix", _text("prefix"))
_add("operation", _choice("operation", "operation", ENQUEUE, *CHANGES))
_add("writeId", _key("write", "writeId"))
_add("groupMode", _choice("group_mode", "groupMode", *GROUP_MODES))
_add("queue", _named("queue"))
_add("queueColumn", _text("queue_column"))
_add("job", _named("job"))
_add("jobColumn", _text("job_column"))
_add("idColumn", _column("id"))
for _option in PER_JOB:
    _add(camel(_option), _constant(_option))
    _add(camel(_option) + "Column", _column(_option))
_add("payloadColumn", _text("payload_column"))
_add("payloadFormat", _choice("payload_format", "payloadFormat", "value", "json", "msgpack"))
_add("argsColumn", _text("args_column"))
_add("kwargsColumn", _text("kwargs_column"))
_add("includeColumns", _include)
_add("excludeColumns", _names("exclude"))
_add("maxPayloadBytes", _number("max_payload", "maxPayloadBytes", int, 1))
_add("txnAppId", _key("app", "txnAppId"))
_add("txnVersion", _number("version", "txnVersion", int, 0, 2**63 - 1))
_add("deliveryMode", _choice("delivery", "deliveryMode", STAGED, DIRECT))
_add("batchSize", _batch_size)
_add("maxQueueDepth", _number("max_queue_depth", "maxQueueDepth", int, 1, 2**63 - 1))
_add("backpressureTimeout", _number("backpressure_timeout", "backpressureTimeout", float, 0))
_add("rateLimit", _number("rate_limit", "rateLimit", float, 0.001))
_add("maxRetries", _number("max_retries", "maxRetries", int, 0))
_add("stageTtl", _number("stage_ttl", "stageTtl", float, 1, LONGEST_STAGE))
_add("onError", _choice("on_error", "onError", FAIL, SKIP, DEAD, alias={"dlq": DEAD}))
_add("dryRun", _flag("dry_run", "dryRun"))
