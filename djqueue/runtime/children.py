"""The jobs that a job has waited for, as its handler reads them."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from djqueue.client.info import outcome
from djqueue.core.errors import JobNotFoundError
from djqueue.core.job import JobFailure, JobRecord
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.storage.base import Storage


class Child:
    """One of the jobs in `depends_on`, as it was when it was read."""

    def __init__(self, key: JobKey, record: JobRecord | None) -> None:
        self.queue, self.id = key
        self._record = record

    def __repr__(self) -> str:
        return f"<child {self.id} of queue {self.queue}: {self.state or 'gone'}>"

    @property
    def name(self) -> str:
        """The job's name; empty if it is gone."""
        return self._record.name if self._record is not None else ""

    @property
    def state(self) -> State | None:
        """How it ended; None if it is gone: removed, or over its time."""
        return self._record.state if self._record is not None else None

    @property
    def error(self) -> JobFailure | None:
        """What it raised, if it failed: type, message, traceback."""
        return self._record.error if self._record is not None else None

    @cached_property
    def result(self) -> Any:
        """What it returned.

        Raises JobFailedError or JobCancelledError if it ended otherwise, JobNotFoundError if it, or its
        result, is gone.
        """
        value = outcome(self._record, self.id)
        if self._record is not None and self._record.result is None:
            raise JobNotFoundError(f"the result of job {self.id!r} has expired", job_id=self.id)
        return value


def read(storage: Storage, keys: Sequence[JobKey]) -> list[Child]:
    """These jobs, in this order."""
    found = [(queue, ids, storage.reads.jobs(queue, ids)) for queue, ids in _by_queue(keys)]
    return _in_order(keys, found)


async def aread(storage: Storage, keys: Sequence[JobKey]) -> list[Child]:
    """See `read`."""
    found = [(queue, ids, await storage.reads.ajobs(queue, ids)) for queue, ids in _by_queue(keys)]
    return _in_order(keys, found)


def _by_queue(keys: Iterable[JobKey]) -> Iterable[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for queue, job_id in keys:
        found.setdefault(queue, []).append(job_id)
    return found.items()


def _in_order(
    keys: Sequence[JobKey], found: Iterable[tuple[str, list[str], list[JobRecord | None]]]
) -> list[Child]:
    records = {
        (queue, job_id): record
        for queue, ids, some in found
        for job_id, record in zip(ids, some, strict=True)
    }
    return [Child(key, records[key]) for key in keys]
