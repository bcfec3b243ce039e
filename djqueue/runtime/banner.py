"""What `runworkers` says when it starts and when it ends."""

import textwrap
from os import getpid

from djqueue._version import __version__
from djqueue.client import hints
from djqueue.core.suggest import similar

from .worker import Worker

SHOWN = 20
"""Handlers that are named."""
WIDTH = 100

NO_HANDLERS = (
    "No jobs are registered, so nothing will be claimed: no installed app has a jobs.py with a function "
    "under @djqueue.job. Is the app in INSTALLED_APPS?"
)


def banner(worker: Worker) -> str:
    """Which storage, queues and handlers a worker serves, and how to stop it."""
    options = worker.options
    names = sorted(worker.handlers)
    listed = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        listed += f" and {len(names) - SHOWN} more"
    rows = {
        "storage": worker.storage.describe(),
        "queues": "all" if options.queues is None else ", ".join(options.queues),
        "handlers": f"{len(names)}: {listed}" if names else "none",
        "concurrency": str(options.concurrency),
        "worker": f"{worker.id}, process {getpid()}",
    }
    ending = (
        f"Ctrl-C or SIGTERM stops it: running jobs have {options.shutdown_timeout / 1_000:g} s to end. "
        "A second one does not wait for them."
    )
    if options.until_empty:
        ending += " It ends by itself when its queues are empty."
    if options.max_jobs is not None:
        ending += f" It ends by itself after {options.max_jobs:,} runs."
    return "\n".join([f"djqueue {__version__}", *map(_row, rows.items()), textwrap.fill(ending, WIDTH)])


def findings(worker: Worker) -> list[str]:
    """What looks wrong: with the storage's servers, and with the queues to be served. A line each."""
    found = worker.storage.reads.findings()
    return [
        *(f"{each.text} {each.hint} ({each.id})" for each in found if each.level != "info"),
        *_unknown_queues(worker),
    ]


def _unknown_queues(worker: Worker) -> list[str]:
    """Queues to be served that nothing names, but that resemble one that is there."""
    if worker.options.queues is None:
        return []
    known = hints.declared_queues().union(worker.storage.queues.names())
    return [
        f"Queue {name!r} is not declared, and has no jobs. Did you mean {meant!r}?"
        for name in worker.options.queues
        if name not in known and (meant := similar(name, known)) is not None
    ]


def farewell(worker: Worker) -> str:
    """What came of it."""
    counters = worker.counters
    words = [
        f"{counters.completed:,} completed",
        f"{counters.failed:,} failed",
        f"{counters.retried:,} retried",
        f"{counters.cancelled:,} cancelled",
        f"{counters.released:,} given back",
    ]
    if counters.lost:
        words.append(f"{counters.lost:,} lost")
    return f"djqueue has stopped: {', '.join(words)}."


def _row(entry: tuple[str, str]) -> str:
    label, value = entry
    indent = " " * 14
    return textwrap.fill(
        value, WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=indent, break_on_hyphens=False
    )
