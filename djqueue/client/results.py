"""Implement `EnqueueResult.wait`, `refresh` and `job`."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from djqueue.core.errors import JobNotFoundError
from djqueue.core.followup import ResultReader, install
from djqueue.core.job import EnqueueResult, JobRecord
from djqueue.core.states import State
from djqueue.storage.base import Storage

from . import waiting
from .info import JobInfo
from .storages import get_storage


class StoredResult(EnqueueResult):
    """A result of a storage other than the configured one."""

    storage: Storage

    def __reduce__(self) -> Any:
        return EnqueueResult, tuple(self)


def of_storage(results: Sequence[EnqueueResult], storage: Storage | None) -> list[EnqueueResult]:
    """Return results that read from this storage later; with None, from the configured one."""
    if storage is None:
        return list(results)
    return [_stored(result, storage) for result in results]


class StorageResultReader(ResultReader):
    """Reads results from the storage."""

    def wait(self, result: EnqueueResult, timeout: float | timedelta) -> Any:
        return waiting.wait_for(_storage(result), result, timeout)

    async def await_(self, result: EnqueueResult, timeout: float | timedelta) -> Any:
        return await waiting.await_for(_storage(result), result, timeout)

    def refresh(self, result: EnqueueResult) -> EnqueueResult:
        storage = _storage(result)
        record = storage.reads.jobs(result.queue, [result.id])[0]
        if (
            record is None
            and storage.capabilities.transactions.uncommitted_in(result.queue, result.id) is not None
        ):
            return result
        return _refreshed(result, record)

    async def arefresh(self, result: EnqueueResult) -> EnqueueResult:
        storage = _storage(result)
        record = (await storage.reads.ajobs(result.queue, [result.id]))[0]
        if (
            record is None
            and await storage.capabilities.transactions.auncommitted_in(result.queue, result.id) is not None
        ):
            return result
        return _refreshed(result, record)

    def job(self, result: EnqueueResult) -> JobInfo | None:
        return _info(_storage(result).reads.jobs(result.queue, [result.id])[0])

    async def ajob(self, result: EnqueueResult) -> JobInfo | None:
        return _info((await _storage(result).reads.ajobs(result.queue, [result.id]))[0])


def _storage(result: EnqueueResult) -> Storage:
    return result.storage if isinstance(result, StoredResult) else get_storage()


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


install(StorageResultReader())
