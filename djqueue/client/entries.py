"""Checks of what a queue's callers pass, with the call that they may have meant in the error."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from djqueue.core.errors import ArgumentsError, OptionError
from djqueue.core.job import is_call
from djqueue.core.options import check_text

from .registered import registry


def check_id(value: object, label: str = "id") -> str:
    """Return a job's id. Raises OptionError for anything else, which no job could have."""
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    if isinstance(value, UUID):
        hint = ": pass str(...)"
    elif isinstance(getattr(value, "id", None), str):
        hint = ": pass its .id"
    else:
        hint = ""
    raise OptionError(f"{label}: expected a job's id (a string), got an object of type {kind}{hint}")


def check_ids(values: object) -> list[str]:
    """Return the ids of jobs; one id stands for itself. Raises OptionError."""
    if isinstance(values, str):
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)) or hasattr(values, "id"):
        return [check_id(values, "ids")]
    return [check_id(value, "ids") for value in values]


def check_name(queue: str, value: object) -> str:
    """Return a job's name. Raises OptionError, with the right call for a function."""
    if callable(value):
        raise OptionError(
            f"name: expected the name of a job (a string), got {value!r}. {_call(queue, value)}"
        )
    return check_text("name", value)


def check_payloads(values: object) -> Iterable[Any]:
    """Return the payloads of many jobs. Raises OptionError for one value, which would be taken apart."""
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        return values
    raise OptionError(
        "payloads: expected a list or another iterable with one payload per job, got an object of type "
        f"{type(values).__name__}; to enqueue one job, use enqueue()"
    )


def check_arguments(name: str, payloads: Sequence[Any]) -> None:
    """Check payloads for a function under `@job` of this process, as its own `enqueue` does.

    Raises:
        ArgumentsError: The function could not be called with one of them.
    """
    job_type = registry.find(name)
    if job_type is None or job_type.arguments is None:
        return
    for payload in payloads:
        if not is_call(payload):
            short = name.rpartition(".")[2]
            raise ArgumentsError(
                f'Job {name!r} is a @job function: its payload must be {{"args": [...], "kwargs": {{...}}}}, '
                f"got an object of type {type(payload).__name__}. Enqueue the job with "
                f"{short}.enqueue(...)."
            )
        job_type.arguments.check(name, payload["args"], payload["kwargs"])


def refuse_function(queue: str, payloads: Sequence[Any], more: Sequence[Any] = ()) -> None:
    """Raise ArgumentsError for functions as payloads, and for several payloads: those are calls of RQ."""
    found = next((payload for payload in payloads if callable(payload)), None)
    if found is not None:
        raise ArgumentsError(
            f"Queue.enqueue takes a payload, not a function: got {found!r}. {_call(queue, found)}"
        )
    if more:
        raise ArgumentsError(
            f"Queue.enqueue takes one payload, got {1 + len(more)}: put the values into a list or a dict. "
            "To enqueue a @job function, use its own enqueue(...)."
        )


def _call(queue: str, function: Any) -> str:
    name = getattr(function, "__name__", None) or "function"
    call = f"{name}.using(queue={queue!r}).enqueue(...)"
    if isinstance(getattr(function, "name", None), str) and hasattr(function, "using"):
        return f"Use {call}."
    return f"Put @job on the function, then use {call}."
