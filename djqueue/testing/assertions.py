"""Assertions for tests about the jobs that the tested code has enqueued.

    from djqueue.testing.assertions import assert_enqueued, assert_not_enqueued

    assert_enqueued(send_receipt, args=(42,), queue="emails", count=1)
    assert_not_enqueued(send_reminder)

A job counts as enqueued until it starts. Both look into the settings' storage; the fixture
`djqueue_memory` gives each test an empty one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from djqueue.client import JobType, get_storage
from djqueue.client.info import JobInfo
from djqueue.core.job import is_call
from djqueue.core.states import PENDING

PAGE = 1_000


class TaskLike(Protocol):
    """A task of `django.tasks` or of its backport, neither of which is imported here."""

    @property
    def module_path(self) -> str:
        """The name of the task's jobs."""


Job = JobType[..., Any] | TaskLike | str
"""A function under `@job`, a task of `django.tasks`, or a job's name."""


def assert_enqueued(
    job: Job,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    count: int | None = None,
    queue: str | None = None,
) -> list[JobInfo]:
    """Assert that such jobs wait, are delayed or blocked; returns them.

    args, kwargs: what the jobs were enqueued with; None is anything.
    count: how many there have to be; None is at least one.
    queue: where; None is anywhere.
    """
    __tracebackhide__ = True
    found = [info for info in _pending(queue) if _matches(info, job, args, kwargs)]
    if len(found) == count if count is not None else found:
        return found
    wanted = _call(_name(job), args, kwargs)
    raise AssertionError(
        f"enqueued jobs matching {wanted}{_in(queue)}: expected {'at least one' if count is None else count}"
        f", found {len(found)}; {_listing(list(_pending(None)))}"
    )


def assert_not_enqueued(
    job: Job,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    queue: str | None = None,
) -> None:
    """Assert that no such job waits, is delayed or blocked: see `assert_enqueued`."""
    __tracebackhide__ = True
    assert_enqueued(job, args=args, kwargs=kwargs, queue=queue, count=0)


class JobAssertions:
    """The same for unittest: mix it into a TestCase."""

    def assertEnqueued(self, job: Job, **expected: Any) -> list[JobInfo]:  # noqa: N802
        """Async version of `assert_enqueued`."""
        __tracebackhide__ = True
        return assert_enqueued(job, **expected)

    def assertNotEnqueued(self, job: Job, **expected: Any) -> None:  # noqa: N802
        """Async version of `assert_not_enqueued`."""
        __tracebackhide__ = True
        assert_not_enqueued(job, **expected)


def _pending(queue: str | None) -> Iterator[JobInfo]:
    storage = get_storage()
    for name in storage.queues.names() if queue is None else [queue]:
        after = None
        while page := storage.reads.page(name, None, PAGE, after):
            yield from (JobInfo(record) for record in page if record.state in PENDING)
            after = page[-1].id


def _matches(info: JobInfo, job: Job, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> bool:
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise TypeError(f"args: expected a list or tuple of the positional arguments, got {args!r}")
    if info.name != _name(job):
        return False
    given_args, given_kwargs = _arguments(info)
    if args is not None and list(args) != given_args:
        return False
    return kwargs is None or dict(kwargs) == given_kwargs


def _arguments(info: JobInfo) -> tuple[list[Any] | None, dict[str, Any] | None]:
    """Return the arguments of a job from a job type; a job from a `Queue` has a payload of any shape."""
    payload = info.payload
    if is_call(payload):
        return list(payload["args"]), payload["kwargs"]
    return None, None


def _name(job: Job) -> str:
    if isinstance(job, str):
        return job
    return job.name if isinstance(job, JobType) else job.module_path


def _listing(pending: list[JobInfo]) -> str:
    if not pending:
        return "no jobs are enqueued"
    texts = [f"{_call(info.name, *_arguments(info))} in {info.queue!r}" for info in pending[:10]]
    more = f" and {len(pending) - 10} more" if len(pending) > 10 else ""
    return f"enqueued jobs: {', '.join(texts)}{more}"


def _call(name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str:
    if args is None and kwargs is None:
        return name
    words = ["…"] if args is None else [repr(arg) for arg in args]
    words += ["…"] if kwargs is None else [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{name}({', '.join(words)})"


def _in(queue: str | None) -> str:
    return "" if queue is None else f" in queue {queue!r}"
