"""What a Django project says of a queue and of a job, for writes that begin where it is configured.

Spark's own processes have no settings: what they are to know is among the options by then.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from .options import DURATIONS, ENQUEUE, PER_JOB, camel, key_of

if TYPE_CHECKING:
    from djqueue.conf import Settings
    from djqueue.core.backoff import Backoff

INSTEAD = {"delay": ("runAt", "runAtColumn"), "runAt": ("delay", "delayColumn")}
"""Options that leave no room for another."""


def with_defaults(given: Mapping[str, str]) -> dict[str, str]:
    """Options, and what the project says where they say nothing; the same if there is no project."""
    settings = _settings()
    if settings is None:
        return dict(given)
    said = {key_of(name): value for name, value in given.items()}
    found = dict(_place(settings))
    if said.get("operation", ENQUEUE) == ENQUEUE:
        found |= _of_queue(settings, said.get("queue"))
        found |= _of_job(settings, said.get("job"))
    return {**{name: text for name, text in found.items() if not _is_said(name, said)}, **given}


def _is_said(name: str, said: Mapping[str, str]) -> bool:
    if name == "keyPrefix" and "url" in said:
        return True  # it belongs to the project's own storage
    others = (name, f"{name}Column", *INSTEAD.get(name, ()))
    return any(key_of(other) in said for other in others)


def _settings() -> "Settings | None":
    """The project's, if one is configured here that has `DJQUEUE`."""
    from .aliases import has_project

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


def _place(settings: "Settings") -> Iterator[tuple[str, str]]:
    """Where the project's storage is, if a URL says all of it."""
    given = settings.storage_options
    if settings.backend.endswith("DatabaseStorage"):
        url = _database(given.get("database", "default"))
        if url is not None:
            yield "url", url
    elif isinstance(given.get("url"), str) and not given.get("connection"):
        yield "url", given["url"]
    if given.get("prefix"):
        yield "keyPrefix", str(given["prefix"])


def _database(alias: str) -> str | None:
    from django.conf import settings

    said: Mapping[str, Any] = settings.DATABASES.get(alias, {})
    engine, name = str(said.get("ENGINE", "")), str(said.get("NAME", ""))
    if engine.endswith("sqlite3"):
        return f"sqlite://{quote(os.path.abspath(name))}"
    if not engine.endswith("postgresql"):
        return None
    user, password, port = (str(said.get(key) or "") for key in ("USER", "PASSWORD", "PORT"))
    who = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    options = {key: value for key, value in said.get("OPTIONS", {}).items() if isinstance(value, str | int)}
    host = str(said.get("HOST") or "")
    if "/" in host:
        options["host"], host = host, ""  # a socket's folder
    where = (f"{who}@" if who else "") + host + (f":{port}" if port else "")
    more = f"?{urlencode(options)}" if options else ""
    return f"postgresql://{where}/{quote(name, safe='')}{more}"


def _of_queue(settings: "Settings", queue: str | None) -> dict[str, str]:
    found = {"maxPayloadBytes": str(settings.max_payload)}
    if queue is not None and queue in settings.queues:
        policy = settings.queues[queue]
        found["groupMode"] = policy.group_mode
        if policy.max_size is not None:
            found["maxQueueDepth"] = str(policy.max_size)
    return found


def _of_job(settings: "Settings", job: str | None) -> dict[str, str]:
    """The options of a registered job, or the settings' own."""
    from djqueue.client.registered import registry

    job_type = registry.find(job) if job is not None else None
    options = settings.defaults if job_type is None else job_type.options
    values: dict[str, Any] = {name: value for name, value in options.job.as_dict().items() if name in PER_JOB}
    if job_type is not None and job_type.backoff_function is not None:
        values.pop("backoff", None)  # its workers know it
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
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _backoff(rule: "Backoff") -> str:
    times = {"base": rule.base / 1_000, "cap": rule.cap / 1_000}
    return json.dumps({"kind": rule.kind, "factor": rule.factor, "jitter": rule.jitter, **times})
