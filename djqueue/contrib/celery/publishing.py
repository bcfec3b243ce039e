"""Send tasks to an existing Celery broker, with kombu alone: Celery need not be installed."""

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict, Unpack
from uuid import uuid4

from kombu import Connection, Exchange, pools

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ArgumentsError, OptionError
from djqueue.core.units import to_datetime

DEFAULT_QUEUE = "celery"
RETRY_POLICY = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}
"""Retries of publishing while the broker is unavailable: the same as those of Celery."""
MAX_SHOWN = 1024
"""Maximum of characters of the arguments' representations, which Celery's monitors show."""


class MessageOptions(TypedDict, total=False):
    """Options of `publish` that the message of the task carries to its worker."""

    id: str | None
    """Id of the task; by default a new one."""
    countdown: float | timedelta | None
    """Seconds, or a timedelta, before the task may start; excludes `eta`."""
    eta: datetime | None
    """Aware datetime before which the task does not start."""
    expires: float | timedelta | datetime | None
    """Seconds, a timedelta or an aware datetime after which the task is not started any more."""
    time_limit: float | None
    """Seconds after which the worker ends the task."""
    soft_time_limit: float | None
    """Seconds after which the task is interrupted."""
    headers: Mapping[str, Any] | None
    """Further headers of the message."""
    ignore_result: bool
    """Whether the worker discards the result."""


def publish(
    task: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    broker: str | Connection,
    queue: str = DEFAULT_QUEUE,
    exchange: str | Exchange | None = None,
    routing_key: str | None = None,
    priority: int | None = None,
    reply_to: str | None = None,
    serializer: str = "json",
    compression: str | None = None,
    retry: bool = True,
    retry_policy: Mapping[str, Any] | None = None,
    transport_options: Mapping[str, Any] | None = None,
    **options: Unpack[MessageOptions],
) -> str:
    """Send a task to a Celery broker, and return its id.

    Connections are pooled by URL, and shared by all threads.

    Args:
        task: Name of the task, as its Celery worker registers it, such as `shop.tasks.send_receipt`.
        args: Positional arguments.
        kwargs: Keyword arguments.
        broker: URL of the broker, or a kombu connection.
        queue: Queue of the task, if no exchange is given.
        exchange: Name of an exchange, or an exchange, to which the message is sent with `routing_key`.
        routing_key: Routing key; by default the name of the queue.
        priority: 0 to 9; the broker decides which is first.
        reply_to: Queue for the result, with the `rpc://` result backend.
        serializer: Name of a serializer of kombu. The worker must accept it.
        compression: Name of a compression of kombu.
        retry: Whether to try again while the broker is unavailable.
        retry_policy: Overrides of `max_retries`, `interval_start`, `interval_step` and `interval_max`.
        transport_options: Options of the broker's transport.
        options: Options of the message; see `MessageOptions`.

    Raises:
        ArgumentsError: The arguments are not a list and a dict.
        OptionError: An option is invalid; the message names it.
        kombu.exceptions.OperationalError: The broker is unavailable.
        kombu.exceptions.EncodeError: The arguments cannot be encoded.
    """
    _check_task(task, args, kwargs)
    if priority is not None and (type(priority) is not int or not 0 <= priority <= 9):
        raise OptionError(f"priority: must be from 0 to 9; got {priority!r}")
    positional, named = list(args), dict(kwargs or {})
    headers = _headers(task, positional, named, options)
    body = (positional, named, {"callbacks": None, "errbacks": None, "chain": None, "chord": None})
    if not isinstance(broker, Connection):
        # Pools are found by the options of a connection, so that equal ones share their connections.
        broker = Connection(broker, transport_options=dict(transport_options or {}))
    target = exchange if exchange is not None else ""
    with pools.producers[broker].acquire(block=True) as producer:
        producer.publish(
            body,
            exchange=target,
            routing_key=routing_key if routing_key is not None else queue,
            headers=headers,
            correlation_id=headers["id"],
            reply_to=reply_to or "",
            serializer=serializer,
            compression=compression,
            priority=priority,
            delivery_mode=2,
            declare=[target] if isinstance(target, Exchange) else [],
            retry=retry,
            retry_policy={**RETRY_POLICY, **(retry_policy or {})},
        )
    return str(headers["id"])


def _check_task(task: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ArgumentsError(f"args: expected a list or tuple, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentsError(f"kwargs: expected a dict, got {type(kwargs).__name__}")
    if not isinstance(task, str) or not task:
        raise OptionError(f"task: expected the name of a task, got {task!r}")


def _headers(task: str, args: list[Any], kwargs: dict[str, Any], options: MessageOptions) -> dict[str, Any]:
    """Return the headers of a message of Celery's protocol 2."""
    for name in options.keys() - MessageOptions.__annotations__.keys():
        raise TypeError(f"publish() got an unexpected keyword argument {name!r}")
    eta, countdown = options.get("eta"), options.get("countdown")
    if eta is not None and countdown is not None:
        raise OptionError("eta and countdown can't be combined: remove one of them")
    task_id = options.get("id") or str(uuid4())
    return {
        **(options.get("headers") or {}),
        "lang": "py",
        "task": task,
        "id": task_id,
        "shadow": None,
        "eta": _time("eta", eta if eta is not None else countdown),
        "expires": _time("expires", options.get("expires")),
        "group": None,
        "group_index": None,
        "retries": 0,
        # The hard limit comes first, whatever the documentation of the protocol says.
        "timelimit": [
            _seconds("time_limit", options.get("time_limit")),
            _seconds("soft_time_limit", options.get("soft_time_limit")),
        ],
        "root_id": task_id,
        "parent_id": None,
        "argsrepr": _shown(tuple(args)),
        "kwargsrepr": _shown(kwargs),
        "origin": f"{os.getpid()}@{socket.gethostname()}",
        "ignore_result": options.get("ignore_result", False),
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }


def _seconds(name: str, value: float | None) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise OptionError(f"{name}: expected seconds greater than 0, got {value!r}")
    return value


def _time(name: str, value: float | timedelta | datetime | None) -> str | None:
    """Return a time as Celery's headers have it."""
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise OptionError(f"{name}: {value!r} is naive; use a datetime with a time zone")
        return value.isoformat()
    if isinstance(value, bool) or not isinstance(value, (int, float, timedelta)):
        raise OptionError(f"{name}: expected seconds, a timedelta or an aware datetime, got {value!r}")
    wait = value if isinstance(value, timedelta) else timedelta(seconds=value)
    return (to_datetime(SYSTEM_CLOCK.now()) + wait).isoformat()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
