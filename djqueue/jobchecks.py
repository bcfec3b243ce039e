"""System checks of how jobs run and are kept. `djqueue.checks` lists their ids."""

import os
from collections.abc import Iterable, Iterator
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.core import checks

from .conf import Settings
from .core.errors import ConfigurationError, DjqueueError, OptionError
from .core.executors import INLINE

if TYPE_CHECKING:
    from .client import JobType

SHOWN = 5
"""Number of job types that a message names."""


def databases_of_permissions() -> Iterator[checks.CheckMessage]:
    """Report permissions for databases that do not exist."""
    for name, job_type in _job_types().items():
        try:
            if job_type.permissions is not None:
                job_type.permissions.check_databases(django_settings.DATABASES)
        except OptionError as error:
            yield checks.Error(
                f"Job {name!r}: permissions: {error}",
                hint="Workers with this job do not start. Correct the alias in its Permissions(db=[...]).",
                id="djqueue.E011",
            )


def ignored_limits(settings: Settings) -> Iterator[checks.CheckMessage]:
    """Report limits of job types whose jobs run inline."""
    for name, job_type in _job_types().items():
        if not job_type.limits:
            continue
        queue, executor = _place(job_type, settings)
        if executor == INLINE:
            yield checks.Warning(
                f"Job {name!r}: its limits ({', '.join(job_type.limits)}) have no effect, because jobs in "
                f"the queue {queue!r} run inline.",
                hint=f"Set executor='isolated' on the job, or DJQUEUE['QUEUES'][{queue!r}]['EXECUTOR'].",
                id="djqueue.W017",
            )


def soft_timeouts(settings: Settings) -> Iterator[checks.CheckMessage]:
    """Report the sync functions that run inline with a timeout, in one message."""
    names = []
    for name, job_type in _job_types().items():
        if job_type.batch is not None or iscoroutinefunction(job_type.function):
            continue
        try:
            timeout = job_type.options.job.timeout
        except DjqueueError:
            continue  # E001 or E009 reports it.
        if timeout and _place(job_type, settings)[1] == INLINE:
            names.append(name)
    if names:
        yield checks.Info(
            "The timeout of these jobs can't interrupt them, because they are sync functions that run "
            f"inline: {_listed(names)}. One that ignores current_job().cancelled ends with its worker "
            "process, which the supervisor replaces.",
            hint="Set executor='isolated' on jobs that must end at their timeout.",
            id="djqueue.I003",
        )


def root_with_permissions() -> Iterator[checks.CheckMessage]:
    """Recommend an ordinary user if jobs have permissions."""
    names = [name for name, job_type in _job_types().items() if job_type.permissions is not None]
    if names and hasattr(os, "geteuid") and os.geteuid() == 0:
        yield checks.Warning(
            f"This process runs as root, and these jobs have permissions: {_listed(names)}. Files and "
            "control sockets that only root can open are protected by the sandbox alone.",
            hint="Run workers as an ordinary user, such as with User= in the systemd unit.",
            id="djqueue.W018",
        )


def immediate(settings: Settings) -> Iterator[checks.CheckMessage]:
    """Report that jobs need no worker, which is for development."""
    if settings.immediate:
        yield checks.Warning(
            "DJQUEUE['IMMEDIATE'] is on: jobs run in the process that enqueues them, before the enqueue "
            "returns, and are kept in its memory only.",
            hint="Turn IMMEDIATE off in production, and start manage.py runworkers.",
            id="djqueue.W019",
        )


def place_of_backups(settings: Settings) -> Iterator[checks.CheckMessage]:
    """Report that the backups of `runworkers` cannot be saved anywhere."""
    from .backup.store import BackupStore

    if settings.backup.every is None:
        return
    try:
        BackupStore.configured(settings.backup)
    except ConfigurationError as error:
        yield checks.Warning(
            f"runworkers takes no backups: {error}.",
            hint="See Backups in the docs, or set DJQUEUE['BACKUP'] to None.",
            id="djqueue.W020",
        )


def _job_types() -> "dict[str, JobType[..., Any]]":
    from .client import registry

    return registry.all()


def _place(job_type: "JobType[..., Any]", settings: Settings) -> tuple[str, str]:
    """Return the queue of a job type, and the executor of its jobs there."""
    from .client import envelope

    queue = envelope.queue_of(job_type.declared_queue, settings)
    return queue, job_type.executor or settings.policy(queue).executor or settings.executor


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and {more} more" if more > 0 else "")
