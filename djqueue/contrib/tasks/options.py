"""The options of djqueue that a task has besides those of Django, and `OPTIONS` of the backend."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from django.db import connections

from djqueue.client.jobs import ONLY_JOB
from djqueue.core.errors import OptionError
from djqueue.core.options import PARSERS
from djqueue.core.suggest import nearest, nearest_option
from djqueue.schedules import SCHEDULE_PARSERS


class NotGiven(Enum):
    """The type of `NOT_GIVEN`, which tells an option that was not given from one that is None."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN = NotGiven.NOT_GIVEN
"""The value of an option that was not given. It stays the same object when it is pickled."""

PER_ENQUEUE = (
    "max_attempts",
    "max_stalls",
    "backoff",
    "timeout",
    "ttl",
    "unique_key",
    "unique_ttl",
    "on_duplicate",
    "group",
    "weight",
    "result_ttl",
    "retention",
    "tags",
    "subject",
    "headers",
)
"""Options that both the decorator and `using` accept."""
PER_TASK = tuple(sorted((ONLY_JOB - {"name"}) | SCHEDULE_PARSERS.keys()))
"""Options that only the decorator accepts: executor, permissions and schedules."""
DEFAULTS: dict[str, Any] = {"max_attempts": 1, "result_ttl": 86_400}
"""Default options of tasks: results are kept for a day, and as with the backends of Django, a task that fails
is not retried."""
BACKEND_DEFAULTS = ("backoff", "max_attempts", "max_stalls", "result_ttl", "retention", "timeout", "ttl")
"""Job options that `OPTIONS` may set for all tasks of a backend."""
ON_COMMIT = "enqueue_on_commit"
"""Key of `OPTIONS` that delays enqueues until the transaction commits: True, or the alias of a database."""


def backend_problems(options: Any) -> list[str]:
    """Return the problems of a backend's `OPTIONS`."""
    if not isinstance(options, Mapping):
        return [f"OPTIONS must be a dictionary; got {options!r}"]
    found = []
    known = (*BACKEND_DEFAULTS, ON_COMMIT)
    for name, value in options.items():
        if name == ON_COMMIT:
            if not isinstance(value, (bool, str)):
                text = "must be True, False or the alias of a database"
                found.append(f"OPTIONS[{name!r}] {text}; got {value!r}")
            elif isinstance(value, str) and value not in connections:
                found.append(f"OPTIONS[{name!r}]: {value!r} is not in DATABASES{nearest(value, connections)}")
        elif name not in BACKEND_DEFAULTS:
            found.append(f"OPTIONS has no option {name!r}{nearest(str(name), known)}")
        else:
            try:
                PARSERS[name](f"OPTIONS[{name!r}]", value)
            except OptionError as error:
                found.append(str(error))
    return found


def defaults_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default job options of a backend's tasks."""
    given = {name: value for name, value in options.items() if name in BACKEND_DEFAULTS}
    return {**DEFAULTS, **given}


def check_names(given: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that a task does not have."""
    for name in given:
        if name not in PER_ENQUEUE and name not in PER_TASK:
            raise OptionError(f"unknown option {name!r}{_hint(name)}")


def check_using(given: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that `using` does not accept."""
    for name in given:
        if name in PER_TASK:
            raise OptionError(f"{name}: set the option on the task: @task({name}=...)")
    if callable(given.get("backoff")):
        raise OptionError("backoff: a backoff function must be set on the task: @task(backoff=...)")
    check_names(given)


def _hint(name: str) -> str:
    if name in ("delay", "run_at"):
        return "; use using(run_after=...)"
    if name == "queue":
        return "; use queue_name"
    return nearest_option(name, (*PER_ENQUEUE, *PER_TASK))
