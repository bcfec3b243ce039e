"""The output of `runworkers`: log records, the banner at the start, and the summary at the end."""

import logging
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import getpid

from djqueue._version import __version__
from djqueue.client import hints
from djqueue.conf import get_settings
from djqueue.core.messages import numbered
from djqueue.core.suggest import similar
from djqueue.storage.base import Storage

from .worker import Worker

SHOWN = 20
"""Maximum of handlers listed by name."""
WIDTH = 100
"""Columns of the banner."""
LEVELS = {0: logging.ERROR, 1: logging.INFO}
"""Log levels by Django's --verbosity; from 2 on, DEBUG logs the start and end of each job."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class UtcFormatter(logging.Formatter):
    """Formats records with times in UTC, like the other times that commands write."""

    converter: Callable[[float | None], time.struct_time] = time.gmtime
    default_msec_format = "%s.%03d+00:00"


NO_HANDLERS = (
    "No jobs are registered, so nothing will be claimed: no installed app has a jobs.py with a "
    "@djqueue.job function. Is the app in INSTALLED_APPS?"
)


def banner(worker: Worker, processes: int | None = None) -> str:
    """Return the storage, queues and handlers of the workers, and how to stop them."""
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
    if processes is not None:
        rows["concurrency"] += f" in each of {processes} processes" if processes > 1 else " in one process"
        rows["supervisor"] = f"process {getpid()}"
        del rows["worker"]
    timeout = f"{options.shutdown_timeout / 1_000:g} s"
    ending = (
        f"Press Ctrl-C, or send SIGTERM, to stop: running jobs then have {timeout} to finish. "
        "Repeat to stop at once."
    )
    if options.until_empty:
        ending += " The worker stops when its queues are empty."
    if options.max_jobs is not None:
        ending += f" The worker stops after {numbered(options.max_jobs, 'attempt')}."
    return "\n".join([f"djqueue {__version__}", *map(_row, rows.items()), textwrap.fill(ending, WIDTH)])


def findings(worker: Worker, *, own_process: bool = True) -> list[str]:
    """Return problems of the storage and its servers, and queues that nothing declares, one line each.

    own_process: Whether the process does nothing but run the worker, so that others enqueue its jobs.
    """
    return [
        *(
            f"{finding.text} {finding.hint} ({finding.id})"
            for finding in worker.storage.reads.findings()
            if finding.level != "info"
        ),
        *_unknown_queues(worker),
        *(_apart(worker) if own_process else ()),
    ]


def _apart(worker: Worker) -> Iterator[str]:
    storage = worker.storage
    if storage.capabilities.in_process:
        others = "Jobs of other processes, such as the web server, do not reach this worker"
        yield f"{others}: {to_share(storage)}."


def to_share(storage: Storage) -> str:
    """Return what to do so that processes share their jobs."""
    if get_settings().immediate:
        return "DJQUEUE['IMMEDIATE'] runs each job when it is enqueued; turn it off"
    return f"the jobs of {storage.describe()} are its own; set DJQUEUE['STORAGE'] to another storage"


def summary(worker: Worker) -> str:
    """Return the number of attempts by outcome."""
    counters = worker.counters
    words = [
        f"{counters.completed:,} completed",
        f"{counters.failed:,} failed",
        f"{counters.retried:,} retried",
        f"{counters.cancelled:,} cancelled",
        f"{counters.released:,} released",
    ]
    if counters.lost:
        words.append(f"{counters.lost:,} lost")
    return f"djqueue stopped: {', '.join(words)}."


@contextmanager
def visible_logs(verbosity: int) -> Iterator[None]:
    """Set the level of the logger `djqueue`, and give it a handler on stderr if it has none.

    A level set by the project is kept unless another verbosity than 1 is given.
    """
    logger = logging.getLogger("djqueue")
    before = logger.level
    if before == logging.NOTSET or verbosity != 1:
        logger.setLevel(LEVELS.get(verbosity, logging.DEBUG))
    handler = None
    if not has_enabled_handler(logger):
        handler = logging.StreamHandler()
        handler.setFormatter(UtcFormatter(FORMAT))
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(before)
        if handler is not None:
            logger.removeHandler(handler)
            handler.close()


def has_enabled_handler(logger: logging.Logger) -> bool:
    """Return whether any handler would show a warning of this logger.

    `hasHandlers` is not enough: Django's console handler shows nothing unless DEBUG is on.
    """
    record = logger.makeRecord(logger.name, logging.WARNING, "", 0, "", (), None)
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            if handler.level <= record.levelno and handler.filter(record):
                return True
        at = at.parent if at.propagate else None
    return False


def _row(entry: tuple[str, str]) -> str:
    label, value = entry
    indent = " " * 14
    return textwrap.fill(
        value, WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=indent, break_on_hyphens=False
    )


def _unknown_queues(worker: Worker) -> list[str]:
    """Return a line for each queue that nothing declares or has filled."""
    if worker.options.queues is None:
        return []
    known = hints.declared_queues().union(worker.storage.queues.names())
    return [
        f"Queue {name!r} has no jobs, and no job type, schedule or setting names it."
        + (f" Did you mean {suggestion!r}?" if (suggestion := similar(name, known)) is not None else "")
        for name in worker.options.queues
        if name not in known
    ]
