"""The `DJQUEUE` setting: read, checked and given defaults in this one place."""

import os
from collections.abc import Mapping
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
from .core.limiter import Rate
from .core.options import MAX_INTEGER, MSGPACK, EnqueueOptions, check_text, parse_options
from .core.queue import GROUP_MODES, QueuePolicy
from .core.retention import Keep, Retention
from .core.suggest import nearest


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """What `settings.DJQUEUE` says, in the form that the package uses."""

    backend: str = "djqueue.storage.database.DatabaseStorage"
    """Dotted path of the storage's class."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the storage."""
    queues: Mapping[str, QueuePolicy] = field(default_factory=dict)
    strict_queues: bool = False
    """Whether only the queues named in QUEUES exist."""
    defaults: EnqueueOptions = field(default_factory=EnqueueOptions)
    """Options that a job has unless its type or its caller says otherwise."""
    max_payload: int = 1024 * 1024
    """Bytes that an encoded payload or result may have."""
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

    middleware: tuple[str, ...] = ()
    """Dotted paths of the classes around every enqueue and every run, from the outermost on."""

    def policy(self, queue: str) -> QueuePolicy:
        """What the queue is configured to do."""
        return self.queues.get(queue, DEFAULT_POLICY)


DEFAULT_POLICY = QueuePolicy()
LISTS = (list, tuple, set, frozenset)


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Check a `DJQUEUE` mapping. Raises ConfigurationError naming the first bad key; see `problems`."""
    found = problems(given)
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
        return [f"DJQUEUE must be a dict, not {given!r}"]
    found = []
    for key, value in given.items():
        reader = READERS.get(key)
        if reader is None:
            found.append(f"DJQUEUE[{key!r}] is not a setting{nearest(str(key), READERS)}")
            continue
        try:
            reader(key, value)
        except (ConfigurationError, OptionError) as error:
            found.append(f"DJQUEUE[{key!r}]: {error}")
    return found


def _storage(_key: str, value: Any) -> dict[str, Any]:
    mapping = _mapping(value, {"BACKEND", "OPTIONS"})
    options = mapping.get("OPTIONS", {})
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"OPTIONS must be a dict, not {options!r}")
    backend = mapping.get("BACKEND", Settings.backend)
    if not isinstance(backend, str) or "." not in backend:
        raise ConfigurationError(f"BACKEND must be the dotted path of a storage, not {backend!r}")
    return {
        "backend": backend,
        "storage_options": {str(name).lower(): option for name, option in options.items()},
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
        "GROUP_CONCURRENCY",
        "GROUP_MODE",
        "MAX_SIZE",
        "WHEN_FULL",
        "BLOCK_TIMEOUT",
        "DEAD_LETTERS",
        "RETENTION",
        "OUTBOX",
    }
    given = _mapping(value, known, f"queue {name!r}: ")
    policy: dict[str, Any] = {}
    if "LEASE" in given:
        policy["lease"] = _lasting(given["LEASE"], f"queue {name!r}: LEASE")
    if given.get("RATE") is not None:
        policy["rate"] = parse_rate(given["RATE"], f"queue {name!r}: RATE")
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
    if "OUTBOX" in given:
        policy["outbox"] = _flag(given["OUTBOX"], f"queue {name!r}: OUTBOX: ")
    return replace(default, **policy)


def _dead_letters(name: str, value: Any) -> DeadLetterPolicy:
    where = f"queue {name!r}: DEAD_LETTERS: "
    given = _mapping(value, {"MAX_ENTRIES", "TTL", "AUTO_RETRIES", "AUTO_RETRY_DELAY"}, where)
    policy: dict[str, Any] = {}
    if "TTL" in given:
        policy["ttl"] = _lasting(given["TTL"], where + "TTL")
    if "AUTO_RETRY_DELAY" in given:
        policy["auto_retry_delay"] = _delay(given["AUTO_RETRY_DELAY"], where + "AUTO_RETRY_DELAY")
    if "MAX_ENTRIES" in given:
        policy["max_entries"] = _positive(given["MAX_ENTRIES"], where + "MAX_ENTRIES")
    if "AUTO_RETRIES" in given:
        policy["auto_retries"] = _integer(given["AUTO_RETRIES"], where + "AUTO_RETRIES")
    return DeadLetterPolicy(**policy)


def _retention(name: str, value: Any) -> Retention:
    where = f"queue {name!r}: RETENTION: "
    if isinstance(value, Mapping) and "FAILED" in value:
        raise ConfigurationError(f"{where}'FAILED' is not known here: DEAD_LETTERS has TTL and MAX_ENTRIES")
    bounds: dict[str, Keep] = {}
    for word, entry in _mapping(value, {"COMPLETED", "CANCELLED"}, where).items():
        given = _mapping(entry, {"AGE", "COUNT"}, f"{where}{word}: ")
        keep: dict[str, int] = {}
        if given.get("AGE") is not None:
            keep["age"] = _lasting(given["AGE"], f"{where}{word}: AGE")
        if given.get("COUNT") is not None:
            keep["count"] = _integer(given["COUNT"], f"{where}{word}: COUNT")
        bounds[word.lower()] = Keep(**keep)
    return Retention(**bounds)


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


def _middleware(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(path, str) for path in value):
        raise ConfigurationError(f"must be a list of dotted paths of classes, not {value!r}")
    return {key.lower(): tuple(value)}


def _mapping(value: Any, known: set[str], where: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where}must be a dict, not {value!r}")
    for key in value:
        if key not in known:
            raise ConfigurationError(f"{where}{key!r} is not known here{nearest(str(key), known)}")
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
    return _positive(milliseconds(where, value), where)


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
    "STRICT_QUEUES": _strict,
    "DEFAULTS": _defaults,
    "MAX_PAYLOAD": _count,
    "ACCEPT_CONTENT": _accept,
    "CODEC": _codec,
    "CONCURRENCY": _count,
    "SHUTDOWN_TIMEOUT": _duration,
    "HEARTBEAT": _interval,
    "MIDDLEWARE": _middleware,
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
