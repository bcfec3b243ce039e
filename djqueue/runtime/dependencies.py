"""The jobs that a job depended on, as its handler reads them."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from djqueue.client.info import outcome
from djqueue.core.errors import JobNotFoundError
from djqueue.core.job import JobFailure, JobRecord
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.storage.base import Storage

Records = list[JobRecord | None]


class Child:
    """One of the jobs in `depends_on`, as it was when it was read."""

    def __init__(self, key: JobKey, record: JobRecord | None) -> None:
        self.queue, self.id = key
        self._record = record

    def __repr__(self) -> str:
        return f"<Child {self.id} of queue {self.queue}: {self.state or 'not found'}>"

    @property
    def name(self) -> str:
        """The job's name; empty if the job no longer exists."""
        return self._record.name if self._record is not None else ""

    @property
    def state(self) -> State | None:
        """The job's final state; None if the job was removed or its retention is over."""
        return self._record.state if self._record is not None else None

    @property
    def error(self) -> JobFailure | None:
        """The exception of a failed job: type, message and traceback."""
        return self._record.error if self._record is not None else None

    @cached_property
    def result(self) -> Any:
        """The job's result.

        Raises JobFailedError or JobCancelledError if the job did not complete, JobNotFoundError if the job or
        its result no longer exists.
        """
        value = outcome(self._record, self.id)
        if self._record is not None and self._record.result is None:
            raise JobNotFoundError(f"the result of job {self.id!r} has expired", job_id=self.id)
        return value


def read(storage: Storage, keys: Sequence[JobKey]) -> Records:
    """Return the records of jobs, in the order of their keys; None for a job that no longer exists."""
    pages = [(queue, ids, storage.reads.jobs(queue, ids)) for queue, ids in _by_queue(keys)]
    return _in_order(keys, pages)


async def aread(storage: Storage, keys: Sequence[JobKey]) -> Records:
    """Async version of `read`."""
    pages = [(queue, ids, await storage.reads.ajobs(queue, ids)) for queue, ids in _by_queue(keys)]
    return _in_order(keys, pages)


def children(keys: Sequence[JobKey], records: Records) -> list[Child]:
    """Return the jobs of these keys, with their records."""
    return [Child(key, record) for key, record in zip(keys, records, strict=True)]


def _by_queue(keys: Iterable[JobKey]) -> Iterable[tuple[str, list[str]]]:
    ids: dict[str, list[str]] = {}
    for queue, job_id in keys:
        ids.setdefault(queue, []).append(job_id)
    return ids.items()


def _in_order(keys: Sequence[JobKey], pages: Iterable[tuple[str, list[str], Records]]) -> Records:
    records = {
        (queue, job_id): record
        for queue, ids, page in pages
        for job_id, record in zip(ids, page, strict=True)
    }
    return [records[key] for key in keys]
