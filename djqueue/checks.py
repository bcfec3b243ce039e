"""System checks (`manage.py check --tag djqueue`): what can be known to be wrong before a job runs.

| id | what is wrong |
|---|---|
| djqueue.E001 | a key of `DJQUEUE` |
| djqueue.E002 | the storage's class cannot be imported |
| djqueue.E003 | the storage's class is no `djqueue.storage.base.Storage` |
| djqueue.E004 | an option of the storage is not known, or is missing |
| djqueue.E005 | jobs would be written in a content type that is not accepted |
| djqueue.E006 | the Redis server is too old |
| djqueue.E007 | an entry of `MIDDLEWARE` |
| djqueue.E008 | a queue's `LIMITER` |
| djqueue.E009 | a job's queue is not in `QUEUES`, and `STRICT_QUEUES` is on |
| djqueue.E010 | a module of `MODULES` does not exist |
| djqueue.I001 | a Redis server does not let us look at its settings |
| djqueue.I002 | Redis leaves it to the system when its log is written to the disk |
| djqueue.W001 | pickle is accepted |
| djqueue.W002 | SQLite without IMMEDIATE transactions |
| djqueue.W003 | a SQLite database in memory, which no other process sees |
| djqueue.W004 | a database on which djqueue is not tested |
| djqueue.W005 | leases that may run out between two heartbeats |
| djqueue.W006 | leases that may run out while a call to Redis is tried |
| djqueue.W007 | a Redis server could not be asked |
| djqueue.W008 | Redis may delete jobs to make room |
| djqueue.W009 | Redis keeps nothing on the disk |
| djqueue.W010 | Redis hangs up on connections that rest |
| djqueue.W011 | Redis refuses calls while a script runs |
| djqueue.W012 | jobs on their way to Redis that nobody takes there |
| djqueue.W013 | a limiter that no queue uses |
| djqueue.W015 | a module of `MODULES` that no app has |
| djqueue.W016 | the `QUEUE_FILTER` of `DASHBOARD` cannot be imported |

Only W012 asks the database anything, when Django asks databases: with `--database`, and before
`migrate`. Redis is asked then, and with `--deploy`. E006, the I… and W007 to W011 are of
`djqueue.storage.redis.health`.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.utils.module_loading import import_string

from . import middleware
from .conf import READERS, Settings, is_wrong, problems, read_settings, unknown_limiters
from .core.errors import ConfigurationError, StorageError, UnknownQueueError
from .core.hiding import shown_name
from .core.suggest import nearest, similar

if TYPE_CHECKING:
    from .core.diagnostics import Finding
    from .storage.redis.options import RedisOptions

TAG = "djqueue"
PICKLES = frozenset({"application/x-python-serialize", "application/x-pickle", "pickle"})
TESTED_VENDORS = ("sqlite", "postgresql")

HINTS = {
    "STORAGE": "For example {'BACKEND': 'djqueue.storage.database.DatabaseStorage', 'OPTIONS': {}}.",
    "QUEUES": "For example {'emails': {'RATE': '100/s', 'CONCURRENCY': 10}}, or a list of names.",
    "LIMITERS": "For example {'stripe': {'RATE': '100/s', 'CONCURRENCY': 20}}.",
    "STRICT_QUEUES": "With True, only the queues named in QUEUES exist.",
    "DEFAULTS": "Options of every job, as they are given to @job: {'max_attempts': 5}.",
    "MAX_PAYLOAD": "The bytes that an encoded payload may have: 1_048_576 unless set.",
    "MAX_ITEMS": "How many items one run of a generator may send: 10_000 unless set.",
    "MAX_ITEMS_SIZE": "The bytes that these may have together: 16_777_216 unless set.",
    "ACCEPT_CONTENT": "For example ['application/x-djqueue-msgpack', 'application/json'].",
    "CODEC": "A content type, such as 'application/json'.",
    "CONCURRENCY": "How many jobs a worker runs at once: 10 unless set.",
    "SHUTDOWN_TIMEOUT": "Seconds that a stopping worker gives its jobs: 25 unless set.",
    "HEARTBEAT": "Seconds between a worker's signs of life: 5 unless set.",
    "STUCK_TIMEOUT": "Seconds for which the leases of a stuck worker are renewed: 300 unless set.",
    "METRICS": "For example {'MINUTE': 604_800}: seconds for which buckets of MINUTE, HOUR and DAY are kept.",
    "VERSION": "The project's version, for example its release or commit: '2026.11.3'.",
    "MODULES": "For example ['tasks']: imported from every app besides its jobs.py.",
    "MIDDLEWARE": "For example ['djqueue.middleware.LoggingMiddleware'].",
    "DASHBOARD": "For example {'READ_ONLY': True, 'POLL': 5}.",
}
FROM_SETTINGS = frozenset({"clock", "limiters", "metrics", "policies"})
"""Parameters of storages that other settings, or tests, decide."""
MESSAGES = {"error": checks.Error, "warning": checks.Warning, "info": checks.Info}


@checks.register(TAG)
def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Every check that asks nobody: the later ones only for what the earlier ones could read."""
    given = getattr(django_settings, "DJQUEUE", {})
    found: list[checks.CheckMessage] = list(_bad_keys(given))
    readable = given if isinstance(given, Mapping) else {}
    bad = {key for key, value in readable.items() if problems({key: value})}
    right = {key: value for key, value in readable.items() if key not in bad}
    if unknown := unknown_limiters(right):
        del right["QUEUES"]
        if "LIMITERS" not in bad:
            hint = HINTS["LIMITERS"]
            found += [checks.Error(f"{problem}.", hint=hint, id="djqueue.E008") for problem in unknown]
    settings = read_settings(right)
    if not unknown and "QUEUES" not in bad:
        found += _unused_limiters(settings)
    if bad.isdisjoint({"CODEC", "ACCEPT_CONTENT"}):
        found += _content_types(settings)
    found += _middleware(settings)
    found += _queue_filter(settings)
    found += _missing_modules(settings)
    found += _modules_of_no_app(settings)
    if bad.isdisjoint({"QUEUES", "STRICT_QUEUES"}):
        found += _queues_of_jobs(settings)
    if "STORAGE" in bad:
        return [*found, *_leases(settings, settings.policy("").lease)]
    of_storage = list(_storage(settings))
    redis = _redis_options(settings)
    found += _leases(settings, redis.lease if redis is not None else settings.policy("").lease)
    return found + of_storage


@checks.register(TAG, checks.Tags.database)
def check_servers(databases: Iterable[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """What asks Redis, and the table of jobs on their way there, when databases are asked, too."""
    if not databases:
        return []
    _LastRun.databases = databases
    return [*_servers(), *_left_in_outbox(databases)]


@checks.register(TAG, deploy=True)
def check_servers_to_deploy(databases: Iterable[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Report the Redis servers with `--deploy`, unless `check_servers` has reported them in the same run.

    Django 6.1 passes every database here even if none was chosen, and then skips `check_servers`. All checks
    of one run receive the same object, and the regular ones run before those of `--deploy`.
    """
    asked, _LastRun.databases = _LastRun.databases, None
    return [] if databases and databases is asked else list(_servers())


class _LastRun:
    """The latest run of `check_servers` that asked Redis."""

    databases: Iterable[str] | None = None


def _bad_keys(given: Any) -> Iterator[checks.CheckMessage]:
    if not isinstance(given, Mapping):
        yield checks.Error(problems(given)[0], hint="DJQUEUE = {} is a good start.", id="djqueue.E001")
        return
    for key, value in given.items():
        for problem in problems({key: value}):
            hint = HINTS.get(key) or f"The settings are: {', '.join(READERS)}."
            yield checks.Error(problem, hint=hint, id="djqueue.E001")


def _content_types(settings: Settings) -> Iterator[checks.CheckMessage]:
    accepted = settings.accept_content
    if settings.codec not in accepted:
        yield checks.Error(
            f"DJQUEUE['CODEC']: jobs would be written as {settings.codec!r}, which "
            "DJQUEUE['ACCEPT_CONTENT'] does not list: none could be enqueued.",
            hint=f"Add {settings.codec!r} to ACCEPT_CONTENT ({', '.join(sorted(accepted))}).",
            id="djqueue.E005",
        )
    for content_type in sorted(accepted & PICKLES):
        yield checks.Warning(
            f"DJQUEUE['ACCEPT_CONTENT'] lists {content_type!r}: whoever can write to the storage "
            "can run any code in the workers, and in the admin.",
            hint="Enqueue ids and plain values, and leave pickle out.",
            id="djqueue.W001",
        )


def _unused_limiters(settings: Settings) -> Iterator[checks.CheckMessage]:
    used = {policy.limiter for policy in settings.queues.values()}
    for name in settings.limiters:
        if name not in used:
            yield checks.Warning(
                f"DJQUEUE['LIMITERS']: no queue uses {name!r}: it limits nothing.",
                hint=f"DJQUEUE['QUEUES'] = {{'some-queue': {{'LIMITER': {name!r}}}}}, or leave it out.",
                id="djqueue.W013",
            )


def _middleware(settings: Settings) -> Iterator[checks.CheckMessage]:
    for path in settings.middleware:
        wrong = middleware.problem(path)
        if wrong is not None:
            hint = "A class with enqueue and aenqueue, or with execute and aexecute, or with all four."
            yield checks.Error(f"DJQUEUE: {wrong}.", hint=hint, id="djqueue.E007")


def _queue_filter(settings: Settings) -> Iterator[checks.CheckMessage]:
    path = settings.dashboard.queue_filter
    if not isinstance(path, str):
        return
    try:
        import_string(path)
    except ImportError as error:
        yield checks.Warning(
            f"DJQUEUE['DASHBOARD']: QUEUE_FILTER: {path!r} cannot be imported: {error}",
            hint="The dotted path of a function (request, queue) -> bool: 'shop.rights.may_see'.",
            id="djqueue.W016",
        )


def _missing_modules(settings: Settings) -> Iterator[checks.CheckMessage]:
    from .apps import missing_modules

    for name in settings.modules:
        if name in missing_modules:
            yield checks.Error(
                f"DJQUEUE['MODULES']: {name!r} cannot be imported: {missing_modules[name]}.",
                hint=HINTS["MODULES"],
                id="djqueue.E010",
            )


def _modules_of_no_app(settings: Settings) -> Iterator[checks.CheckMessage]:
    names = [name for name in settings.modules if "." not in name]
    if not names:
        return
    found: dict[str, str] = {}
    for app in apps.get_app_configs():
        for module in iter_modules([app.path]):
            found.setdefault(module.name, app.name)
    for name in names:
        if name not in found:
            own = [other for other, app in found.items() if not app.startswith(("django.", "djqueue"))]
            meant = similar(name, own)
            hint = f"Did you mean {meant!r} (in {found[meant]})?" if meant else HINTS["MODULES"]
            yield checks.Warning(
                f"DJQUEUE['MODULES']: no installed app has a module {name!r}, so it adds no jobs.",
                hint=hint,
                id="djqueue.W015",
            )


def _queues_of_jobs(settings: Settings) -> Iterator[checks.CheckMessage]:
    from .client import envelope, registry

    default = settings.defaults.queue or envelope.DEFAULT_QUEUE
    for name, job_type in registry.all().items():
        try:
            envelope.check_queue(job_type.declared_queue or default, settings)
        except UnknownQueueError as error:
            yield checks.Error(
                f"Job {name!r}: {error}",
                hint="Add the queue to QUEUES, give the job a queue of QUEUES, or turn STRICT_QUEUES off.",
                id="djqueue.E009",
            )


def _leases(settings: Settings, default: int) -> Iterator[checks.CheckMessage]:
    leases = {name: policy.lease for name, policy in settings.queues.items()}
    leases["every other queue"] = default
    for name, lease in leases.items():
        if lease < 2 * settings.heartbeat:
            yield checks.Warning(
                f"DJQUEUE: the lease of {name} ({lease / 1000:g} s) is shorter than two heartbeats "
                f"({settings.heartbeat / 1000:g} s each): one that is late, and a job that is "
                "running counts as lost and runs again.",
                hint="Lengthen the queue's LEASE or shorten HEARTBEAT.",
                id="djqueue.W005",
            )


def _storage(settings: Settings) -> Iterator[checks.CheckMessage]:
    from .storage.base import Storage

    where = f"DJQUEUE['STORAGE']: BACKEND {settings.backend!r}"
    try:
        backend = import_string(settings.backend)
    except (ImportError, ConfigurationError) as error:  # ConfigurationError: an extra is not installed
        yield checks.Error(f"{where} cannot be imported: {error}", hint=HINTS["STORAGE"], id="djqueue.E002")
        return
    if not (isinstance(backend, type) and issubclass(backend, Storage)):
        yield checks.Error(
            f"{where} is not a subclass of djqueue.storage.base.Storage.",
            hint=HINTS["STORAGE"],
            id="djqueue.E003",
        )
        return
    yield from _storage_options(backend, settings.storage_options)
    from .storage.database import DatabaseStorage

    if issubclass(backend, DatabaseStorage):
        yield from _database(settings.storage_options)
    elif _is_redis(backend):
        yield from _redis(settings)


def _storage_options(backend: type, given: Mapping[str, Any]) -> Iterator[checks.CheckMessage]:
    parameters = inspect.signature(backend).parameters
    known = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in FROM_SETTINGS
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    where = f"DJQUEUE['STORAGE']: OPTIONS: {backend.__name__}"
    hint = f"It has: {', '.join(sorted(name.upper() for name in known)) or 'none'}."
    for name in given:
        if name not in known and not open_ended:
            near = nearest(name.upper(), [other.upper() for other in known]) or "."
            yield checks.Error(
                f"{where} has no option {shown_name(name.upper())}{near}", hint=hint, id="djqueue.E004"
            )
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            yield checks.Error(f"{where} needs the option {name.upper()!r}.", hint=hint, id="djqueue.E004")


def _database(options: Mapping[str, Any]) -> Iterator[checks.CheckMessage]:
    alias = options.get("database") or DEFAULT_DB_ALIAS
    if alias not in connections:
        known = ", ".join(connections)
        yield checks.Error(
            f"DJQUEUE['STORAGE']: OPTIONS: DATABASE: {shown_name(alias)} is not one of DATABASES.",
            hint=f"There are: {known}.",
            id="djqueue.E004",
        )
        return
    yield from _values_of_database(options)
    vendor = connections[alias].vendor
    if vendor == "sqlite":
        yield from _sqlite(alias)
    elif vendor not in TESTED_VENDORS:
        yield checks.Warning(
            f"DATABASES[{alias!r}]: djqueue is not tested on {connections[alias].display_name}.",
            hint="SQLite and PostgreSQL are.",
            id="djqueue.W004",
        )


def _values_of_database(options: Mapping[str, Any]) -> Iterator[checks.CheckMessage]:
    from .storage.database import DatabaseStorage

    backend: Any = DatabaseStorage
    known = inspect.signature(backend).parameters.keys() - FROM_SETTINGS
    try:
        backend(**{name: value for name, value in options.items() if name in known}).close()
    except (ConfigurationError, ImproperlyConfigured) as error:
        yield checks.Error(
            f"DJQUEUE['STORAGE']: OPTIONS: {error}",
            hint="The options are in the docs, under Storages.",
            id="djqueue.E004",
        )


def _sqlite(alias: str) -> Iterator[checks.CheckMessage]:
    database = connections[alias].settings_dict
    name = str(database["NAME"])
    if name.startswith("file:memorydb_"):  # the one that Django's test runner makes
        return
    if ":memory:" in name or "mode=memory" in name:
        yield checks.Warning(
            f"DATABASES[{alias!r}] is in memory: no other process, such as `manage.py runworkers`, "
            "sees its jobs.",
            hint="Give it a file, or use djqueue.storage.memory.MemoryStorage in one process.",
            id="djqueue.W003",
        )
    elif str(database.get("OPTIONS", {}).get("transaction_mode") or "").upper() != "IMMEDIATE":
        yield checks.Warning(
            f"DATABASES[{alias!r}]: a transaction of this SQLite database that reads before it "
            "writes fails with 'database is locked', whatever its timeout, when another process "
            "has written in between; workers and web server do that.",
            hint=f"Set DATABASES[{alias!r}]['OPTIONS']['transaction_mode'] = 'IMMEDIATE'.",
            id="djqueue.W002",
        )


def _is_redis(backend: object) -> bool:
    # A backend that is one has imported it; for the others it may not be installed.
    package = sys.modules.get("djqueue.storage.redis")
    return package is not None and isinstance(backend, type) and issubclass(backend, package.RedisStorage)


def _redis_options(settings: Settings) -> "RedisOptions | None":
    """The options of a Redis storage; None if it is another one, or they are wrong (E004)."""
    try:
        if not _is_redis(import_string(settings.backend)):
            return None
        from .storage.redis.options import RedisOptions

        return RedisOptions.read(_upper(settings))
    except (ImportError, ConfigurationError):
        return None


def _redis(settings: Settings) -> Iterator[checks.CheckMessage]:
    from .storage.redis.health import lease_findings
    from .storage.redis.location import locate
    from .storage.redis.options import RedisOptions

    given = _upper(settings)
    try:
        options = RedisOptions.read(given)
        if given.get("CLIENT") is None:  # a project's own function may well connect
            locate(given)
    except ConfigurationError as error:
        yield _wrong_option(error)
    else:
        yield from map(_message, lease_findings(options, settings.queues))


def _servers() -> Iterator[checks.CheckMessage]:
    given = getattr(django_settings, "DJQUEUE", {})
    settings = None if is_wrong(given) else read_settings(given)
    if settings is None or _redis_options(settings) is None:
        return
    from .storage.redis.connections import Connections
    from .storage.redis.health import away, findings

    try:
        connections = Connections(_upper(settings))
    except ConfigurationError as error:
        if settings.storage_options.get("client") is not None:  # of the others E004 is told already
            yield _wrong_option(error)
    except StorageError as error:
        yield _message(away(error))
    else:
        try:
            yield from map(_message, findings(connections))
        finally:
            connections.close()


def _left_in_outbox(databases: Iterable[str]) -> Iterator[checks.CheckMessage]:
    from .models import OutboxJob

    given = getattr(django_settings, "DJQUEUE", {})
    alias, table = router.db_for_write(OutboxJob), OutboxJob._meta.db_table
    if alias not in databases or is_wrong(given):
        return
    if any(policy.outbox for policy in read_settings(given).queues.values()):
        return
    many = 0
    with suppress(Error):  # of a database that is away, Django tells
        if table in connections[alias].introspection.table_names():
            many = OutboxJob.objects.using(alias).count()
    if many:
        yield checks.Warning(
            f"DATABASES[{alias!r}]: {many} rows of {table} are jobs on their way to Redis, and no queue "
            "has OUTBOX any more: nobody takes them there.",
            hint="Give their queue OUTBOX again until `runworkers` has emptied the table, or delete them.",
            id="djqueue.W012",
        )


def _upper(settings: Settings) -> dict[str, Any]:
    return {name.upper(): value for name, value in settings.storage_options.items()}


def _wrong_option(error: ConfigurationError) -> checks.CheckMessage:
    return checks.Error(
        f"DJQUEUE['STORAGE']: OPTIONS: {error}",
        hint="For example {'CACHE': 'default'}, or {'URL': 'redis://localhost:6379/0'}.",
        id="djqueue.E004",
    )


def _message(finding: "Finding") -> checks.CheckMessage:
    return MESSAGES[finding.level](finding.text, hint=finding.hint, id=finding.id)
