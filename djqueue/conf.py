"""The `DJQUEUE` setting: read, checked and given defaults in this one place."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from .core.backoff import Backoff, parse_backoff
from .core.capacity import WHEN_FULL
from .core.deadletters import DeadLetterPolicy
from .core.durations import milliseconds
from .core.errors import ConfigurationError, OptionError
from .core.hiding import NAME, HiddenOptions, kind_of, shown_name, without_credentials
from .core.limiter import Rate
from .core.metrics import DEFAULT_TIERS, Tiers
from .core.options import MAX_INTEGER, MSGPACK, EnqueueOptions, check_text, parse_options
from .core.queue import GROUP_MODES, QueuePolicy
from .core.retention import Keep, KeepOfJob, KeepResults, Retention
from .core.sharing import LimiterPolicy
from .core.sizes import parse_size
from .core.suggest import nearest


@dataclass(frozen=True, kw_only=True)
class DashboardSettings:
    """What `settings.DJQUEUE["DASHBOARD"]` says."""

    read_only: bool = False
    """Whether nobody can change anything there, whatever rights they have."""
    queue_filter: str | Callable[..., bool] | None = None
    """Dotted path of, or a function of, (request, queue's name): whether the user is to see the queue."""
    poll: int = 5_000
    """Milliseconds between looks of an open page, unless the user chooses others; 0: none."""
    sse: bool = False
    """Whether open pages are told of changes, where the server runs the site by ASGI, instead of asking."""
    redact: tuple[str, ...] = (
        "authorization",
        "card",
        "cookie",
        "credential",
        "cvv",
        "email",
        "iban",
        "password",
        "phone",
        "secret",
        "session",
        "ssn",
        "token",
        "*key",
    )
    """Words in names of values that are hidden until they are revealed; `*word`: at the end of a name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """What `settings.DJQUEUE` says, in the form that the package uses."""

    backend: str = "djqueue.storage.database.DatabaseStorage"
    """Dotted path of the storage's class."""
    storage_options: Mapping[str, Any] = field(default_factory=HiddenOptions)
    """Keyword arguments of the storage. They may hold passwords: their representation has no values."""
    queues: Mapping[str, QueuePolicy] = field(default_factory=dict)
    limiters: Mapping[str, LimiterPolicy] = field(default_factory=dict)
    """What queues share, by the name that a queue's LIMITER has."""
    strict_queues: bool = False
    """Whether only the queues named in QUEUES exist."""
    defaults: EnqueueOptions = field(default_factory=EnqueueOptions)
    """Options that a job has unless its type or its caller says otherwise."""
    max_payload: int = 1024 * 1024
    """Bytes that an encoded payload or result may have."""
    max_items: int = 10_000
    """Items that one run of a generator may send."""
    max_items_size: int = 16 * 1024 * 1024
    """Bytes that these may have together."""
    accept_content: frozenset[str] = frozenset({MSGPACK, "application/json"})
    """Content types that payloads and results may have."""
    codec: str = MSGPACK
    """Content type of jobs that do not say another."""
    concurrency: int = 10
    """Slots of a worker, unless its command says otherwise."""
    shutdown_timeout: int = 25_000
    """Milliseconds that a stopping worker gives its jobs."""
    heartbeat: int = 5_000
    """Milliseconds between a worker's renewals of its leases."""
    stuck_timeout: int = 300_000
    """Milliseconds for which the leases of a worker are renewed that cannot do so itself; 0: they are not."""

    metrics: Tiers = DEFAULT_TIERS
    """For how long buckets of metrics are kept."""

    version: str = ""
    """The project's, as its workers tell it; the charts mark when another one begins to run."""

    modules: tuple[str, ...] = ()
    """Modules that define jobs, besides `jobs` of every app: a name in every app, or a whole dotted path."""

    middleware: tuple[str, ...] = ()
    """Dotted paths of the classes around every enqueue and every run, from the outermost on."""
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)

    def policy(self, queue: str) -> QueuePolicy:
        """What the queue is configured to do."""
        return self.queues.get(queue, DEFAULT_POLICY)


DEFAULT_POLICY = QueuePolicy()
LISTS = (list, tuple, set, frozenset)


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Check a `DJQUEUE` mapping. Raises ConfigurationError naming the first bad key; see `problems`."""
    found = problems(given) or unknown_limiters(given)
    if found:
        raise ConfigurationError(found[0])
    values: dict[str, Any] = {}
    for key, value in given.items():
        values.update(READERS[key](key, value))
    if "QUEUES" in given:
        default = _default_policy(values.get("storage_options", {}))
        values.update(_queues("QUEUES", given["QUEUES"], default))
    return Settings(**values)


def problems(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with a `DJQUEUE` mapping, a sentence for each bad key."""
    if not isinstance(given, Mapping):
        return [f"DJQUEUE must be a dict, not {shown_name(given)}"]
    found = []
    for key, value in given.items():
        reader = READERS.get(key)
        if reader is None:
            found.append(f"DJQUEUE[{shown_name(key)}] is not a setting{nearest(str(key), READERS)}")
            continue
        try:
            reader(key, value)
        except (ConfigurationError, OptionError) as error:
            found.append(without_credentials(f"DJQUEUE[{key!r}]: {error}"))
    return found


def is_wrong(given: Mapping[str, Any]) -> bool:
    """Whether `read_settings` would raise."""
    return bool(problems(given) or unknown_limiters(given))


def unknown_limiters(given: Mapping[str, Any]) -> list[str]:
    """A sentence for each queue that names a limiter which is not there. `given` is right otherwise."""
    known = given.get("LIMITERS", {})
    queues = given.get("QUEUES", {})
    return [
        f"DJQUEUE['QUEUES']: queue {name!r}: LIMITER {limiter!r} is not one of DJQUEUE['LIMITERS']"
        f"{nearest(limiter, known)}"
        for name, entry in (queues.items() if isinstance(queues, Mapping) else ())
        if (limiter := entry.get("LIMITER")) is not None and limiter not in known
    ]


def _limiters(_key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"must be a dict of limiters, not {value!r}")
    limiters: dict[str, LimiterPolicy] = {}
    for name, entry in value.items():
        where = f"limiter {check_text('limiter', name)!r}: "
        given = _mapping(entry, {"RATE", "CONCURRENCY"}, where)
        rate, concurrency = given.get("RATE"), given.get("CONCURRENCY")
        limiters[name] = LimiterPolicy(
            rate=None if rate is None else parse_rate(rate, where + "RATE"),
            concurrency=None if concurrency is None else _positive(concurrency, where + "CONCURRENCY"),
        )
    return {"limiters": limiters}


def _storage(_key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"must be a dict, not {kind_of(value)}")
    mapping = _mapping(value, {"BACKEND", "OPTIONS"})
    options = mapping.get("OPTIONS", {})
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"OPTIONS must be a dict, not {kind_of(options)}")
    backend = mapping.get("BACKEND", Settings.backend)
    if not isinstance(backend, str) or "." not in backend or not NAME.fullmatch(backend):
        raise ConfigurationError(f"BACKEND must be the dotted path of a storage, not {shown_name(backend)}")
    return {
        "backend": backend,
        "storage_options": HiddenOptions(
            {str(name).lower(): option for name, option in options.items()},
        ),
    }


def _default_policy(storage_options: Mapping[str, Any]) -> QueuePolicy:
    """What queues do that say nothing else: a storage may have a LEASE for all of them."""
    try:
        return replace(DEFAULT_POLICY, lease=_lasting(storage_options["lease"], "LEASE"))
    except (KeyError, ConfigurationError, OptionError):  # a wrong one is refused by the storage
        return DEFAULT_POLICY


def _queues(_key: str, value: Any, default: QueuePolicy = DEFAULT_POLICY) -> dict[str, Any]:
    if isinstance(value, LISTS):
        value = {check_text("queue", name): {} for name in value}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"must be a dict of queues, or a list of their names, not {value!r}")
    return {
        "queues": {check_text("queue", name): _policy(name, entry, default) for name, entry in value.items()}
    }


def _policy(name: str, value: Any, default: QueuePolicy) -> QueuePolicy:
    known = {
        "LEASE",
        "RATE",
        "CONCURRENCY",
        "LIMITER",
        "GROUP_CONCURRENCY",
        "GROUP_RATE",
        "GROUP_WEIGHTS",
        "GROUP_MODE",
        "MAX_SIZE",
        "WHEN_FULL",
        "BLOCK_TIMEOUT",
        "DEAD_LETTERS",
        "RETENTION",
        "OBJECTIVE",
        "OUTBOX",
    }
    given = _mapping(value, known, f"queue {name!r}: ")
    policy: dict[str, Any] = {}
    if "LEASE" in given:
        policy["lease"] = _lasting(given["LEASE"], f"queue {name!r}: LEASE")
    for word in ("RATE", "GROUP_RATE"):
        if given.get(word) is not None:
            policy[word.lower()] = parse_rate(given[word], f"queue {name!r}: {word}")
    if "GROUP_WEIGHTS" in given:
        policy["group_weights"] = _weights(given["GROUP_WEIGHTS"], f"queue {name!r}: GROUP_WEIGHTS")
    if given.get("LIMITER") is not None:
        policy["limiter"] = check_text(f"queue {name!r}: LIMITER", given["LIMITER"])
    if "WHEN_FULL" in given:
        policy["when_full"] = _word(given["WHEN_FULL"], WHEN_FULL, f"queue {name!r}: WHEN_FULL")
    if "BLOCK_TIMEOUT" in given:
        policy["block_timeout"] = _lasting(given["BLOCK_TIMEOUT"], f"queue {name!r}: BLOCK_TIMEOUT")
    for word in ("CONCURRENCY", "GROUP_CONCURRENCY", "MAX_SIZE"):
        if given.get(word) is not None:
            policy[word.lower()] = _positive(given[word], f"queue {name!r}: {word}")
    if "GROUP_MODE" in given:
        policy["group_mode"] = _word(given["GROUP_MODE"], GROUP_MODES, f"queue {name!r}: GROUP_MODE")
    if "DEAD_LETTERS" in given:
        policy["dead_letters"] = _dead_letters(name, given["DEAD_LETTERS"])
    if "RETENTION" in given:
        policy["retention"] = _retention(name, given["RETENTION"])
    if given.get("OBJECTIVE") is not None:
        policy["objective"] = _lasting(given["OBJECTIVE"], f"queue {name!r}: OBJECTIVE")
    if "OUTBOX" in given:
        policy["outbox"] = _flag(given["OUTBOX"], f"queue {name!r}: OUTBOX: ")
    return replace(default, **policy)


def _weights(value: Any, where: str) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where} must be a dict of groups' weights, not {value!r}")
    return {
        check_text(f"{where}: a group", group): _positive(weight, f"{where}: {group!r}")
        for group, weight in value.items()
    }


def _dead_letters(name: str, value: Any) -> DeadLetterPolicy:
    where = f"queue {name!r}: DEAD_LETTERS: "
    given = _mapping(value, {"MAX_ENTRIES", "MAX_BYTES", "TTL", "AUTO_RETRIES", "AUTO_RETRY_DELAY"}, where)
    policy: dict[str, Any] = {}
    if "TTL" in given:
        policy["ttl"] = _lasting(given["TTL"], where + "TTL")
    if "AUTO_RETRY_DELAY" in given:
        policy["auto_retry_delay"] = _delay(given["AUTO_RETRY_DELAY"], where + "AUTO_RETRY_DELAY")
    if "MAX_ENTRIES" in given:
        policy["max_entries"] = _positive(given["MAX_ENTRIES"], where + "MAX_ENTRIES")
    if given.get("MAX_BYTES") is not None:
        policy["max_bytes"] = parse_size(where + "MAX_BYTES", given["MAX_BYTES"])
    if "AUTO_RETRIES" in given:
        policy["auto_retries"] = _integer(given["AUTO_RETRIES"], where + "AUTO_RETRIES")
    return DeadLetterPolicy(**policy)


def _retention(name: str, value: Any) -> Retention:
    where = f"queue {name!r}: RETENTION: "
    if isinstance(value, Mapping) and "FAILED" in value:
        raise ConfigurationError(f"{where}'FAILED' is not known here: DEAD_LETTERS has their bounds")
    bounds: dict[str, Any] = {}
    for word, entry in _mapping(value, {*BOUNDS}, where).items():
        kind = BOUNDS[word]
        known = {name.upper() for name in kind.__dataclass_fields__}
        given = _mapping(entry, known, f"{where}{word}: ")
        keep = {
            name.lower(): _bound(name, bound, f"{where}{word}: {name}", of_each=kind is KeepOfJob)
            for name, bound in given.items()
            if bound is not None
        }
        bounds[word.lower()] = kind(**keep)
    return Retention(**bounds)


BOUNDS: dict[str, type[Keep | KeepResults | KeepOfJob]] = {
    "COMPLETED": Keep,
    "CANCELLED": Keep,
    "RESULTS": KeepResults,
    "ATTEMPTS": KeepOfJob,
    "LOGS": KeepOfJob,
}
MOST_OF_EACH = 65_535
"""Attempts, or log lines, that one job may keep."""


def _bound(name: str, value: Any, where: str, *, of_each: bool) -> int:
    if name == "AGE":
        return _lasting(value, where)
    if name == "BYTES":
        return parse_size(where, value)
    if of_each and not 1 <= _integer(value, where) <= MOST_OF_EACH:
        raise ConfigurationError(f"{where}: {value!r} is not from 1 to {MOST_OF_EACH}")
    return _integer(value, where)


def _delay(value: Any, where: str) -> int | Backoff:
    if isinstance(value, (str, dict, Backoff)):
        try:
            return parse_backoff(value)
        except OptionError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    return _lasting(value, where)


RATE_UNITS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_rate(value: Any, where: str = "rate") -> Rate:
    """A rate as users write it: `"100/s"`, `"20/m"`, `"5/h"`, or (count, seconds)."""
    if isinstance(value, str):
        count, slash, unit = value.partition("/")
        if slash and count.isdecimal() and len(count) < 10 and int(count) and unit in RATE_UNITS:
            return Rate(int(count), RATE_UNITS[unit])
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        return Rate(_positive(value[0], where), _lasting(value[1], where))
    raise ConfigurationError(f"{where}: {value!r} is neither like '100/s' (s, m, h, d) nor (count, seconds)")


def _strict(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _flag(value)}


def _defaults(_key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"must be a dict of job options, not {value!r}")
    for name in value:
        check_text("the name of an option", name)
        if name == "content_type":
            raise ConfigurationError("content_type is the setting DJQUEUE['CODEC']")
    return {"defaults": parse_options(value, EnqueueOptions())}


def _count(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _positive(value, key)}


def _size(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _positive(parse_size(key, value), key)}


def _duration(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): milliseconds(key, value)}


def _interval(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _lasting(value, key)}


def _accept(_key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, LISTS) or not value or not all(isinstance(kind, str) for kind in value):
        raise ConfigurationError(f"must be a list of content types, not {value!r}")
    return {"accept_content": frozenset(value)}


def _codec(key: str, value: Any) -> dict[str, Any]:
    return {"codec": check_text(key, value)}


def _modules(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (list, tuple)):
        raise ConfigurationError(f"must be a list of modules' names such as ['tasks'], not {value!r}")
    for name in value:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ConfigurationError(
                f"{name!r} is not the name of a module: expected 'tasks', to import it from every app, or "
                "a dotted path such as 'shop.background'"
            )
    return {key.lower(): tuple(value)}


def _middleware(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(path, str) for path in value):
        raise ConfigurationError(f"must be a list of dotted paths of classes, not {value!r}")
    return {key.lower(): tuple(value)}


def _metrics(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"MINUTE", "HOUR", "DAY"})
    return {key.lower(): Tiers(**{word.lower(): _lasting(time, word) for word, time in given.items()})}


def _version(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): "" if value is None else check_text(key, value)}


def _dashboard(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"READ_ONLY", "QUEUE_FILTER", "POLL", "SSE", "REDACT"})
    said: dict[str, Any] = {}
    if "READ_ONLY" in given:
        said["read_only"] = _flag(given["READ_ONLY"], "READ_ONLY ")
    chosen = given.get("QUEUE_FILTER")
    if chosen is not None:
        if not callable(chosen) and not (isinstance(chosen, str) and "." in chosen):
            raise ConfigurationError(
                f"QUEUE_FILTER must be a function or the dotted path of one, not {chosen!r}"
            )
        said["queue_filter"] = chosen
    if "SSE" in given:
        said["sse"] = _flag(given["SSE"], "SSE ")
    if "POLL" in given:
        said["poll"] = milliseconds("POLL", given["POLL"])
    if "REDACT" in given:
        words = given["REDACT"]
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise ConfigurationError(f"REDACT must be a list of words, not {words!r}")
        said["redact"] = tuple(word.lower() for word in words)
    return {key.lower(): DashboardSettings(**said)}


def _mapping(value: Any, known: set[str], where: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where}must be a dict, not {value!r}")
    for key in value:
        if key not in known:
            raise ConfigurationError(f"{where}{shown_name(key)} is not known here{nearest(str(key), known)}")
    return value


def _flag(value: Any, where: str = "") -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{where}must be True or False, not {value!r}")
    return value


def _word(value: Any, words: tuple[str, ...], where: str) -> str:
    if value not in words:
        raise ConfigurationError(f"{where}: {value!r} is not one of {', '.join(words)}")
    return str(value)


def _lasting(value: Any, where: str) -> int:
    lasting = milliseconds(where, value)
    if not lasting:
        raise ConfigurationError(f"{where}: {value!r} is not positive")
    return lasting


def _positive(value: Any, where: str) -> int:
    if _integer(value, where) < 1:
        raise ConfigurationError(f"{where}: {value!r} is not positive")
    return int(value)


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INTEGER:
        raise ConfigurationError(f"{where}: {value!r} is not a whole number from 0 to {MAX_INTEGER}")
    return value


READERS = {
    "STORAGE": _storage,
    "QUEUES": _queues,
    "LIMITERS": _limiters,
    "STRICT_QUEUES": _strict,
    "DEFAULTS": _defaults,
    "MAX_PAYLOAD": _size,
    "MAX_ITEMS": _count,
    "MAX_ITEMS_SIZE": _size,
    "ACCEPT_CONTENT": _accept,
    "CODEC": _codec,
    "CONCURRENCY": _count,
    "SHUTDOWN_TIMEOUT": _duration,
    "HEARTBEAT": _interval,
    "STUCK_TIMEOUT": _duration,
    "METRICS": _metrics,
    "VERSION": _version,
    "MODULES": _modules,
    "MIDDLEWARE": _middleware,
    "DASHBOARD": _dashboard,
}


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The project's settings; read anew after a test changes them. Defaults where there is no Django."""
    if not has_django():
        return Settings()
    return read_settings(getattr(django_settings, "DJQUEUE", {}))


def has_django() -> bool:
    """Whether this process has Django's settings: without them there are no databases."""
    return bool(django_settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ)


def _forget(*, setting: str, **_: object) -> None:
    if setting == "DJQUEUE":
        get_settings.cache_clear()


setting_changed.connect(_forget)
