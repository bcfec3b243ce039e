"""Arguments that several verbs take, and the jobs and queues that they name."""

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError

from djqueue.core.states import State
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
"""Seconds of each unit of a duration."""


def duration(text: str) -> float:
    """Parse a duration such as 90, 30s, 15m, 6h, 7d or 2w; return seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    if not number.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a duration: write a number and s, m, h, d or w, such as 7d")
    return float(int(number) * UNITS[unit])


def json_value(text: str) -> Any:
    """Parse a JSON value."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def json_list(text: str) -> list[Any]:
    """Parse a JSON array."""
    value = json_value(text)
    if not isinstance(value, list):
        raise ArgumentTypeError(f"expected a JSON array, such as '[1, \"a\"]'; got {text!r}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"expected a JSON object, such as '{{\"n\": 1}}'; got {text!r}")
    return value


def state(text: str) -> State:
    """Parse the name of a state."""
    try:
        return State(text)
    except ValueError:
        names = [one.value for one in State]
        raise ArgumentTypeError(
            f"unknown state {text!r}{nearest(text, names) or '.'} Choose from {', '.join(names)}."
        ) from None


def add_confirmation(parser: ArgumentParser, changes: str) -> None:
    """Add the options of a verb that changes or deletes many jobs."""
    parser.add_argument("--dry-run", action="store_true", help=f"Only count what would be {changes}.")
    parser.add_argument(
        "--no-input", "--yes", action="store_true", dest="no_input", help="Do not ask for confirmation."
    )


def add_ids(parser: ArgumentParser, *, required: bool = True) -> None:
    """Add the IDs of jobs, and the queue that has them."""
    parser.add_argument("ids", metavar="ID", nargs="+" if required else "*", help="IDs of jobs.")
    parser.add_argument(
        "--queue", metavar="NAME", help="Queue of the jobs (default: the one that has the IDs)."
    )


def used_queue(storage: Storage, name: str) -> str:
    """Return the name of a queue that has been used. Raises CommandError."""
    names = storage.queues.names()
    if name not in names:
        raise CommandError(f"no queue {name!r} has been used{nearest(name, names) or '.'}")
    return name


def located(storage: Storage, ids: Sequence[str], queue: str | None) -> dict[str, list[str]]:
    """Return the IDs by queue. Raises CommandError for an unknown job, or one that several queues have."""
    if queue is not None:
        states = storage.reads.states(queue, ids)
        missing = [job_id for job_id, found in zip(ids, states, strict=True) if found is None]
        if missing:
            raise CommandError(f"queue {queue!r} has no job {missing[0]!r}")
        return {queue: list(ids)}
    by_queue: dict[str, list[str]] = {}
    for job_id in ids:
        queues = [name for name, _ in storage.reads.find(job_id)]
        if not queues:
            raise CommandError(f"no queue has a job {job_id!r}; its record may have expired")
        if len(queues) > 1:
            raise CommandError(
                f"job {job_id!r} is in several queues ({', '.join(sorted(queues))}): name one with --queue"
            )
        by_queue.setdefault(queues[0], []).append(job_id)
    return by_queue
