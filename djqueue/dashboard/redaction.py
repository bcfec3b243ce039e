"""What of a job's values is shown: not what has the name of a secret, nor what the job itself hides."""

import inspect
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from djqueue.client import registry
from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.job import JobRecord

logger = logging.getLogger("djqueue.dashboard")

HIDDEN = "•••"
DEEPEST = 30
"""Levels of a value that are looked through; what lies deeper is hidden."""


class Hidden:
    """Stands where a value is not shown."""

    def __repr__(self) -> str:
        return HIDDEN


def redact(value: Any, words: Sequence[str], level: int = 0) -> Any:
    """A value without what secret names name."""
    if level > DEEPEST:
        return Hidden()
    if isinstance(value, Mapping):
        return {
            key: Hidden() if is_secret(key, words) else redact(part, words, level + 1)
            for key, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        parts = [redact(part, words, level + 1) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def is_secret(name: Any, words: Sequence[str]) -> bool:
    """Whether a name is one of a secret: it has one of the words in it, or ends with the rest of `*word`."""
    text = str(name).lower()
    return any(text.endswith(word[1:]) if word.startswith("*") else word in text for word in words)


def payload(record: JobRecord, *, revealed: bool) -> Any:
    """What a job was given. Raises SerializationError if its bytes cannot be read here.

    Arguments by position have the names that the function's parameters have; where no function is
    registered here, nobody knows what they are, and they are hidden.
    """
    value = _decoded(record, record.payload)
    return value if revealed else _without_secrets(record.name, value, "payload")


def result(record: JobRecord, *, revealed: bool) -> Any:
    """What a job returned. Raises SerializationError."""
    value = _decoded(record, record.result)
    return value if revealed else _without_secrets(record.name, value, "result")


def stored(name: str, part: str, data: bytes | None, content_type: str) -> Any:
    """Return what may be shown of a stored value of a job, as `payload` and `result` do without a record.

    Args:
        name: The job's name; empty if it is not known, in which case the whole value is hidden.
        part: "payload" or "result".

    Raises:
        SerializationError: The bytes cannot be read here.
    """
    if data is None:
        return None
    value = decode(data, content_type, accept=get_settings().accept_content)
    return _without_secrets(name, value, part) if name else Hidden()


def arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what may be shown of the arguments of a job that is still to be enqueued, as of a schedule."""
    return _without_secrets(name, {"args": args, "kwargs": kwargs}, "payload")


def hides(record: JobRecord, data: bytes, shown: Any) -> bool:
    """Whether what is shown of a value's bytes is not all of it."""
    job_type = registry.find(record.name)
    if has_secrets(shown) or job_type is None or job_type.redact_function is None:
        return has_secrets(shown)
    return bool(shown != _decoded(record, data))


def has_secrets(value: Any) -> bool:
    """Whether something of a value is hidden."""
    if isinstance(value, Hidden):
        return True
    parts = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return any(map(has_secrets, parts))


def _without_secrets(name: str, value: Any, part: str) -> Any:
    """A value as its job's own function leaves it, and then without what secret names name.

    If that function fails nothing is shown. What it raised may say what it was to hide, so that it is told
    of without its message.
    """
    words = get_settings().dashboard.redact
    job_type = registry.find(name)
    if job_type is None or job_type.redact_function is None:
        return _unnamed(value, part, job_type, words)
    try:
        return _unnamed(job_type.redact_function(value, part), part, job_type, words)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        logger.error(
            "The redact function of %s failed at %s:%s with %s: nothing of the %s is shown.",
            name,
            where.filename,
            where.lineno,
            type(error).__qualname__,
            part,
        )
        return Hidden()


def _unnamed(value: Any, part: str, job_type: Any, words: Sequence[str]) -> Any:
    if part != "payload" or not isinstance(value, Mapping) or value.keys() != {"args", "kwargs"}:
        return redact(value, words)
    args, kwargs = value["args"], value["kwargs"]
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        return Hidden()  # a producer may send anything under these keys, and no parameter names it
    return {"args": _positional(args, job_type, words), "kwargs": redact(kwargs, words)}


def _positional(args: Sequence[Any], job_type: Any, words: Sequence[str]) -> list[Any]:
    if job_type is None:
        return [Hidden() for _ in args]
    parameters = [
        one
        for one in inspect.signature(job_type.function).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
    ]
    shown = []
    for index, arg in enumerate(args):
        name = parameters[min(index, len(parameters) - 1)].name if parameters else ""
        shown.append(Hidden() if is_secret(name, words) else redact(arg, words))
    return shown


def _decoded(record: JobRecord, data: bytes | None) -> Any:
    if data is None:
        return None
    accepted = get_settings().accept_content
    return decode(data, record.options.content_type, accept=accepted)
