"""Job options, and the one place where they are checked."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, Literal, get_args

from .backoff import DEFAULT_BACKOFF, Backoff, parse_backoff
from .errors import OptionError
from .headers import NO_HEADERS, Headers, parse_headers
from .messages import shown
from .suggest import nearest_option
from .units import instant, milliseconds, positive_milliseconds

MAX_NAME = 255
"""Maximum number of characters of a queue name, job name, id, unique key, concurrency key, tag or subject."""
MAX_CONTENT_TYPE = 100
MAX_TAGS = 1_000
MAX_DEPENDENCIES = 10_000
MAX_INTEGER = 2**31 - 1
DAY = 86_400_000
MSGPACK = "application/x-djqueue-msgpack"
"""Content type of the default codec."""

OnDuplicate = Literal["keep", "replace", "debounce", "keep_last_if_active"]
ON_DUPLICATE: tuple[str, ...] = get_args(OnDuplicate)
OnDependencyFailure = Literal["fail", "ignore", "cancel", "wait"]
ON_DEPENDENCY_FAILURE: tuple[str, ...] = get_args(OnDependencyFailure)

JobKey = tuple[str, str]
"""(queue, id): identifies one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of a job. Immutable: the jobs of one bulk call share one."""

    priority: int = 0
    """Higher priorities run first."""
    max_attempts: int = 3
    """Maximum number of attempts, including the first, before the job is a dead letter."""
    max_stalls: int = 3
    """Maximum number of stalled attempts before the job is a dead letter."""
    backoff: Backoff = DEFAULT_BACKOFF
    """Wait before the next attempt after a failure."""
    backoff_given: bool = False
    """True if the caller gave `backoff`, which then overrides a function of the job type."""
    timeout: int | None = None
    """Maximum milliseconds of one attempt."""
    ttl: int | None = None
    """Milliseconds after the enqueue at which the job expires if it has not started."""
    unique_key: str | None = None
    """Key that at most one live job of a queue has."""
    unique_ttl: int | None = None
    """Milliseconds after which the key is free although its job is live."""
    on_duplicate: str = "keep"
    """Behavior of an enqueue whose `unique_key` is taken.

    `keep` the existing job; `replace` it if it has not started; `debounce`: replace it, and restart the
    delay; `keep_last_if_active`: replace it if it has not started, otherwise start after its end.
    """
    concurrency_key: str | None = None
    """Key whose jobs run one at a time in a queue, or as many at once as the queue allows."""
    weight: int = 1
    """Slots of the queue's concurrency that the job takes; a weight above the limit takes them all."""
    depends_on: tuple[JobKey, ...] = ()
    """Jobs that must complete before this one may start."""
    dependents: tuple[JobKey, ...] = ()
    """Some jobs that depend on this one, used to find them after all have ended. Set by flows."""
    on_dependency_failure: str = "fail"
    """Behavior when a dependency fails or is cancelled: `fail` | `ignore` | `cancel` | `wait`."""
    lifo: bool = False
    """True: before the waiting jobs of its priority instead of behind them."""
    durable: bool | None = None
    """True: written and synced before the enqueue returns. False: written a moment later, also when the
    producer is in a transaction or in another process. None: the default of the storage.
    """
    result_ttl: int | None = 3_600_000
    """Milliseconds for which the result is kept; None keeps it."""
    retention: int | None = None
    """Milliseconds for which the record of the ended job is kept, if longer than its result."""
    delay: int | None = field(default=None, compare=False)
    """Milliseconds of delay from the enqueue, if the caller gave them. Set by the storage; only displayed."""
    tags: tuple[str, ...] = ()
    """Labels stored with the job."""
    subject: str | None = None
    """Object that the job is about: `app_label.model:pk` of a model instance, or any string. See
    `Reads.jobs_about`.
    """
    headers: Headers = NO_HEADERS
    """Values carried with the job beside its payload, such as a trace context. Middleware may add some."""
    content_type: str = MSGPACK
    """Content type of the payload and the result."""
    rejected: tuple[str, str] | None = None
    """Type and message of the error with which the job becomes a dead letter at once. Set by bulk writes for
    invalid rows; such a job has no unique key and no dependencies.
    """
    plain: bool = field(init=False, default=True, compare=False, repr=False)
    """True if the job has no unique key, concurrency key or dependencies, so that its end needs no lock of
    the queue.
    """
    kept: int | None = field(init=False, default=None, compare=False, repr=False)
    """Milliseconds for which the record of the ended job is kept; None: forever."""

    def __post_init__(self) -> None:
        plain = (
            self.unique_key is None
            and self.concurrency_key is None
            and not self.depends_on
            and self.rejected is None
        )
        object.__setattr__(self, "plain", plain)
        if self.result_ttl is not None:
            object.__setattr__(self, "kept", max(self.result_ttl, self.retention or 0))

    def refused(self, error: Exception, limit: int | None = None) -> "JobOptions":
        """Return the options with which a job becomes a dead letter because of this error.

        Args:
            limit: Maximum characters of the error's text; None for all.
        """
        rejected = (f"{type(error).__module__}.{type(error).__qualname__}", str(error)[:limit])
        return replace(self, rejected=rejected, depends_on=(), unique_key=None, unique_ttl=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as plain values."""
        plain = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                plain[name] = _PLAIN[name](value) if name in _PLAIN else value
        return plain

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "JobOptions":
        """Return the options of `as_dict`; names that this version does not know are ignored."""
        values = {name: value for name, value in stored.items() if name in _DEFAULTS}
        if "backoff" in values:
            values["backoff"] = Backoff(**values["backoff"])
        if "headers" in values:
            values["headers"] = Headers(values["headers"])
        for name in ("depends_on", "dependents"):
            if name in values:
                values[name] = tuple((queue, id) for queue, id in values[name])
        for name in ("tags", "rejected"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(**values)


_DEFAULTS = {item.name: item.default for item in fields(JobOptions) if item.init}
DEFAULT_OPTIONS = JobOptions()


def _plain_backoff(backoff: Backoff) -> dict[str, Any]:
    return {item.name: getattr(backoff, item.name) for item in fields(Backoff)}


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "backoff": _plain_backoff,
    "headers": lambda headers: headers.text,
}
"""Conversions of options that are not plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueOptions:
    """Options of an enqueue: those of the job, its queue, and its start."""

    job: JobOptions = DEFAULT_OPTIONS
    queue: str | None = None
    delay: int | None = None
    """Milliseconds from the storage's current time."""
    run_at: int | None = None
    """UTC milliseconds."""
    enqueue_on_commit: bool | str = False
    """True: enqueue when the caller's transaction commits, on the storage's database, or `default` if it has
    none. A string: when the transaction on the database of this alias commits."""


OF_ENQUEUE = frozenset({"queue", "delay", "run_at", "enqueue_on_commit"})
"""Options that are not stored with the job."""


def parse_options(given: Mapping[str, Any], base: EnqueueOptions) -> EnqueueOptions:
    """Return `base` with the options that a user gave, each checked; headers are added to those of `base`.

    Raises OptionError with the name of the option in the message.
    """
    job: dict[str, Any] = {}
    where: dict[str, Any] = {}
    for name, value in given.items():
        parser = PARSERS.get(name)
        if parser is None:
            raise OptionError(f"unknown option {name!r}{nearest_option(name, PARSERS)}")
        target = where if name in OF_ENQUEUE else job
        target[name] = parser(name, value)
    if where.get("delay") is not None and where.get("run_at") is not None:
        raise OptionError("delay and run_at can't be combined: remove one of them")
    # A later `delay` or `run_at` replaces an earlier one of either form.
    if "delay" in where:
        where.setdefault("run_at", None)
    if "run_at" in where:
        where.setdefault("delay", None)
    if "headers" in job and base.job.headers:
        job["headers"] = base.job.headers.merged(job["headers"])
    options = replace(base.job, **job) if job else base.job
    if options.unique_ttl is not None and options.unique_key is None:
        raise OptionError("unique_ttl: requires a unique_key")
    return replace(base, job=options, **where)


def merge_given(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that a user gave in two places; later ones win, and headers are merged by name.

    The values are unchecked, so those that are not mappings are left for `parse_options` to refuse.
    """
    merged = {**earlier, **later}
    both = earlier.get("headers"), later.get("headers")
    if isinstance(both[0], Mapping) and isinstance(both[1], Mapping):
        merged["headers"] = {**both[0], **both[1]}
    return merged


def check_text(name: str, value: Any) -> str:
    """Return a name, key or id; raise OptionError unless it is a string of 1 to 255 characters."""
    if not isinstance(value, str):
        raise OptionError(f"{name}: expected a string, got {shown(value)}")
    if not 1 <= len(value) <= MAX_NAME:
        raise OptionError(f"{name}: must have 1 to {MAX_NAME} characters; got {len(value)}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{name}: {shown(value)} is not valid Unicode") from None
    if "\0" in value:
        raise OptionError(f"{name}: must not contain the NUL character")
    # A lazy object of Django claims to be a string, but cannot be stored.
    return value if type(value) is str else encoded.decode()


Parser = Callable[[str, Any], Any]


def _integer(low: int, high: int) -> Parser:
    def parse(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionError(f"{name}: expected a whole number, got {shown(value)}")
        if not low <= value <= high:
            raise OptionError(f"{name}: must be from {low} to {high}; got {shown(value)}")
        return value

    return parse


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}: expected True or False, got {shown(value)}")
    return value


def _choice(choices: tuple[str, ...]) -> Parser:
    def parse(name: str, value: Any) -> str:
        if value not in choices:
            raise OptionError(f"{name}: {shown(value)} is not one of {', '.join(choices)}")
        return str(value)

    return parse


def _content_type(name: str, value: Any) -> str:
    if len(check_text(name, value)) > MAX_CONTENT_TYPE:
        raise OptionError(f"{name}: must have at most {MAX_CONTENT_TYPE} characters; got {len(value)}")
    return str(value)


def _optional(parser: Parser) -> Parser:
    return lambda name, value: None if value is None else parser(name, value)


def _tags(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise OptionError(f"{name}: expected a list of strings, got {shown(value)}")
    tags = tuple(check_text(name, tag) for tag in islice(value, MAX_TAGS + 1))
    if len(tags) > MAX_TAGS:
        raise OptionError(f"{name}: a job may have at most {MAX_TAGS:,} tags, got {_count_of(value)}")
    return tags


def check_dependencies(name: str, keys: Collection[JobKey]) -> None:
    """Raise OptionError if a job would depend on too many others."""
    if len(keys) > MAX_DEPENDENCIES:
        raise OptionError(
            f"{name}: a job may depend on at most {MAX_DEPENDENCIES:,} jobs; add intermediate jobs that "
            "each depend on some of them"
        )


def _count_of(values: Iterable[Any]) -> str:
    return f"{len(values):,}" if isinstance(values, Sized) else "more"


def _subject(name: str, value: Any) -> str:
    if not hasattr(value, "_state"):
        if not isinstance(value, str):
            raise OptionError(f"{name}: expected a model instance or a string, got {shown(value)}")
        return check_text(name, value)
    named = name_of(value)
    if named is None:
        raise OptionError(f"{name}: {shown(value)} has no primary key; save the instance first")
    return check_text(name, named)


def _dependencies(name: str, value: Any) -> tuple[JobKey, ...]:
    entries = [value] if hasattr(value, "queue") else value
    if isinstance(entries, (str, bytes)) or not isinstance(entries, Iterable):
        raise OptionError(
            f"{name}: expected a list of results of enqueue() or (queue, id) pairs, got {shown(value)}"
        )
    keys: dict[JobKey, None] = {}
    for entry in entries:
        if hasattr(entry, "queue") and hasattr(entry, "id"):
            queue, job_id = entry.queue, entry.id
        elif isinstance(entry, tuple) and len(entry) == 2:
            queue, job_id = entry
        else:
            raise OptionError(
                f"{name}: {shown(entry)} is neither a result of enqueue() nor a (queue, id) pair"
            )
        keys[check_text(f"{name}: queue", queue), check_text(f"{name}: id", job_id)] = None
        check_dependencies(name, keys)
    return tuple(keys)


def parse_on_commit(name: str, value: Any) -> bool | str:
    """Check `enqueue_on_commit`: True, False, or the alias of a database. Raises OptionError."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise OptionError(f"{name}: expected True, False or the alias of a database, got {shown(value)}")
    return check_text(name, value)


def _backoff(_name: str, value: Any) -> Backoff:
    return parse_backoff(value)


_delay = _optional(milliseconds)
_duration = _optional(positive_milliseconds)

PARSERS: dict[str, Parser] = {
    "queue": check_text,
    "priority": _integer(-MAX_INTEGER, MAX_INTEGER),
    "delay": _delay,
    "run_at": _optional(instant),
    "max_attempts": _integer(1, MAX_INTEGER),
    "max_stalls": _integer(0, MAX_INTEGER),
    "backoff": _backoff,
    "timeout": _duration,
    "ttl": _duration,
    "unique_key": _optional(check_text),
    "unique_ttl": _duration,
    "on_duplicate": _choice(ON_DUPLICATE),
    "concurrency_key": _optional(check_text),
    "weight": _integer(1, MAX_INTEGER),
    "depends_on": _dependencies,
    "on_dependency_failure": _choice(ON_DEPENDENCY_FAILURE),
    "lifo": _flag,
    "durable": _optional(_flag),
    "result_ttl": _duration,
    "retention": _duration,
    "tags": _tags,
    "subject": _optional(_subject),
    "headers": parse_headers,
    "content_type": _content_type,
    "enqueue_on_commit": parse_on_commit,
}
DURATIONS = frozenset(name for name, parser in PARSERS.items() if parser in (_delay, _duration))
"""Options that are durations: users give seconds or a timedelta, and parsed options have milliseconds."""


def name_of(instance: Any) -> str | None:
    """Return `app_label.model:pk` of a model instance; None if it is not saved.

    A proxy has the name of its concrete model.
    """
    if instance.pk is None or instance._state.adding:
        return None
    return f"{instance._meta.concrete_model._meta.label_lower}:{instance.pk}"


def parts_of(subject: str) -> tuple[str, str, str] | None:
    """Return app label, model name and primary key; None if a subject cannot be a model instance."""
    label, colon, key = subject.partition(":")
    app, dot, model = label.partition(".")
    if not (colon and dot and key and app.isidentifier() and model.isidentifier()):
        return None
    return app, model, key
