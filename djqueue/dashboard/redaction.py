"""Hides secrets in values of jobs: by the names of their keys, and by the job's own redact function."""

import inspect
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from logging import ERROR
from time import monotonic
from typing import Any

from django.utils.translation import gettext as _

from djqueue.client import registry
from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.errors import SerializationError
from djqueue.core.headers import Headers
from djqueue.core.job import JobRecord, is_call
from djqueue.core.logs import Log, frames_of, type_name
from djqueue.core.messages import ThrottledLog
from djqueue.dashboard import rendering

logger = Log("djqueue.dashboard")
HIDDEN = "•••"
MAX_DEPTH = 30
"""Maximum nesting level searched; deeper values are hidden."""
LARGEST_LISTED = 8_192
"""Largest payload, in bytes, that a list decodes. Lists that read rows read one byte more."""
LINE_LENGTH = 80
"""Maximum characters shown of one job's arguments."""


SLOW = 0.5
"""Seconds after which a redact function keeps pages waiting for too long."""
PAUSE = 60.0
"""Seconds for which such a function is not called again, and between two lines about a function."""
problems = ThrottledLog(logger, PAUSE)
_paused: dict[str, float] = {}
"""When the redact functions of job types that were slow are called again, in monotonic seconds."""


class Hidden:
    """Replaces a hidden value."""

    def __repr__(self) -> str:
        return HIDDEN


def redact(value: Any, words: Sequence[str], level: int = 0) -> Any:
    """Return a value with everything under a secret name hidden."""
    if level > MAX_DEPTH:
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
    """Return whether a name contains one of the words, or ends with the rest of a `*word`."""
    text = str(name).lower()
    return any(text.endswith(word[1:]) if word.startswith("*") else word in text for word in words)


def payload(record: JobRecord, *, revealed: bool) -> Any:
    """Return the payload of a job.

    Positional arguments are hidden by the names of the function's parameters. If the function is not
    registered in this process, all of them are hidden.

    Raises:
        SerializationError: The payload can't be decoded in this process.
    """
    value = _decoded(record, record.payload)
    return value if revealed else _without_secrets(record.name, value, "payload")


def result(record: JobRecord, *, revealed: bool) -> Any:
    """Return the result of a job.

    Raises:
        SerializationError: The result can't be decoded in this process.
    """
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


def headers(given: Headers, *, revealed: bool) -> dict[str, Any]:
    """Return the headers of a job; those with secret names are hidden."""
    try:
        value = dict(given)
    except SerializationError as error:
        return {_("unreadable"): Hidden() if not revealed else str(error)}
    return value if revealed else redact(value, get_settings().dashboard.redact)


def arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the visible part of the arguments of a job that is not enqueued yet, such as a schedule's."""
    return _without_secrets(name, {"args": args, "kwargs": kwargs}, "payload")


def hides(record: JobRecord, data: bytes, shown: Any) -> bool:
    """Return whether the shown value differs from the stored one."""
    job_type = registry.find(record.name)
    if has_secrets(shown) or job_type is None or job_type.redact_function is None:
        return has_secrets(shown)
    try:
        return bool(shown != _decoded(record, data))
    except Exception:
        return True  # It is an object of the project.


def has_secrets(value: Any) -> bool:
    """Return whether part of a value is hidden."""
    if isinstance(value, Hidden):
        return True
    parts = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return any(map(has_secrets, parts))


def payload_line(record: JobRecord) -> str:
    """Return a job's redacted arguments with the names of the parameters, cut to `LINE_LENGTH` characters."""
    if len(record.payload) > LARGEST_LISTED:
        return _("too large to list")
    try:
        value = payload(record, revealed=False)
    except SerializationError:
        return _("unreadable")
    text = _line(value, parameter_names(record.name))
    return text if len(text) <= LINE_LENGTH else f"{text[: LINE_LENGTH - 1]}…"


def _without_secrets(name: str, value: Any, part: str) -> Any:
    """Apply the job's own redact function, then hide what has a secret name.

    If the function fails, or has just been slow, the whole value is hidden. Its exception is logged without
    the message, which may contain the secret.
    """
    words = get_settings().dashboard.redact
    job_type = registry.find(name)
    if job_type is None or job_type.redact_function is None:
        return _unnamed(value, part, job_type, words)
    began = monotonic()
    if began < _paused.get(name, 0):
        return Hidden()
    try:
        return _unnamed(job_type.redact_function(value, part), part, job_type, words)
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(frames_of(error))[-1]
        text = "The redact function of %s failed at %s:%s with %s; the whole %s is hidden."
        problems.log(ERROR, name, text, name, where.filename, where.lineno, type_name(error), part)
        return Hidden()
    finally:
        if (took := monotonic() - began) >= SLOW:
            _paused[name] = began + took + PAUSE
            text = "The redact function of %s took %.1f s; what it would show is hidden for %d s."
            problems.log(ERROR, (name, "slow"), text, name, took, PAUSE)


def _unnamed(value: Any, part: str, job_type: Any, words: Sequence[str]) -> Any:
    if part != "payload" or not isinstance(value, Mapping) or value.keys() != {"args", "kwargs"}:
        return redact(value, words)
    args, kwargs = value["args"], value["kwargs"]
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        return Hidden()  # a producer may send anything under these keys, without parameter names
    return {"args": _positional(args, job_type, words), "kwargs": redact(kwargs, words)}


def parameter_names(name: str) -> tuple[str, ...]:
    """Return the names of a job's positional parameters, in order; none if it is not registered here."""
    job_type = registry.find(name)
    if job_type is None:
        return ()
    return tuple(one.name for one in _parameters(job_type.function) if one.kind is not one.VAR_POSITIONAL)


@lru_cache(maxsize=1_000)
def _parameters(function: Any) -> tuple[inspect.Parameter, ...]:
    return tuple(
        one
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
    )


def _positional(args: Sequence[Any], job_type: Any, words: Sequence[str]) -> list[Any]:
    if job_type is None:
        return [Hidden() for _ in args]
    parameters = _parameters(job_type.function)
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


def _line(value: Any, names: Sequence[str]) -> str:
    """Return the arguments of a call, or any other payload as a value."""
    if is_call(value):
        args, kwargs = value["args"], value["kwargs"].items()
        first = [f"{name}={_flat(one)}" for name, one in zip(names, args, strict=False)]
        last = [f"{name}={_flat(one)}" for name, one in kwargs]
        return ", ".join([*first, *map(_flat, args[len(first) :]), *last])
    return _flat(value)


def _flat(value: Any) -> str:
    return " ".join(rendering.text(value, LINE_LENGTH * 4).split())
