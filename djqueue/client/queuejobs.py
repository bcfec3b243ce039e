"""The operations of `Queue` on single jobs: read, cancel, promote, move, update, retry, remove."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError
from djqueue.core.job import CancelResult
from djqueue.core.options import PARSERS, check_text
from djqueue.core.states import PENDING, State
from djqueue.core.units import instant, milliseconds

from . import envelope
from .chunking import chunks
from .entries import check_id, check_ids
from .info import JobInfo, JobStatus, outcome
from .limiters import UNCHANGED
from .queuehandle import QueueHandle


class JobActions(QueueHandle):
    """Operations on jobs of a queue by their ids."""

    def get_job(self, id: str) -> JobInfo | None:
        """Return the job as it is now; None if no job has this id."""
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        return None if record is None else JobInfo(record)

    async def aget_job(self, id: str) -> JobInfo | None:
        """Async version of `get_job`."""
        return await self._acall(self.get_job, id)

    def get_status(self, id: str) -> JobStatus | None:
        """Return the job's status; None if no job has this id."""
        info = self.get_job(id)
        return None if info is None else info.status()

    async def aget_status(self, id: str) -> JobStatus | None:
        """Async version of `get_status`."""
        return await self._acall(self.get_status, id)

    def get_states(self, ids: Iterable[str]) -> dict[str, State | None]:
        """Return the states of many jobs, by id, in one call."""
        wanted = check_ids(ids)
        return dict(zip(wanted, self.storage.reads.states(self.name, wanted), strict=True))

    async def aget_states(self, ids: Iterable[str]) -> dict[str, State | None]:
        """Async version of `get_states`."""
        return await self._acall(self.get_states, ids)

    def get_result(self, id: str) -> Any:
        """Return the job's result; None if it has not ended.

        Raises JobNotFoundError, JobFailedError, JobCancelledError.
        """
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        if record is not None and record.state in (*PENDING, State.ACTIVE):
            return None
        return outcome(record, id)

    async def aget_result(self, id: str) -> Any:
        """Async version of `get_result`."""
        return await self._acall(self.get_result, id)

    def cancel(self, id: str) -> CancelResult:
        """Cancel a job: a pending job never starts, and an active job is asked to stop."""
        return self.storage.jobs.cancel(self.name, [check_id(id)])[0]

    async def acancel(self, id: str) -> CancelResult:
        """Async version of `cancel`."""
        return await self._acall(self.cancel, id)

    def promote(self, id: str) -> bool:
        """Run a delayed job now; return False if it is not delayed."""
        return self.storage.jobs.promote(self.name, [check_id(id)])[0]

    async def apromote(self, id: str) -> bool:
        """Async version of `promote`."""
        return await self._acall(self.promote, id)

    def reschedule(
        self, id: str, *, delay: float | timedelta | None = None, run_at: datetime | None = None
    ) -> bool:
        """Change the start time of a job; return False if it has started or does not exist."""
        if (delay is None) == (run_at is None):
            raise OptionError("reschedule: expected either delay or run_at")
        if run_at is not None:
            at = instant("run_at", run_at)
        else:
            at = SYSTEM_CLOCK.now() + milliseconds("delay", delay)
        return self.storage.jobs.reschedule(self.name, [check_id(id)], at)[0]

    async def areschedule(
        self, id: str, *, delay: float | timedelta | None = None, run_at: datetime | None = None
    ) -> bool:
        """Async version of `reschedule`."""
        return await self._acall(self.reschedule, id, delay=delay, run_at=run_at)

    def move(self, ids: str | Iterable[str], to: str) -> dict[str, str]:
        """Move pending jobs and dead letters, with all their data, to another queue.

        Returns the outcome of each id: moved | not_found | active | ended | duplicate (the other queue has a
        job with this id) | unique_key_taken (a live job there has its unique key) | group_needed (the other
        queue requires a group, and the job has none).

        Raises OptionError, UnknownQueueError.
        """
        self._check_target(to)
        wanted = dict.fromkeys(check_ids(ids))
        answers: dict[str, str] = {}
        for some in chunks(check_text("ids", id) for id in wanted):
            answers.update(zip(some, self.storage.jobs.move(self.name, some, to), strict=True))
        return answers

    async def amove(self, ids: str | Iterable[str], to: str) -> dict[str, str]:
        """Async version of `move`."""
        return await self._acall(self.move, ids, to)

    def update(self, id: str, *, payload: Any = UNCHANGED, priority: int | None = None) -> bool:
        """Replace the payload or the priority, or both, of a job that has not started.

        Returns False if the job is active, has ended or does not exist. A waiting job is put behind the jobs
        that have its new priority. The payload of a `@job` function is `{"args": [...], "kwargs": {...}}`.

        Raises OptionError, SerializationError.
        """
        checked = self._checked_priority(payload, priority)
        if payload is UNCHANGED:
            return self.storage.jobs.update(self.name, [check_id(id)], checked)[0]
        # The payload keeps its content type, which the worker expects.
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        if record is None:
            return False
        encode = envelope.encoder(record.options.content_type, get_settings())
        encoded = encode(payload)
        envelope.check_size(record.options, record.name, [encoded])
        return self.storage.jobs.update(self.name, [id], checked, encoded)[0]

    async def aupdate(self, id: str, *, payload: Any = UNCHANGED, priority: int | None = None) -> bool:
        """Async version of `update`."""
        return await self._acall(self.update, id, payload=payload, priority=priority)

    def retry(self, id: str) -> bool:
        """Retry a dead letter; return False if it is none, its key is taken or a dependency is gone.

        A job that failed because a dependency did is blocked again until its dependencies complete.
        """
        return self.storage.jobs.retry(self.name, [check_id(id)])[0] in ("retried", "blocked_again")

    async def aretry(self, id: str) -> bool:
        """Async version of `retry`."""
        return await self._acall(self.retry, id)

    def remove(self, id: str) -> bool:
        """Remove a job with all its data; return False if it is active or does not exist."""
        return self.storage.jobs.remove(self.name, [check_id(id)])[0]

    async def aremove(self, id: str) -> bool:
        """Async version of `remove`."""
        return await self._acall(self.remove, id)

    @staticmethod
    def _checked_priority(payload: Any, priority: int | None) -> int | None:
        if priority is not None:
            return int(PARSERS["priority"]("priority", priority))
        if payload is UNCHANGED:
            raise OptionError("update: expected payload, priority or both")
        return None
