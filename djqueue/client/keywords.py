"""Options as callers write them, for type checkers and editors.

A function with such keyword arguments is annotated `**options: Unpack[QueueKeywords]`. The values are checked
at runtime by `djqueue.core.options` and `djqueue.schedules`.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from djqueue.core.backoff import Backoff, BackoffFunction
from djqueue.core.executors import ExecutorName
from djqueue.core.options import JobKey, OnDependencyFailure, OnDuplicate
from djqueue.core.permissions import Permissions
from djqueue.schedules import Missed, OnBlackout, Overlap

from .streaming import OnRestart

if TYPE_CHECKING:
    from django.db.models import Model

Duration = float | timedelta
"""Seconds, or a timedelta."""
Texts = list[str] | tuple[str, ...] | AbstractSet[str]
"""Several strings, which a single string is not."""
BackoffRule = Duration | Literal["fixed", "linear", "exponential"] | dict[str, Any] | Backoff
Redact = Callable[[Any, str], Any]
"""Called with a value and its part, `payload` or `result`; returns what the dashboard shows."""


class EnqueuedJob(Protocol):
    """An enqueued job, such as a result of `enqueue`."""

    @property
    def id(self) -> str:
        """The job's id."""

    @property
    def queue(self) -> str:
        """Name of its queue."""


class CommonKeywords(TypedDict, total=False):
    """Options of jobs that Django's tasks have under the same names; `JobOptions` describes them."""

    max_attempts: int
    max_stalls: int
    timeout: Duration | None
    ttl: Duration | None
    unique_key: str | None
    unique_ttl: Duration | None
    on_duplicate: OnDuplicate
    concurrency_key: str | None
    weight: int
    result_ttl: Duration | None
    retention: Duration | None
    tags: Texts
    subject: "Model | str | None"
    headers: Mapping[str, Any]


class EnqueueKeywords(CommonKeywords, total=False):
    """Options of an enqueue, but for `queue` and `backoff`."""

    priority: int
    delay: Duration | None
    run_at: datetime | None
    depends_on: EnqueuedJob | Iterable[EnqueuedJob | JobKey]
    on_dependency_failure: OnDependencyFailure
    lifo: bool
    durable: bool | None
    content_type: str
    enqueue_on_commit: bool | str


class QueueKeywords(EnqueueKeywords, total=False):
    """Options of `Queue` and of its `enqueue`."""

    backoff: BackoffRule


class UsingKeywords(QueueKeywords, total=False):
    """Options of `JobType.using`."""

    queue: str
    id: str | None
    check_arguments: bool
    wait: Duration
    on_restart: OnRestart


class HandlerKeywords(TypedDict, total=False):
    """Options that only the decorators have, because they belong to the function."""

    backoff: BackoffRule | BackoffFunction
    executor: ExecutorName
    limits: Mapping[str, Any]
    permissions: Permissions | Mapping[str, Any] | None
    allow_unenforced: Texts


class ScheduleKeywords(TypedDict, total=False):
    """Options of a schedule. See `djqueue.schedules.Schedule`."""

    cron: str | None
    every: Duration | None
    timezone: str
    start_at: datetime | None
    end_at: datetime | None
    max_executions: int | None
    jitter: Duration
    overlap: Overlap
    missed: Missed
    missed_window: Duration
    blackouts: Texts
    on_blackout: OnBlackout


class JobKeywords(EnqueueKeywords, HandlerKeywords, ScheduleKeywords, total=False):
    """Options of `@job`, but for `batch`."""

    queue: str
    name: str | None
    check_arguments: bool
    redact: Redact | None
