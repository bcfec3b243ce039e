"""Take the defaults of a write from the settings of a Django project.

Spark's processes have no settings, so the defaults are passed to them as options.
"""

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from djqueue.core.options import DURATIONS

from .options import ENQUEUE, PER_JOB, camel, key_of, text_of_list

if TYPE_CHECKING:
    from djqueue.conf import Settings
    from djqueue.core.backoff import Backoff

CONFLICTS = {"delay": ("runAt", "runAtColumn"), "runAt": ("delay", "delayColumn")}
"""Options that make a default inapplicable."""
OF_DJANGO = frozenset({"isolation_level", "pool", "server_side_binding"})
"""Options of Django's connections, which have no text. `assume_role` has one, and is passed on."""


def with_defaults(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options with the project's defaults added, or unchanged without a project."""
    settings = _settings()
    if settings is None:
        return dict(options)
    given_options = {key_of(name): value for name, value in options.items()}
    defaults = storage_options(settings)
    if given_options.get("operation", ENQUEUE) == ENQUEUE:
        defaults |= _of_queue(settings, given_options.get("queue"))
        defaults |= _of_job(settings, given_options.get("job"))
    return {
        **{name: text for name, text in defaults.items() if not _is_given(name, given_options)},
        **options,
    }


def _is_given(name: str, given_options: Mapping[str, str]) -> bool:
    if name == "keyPrefix" and "url" in given_options:
        return True  # The prefix belongs to the project's own storage.
    others = (name, f"{name}Column", *CONFLICTS.get(name, ()))
    return any(key_of(other) in given_options for other in others)


def _settings() -> "Settings | None":
    """Return the project's settings if they define `DJQUEUE`."""
    if not has_project():
        return None
    import django
    from django.apps import apps
    from django.conf import settings

    if not apps.ready:
        django.setup()
    if not hasattr(settings, "DJQUEUE"):
        return None
    from djqueue.conf import get_settings

    return get_settings()


def has_project() -> bool:
    """Return whether `DJANGO_SETTINGS_MODULE` names a module that exists in this process.

    Spark may pass the variable on to machines without the project."""
    module = os.environ.get("DJANGO_SETTINGS_MODULE", "")
    try:
        return bool(module) and find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def storage_options(settings: "Settings") -> dict[str, str]:
    """Return the options `url` and `keyPrefix` of the project's storage, if a URL can express it."""
    configured = settings.storage_options
    options: dict[str, str] = {}
    if settings.backend.endswith("DatabaseStorage"):
        url = _database(configured.get("database", "default"))
    elif configured.get("connection") or configured.get("sentinel_kwargs"):
        url = None
    else:
        url = configured.get("url") or _cache(str(configured.get("cache")))
    if isinstance(url, str):
        options["url"] = url
    if configured.get("prefix"):
        options["keyPrefix"] = str(configured["prefix"])
    return options


def _cache(alias: str) -> str | None:
    """Return a cache's URL, or None if its location needs more than a URL."""
    from django.conf import settings

    cache: Mapping[str, Any] = settings.CACHES.get(alias, {})
    location = cache.get("LOCATION")
    if isinstance(location, list | tuple) and len(location) == 1:
        [location] = location
    unsupported = cache.get("OPTIONS", {}).keys() & {
        "PASSWORD",
        "CONNECTION_POOL_KWARGS",
        "SENTINELS",
    }
    if unsupported or not isinstance(location, str) or any(sign in location for sign in ",;"):
        return None
    return location


def _database(alias: str) -> str | None:
    from django.conf import settings

    database: Mapping[str, Any] = settings.DATABASES.get(alias, {})
    engine, name = str(database.get("ENGINE", "")), str(database.get("NAME", ""))
    if engine.endswith("sqlite3"):
        return f"sqlite://{quote(os.path.abspath(name))}"
    configured: Mapping[str, Any] = database.get("OPTIONS", {})
    if not engine.endswith("postgresql") or not name or "password" in configured:
        return None
    user, password, port = (str(database.get(key) or "") for key in ("USER", "PASSWORD", "PORT"))
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    options = {
        key: int(value) if isinstance(value, bool) else value
        for key, value in configured.items()
        if key not in OF_DJANGO and isinstance(value, str | int)
    }
    host = str(database.get("HOST") or "")
    if "/" in host:
        options["host"], host = host, ""  # The directory of a Unix socket.
    server = (f"{login}@" if login else "") + host + (f":{port}" if port else "")
    more = f"?{urlencode(options)}" if options else ""
    return f"postgresql://{server}/{quote(name, safe='')}{more}"


def _of_queue(settings: "Settings", queue: str | None) -> dict[str, str]:
    options = {"maxPayloadBytes": str(settings.max_payload)}
    if queue is not None and queue in settings.queues:
        policy = settings.queues[queue]
        options["keyMode"] = policy.key_mode
        if policy.max_size is not None:
            options["maxQueueDepth"] = str(policy.max_size)
    return options


def _of_job(settings: "Settings", job: str | None) -> dict[str, str]:
    """Return the options of a registered job, or the defaults of the settings."""
    from djqueue.client import registry

    job_type = registry.find(job) if job is not None else None
    options = settings.defaults if job_type is None else job_type.options
    values: dict[str, Any] = {name: value for name, value in options.job.as_dict().items() if name in PER_JOB}
    if job_type is not None and job_type.backoff_function is not None:
        values.pop("backoff", None)  # The workers know the function.
    if options.delay is not None:
        values["delay"] = options.delay
    if "backoff" in values:
        values["backoff"] = _backoff(options.job.backoff)
    return {camel(name): _text(name, value) for name, value in values.items() if value is not None}


def _text(name: str, value: Any) -> str:
    if name in DURATIONS:
        return repr(value / 1_000)
    if isinstance(value, bool):
        return str(value).lower()
    return text_of_list(value) if isinstance(value, tuple) else str(value)


def _backoff(rule: "Backoff") -> str:
    times = {"base": rule.base / 1_000, "cap": rule.cap / 1_000}
    return json.dumps({"kind": rule.kind, "factor": rule.factor, "jitter": rule.jitter, **times})
