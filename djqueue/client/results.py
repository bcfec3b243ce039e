"""Implement `EnqueueResult.wait`, `refresh` and `job`."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async

from djqueue.core.errors import JobNotFoundError
from djqueue.core.job import EnqueueResult, JobRecord, ResultReader, install_result_reader
from djqueue.core.states import State
from djqueue.storage.base import Storage

from . import waiting
from .info import JobInfo
from .storages import get_storage
from .transactions import refuse_uncommitted


class StoredResult(EnqueueResult):
    """A result of a storage other than the configured one."""

    storage: Storage

    def __reduce__(self) -> Any:
        return EnqueueResult, tuple(self)


class DeferredResult(StoredResult):
    """A result of a job that is enqueued when a transaction commits: see `client.oncommit`."""

    alias: str
    """The database of the transaction."""
    answer: EnqueueResult | None
    """The storage's answer; None until the job was enqueued."""

    @classmethod
    def of(cls, job_id: str, queue: str, storage: Storage, alias: str) -> "DeferredResult":
        """Return the result of a job that is not enqueued yet."""
        result = cls(job_id, "deferred", queue)
        result.storage, result.alias, result.answer = storage, alias, None
        return result

    @property
    def is_uncommitted(self) -> bool:
        """Whether the job waits for a transaction of the caller that is still open."""
        from djqueue.storage.commits import has_uncommitted

        return self.answer is None and has_uncommitted(self.alias, self.queue, self.id)


def enqueued(result: EnqueueResult) -> EnqueueResult:
    """Return the storage's answer for a deferred result, and other results as they are.

    Raises:
        WaitInTransactionError: The transaction is still open.
        JobNotFoundError: The job was not enqueued.
    """
    if not isinstance(result, DeferredResult):
        return result
    if result.answer is None:
        refuse_uncommitted(result.queue, result.id, result.alias if result.is_uncommitted else None)
        raise JobNotFoundError(
            f"job {result.id!r} was to be enqueued in queue {result.queue!r} at the commit of a transaction "
            f"of database {result.alias!r}, and was not: the transaction was rolled back or is open in "
            "another thread, or enqueueing failed after the commit",
            job_id=result.id,
        )
    return result.answer


async def aenqueued(result: EnqueueResult) -> EnqueueResult:
    """Async version of `enqueued`."""
    return await sync_to_async(enqueued)(result) if isinstance(result, DeferredResult) else result


def _is_uncommitted(result: EnqueueResult) -> bool:
    return isinstance(result, DeferredResult) and result.is_uncommitted


async def _ais_uncommitted(result: EnqueueResult) -> bool:
    return isinstance(result, DeferredResult) and await sync_to_async(_is_uncommitted)(result)


def of_storage(results: Sequence[EnqueueResult], storage: Storage | None) -> list[EnqueueResult]:
    """Return results that read from this storage later; with None, from the configured one."""
    if storage is None:
        return list(results)
    return [result if isinstance(result, DeferredResult) else _stored(result, storage) for result in results]


class StorageResultReader(ResultReader):
    """Reads results from the storage."""

    def wait(self, result: EnqueueResult, timeout: float | timedelta) -> Any:
        result = enqueued(result)
        return waiting.wait_for(_storage(result), result, timeout)

    async def await_(self, result: EnqueueResult, timeout: float | timedelta) -> Any:
        result = await aenqueued(result)
        return await waiting.await_for(_storage(result), result, timeout)

    def refresh(self, result: EnqueueResult) -> EnqueueResult:
        if _is_uncommitted(result):
            return result
        result = enqueued(result)
        storage = _storage(result)
        record = storage.reads.jobs(result.queue, [result.id])[0]
        if (
            record is None
            and storage.capabilities.transactions.uncommitted_in(result.queue, result.id) is not None
        ):
            return result
        return _refreshed(result, record)

    async def arefresh(self, result: EnqueueResult) -> EnqueueResult:
        if await _ais_uncommitted(result):
            return result
        result = await aenqueued(result)
        storage = _storage(result)
        record = (await storage.reads.ajobs(result.queue, [result.id]))[0]
        if (
            record is None
            and await storage.capabilities.transactions.auncommitted_in(result.queue, result.id) is not None
        ):
            return result
        return _refreshed(result, record)

    def job(self, result: EnqueueResult) -> JobInfo | None:
        result = _answer(result)
        return _info(_storage(result).reads.jobs(result.queue, [result.id])[0])

    async def ajob(self, result: EnqueueResult) -> JobInfo | None:
        result = _answer(result)
        return _info((await _storage(result).reads.ajobs(result.queue, [result.id]))[0])


def _storage(result: EnqueueResult) -> Storage:
    return result.storage if isinstance(result, StoredResult) else get_storage()


def _answer(result: EnqueueResult) -> EnqueueResult:
    return result.answer or result if isinstance(result, DeferredResult) else result


def _stored(result: EnqueueResult, storage: Storage) -> StoredResult:
    stored = StoredResult(*result)
    stored.storage = storage
    return stored


def _info(record: JobRecord | None) -> JobInfo | None:
    return None if record is None else JobInfo(record)


def _refreshed(result: EnqueueResult, record: JobRecord | None) -> EnqueueResult:
    if record is None:
        raise JobNotFoundError(f"queue {result.queue!r} has no job {result.id!r}", job_id=result.id)
    completed = record.state is State.COMPLETED
    fresh = result._replace(
        status="completed" if completed else result.status,
        existing_state=record.state,
        result=JobInfo(record).result if completed else None,
    )
    return _stored(fresh, result.storage) if isinstance(result, StoredResult) else fresh


install_result_reader(StorageResultReader())
