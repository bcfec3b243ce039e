"""The flags of `manage.py runworkers`: their values, which of them exclude each other, and hints."""

import math
from argparse import ArgumentTypeError
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError

from djqueue.core.errors import OptionError
from djqueue.core.units import parse_size
from djqueue.management.processes import process_count
from djqueue.runtime.exits import MISUSED

NEED_SUPERVISOR = ("processes", "max_jobs_per_process", "max_memory_per_process", "health_file")
"""Options that only a supervisor can follow."""

SMALLEST = 2**24
"""Bytes below which no worker starts."""


def supervisor_flags(options: dict[str, Any]) -> Iterator[str]:
    """Yield the given flags that require the supervisor."""
    for name in NEED_SUPERVISOR:
        if options[name] is not None:
            yield _flag(name)


def check_combination(options: dict[str, Any]) -> None:
    """Raise CommandError if two options exclude each other."""
    if options["single_process"]:
        for flag in supervisor_flags(options):
            raise _excluded(flag, "--single-process")
    if options["max_jobs"] is None:
        return
    if (options["processes"] or 1) > 1:
        raise _excluded("--max-jobs", "several processes; use --max-jobs-per-process")
    for name in ("max_jobs_per_process", "max_memory_per_process"):
        if options[name] is not None:
            raise _excluded("--max-jobs", _flag(name))


def _excluded(flag: str, other: str) -> CommandError:
    return CommandError(f"{flag} can't be combined with {other}", returncode=MISUSED)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Values.


def queue_names(text: str) -> list[str]:
    """Parse a list of names such as `a,b`."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ArgumentTypeError(f"{text!r} contains an empty name; expected NAME,NAME")
    return names


def count(text: str) -> int:
    """Parse a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def processes(text: str) -> int:
    """Parse a number of processes, or `auto`."""
    try:
        return process_count(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a positive whole number nor auto") from None


def size(text: str) -> int:
    """Parse a size in bytes, such as `512MB`."""
    try:
        return parse_size("size", text)
    except OptionError as error:
        raise ArgumentTypeError(str(error)) from error


def memory(text: str) -> int:
    """Parse a limit of a worker's memory, such as `512MB`."""
    limit = size(text)
    if limit < SMALLEST:
        raise ArgumentTypeError(
            f"{text!r} is {limit:,} bytes, less than a worker needs to start: did you forget the unit? Give "
            "a size such as 512MB"
        )
    return limit


def seconds(text: str) -> float:
    """Parse a number of seconds that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds of 0 or more")
    return value


# Hints.

FLAGS = {
    "--autoreload": "Use --reload.",
    "--beat": "Every runworkers process fires schedules.",
    "--burst": "Use --until-empty.",
    "--log-level": "Use --verbosity 2.",
    "--loglevel": "Use --verbosity 2.",
    "--name": "Use --worker-id.",
    "--once": "Use --until-empty, or --max-jobs 1.",
    "--pool": "Async functions run on the event loop, others on threads. Use --concurrency.",
    "--threads": "Use --concurrency.",
    "--watch": "Use --reload.",
    "--workers": "Use --processes for processes, --concurrency for jobs at once in each.",
    "-A": "manage.py selects the project.",
    "-B": "Every runworkers process fires schedules.",
    "-P": "Async functions run on the event loop, others on threads. Use --concurrency.",
    "-Q": "Use --queues.",
    "-b": "Use --until-empty.",
    "-c": "Use --concurrency.",
    "-l": "Use --verbosity 2.",
    "-n": "Use --worker-id.",
    "-p": "Use --processes.",
    "-q": "Use --queues.",
    "-t": "Use --concurrency.",
    "-w": "Use --processes for processes, --concurrency for jobs at once in each.",
}
"""Flags of the workers of Celery, RQ, Huey, Dramatiq and Django Q, with their equivalents here."""
UNRECOGNIZED = "unrecognized arguments: "


def flag_hint(message: str) -> str:
    """Return what to add to the parser's error about an unknown flag."""
    if not message.startswith(UNRECOGNIZED):
        return ""
    flag = message.removeprefix(UNRECOGNIZED).split()[0].partition("=")[0]
    if not flag.startswith("-"):
        return f". Use --queues {flag} if that is a queue."
    hint = FLAGS.get(flag)
    return f". {hint}" if hint else ""
