"""Read the keys of `DJQUEUE`: one function per key converts its value to fields of `Settings`.

Each raises ConfigurationError for an invalid value, with a message that names the value.
"""

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from djqueue.core.backoff import Backoff, parse_backoff
from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.executors import SANDBOXES, parse_executor, parse_limits
from djqueue.core.messages import NAME, HiddenOptions, kind_of, shown_name, without_credentials
from djqueue.core.metrics import Tiers
from djqueue.core.options import MAX_INTEGER, EnqueueOptions, check_text, parse_on_commit, parse_options
from djqueue.core.policies import (
    KEY_MODES,
    WHEN_FULL,
    DeadLetterPolicy,
    Keep,
    KeepOfJob,
    KeepResults,
    LimiterPolicy,
    QueuePolicy,
    Rate,
    Retention,
)
from djqueue.core.suggest import nearest, nearest_setting
from djqueue.core.units import milliseconds, parse_size, positive_milliseconds

from .values import (
    ALERT_RULES,
    DEFAULT_POLICY,
    IN_MEMORY,
    REAL,
    AlertSettings,
    BackupSettings,
    DashboardSettings,
    HealthSettings,
    MonitoringSettings,
    Settings,
    SettingsInTests,
)

LISTS = (list, tuple, set, frozenset)
TOKEN_FORM = "a text of at least 16 printable ASCII characters without spaces"  # noqa: S105 - no token
RATE_UNITS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
BOUNDS: dict[str, type[Keep | KeepResults | KeepOfJob]] = {
    "COMPLETED": Keep,
    "CANCELLED": Keep,
    "RESULTS": KeepResults,
    "ATTEMPTS": KeepOfJob,
    "LOGS": KeepOfJob,
}
MAX_PER_JOB = 65_535
"""Maximum number of attempts or log lines kept for one job."""


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Read a `DJQUEUE` mapping.

    Raises:
        ConfigurationError: A key is invalid. The message has the first of `problems`.
    """
    wrong = problems(given) or unknown_limiters(given)
    if wrong:
        raise ConfigurationError(wrong[0])
    values: dict[str, Any] = {}
    for key, value in given.items():
        values.update(READERS[key](key, value))
    if "QUEUES" in given:
        default = default_policy(values.get("storage_options", {}))
        values.update(read_queues("QUEUES", given["QUEUES"], default))
    return Settings(**values)


def problems(given: Mapping[str, Any]) -> list[str]:
    """Return the problems of a `DJQUEUE` mapping, one sentence per invalid key."""
    if not isinstance(given, Mapping):
        return [f"DJQUEUE must be a dict; got {shown_name(given)}"]
    wrong = []
    for key, value in given.items():
        reader = READERS.get(key)
        if reader is None:
            wrong.append(f"DJQUEUE[{shown_name(key)}] is not a setting{nearest_setting(str(key), READERS)}")
            continue
        try:
            reader(key, value)
        except (ConfigurationError, OptionError) as error:
            wrong.append(without_credentials(f"DJQUEUE[{key!r}]: {error}"))
    return wrong


def is_wrong(given: Mapping[str, Any]) -> bool:
    """Return whether `read_settings` would raise."""
    return bool(problems(given) or unknown_limiters(given))


def unknown_limiters(given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each queue whose limiter is undefined in an otherwise valid mapping."""
    known = given.get("LIMITERS", {})
    queues = given.get("QUEUES", {})
    return [
        f"DJQUEUE['QUEUES']: queue {name!r}: LIMITER {limiter!r} is not one of DJQUEUE['LIMITERS']"
        f"{nearest(limiter, known)}"
        for name, entry in (queues.items() if isinstance(queues, Mapping) else ())
        if (limiter := entry.get("LIMITER")) is not None and limiter not in known
    ]


def parse_rate(value: Any, where: str = "rate") -> Rate:
    """Parse a rate: `"100/s"`, `"20/m"`, `"5/h"`, or (count, seconds)."""
    if isinstance(value, str):
        count, slash, unit = value.partition("/")
        if slash and count.isdecimal() and len(count) < 10 and int(count) and unit in RATE_UNITS:
            return Rate(int(count), RATE_UNITS[unit])
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        return Rate(_positive(value[0], where), positive_milliseconds(where, value[1]))
    raise ConfigurationError(
        f"{where}: must be like '100/s' (s, m, h or d) or (count, seconds); got {value!r}"
    )


def _mapping(value: Any, known: set[str], where: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where}must be a dict; got {value!r}")
    for key in value:
        if key not in known:
            raise ConfigurationError(f"{where}unknown key {shown_name(key)}{nearest(str(key), known)}")
    return value


def _flag(value: Any, where: str = "") -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{where}must be True or False; got {value!r}")
    return value


def _one_of(value: Any, words: tuple[str, ...], where: str) -> str:
    if value not in words:
        raise ConfigurationError(f"{where}: {value!r} is not one of {', '.join(words)}")
    return str(value)


def _positive(value: Any, where: str) -> int:
    if _integer(value, where) < 1:
        raise ConfigurationError(f"{where}: must be positive; got {value!r}")
    return int(value)


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INTEGER:
        raise ConfigurationError(f"{where}: must be an integer from 0 to {MAX_INTEGER}; got {value!r}")
    return value


def is_token(value: Any) -> bool:
    """Return whether a value can be sent as a bearer token, and is hard to guess."""
    return isinstance(value, str) and len(value) >= 16 and all("!" <= one <= "~" for one in value)


def _dashboard(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"READ_ONLY", "QUEUE_FILTER", "ADMIN_LISTS", "POLL", "SSE", "REDACT"})
    fields: dict[str, Any] = {}
    if "READ_ONLY" in given:
        fields["read_only"] = _flag(given["READ_ONLY"], "READ_ONLY ")
    chosen = given.get("QUEUE_FILTER")
    if chosen is not None:
        if not callable(chosen) and not (isinstance(chosen, str) and "." in chosen):
            raise ConfigurationError(
                f"QUEUE_FILTER must be a function or the dotted path of one; got {chosen!r}"
            )
        fields["queue_filter"] = chosen
    for word in ("ADMIN_LISTS", "SSE"):
        if word in given:
            fields[word.lower()] = _flag(given[word], f"{word} ")
    if "POLL" in given:
        fields["poll"] = milliseconds("POLL", given["POLL"])
    if "REDACT" in given:
        words = given["REDACT"]
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise ConfigurationError(f"REDACT must be a list of words; got {words!r}")
        fields["redact"] = tuple(word.lower() for word in words)
    return {key.lower(): DashboardSettings(**fields)}


def _health(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"MAX_WAIT", "LEASE_GRACE", "TIMEOUT"})
    return {
        key.lower(): HealthSettings(
            **{word.lower(): positive_milliseconds(word, time) for word, time in given.items()}
        )
    }


def _backup(key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {key.lower(): BackupSettings(every=None, is_every_given=True)}
    given = _mapping(value, {"EVERY", "KEEP", "FOLDER", "TIMEOUT"})
    fields: dict[str, Any] = {}
    if "EVERY" in given:
        every = given["EVERY"]
        fields["every"] = None if every is None else positive_milliseconds("EVERY", every)
        fields["is_every_given"] = True
    if "KEEP" in given:
        fields["keep"] = _positive(given["KEEP"], "KEEP")
    if "TIMEOUT" in given:
        fields["timeout"] = positive_milliseconds("TIMEOUT", given["TIMEOUT"])
    folder = given.get("FOLDER")
    if folder is not None:
        if not isinstance(folder, (str, Path)) or not Path(folder).is_absolute():
            raise ConfigurationError(f"FOLDER must be an absolute path; got {folder!r}")
        fields["folder"] = str(folder)
    return {key.lower(): BackupSettings(**fields)}


def _monitoring(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"TOKEN", "TOKEN_FILE", "PUBLIC"})
    token, path = given.get("TOKEN"), given.get("TOKEN_FILE")
    if token is not None and path is not None:
        raise ConfigurationError("TOKEN and TOKEN_FILE exclude each other: remove one of them")
    if token is not None and not is_token(token):
        # The message must not show it.
        raise ConfigurationError(f"TOKEN must be {TOKEN_FORM}; got {kind_of(token)}")
    if path is not None and not isinstance(path, (str, PathLike)):
        raise ConfigurationError(f"TOKEN_FILE must be the path of a file; got {kind_of(path)}")
    public = _flag(given.get("PUBLIC", False), "PUBLIC ")
    file = None if path is None else str(fspath(path))
    return {key.lower(): MonitoringSettings(token=token, token_file=file, public=public)}


def _alerts(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"MAIL", "WEBHOOK", "RULES", "AFTER"})
    fields: dict[str, Any] = {}
    mail = given.get("MAIL", ())
    if not isinstance(mail, (list, tuple)) or not all(isinstance(one, str) and "@" in one for one in mail):
        raise ConfigurationError(
            f"MAIL must be a list of addresses such as ['ops@example.com']; got {mail!r}"
        )
    fields["mail"] = tuple(mail)
    webhook = given.get("WEBHOOK")
    if webhook is not None:
        if not isinstance(webhook, str) or not _is_webhook(webhook):
            # The message must not show it.
            raise ConfigurationError(
                "WEBHOOK must be an http or https URL with a host, of ASCII characters without spaces, and "
                f"without a user and a password; got {kind_of(webhook)}"
            )
        fields["webhook"] = webhook
    rules = given.get("RULES", ALERT_RULES)
    if not isinstance(rules, (list, tuple)):
        raise ConfigurationError(f"RULES must be a list; got {rules!r}")
    fields["rules"] = tuple(_one_of(rule, ALERT_RULES, "RULES") for rule in rules)
    if "AFTER" in given:
        fields["after"] = milliseconds("AFTER", given["AFTER"])
    return {key.lower(): AlertSettings(**fields)}


def _test(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"STORAGE", "PREFIX"})
    fields: dict[str, Any] = {}
    if "STORAGE" in given:
        fields["storage"] = _one_of(given["STORAGE"], (IN_MEMORY, REAL), "STORAGE")
    prefix = given.get("PREFIX")
    if prefix is not None:
        if not isinstance(prefix, str) or set(prefix) & set("{}"):
            raise ConfigurationError(f"PREFIX must be a text without braces; got {prefix!r}")
        fields["prefix"] = prefix
    return {key.lower(): SettingsInTests(**fields)}


def _is_webhook(text: str) -> bool:
    if not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        has_port = parts.port != 0
    except ValueError:
        return False
    has_host = bool(parts.hostname) and "@" not in parts.netloc
    return parts.scheme in ("http", "https") and has_host and has_port


def _limiters(_key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"must be a dict of limiters; got {value!r}")
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
        raise ConfigurationError(f"must be a dict; got {kind_of(value)}")
    given = _mapping(value, {"BACKEND", "OPTIONS"})
    options = given.get("OPTIONS", {})
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"OPTIONS must be a dict; got {kind_of(options)}")
    backend = given.get("BACKEND", Settings.backend)
    if not isinstance(backend, str) or "." not in backend or not NAME.fullmatch(backend):
        raise ConfigurationError(
            f"BACKEND must be the dotted path of a storage class; got {shown_name(backend)}"
        )
    return {
        "backend": backend,
        "storage_options": HiddenOptions(
            {str(name).lower(): option for name, option in options.items()},
        ),
    }


def default_policy(storage_options: Mapping[str, Any]) -> QueuePolicy:
    """Return the default of all queues, with the LEASE of the storage if it has one."""
    try:
        return replace(DEFAULT_POLICY, lease=positive_milliseconds("LEASE", storage_options["lease"]))
    except (KeyError, ConfigurationError, OptionError):  # The storage reports an invalid one.
        return DEFAULT_POLICY


def read_queues(_key: str, value: Any, default: QueuePolicy = DEFAULT_POLICY) -> dict[str, Any]:
    if isinstance(value, LISTS):
        value = {check_text("queue", name): {} for name in value}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"must be a dict of queues or a list of their names; got {value!r}")
    return {
        "queues": {check_text("queue", name): _policy(name, entry, default) for name, entry in value.items()}
    }


def _policy(name: str, value: Any, default: QueuePolicy) -> QueuePolicy:
    known = {
        "LEASE",
        "RATE",
        "CONCURRENCY",
        "LIMITER",
        "KEY_CONCURRENCY",
        "KEY_RATE",
        "KEY_WEIGHTS",
        "KEY_MODE",
        "MAX_SIZE",
        "WHEN_FULL",
        "BLOCK_TIMEOUT",
        "DEAD_LETTERS",
        "RETENTION",
        "OBJECTIVE",
        "OUTBOX",
        "EXECUTOR",
    }
    given = _mapping(value, known, f"queue {name!r}: ")
    policy: dict[str, Any] = {}
    if "LEASE" in given:
        policy["lease"] = positive_milliseconds(f"queue {name!r}: LEASE", given["LEASE"])
    for word in ("RATE", "KEY_RATE"):
        if given.get(word) is not None:
            policy[word.lower()] = parse_rate(given[word], f"queue {name!r}: {word}")
    if "KEY_WEIGHTS" in given:
        policy["key_weights"] = _weights(given["KEY_WEIGHTS"], f"queue {name!r}: KEY_WEIGHTS")
    if given.get("LIMITER") is not None:
        policy["limiter"] = check_text(f"queue {name!r}: LIMITER", given["LIMITER"])
    if "WHEN_FULL" in given:
        policy["when_full"] = _one_of(given["WHEN_FULL"], WHEN_FULL, f"queue {name!r}: WHEN_FULL")
    if "BLOCK_TIMEOUT" in given:
        policy["block_timeout"] = positive_milliseconds(
            f"queue {name!r}: BLOCK_TIMEOUT", given["BLOCK_TIMEOUT"]
        )
    for word in ("CONCURRENCY", "KEY_CONCURRENCY", "MAX_SIZE"):
        if given.get(word) is not None:
            policy[word.lower()] = _positive(given[word], f"queue {name!r}: {word}")
    if "KEY_MODE" in given:
        policy["key_mode"] = _one_of(given["KEY_MODE"], KEY_MODES, f"queue {name!r}: KEY_MODE")
    if "DEAD_LETTERS" in given:
        policy["dead_letters"] = _dead_letters(name, given["DEAD_LETTERS"])
    if "RETENTION" in given:
        policy["retention"] = _retention(name, given["RETENTION"])
    if given.get("OBJECTIVE") is not None:
        policy["objective"] = positive_milliseconds(f"queue {name!r}: OBJECTIVE", given["OBJECTIVE"])
    if given.get("EXECUTOR") is not None:
        policy["executor"] = parse_executor(given["EXECUTOR"])
    if "OUTBOX" in given:
        policy["outbox"] = _flag(given["OUTBOX"], f"queue {name!r}: OUTBOX: ")
    return replace(default, **policy)


def _weights(value: Any, where: str) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where} must be a dict of weights by key; got {value!r}")
    return {
        check_text(f"{where}: a key", key): _positive(weight, f"{where}: {key!r}")
        for key, weight in value.items()
    }


def _dead_letters(name: str, value: Any) -> DeadLetterPolicy:
    where = f"queue {name!r}: DEAD_LETTERS: "
    given = _mapping(value, {"MAX_ENTRIES", "MAX_BYTES", "TTL", "AUTO_RETRIES", "AUTO_RETRY_DELAY"}, where)
    policy: dict[str, Any] = {}
    if "TTL" in given:
        policy["ttl"] = positive_milliseconds(where + "TTL", given["TTL"])
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
        raise ConfigurationError(
            f"{where}'FAILED' is not a key; set the bounds of failed jobs in DEAD_LETTERS"
        )
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


def _bound(name: str, value: Any, where: str, *, of_each: bool) -> int:
    if name == "AGE":
        return positive_milliseconds(where, value)
    if name == "BYTES":
        return parse_size(where, value)
    if of_each and not 1 <= _integer(value, where) <= MAX_PER_JOB:
        raise ConfigurationError(f"{where}: must be from 1 to {MAX_PER_JOB}; got {value!r}")
    return _integer(value, where)


def _delay(value: Any, where: str) -> int | Backoff:
    if isinstance(value, (str, dict, Backoff)):
        try:
            return parse_backoff(value)
        except OptionError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    return positive_milliseconds(where, value)


def _switch(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _flag(value)}


def _defaults(_key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"must be a dict of job options; got {value!r}")
    for name in value:
        check_text("the name of an option", name)
        if name == "content_type":
            raise ConfigurationError("set content_type with DJQUEUE['CODEC']")
        if name == "enqueue_on_commit":
            raise ConfigurationError("set enqueue_on_commit with DJQUEUE['ENQUEUE_ON_COMMIT']")
    return {"defaults": parse_options(value, EnqueueOptions())}


def _on_commit(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): parse_on_commit("the value", value)}


def _count(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _positive(value, key)}


def _size(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _positive(parse_size(key, value), key)}


def _duration(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): milliseconds(key, value)}


def _interval(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): positive_milliseconds(key, value)}


def _accept(_key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, LISTS) or not value or not all(isinstance(kind, str) for kind in value):
        raise ConfigurationError(f"must be a list of content types; got {value!r}")
    return {"accept_content": frozenset(value)}


def _codec(key: str, value: Any) -> dict[str, Any]:
    return {"codec": check_text(key, value)}


def _modules(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (list, tuple)):
        raise ConfigurationError(f"must be a list of module names such as ['tasks']; got {value!r}")
    for name in value:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ConfigurationError(
                f"{name!r} is not a module name; expected a name such as 'tasks', to import from every app, "
                "or a dotted path such as 'shop.background'"
            )
    return {key.lower(): tuple(value)}


def _middleware(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(path, str) for path in value):
        raise ConfigurationError(f"must be a list of dotted paths of classes; got {value!r}")
    return {key.lower(): tuple(value)}


def _executor(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): parse_executor(value)}


def _limits(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): parse_limits(value)}


def _sandbox(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): _one_of(value, SANDBOXES, key)}


def _paths(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (list, tuple)):
        raise ConfigurationError(f"must be a list of absolute paths; got {value!r}")
    for path in value:
        if not isinstance(path, (str, Path)) or not Path(path).is_absolute():
            raise ConfigurationError(f"must be a list of absolute paths; got {path!r} in it")
    return {key.lower(): tuple(map(str, value))}


def _metrics(key: str, value: Any) -> dict[str, Any]:
    given = _mapping(value, {"MINUTE", "HOUR", "DAY"})
    return {
        key.lower(): Tiers(
            **{word.lower(): positive_milliseconds(word, time) for word, time in given.items()}
        )
    }


def _version(key: str, value: Any) -> dict[str, Any]:
    return {key.lower(): "" if value is None else check_text(key, value)}


READERS = {
    "STORAGE": _storage,
    "IMMEDIATE": _switch,
    "QUEUES": read_queues,
    "LIMITERS": _limiters,
    "STRICT_QUEUES": _switch,
    "DEFAULTS": _defaults,
    "ENQUEUE_ON_COMMIT": _on_commit,
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
    "EXECUTOR": _executor,
    "LIMITS": _limits,
    "SANDBOX": _sandbox,
    "SANDBOX_IMPORTS": _paths,
    "MIDDLEWARE": _middleware,
    "DASHBOARD": _dashboard,
    "HEALTH": _health,
    "BACKUP": _backup,
    "MONITORING": _monitoring,
    "ALERTS": _alerts,
    "TEST": _test,
}
