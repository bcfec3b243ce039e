"""System checks (`manage.py check --tag djqueue`), registered by `djqueue.apps`.

| id | problem |
|---|---|
| djqueue.E001 | a key of `DJQUEUE` is unknown or its value is invalid |
| djqueue.E002 | the storage class cannot be imported |
| djqueue.E003 | the storage class is not a subclass of `djqueue.storage.base.Storage` |
| djqueue.E004 | an option of the storage is unknown, missing or invalid |
| djqueue.E005 | jobs would be written in a content type that is not accepted, or that requires kombu |
| djqueue.E006 | the Redis server is too old |
| djqueue.E007 | an entry of `MIDDLEWARE` is invalid |
| djqueue.E008 | the `LIMITER` of a queue is not in `LIMITERS` |
| djqueue.E009 | the queue of a job is not in `QUEUES`, and `STRICT_QUEUES` is on |
| djqueue.E010 | a module of `MODULES` does not exist |
| djqueue.E011 | the permissions of a job list a database that is not in `DATABASES` |
| djqueue.E012 | an option of a task backend in `TASKS` is unknown or invalid |
| djqueue.E013 | `TASKS` has a backend of djqueue, and `djqueue` is not installed |
| djqueue.I001 | a Redis server does not allow reading its configuration |
| djqueue.I002 | `appendfsync` of Redis is `no` |
| djqueue.I003 | the timeout of a sync function that runs inline cannot interrupt it (with `--deploy`) |
| djqueue.W001 | pickle is accepted |
| djqueue.W002 | SQLite without IMMEDIATE transactions |
| djqueue.W003 | a SQLite database in memory, which other processes cannot see |
| djqueue.W005 | a lease may expire between two heartbeats |
| djqueue.W006 | a lease may expire during one call to Redis |
| djqueue.W007 | a Redis server could not be reached |
| djqueue.W008 | Redis may evict jobs |
| djqueue.W009 | Redis persists nothing |
| djqueue.W010 | Redis closes idle connections |
| djqueue.W011 | Redis refuses calls while a script runs |
| djqueue.W012 | the outbox has jobs, and no queue uses it |
| djqueue.W013 | no queue uses a limiter |
| djqueue.W015 | no app has a module of `MODULES` |
| djqueue.W016 | the `QUEUE_FILTER` of `DASHBOARD` cannot be imported |
| djqueue.W017 | the limits of a job have no effect, because it runs inline |
| djqueue.W018 | a process with permissions of jobs runs as root (with `--deploy`) |
| djqueue.W019 | `IMMEDIATE` is on (with `--deploy`) |
| djqueue.W020 | there is no place for backups (with `--deploy`) |
| djqueue.W021 | a pool of Django's connections is smaller than a worker needs (with `--deploy`) |

Only W012 queries the database, when Django checks databases: with `--database`, and before `migrate`.
Redis is checked then, and with `--deploy`. E006, I001, I002 and W007 to W011 come from
`djqueue.storage.redis.health`, E012 and E013 from `djqueue.contrib.tasks.backend`.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.utils.module_loading import import_string

from . import middleware
from .conf import (
    READERS,
    Settings,
    is_wrong,
    problems,
    read_settings,
    unknown_limiters,
    uses_memory_in_tests,
)
from .core.errors import ConfigurationError, DjqueueError, OptionError, StorageError, UnknownQueueError
from .core.executors import INLINE
from .core.messages import shown_name
from .core.options import MSGPACK
from .core.overview import Finding, system_finding
from .core.suggest import nearest, similar

if TYPE_CHECKING:
    from .client import JobType
    from .storage.redis.options import RedisOptions

SCHEDULER = "djqueue.storage.scheduler.SchedulerStorage"
"""Storage whose queues all have the outbox."""
PICKLES = frozenset({"application/x-python-serialize", "application/x-pickle", "pickle"})

HINTS = {
    "STORAGE": "For example {'BACKEND': 'djqueue.storage.database.DatabaseStorage', 'OPTIONS': {}}.",
    "IMMEDIATE": "With True, jobs run when they are enqueued, for development and tests.",
    "QUEUES": "For example {'emails': {'RATE': '100/s', 'CONCURRENCY': 10}}, or a list of names.",
    "LIMITERS": "For example {'stripe': {'RATE': '100/s', 'CONCURRENCY': 20}}.",
    "STRICT_QUEUES": "With True, only the queues named in QUEUES exist.",
    "DEFAULTS": "Default options of every job, as for @job: {'max_attempts': 5}.",
    "ENQUEUE_ON_COMMIT": "True, False, or the alias of a database whose commit enqueues the jobs.",
    "MAX_PAYLOAD": "Maximum bytes of an encoded payload, 1_048_576 by default.",
    "MAX_ITEMS": "Maximum items sent by one attempt of a generator, 10_000 by default.",
    "MAX_ITEMS_SIZE": "Maximum bytes of the items of one attempt, 16_777_216 by default.",
    "ACCEPT_CONTENT": "For example ['application/x-djqueue-msgpack', 'application/json'].",
    "CODEC": "A content type, such as 'application/json'.",
    "CONCURRENCY": "Number of jobs that a worker runs at once, 10 by default.",
    "SHUTDOWN_TIMEOUT": "Seconds that a stopping worker waits for its jobs, 25 by default.",
    "HEARTBEAT": "Seconds between the heartbeats of a worker, 5 by default.",
    "STUCK_TIMEOUT": "Seconds after which a worker process that does not answer is killed, 60 by default.",
    "METRICS": "Seconds to keep the buckets of MINUTE, HOUR and DAY, for example {'MINUTE': 604_800}.",
    "VERSION": "Version of the project, such as its release or commit: '2026.11.3'.",
    "MODULES": "Modules to import from every app besides jobs.py, for example ['tasks'].",
    "EXECUTOR": "One of 'inline', 'isolated' and 'subprocess'.",
    "LIMITS": "Limits of jobs in processes of their own, for example {'memory': '256 MiB', 'cpu': 60}.",
    "SANDBOX": "'require' refuses jobs whose permissions cannot be enforced here; 'degrade' accepts some.",
    "SANDBOX_IMPORTS": "List absolute paths, such as [BASE_DIR / 'pyproject.toml'].",
    "MIDDLEWARE": "For example ['djqueue.middleware.LoggingMiddleware'].",
    "DASHBOARD": "For example {'READ_ONLY': True, 'POLL': 5}.",
    "HEALTH": "For example {'MAX_WAIT': 120, 'TIMEOUT': 1}.",
    "BACKUP": "For example {'EVERY': 21_600, 'KEEP': 12}, or None to take no backups in runworkers.",
    "MONITORING": "For example {'TOKEN_FILE': '/run/secrets/djqueue-token'}.",
    "ALERTS": "For example {'MAIL': ['ops@example.com'], 'AFTER': 60}.",
    "TEST": "For example {'STORAGE': 'real'}, to use the storage of STORAGE in tests, too.",
}
FROM_SETTINGS = frozenset({"clock", "limiters", "metrics", "policies", "random"})
"""Parameters of storages that come from other settings or from tests, not from OPTIONS."""
OWN_THREADS = 5
"""Threads of djqueue in a worker process that use Django's connections: sweeps, schedules, heartbeat,
health checks, and the main thread at its start."""
POOL_SIZE = 4
"""Connections of a pool of psycopg whose size is not set."""
SHOWN = 5
"""Number of job types that a message names."""
MESSAGES = {"error": checks.Error, "warning": checks.Warning, "info": checks.Info}
Check = Callable[..., list[Finding]]


def _as_messages(check: Check) -> Callable[..., list[checks.CheckMessage]]:
    """Return the findings of a check as Django's messages."""

    @wraps(check)
    def run(**kwargs: Any) -> list[checks.CheckMessage]:
        return [MESSAGES[one.level](one.text, hint=one.hint, id=one.id) for one in check(**kwargs)]

    return run


@_as_messages
def check_settings(**_: Any) -> list[Finding]:
    """Check the settings without connecting to anything. Invalid keys are left out of later checks."""
    given = getattr(django_settings, "DJQUEUE", {})
    messages: list[Finding] = list(_bad_keys(given))
    readable = given if isinstance(given, Mapping) else {}
    bad = {key for key, value in readable.items() if problems({key: value})}
    right = {key: value for key, value in readable.items() if key not in bad}
    if unknown := unknown_limiters(right):
        del right["QUEUES"]
        if "LIMITERS" not in bad:
            hint = HINTS["LIMITERS"]
            messages += [system_finding("djqueue.E008", f"{problem}.", hint) for problem in unknown]
    settings = read_settings(right)
    if not unknown and "QUEUES" not in bad:
        messages += _unused_limiters(settings)
    if bad.isdisjoint({"CODEC", "ACCEPT_CONTENT"}):
        messages += _content_types(settings)
    messages += _middleware(settings)
    messages += _queue_filter(settings)
    messages += _missing_modules(settings)
    messages += _modules_of_no_app(settings)
    if bad.isdisjoint({"QUEUES", "STRICT_QUEUES"}):
        messages += _queues_of_jobs(settings)
    messages += _databases_of_permissions()
    if bad.isdisjoint({"QUEUES", "EXECUTOR", "DEFAULTS"}):
        messages += _ignored_limits(settings)
    if "STORAGE" in bad:
        return [*messages, *_leases(settings, settings.policy("").lease)]
    of_storage = list(_storage(settings))
    redis = _redis_options(settings)
    messages += _leases(settings, redis.lease if redis is not None else settings.policy("").lease)
    return messages + of_storage


@_as_messages
def check_servers(databases: Iterable[str] | None = None, **_: Any) -> list[Finding]:
    """Check the Redis servers and the outbox, if databases are checked."""
    if not databases:
        return []
    _LastRun.databases = databases
    return [*_servers(), *_left_in_outbox(databases)]


@_as_messages
def check_servers_to_deploy(databases: Iterable[str] | None = None, **_: Any) -> list[Finding]:
    """Report the Redis servers with `--deploy`, unless `check_servers` has reported them in the same run.

    Django 6.1 passes every database here even if none was chosen, and then skips `check_servers`. All checks
    of one run receive the same object, and the regular ones run before those of `--deploy`.
    """
    asked, _LastRun.databases = _LastRun.databases, None
    return [] if databases and databases is asked else list(_servers())


@_as_messages
def check_jobs_to_deploy(**_: Any) -> list[Finding]:
    """Check with `--deploy` how jobs run: these messages would be too much in front of every command."""
    messages = list(_root_with_permissions())
    settings = _valid_settings()
    if settings is not None:
        messages += _soft_timeouts(settings)
        messages += _immediate(settings)
        messages += _place_of_backups(settings)
        messages += _pools(settings)
    return messages


class _LastRun:
    """The latest run of `check_servers` that asked Redis."""

    databases: Iterable[str] | None = None


def _bad_keys(given: Any) -> Iterator[Finding]:
    if not isinstance(given, Mapping):
        yield system_finding("djqueue.E001", problems(given)[0], "Start with DJQUEUE = {}.")
        return
    for key, value in given.items():
        for problem in problems({key: value}):
            hint = HINTS.get(key) or f"Valid keys: {', '.join(READERS)}."
            yield system_finding("djqueue.E001", problem, hint)


def _has_kombu() -> bool:
    # Once imported, kombu is a module without a spec, for which find_spec raises ValueError.
    return sys.modules.get("kombu") is not None or find_spec("kombu") is not None


def _content_types(settings: Settings) -> Iterator[Finding]:
    accepted = settings.accept_content
    if settings.codec not in accepted:
        yield system_finding(
            "djqueue.E005",
            f"DJQUEUE['CODEC']: {settings.codec!r} is not in DJQUEUE['ACCEPT_CONTENT'], so no job can be "
            "enqueued.",
            f"Add {settings.codec!r} to ACCEPT_CONTENT ({', '.join(sorted(accepted))}).",
        )
    elif settings.codec != MSGPACK and not _has_kombu():
        yield system_finding(
            "djqueue.E005",
            f"DJQUEUE['CODEC']: {settings.codec!r} requires kombu, so no job can be enqueued.",
            "Run `pip install 'djqueue[kombu]'`.",
        )
    for content_type in sorted(accepted & PICKLES):
        yield system_finding(
            "djqueue.W001",
            f"DJQUEUE['ACCEPT_CONTENT'] lists {content_type!r}: anyone who can write to the storage can run "
            "code in the workers and in the admin.",
            "Enqueue ids and plain values, and remove pickle.",
        )


def _unused_limiters(settings: Settings) -> Iterator[Finding]:
    used = {policy.limiter for policy in settings.queues.values()}
    for name in settings.limiters:
        if name not in used:
            yield system_finding(
                "djqueue.W013",
                f"DJQUEUE['LIMITERS']: no queue uses {name!r}, so it limits nothing.",
                f"DJQUEUE['QUEUES'] = {{'some-queue': {{'LIMITER': {name!r}}}}}, or remove the limiter.",
            )


def _middleware(settings: Settings) -> Iterator[Finding]:
    for path in settings.middleware:
        wrong = middleware.problem(path)
        if wrong is not None:
            hint = "Expected a class with enqueue and aenqueue, with execute and aexecute, or with all four."
            yield system_finding("djqueue.E007", f"DJQUEUE: {wrong}.", hint)


def _queue_filter(settings: Settings) -> Iterator[Finding]:
    path = settings.dashboard.queue_filter
    if not isinstance(path, str):
        return
    try:
        import_string(path)
    except ImportError as error:
        yield system_finding(
            "djqueue.W016",
            f"DJQUEUE['DASHBOARD']: QUEUE_FILTER: {path!r} cannot be imported: {error}",
            "Expected the dotted path of a function (request, queue) -> bool: 'shop.rights.may_see'.",
        )


def _missing_modules(settings: Settings) -> Iterator[Finding]:
    from .apps import missing_modules

    for name in settings.modules:
        if name in missing_modules:
            yield system_finding(
                "djqueue.E010",
                f"DJQUEUE['MODULES']: {name!r} cannot be imported: {missing_modules[name]}.",
                HINTS["MODULES"],
            )


def _modules_of_no_app(settings: Settings) -> Iterator[Finding]:
    names = [name for name in settings.modules if "." not in name]
    if not names:
        return
    app_of: dict[str, str] = {}
    for app in apps.get_app_configs():
        for module in iter_modules([app.path]):
            app_of.setdefault(module.name, app.name)
    for name in names:
        if name not in app_of:
            own = [other for other, app in app_of.items() if not app.startswith(("django.", "djqueue"))]
            similar_name = similar(name, own)
            hint = (
                f"Did you mean {similar_name!r} (in {app_of[similar_name]})?"
                if similar_name
                else HINTS["MODULES"]
            )
            yield system_finding(
                "djqueue.W015",
                f"DJQUEUE['MODULES']: no installed app has a module {name!r}, so it adds no jobs.",
                hint,
            )


def _queues_of_jobs(settings: Settings) -> Iterator[Finding]:
    from .client import envelope

    for name, job_type in _job_types().items():
        try:
            envelope.check_queue(envelope.queue_of(job_type.declared_queue, settings), settings)
        except UnknownQueueError as error:
            yield system_finding(
                "djqueue.E009",
                f"Job {name!r}: {error}",
                "Add the queue to QUEUES, give the job a queue of QUEUES, or turn STRICT_QUEUES off.",
            )


def _databases_of_permissions() -> Iterator[Finding]:
    """Report permissions for databases that do not exist."""
    for name, job_type in _job_types().items():
        try:
            if job_type.permissions is not None:
                job_type.permissions.check_databases(django_settings.DATABASES)
        except OptionError as error:
            yield system_finding(
                "djqueue.E011",
                f"Job {name!r}: permissions: {error}",
                "Workers with this job do not start. Correct the alias in its Permissions(db=[...]).",
            )


def _ignored_limits(settings: Settings) -> Iterator[Finding]:
    """Report limits of job types whose jobs run inline."""
    for name, job_type in _job_types().items():
        if not job_type.limits:
            continue
        queue, executor = _place(job_type, settings)
        if executor == INLINE:
            yield system_finding(
                "djqueue.W017",
                f"Job {name!r}: its limits ({', '.join(job_type.limits)}) have no effect, because jobs in "
                f"the queue {queue!r} run inline.",
                f"Set executor='isolated' on the job, or DJQUEUE['QUEUES'][{queue!r}]['EXECUTOR'].",
            )


def _soft_timeouts(settings: Settings) -> Iterator[Finding]:
    """Report the sync functions that run inline with a timeout, in one message."""
    names = []
    for name, job_type in _job_types().items():
        if job_type.batch is not None or inspect.iscoroutinefunction(job_type.function):
            continue
        try:
            timeout = job_type.options.job.timeout
        except DjqueueError:
            continue  # E001 or E009 reports it.
        if timeout and _place(job_type, settings)[1] == INLINE:
            names.append(name)
    if names:
        yield system_finding(
            "djqueue.I003",
            "The timeout of these jobs can't interrupt them, because they are sync functions that run "
            f"inline: {_listed(names)}. One that ignores current_job().cancelled ends with its worker "
            "process, which the supervisor replaces.",
            "Set executor='isolated' on jobs that must end at their timeout.",
        )


def _root_with_permissions() -> Iterator[Finding]:
    """Recommend an ordinary user if jobs have permissions."""
    names = [name for name, job_type in _job_types().items() if job_type.permissions is not None]
    if names and hasattr(os, "geteuid") and os.geteuid() == 0:
        yield system_finding(
            "djqueue.W018",
            f"This process runs as root, and these jobs have permissions: {_listed(names)}. Files and "
            "control sockets that only root can open are protected by the sandbox alone.",
            "Run workers as an ordinary user, such as with User= in the systemd unit.",
        )


def _immediate(settings: Settings) -> Iterator[Finding]:
    """Report that jobs need no worker, which is for development."""
    if settings.immediate:
        yield system_finding(
            "djqueue.W019",
            "DJQUEUE['IMMEDIATE'] is on: jobs run in the process that enqueues them, before the enqueue "
            "returns, and are kept in its memory only.",
            "Turn IMMEDIATE off in production, and start manage.py runworkers.",
        )


def _place_of_backups(settings: Settings) -> Iterator[Finding]:
    """Report that the backups of `runworkers` cannot be saved anywhere."""
    from .backup.store import BackupStore

    if settings.backup.every is None:
        return
    try:
        BackupStore.configured(settings.backup)
    except ConfigurationError as error:
        yield system_finding(
            "djqueue.W020",
            f"runworkers takes no backups: {error}.",
            "See Backups in the docs, or set DJQUEUE['BACKUP'] to None.",
        )


def _pools(settings: Settings) -> Iterator[Finding]:
    """Report pools with fewer connections than the threads of a worker process, each of which keeps one."""
    needed = settings.concurrency + OWN_THREADS
    for alias, database in django_settings.DATABASES.items():
        options: Any = database.get("OPTIONS", {})
        pool = options.get("pool")
        if not pool:
            continue
        given = pool if isinstance(pool, Mapping) else {}
        size = given.get("max_size") or given.get("min_size", POOL_SIZE)
        if size < needed:
            yield system_finding(
                "djqueue.W021",
                f"DATABASES[{alias!r}]['OPTIONS']['pool'] has {size} connections, and a worker process may "
                f"need {needed}: one for each of its {settings.concurrency} jobs, and {OWN_THREADS} for "
                "threads of djqueue. The others wait, and fail after the timeout of the pool.",
                f"Set it to {{'max_size': {needed}}} or more, or lower CONCURRENCY. With --concurrency, add "
                f"{OWN_THREADS} to that number.",
            )


def _job_types() -> "dict[str, JobType[..., Any]]":
    from .client import registry

    return registry.all()


def _place(job_type: "JobType[..., Any]", settings: Settings) -> tuple[str, str]:
    """Return the queue of a job type, and the executor of its jobs there."""
    from .client import envelope

    queue = envelope.queue_of(job_type.declared_queue, settings)
    return queue, job_type.executor or settings.policy(queue).executor or settings.executor


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - SHOWN
    return ", ".join(ordered[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _leases(settings: Settings, default: int) -> Iterator[Finding]:
    leases = {name: policy.lease for name, policy in settings.queues.items()}
    leases["every other queue"] = default
    for name, lease in leases.items():
        if lease < 2 * settings.heartbeat:
            yield system_finding(
                "djqueue.W005",
                f"DJQUEUE: the lease of {name} ({lease / 1000:g} s) is shorter than two heartbeats "
                f"({settings.heartbeat / 1000:g} s each): after one late heartbeat, a running job is "
                "considered stalled and runs again.",
                "Increase LEASE of the queue or reduce HEARTBEAT.",
            )


def _storage(settings: Settings) -> Iterator[Finding]:
    from .storage.base import Storage

    where = f"DJQUEUE['STORAGE']: BACKEND {settings.backend!r}"
    try:
        backend = import_string(settings.backend)
    except (ImportError, ConfigurationError) as error:  # ConfigurationError: an extra is not installed
        yield system_finding("djqueue.E002", f"{where} cannot be imported: {error}", HINTS["STORAGE"])
        return
    if not (isinstance(backend, type) and issubclass(backend, Storage)):
        yield system_finding(
            "djqueue.E003",
            f"{where} is not a subclass of djqueue.storage.base.Storage.",
            HINTS["STORAGE"],
        )
        return
    yield from _storage_options(backend, settings.storage_options)
    from .storage.database import DatabaseStorage

    if issubclass(backend, DatabaseStorage):
        yield from _database(settings.storage_options)
    elif _is_redis(backend):
        yield from _redis(settings)


def _storage_options(backend: type, given: Mapping[str, Any]) -> Iterator[Finding]:
    parameters = inspect.signature(backend).parameters
    known = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in FROM_SETTINGS
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    where = f"DJQUEUE['STORAGE']: OPTIONS: {backend.__name__}"
    hint = f"Valid options: {', '.join(sorted(name.upper() for name in known)) or 'none'}."
    for name in given:
        if name not in known and not open_ended:
            near = nearest(name.upper(), [other.upper() for other in known]) or "."
            yield system_finding(
                "djqueue.E004", f"{where} has no option {shown_name(name.upper())}{near}", hint
            )
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            yield system_finding("djqueue.E004", f"{where} requires the option {name.upper()!r}.", hint)


def _database(options: Mapping[str, Any]) -> Iterator[Finding]:
    alias = options.get("database") or DEFAULT_DB_ALIAS
    if alias not in connections:
        known = ", ".join(connections)
        yield system_finding(
            "djqueue.E004",
            f"DJQUEUE['STORAGE']: OPTIONS: DATABASE: {shown_name(alias)} is not in DATABASES.",
            f"DATABASES has: {known}.",
        )
        return
    yield from _values_of_database(options)
    if connections[alias].vendor == "sqlite":
        yield from _sqlite(alias)


def _values_of_database(options: Mapping[str, Any]) -> Iterator[Finding]:
    from .storage.database import DatabaseStorage

    backend: Any = DatabaseStorage
    known = inspect.signature(backend).parameters.keys() - FROM_SETTINGS
    try:
        backend(**{name: value for name, value in options.items() if name in known}).close()
    except (ConfigurationError, ImproperlyConfigured) as error:
        yield system_finding(
            "djqueue.E004",
            f"DJQUEUE['STORAGE']: OPTIONS: {error}",
            "See the options of DatabaseStorage in the docs, under Storages.",
        )


def _sqlite(alias: str) -> Iterator[Finding]:
    database = connections[alias].settings_dict
    name = str(database["NAME"])
    if name.startswith("file:memorydb_"):  # The database of Django's test runner.
        return
    if ":memory:" in name or "mode=memory" in name:
        yield system_finding(
            "djqueue.W003",
            f"DATABASES[{alias!r}] is in memory, so other processes such as `manage.py runworkers` cannot "
            "see its jobs.",
            "Use a file, or djqueue.storage.memory.MemoryStorage in a single process.",
        )
    elif str(database.get("OPTIONS", {}).get("transaction_mode") or "").upper() != "IMMEDIATE":
        yield system_finding(
            "djqueue.W002",
            f"DATABASES[{alias!r}]: SQLite transactions are not IMMEDIATE. One that reads before it writes "
            "fails with 'database is locked', whatever its timeout, if another process writes in between, as "
            "workers and web servers do.",
            f"Set DATABASES[{alias!r}]['OPTIONS']['transaction_mode'] = 'IMMEDIATE'.",
        )


def _is_redis(backend: object) -> bool:
    # Importing a Redis backend has imported the package. With other backends, redis may not be installed.
    package = sys.modules.get("djqueue.storage.redis")
    return package is not None and isinstance(backend, type) and issubclass(backend, package.RedisStorage)


def _redis_options(settings: Settings) -> "RedisOptions | None":
    """Return the options of a Redis storage; None for other storages and invalid options (E004)."""
    try:
        if not _is_redis(import_string(settings.backend)):
            return None
        from .storage.redis.options import RedisOptions

        return RedisOptions.read(_upper(settings))
    except (ImportError, ConfigurationError):
        return None


def _redis(settings: Settings) -> Iterator[Finding]:
    from .storage.redis.health import lease_findings
    from .storage.redis.location import locate
    from .storage.redis.options import RedisOptions

    given = _upper(settings)
    try:
        options = RedisOptions.read(given)
        if given.get("CLIENT") is None:  # A function of the project might connect.
            locate(given)
    except ConfigurationError as error:
        yield _wrong_option(error)
    else:
        yield from lease_findings(options, settings.queues)


def _servers() -> Iterator[Finding]:
    settings = _valid_settings()
    if settings is None or _redis_options(settings) is None or uses_memory_in_tests():
        return
    from .storage.redis.connections import Connections
    from .storage.redis.health import findings, unreachable

    try:
        connections = Connections(_upper(settings))
    except ConfigurationError as error:
        if settings.storage_options.get("client") is not None:  # E004 covers the other options.
            yield _wrong_option(error)
    except StorageError as error:
        yield unreachable(error)
    else:
        try:
            yield from findings(connections)
        finally:
            connections.close()


def _left_in_outbox(databases: Iterable[str]) -> Iterator[Finding]:
    from .models import OutboxJob

    settings = _valid_settings()
    alias, table = router.db_for_write(OutboxJob), OutboxJob._meta.db_table
    if alias not in databases or settings is None:
        return
    if settings.backend == SCHEDULER or any(policy.outbox for policy in settings.queues.values()):
        return
    count = 0
    with suppress(Error):  # Django reports an unavailable database.
        if table in connections[alias].introspection.table_names():
            count = OutboxJob.objects.using(alias).count()
    if count:
        yield system_finding(
            "djqueue.W012",
            f"DATABASES[{alias!r}]: {table} has {count} {'job' if count == 1 else 'jobs'} for Redis, but no "
            "queue has OUTBOX, so they are not sent.",
            "Set OUTBOX for their queue until `runworkers` has emptied the table, or delete the rows.",
        )


def _valid_settings() -> Settings | None:
    """Return the settings; None if they are invalid, which `check_settings` reports."""
    given = getattr(django_settings, "DJQUEUE", {})
    return None if is_wrong(given) else read_settings(given)


def _upper(settings: Settings) -> dict[str, Any]:
    return {name.upper(): value for name, value in settings.storage_options.items()}


def _wrong_option(error: ConfigurationError) -> Finding:
    return system_finding(
        "djqueue.E004",
        f"DJQUEUE['STORAGE']: OPTIONS: {error}",
        "For example {'CACHE': 'default'}, or {'URL': 'redis://localhost:6379/0'}.",
    )
