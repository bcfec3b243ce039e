"""What is said of a write by `.option(…)`: read and checked on the driver, before any task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.options import PARSERS, check_text
from djqueue.core.suggest import nearest

STAGED, DIRECT = "staged", "direct"
FAIL, SKIP = "fail", "skip"
SPARKS_OWN = frozenset({"checkpointlocation"})
"""Options of a stream that Spark passes on."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """See docs/spark.md, which has them all."""

    url: str
    prefix: str = ""
    queue: str | None = None
    queue_column: str | None = None
    job: str | None = None
    job_column: str | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Job options that all jobs have, checked."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of columns by the job option, or `id`, that they hold."""
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
    batch_size: int = 1_000
    max_queue_depth: int | None = None
    backpressure_timeout: float = 600.0
    rate_limit: float | None = None
    stage_ttl: float = 86_400.0
    on_error: str = FAIL
    dry_run: bool = False

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "WriteOptions":
        """The options of a write. Names are not case-sensitive. Raises OptionError naming a wrong one."""
        values: dict[str, Any] = {"constants": {}, "columns": {}}
        for name, text in given.items():
            if name.lower() in SPARKS_OWN:
                continue
            known = _KNOWN.get(name.lower())
            if known is None:
                raise OptionError(f"unknown option {name!r}{nearest(name, _SPELLED)}")
            known(values, text)
        for needed, instead in (("queue", "queue_column"), ("job", "job_column")):
            if needed not in values and instead not in values:
                raise OptionError(f"{needed}: say it as an option, or name its column by {needed}Column")
        if "url" not in values:
            raise OptionError("url: say where the jobs go: redis://…, rediss://…, redis+cluster://…")
        if ("app" in values) != ("version" in values):
            raise OptionError("txnAppId and txnVersion: both, or neither: together they name one write")
        for name in set(values["constants"]) & set(values["columns"]):
            raise OptionError(f"{_camel(name)}: it is said for all jobs, and as a column: keep one")
        return cls(**values)


def _text(field_name: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        if not text:
            raise OptionError(f"{_camel(field_name)}: is empty")
        values[field_name] = text

    return read


def _named(field_name: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        values[field_name] = check_text(_camel(field_name), text)

    return read


def _names(field_name: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        values[field_name] = tuple(part.strip() for part in text.split(",") if part.strip())

    return read


def _number(
    field_name: str, spelled: str, convert: Callable[[str], Any], least: float
) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        try:
            number = convert(text)
        except ValueError:
            raise OptionError(f"{spelled}: {text!r} is not a number") from None
        if not least <= number < float("inf"):
            raise OptionError(f"{spelled}: {text} is not a number from {least:g} on")
        values[field_name] = number

    return read


def _choice(field_name: str, spelled: str, *choices: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        if text.lower() not in choices:
            raise OptionError(f"{spelled}: {text!r} is not one of {', '.join(choices)}")
        values[field_name] = text.lower()

    return read


def _flag(field_name: str, spelled: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        if text.lower() not in ("true", "false"):
            raise OptionError(f"{spelled}: {text!r} is neither true nor false")
        values[field_name] = text.lower() == "true"

    return read


def _constant(option: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        values["constants"][option] = parse(option, of_text(option, text))

    return read


def _column(option: str) -> Callable[[dict[str, Any], str], None]:
    def read(values: dict[str, Any], text: str) -> None:
        values["columns"][option] = text

    return read


DURATIONS = frozenset({"delay", "timeout", "ttl", "unique_ttl", "result_ttl", "retention"})
WHOLE = frozenset({"priority", "max_attempts", "max_stalls", "weight"})
SAID_OTHERWISE = frozenset({"queue", "backoff", "depends_on", "content_type", "durable", "executor"})
"""Options of jobs that a write does not take, or takes by another name."""
PER_JOB = tuple(name for name in PARSERS if name not in SAID_OTHERWISE)


def of_text(option: str, text: str) -> Any:
    """The value that a text is meant to be: seconds, a whole number, true or false, texts and commas."""
    try:
        if option in WHOLE:
            return int(text)
        if option in DURATIONS:
            return float(text)
    except ValueError:
        raise OptionError(f"{_camel(option)}: {text!r} is not a number") from None
    if option == "lifo":
        if text.lower() not in ("true", "false"):
            raise OptionError(f"lifo: {text!r} is neither true nor false")
        return text.lower() == "true"
    if option == "tags":
        return [tag.strip() for tag in text.split(",") if tag.strip()]
    return text


def parse(option: str, value: Any) -> Any:
    """A job option's value, checked. Raises OptionError, with the name as it is written here."""
    try:
        return PARSERS[option](option, value)
    except OptionError as error:
        raise OptionError(str(error).replace(option, _camel(option), 1)) from None


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


_SPELLED: list[str] = []
_KNOWN: dict[str, Callable[[dict[str, Any], str], None]] = {}


def _add(spelled: str, reader: Callable[[dict[str, Any], str], None]) -> None:
    _SPELLED.append(spelled)
    _KNOWN[spelled.lower()] = reader


_add("url", _text("url"))
_add("keyPrefix", _text("prefix"))
_add("queue", _named("queue"))
_add("queueColumn", _text("queue_column"))
_add("job", _named("job"))
_add("jobColumn", _text("job_column"))
_add("idColumn", _column("id"))
for _option in PER_JOB:
    _add(_camel(_option), _constant(_option))
    _add(_camel(_option) + "Column", _column(_option))
_add("payloadColumn", _text("payload_column"))
_add("payloadFormat", _choice("payload_format", "payloadFormat", "value", "json", "msgpack"))
_add("argsColumn", _text("args_column"))
_add("kwargsColumn", _text("kwargs_column"))
_add("includeColumns", _names("include"))
_add("excludeColumns", _names("exclude"))
_add("maxPayloadBytes", _number("max_payload", "maxPayloadBytes", int, 1))
_add("txnAppId", _named("app"))
_add("txnVersion", _number("version", "txnVersion", int, 0))
_add("deliveryMode", _choice("delivery", "deliveryMode", STAGED, DIRECT))
_add("batchSize", _number("batch_size", "batchSize", int, 1))
_add("maxQueueDepth", _number("max_queue_depth", "maxQueueDepth", int, 1))
_add("backpressureTimeout", _number("backpressure_timeout", "backpressureTimeout", float, 0))
_add("rateLimit", _number("rate_limit", "rateLimit", float, 0.001))
_add("stageTtl", _number("stage_ttl", "stageTtl", float, 1))
_add("onError", _choice("on_error", "onError", FAIL, SKIP))
_add("dryRun", _flag("dry_run", "dryRun"))
