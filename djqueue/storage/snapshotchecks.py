"""Checks of the records of a snapshot, which may come from a file that someone else has written.

A storage must not get a value of a type that it would never write itself: it could fail when the job is read
or claimed, long after the restore.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from djqueue.core.backoff import Backoff, parse_backoff
from djqueue.core.errors import OptionError
from djqueue.core.messages import shown
from djqueue.core.options import MAX_INTEGER, ON_DEPENDENCY_FAILURE, ON_DUPLICATE, check_text
from djqueue.core.states import State
from djqueue.core.units import LATEST, MAX_DURATION

from .snapshots import DEAD, FORMAT, JOB, KINDS, LIMITER, QUEUE, SCHEDULE, Part

INTEGER_64 = 2**63 - 1

Check = Callable[[Any], bool]
"""Returns whether a value may be stored."""


def check_part(part: Part) -> None:
    """Check all records of a part. Raises OptionError for the first invalid value, with its key."""
    kind, queue = part.kind, part.queue
    if not isinstance(kind, str) or kind not in KINDS:
        raise OptionError(
            f"snapshot: the kind of a part must be one of {', '.join(KINDS)}; got {shown(kind)}"
        )
    is_of_queue = kind in (QUEUE, JOB, DEAD)
    if not (_name(queue) if is_of_queue else queue == ""):
        expected = "a name" if is_of_queue else "an empty string"
        raise OptionError(f"snapshot: the queue of a {kind} part must be {expected}; got {shown(queue)}")
    checks = CHECKS[kind]
    for record in part.records:
        if not isinstance(record, Mapping):
            raise OptionError(
                f"snapshot: a {kind} record of queue {queue!r} is invalid: expected a mapping, got "
                f"{shown(record)}"
            )
        for key, is_valid in checks.items():
            if key not in record:
                raise _invalid(kind, queue, record, f"{key} is missing")
            if not is_valid(record[key]):
                raise _invalid(kind, queue, record, f"{key} must not be {shown(record[key])}")


def _invalid(kind: str, queue: str, record: Mapping[str, Any], how: str) -> OptionError:
    name = record.get("id") or record.get("name") or queue
    return OptionError(
        f"snapshot: the {kind} record {shown(name)} of queue {queue!r} is invalid: expected a record of "
        f"format {FORMAT} ({how})"
    )


# Checks of values.


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _name(value: Any) -> bool:
    try:
        check_text("", value)
    except OptionError:
        return False
    return True


def _job_name(value: Any) -> bool:
    return value == "" or _name(value)


def _data(value: Any) -> bool:
    return isinstance(value, (bytes, bytearray, memoryview))


def _flag(value: Any) -> bool:
    return value is True or value is False


def _any(_value: Any) -> bool:
    return True


def _integer(low: int, high: int) -> Check:
    def is_valid(value: Any) -> bool:
        return isinstance(value, int) and value is not True and value is not False and low <= value <= high

    return is_valid


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _choice(values: tuple[str, ...]) -> Check:
    return lambda value: isinstance(value, str) and value in values


def _each(check: Check) -> Check:
    return lambda value: isinstance(value, (list, tuple)) and all(map(check, value))


def _row(*checks: Check) -> Check:
    def is_valid(value: Any) -> bool:
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(checks)
            and all(check(one) for check, one in zip(checks, value, strict=True))
        )

    return is_valid


def _mapping(checks: Mapping[str, Check]) -> Check:
    def is_valid(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            key in value and check(value[key]) for key, check in checks.items()
        )

    return is_valid


_count = _integer(0, MAX_INTEGER)
_positive = _integer(1, MAX_INTEGER)
_long = _integer(-INTEGER_64 - 1, INTEGER_64)
_number = _integer(0, INTEGER_64)
_time = _integer(0, LATEST)
_duration = _optional(_integer(0, MAX_DURATION))
_error = _optional(_row(_text, _text, _text))
_keys = _each(_row(_name, _name))
_concurrency = _optional(_positive)
_rate = _optional(_row(_positive, _integer(1, MAX_DURATION)))


def _backoff(value: Any) -> bool:
    try:
        parse_backoff(Backoff(**value))
    except (TypeError, ValueError):
        return False
    return True


def _headers(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return value == "" or isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


OPTIONS: dict[str, Check] = {
    "priority": _integer(-MAX_INTEGER, MAX_INTEGER),
    "max_attempts": _positive,
    "max_stalls": _count,
    "backoff": _backoff,
    "backoff_given": _flag,
    "timeout": _duration,
    "ttl": _duration,
    "unique_key": _optional(_name),
    "unique_ttl": _duration,
    "on_duplicate": _choice(ON_DUPLICATE),
    "concurrency_key": _optional(_name),
    "weight": _positive,
    "depends_on": _keys,
    "dependents": _keys,
    "on_dependency_failure": _choice(ON_DEPENDENCY_FAILURE),
    "lifo": _flag,
    "durable": _optional(_flag),
    "result_ttl": _duration,
    "retention": _duration,
    "delay": _duration,
    "tags": _each(_text),
    "subject": _optional(_text),
    "headers": _headers,
    "content_type": _name,
    "rejected": _optional(_row(_text, _text)),
}
"""Checks of the options of a job, all of which may be missing. Others are ignored, as when they are read."""


def _options(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        name not in OPTIONS or OPTIONS[name](one) for name, one in value.items()
    )


_key_limit = _mapping({"concurrency": _concurrency, "paused": _flag, "rate": _rate, "weight": _concurrency})


def _key_limits(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_text(name) and _key_limit(one) for name, one in value.items())


CHECKS: dict[str, dict[str, Check]] = {
    QUEUE: {
        "paused": _flag,
        "key_mode": _text,
        "limits": _optional(_mapping({"rate": _rate, "concurrency": _concurrency})),
        "key_limits": _key_limits,
        "holds": _each(_row(_name, _time, _optional(_time), _text)),
    },
    LIMITER: {"name": _name, "rate": _rate, "concurrency": _concurrency},
    JOB: {
        "id": _name,
        "name": _job_name,
        "state": _choice(tuple(state.value for state in State)),
        "position": _row(_long, _long),
        "payload": _data,
        "options": _options,
        "created_at": _time,
        "run_at": _time,
        "started_at": _time,
        "finished_at": _time,
        "attempts": _count,
        "failures": _count,
        "stalls": _count,
        "worker": _text,
        "reason": _text,
        "error": _error,
        "result": _optional(_data),
        "progress": _any,
        "history": _each(_row(_count, _text, _time, _time, _text, _error)),
        "logs": _each(_row(_time, _text)),
        "stream": _optional(_mapping({"run": _number, "count": _number, "items": _each(_data)})),
        "cancel_requested": _flag,
        "retries": _count,
    },
    DEAD: {
        "id": _name,
        "position": _long,
        "reason": _text,
        "entered_at": _time,
        "expires_at": _time,
        "retries": _count,
        "next_retry_at": _time,
        "name": _text,
        "error_type": _text,
        "error_message": _text,
        "unmet": _keys,
    },
    # Its other values are checked by the columns of the table.
    SCHEDULE: {"name": _name},
}
"""Checks of the values of records, by kind and key."""
