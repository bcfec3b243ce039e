"""Wait for results of jobs, and read them: `enqueue_and_wait`, and what `EnqueueResult` calls.

A caller subscribes before the enqueue, so that no event is missed. The error for one that waited too long
has the job's state, the reason why it has not finished, and the remedy.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from threading import Event as ThreadEvent
from typing import Any

from djqueue.core import explain
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import within
from djqueue.core.errors import DjqueueError, JobNotFoundError, ResultTimeoutError, StorageUnavailableError
from djqueue.core.explain import MAX_BEFORE, Explanation
from djqueue.core.job import Batch, EnqueueResult, Event, JobRecord, ResultReader, install_result_reader
from djqueue.core.logs import Log
from djqueue.core.options import MSGPACK
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.core.units import milliseconds, to_datetime
from djqueue.storage.base import EventHandler, Storage, Unsubscribe

from .envelope import with_ids
from .info import JobInfo, outcome
from .sending import aenqueue, enqueue
from .steps import LoopSignal, Signal, Step, Steps, apart, arun, in_thread, run
from .storages import get_storage
from .transactions import (
    DeferredResult,
    StoredResult,
    When,
    acheck_waiting,
    aenqueued,
    ais_uncommitted,
    check_waiting,
    check_worker,
    enqueued,
    is_uncommitted,
    refuse_uncommitted,
    stored_result,
)

logger = Log("djqueue.client")

DEFAULT_WAIT = 30.0
"""Default time limit of `enqueue_and_wait`, in seconds."""
CHECK_EVERY = 2.0
"""Seconds between reads of the job, in case an event was lost with a connection."""
RETRY_INTERVAL = 0.25
"""Seconds between reads while the storage is unavailable."""
SUBSCRIPTION_TIMEOUT = 1.0
"""Seconds to wait for a subscription before the job is enqueued without one."""
UNSUBSCRIBED = 0.5
"""Seconds between reads of a job whose events could not be subscribed to."""
LAST_LOOK = 0.25
"""Seconds that the last read of the job may take after the deadline."""
ENDINGS = frozenset({"completed", "failed", "cancelled", "removed"})
EXPLAIN_TIMEOUT = 0.25
"""Maximum seconds of the search for why a job has not finished."""
NO_ANSWER = "The storage did not return the job's state."


def enqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta, on_commit: When = False) -> Any:
    """Enqueue one job, wait for it, and return its result. A duplicate waits for the existing job.

    Raises:
        JobFailedError, MaxRetriesError, JobCancelledError: The job ended without a result.
        ResultTimeoutError: The job did not end within `wait` seconds; it continues.
        WaitInTransactionError: The job would start only after the caller's transaction has committed.
    """
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return run(_enqueue_and_wait(storage, batch, wait, on_commit, deadline, ThreadEvent()))


async def aenqueue_and_wait(
    storage: Storage, batch: Batch, wait: float | timedelta, on_commit: When = False
) -> Any:
    """Async version of `enqueue_and_wait`."""
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return await arun(_enqueue_and_wait(storage, batch, wait, on_commit, deadline, LoopSignal()))


def wait_for(storage: Storage, result: EnqueueResult, wait: float | timedelta) -> Any:
    """Wait for the end of an enqueued job, and return its result.

    Raises the errors of `enqueue_and_wait`, and JobNotFoundError.
    """
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return run(_wait_for(storage, result, wait, deadline, ThreadEvent()))


async def await_for(storage: Storage, result: EnqueueResult, wait: float | timedelta) -> Any:
    """Async version of `wait_for`."""
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return await arun(_wait_for(storage, result, wait, deadline, LoopSignal()))


def _enqueue_and_wait(
    storage: Storage,
    batch: Batch,
    wait: float | timedelta,
    on_commit: When,
    deadline: int,
    signal: Signal,
) -> Steps[Any]:
    batch = with_ids(batch)
    assert batch.ids is not None
    yield Step(check_waiting, acheck_waiting, (storage, batch, on_commit))
    handler = _on_ending(signal.set)
    # A thread of `acall` is not the one that enqueues.
    together = partial(_subscribe, storage, storage.subscribe_new)
    alone = in_thread(storage, partial(_subscribe, storage, storage.events.subscribe))
    unsubscribe = yield Step(together, alone.acall, (batch.queue, handler, batch.ids[0]))
    try:
        [result] = yield Step(enqueue, aenqueue, (storage, batch))
        if result.id != batch.ids[0]:
            if unsubscribe is not None:
                unsubscribe()
            subscribe = storage.events.subscribe
            unsubscribe = yield in_thread(
                storage, _subscribe, storage, subscribe, batch.queue, handler, result.id
            )
        interval = UNSUBSCRIBED if unsubscribe is None else CHECK_EVERY
        if result.status == "queued":
            yield _wait(signal, interval, deadline)
        return (yield from _watch(storage, result, wait, deadline, signal, interval))
    finally:
        if unsubscribe is not None:
            unsubscribe()


def _wait_for(
    storage: Storage, result: EnqueueResult, wait: float | timedelta, deadline: int, signal: Signal
) -> Steps[Any]:
    queue, job_id = result.queue, result.id
    transactions = storage.capabilities.transactions
    alias = yield Step(transactions.uncommitted_in, transactions.auncommitted_in, (queue, job_id))
    refuse_uncommitted(queue, job_id, alias, can_leave=transactions.can_leave)
    unsubscribe = yield in_thread(storage, storage.events.subscribe, queue, _on_ending(signal.set), job_id)
    try:
        return (yield from _watch(storage, result, wait, deadline, signal, CHECK_EVERY))
    finally:
        unsubscribe()


def _watch(
    storage: Storage,
    result: EnqueueResult,
    wait: float | timedelta,
    deadline: int,
    signal: Signal,
    interval: float,
) -> Steps[Any]:
    """Read the job now, after each signal, and every `interval` seconds, until it has ended."""
    while True:
        signal.clear()
        outage, pause = None, interval
        try:
            [record] = yield Step(storage.reads.jobs, storage.reads.ajobs, (result.queue, [result.id]))
        except StorageUnavailableError as error:
            outage, pause = error, RETRY_INTERVAL
        else:
            if has_ended(record):
                return (yield read_outcome(record, result.id))
        if not _left(deadline):
            raise (yield from timed_out(storage, result.queue, result.id, wait, outage)) from outage
        check_worker(storage, result.queue)
        yield _wait(signal, pause, deadline)


def _wait(signal: Signal, seconds: float, deadline: int) -> Step:
    return Step(signal.wait, signal.wait, (min(seconds, _left(deadline)),))


def _subscribe(
    storage: Storage,
    subscribe: Callable[[str, EventHandler, str], Unsubscribe],
    queue: str,
    handler: EventHandler,
    job_id: str,
) -> Unsubscribe | None:
    """Subscribe to a job's events; None if the storage does not confirm it in time.

    A slow storage can still run the job, and one that is away fails the enqueue with its own error.
    """
    if storage.outage is not None:
        return None
    try:
        with within(SUBSCRIPTION_TIMEOUT):
            return subscribe(queue, handler, job_id)
    except StorageUnavailableError as error:
        logger.debug("Polling job %s, because its events could not be subscribed to: %s", job_id, error)
        return None


def _on_ending(done: Callable[[], None]) -> Callable[[Event], None]:
    def handler(event: Event) -> None:
        if event.event in ENDINGS:
            done()

    return handler


def read_outcome(record: JobRecord | None, job_id: str) -> Step:
    """Return the step that returns the result of an ended job, or raises the error of its other outcomes."""
    content_type = MSGPACK if record is None else record.options.content_type
    return Step(outcome, partial(apart, content_type, outcome), (record, job_id))


def has_ended(record: JobRecord | None) -> bool:
    """Return whether the job has ended, or is gone."""
    return record is None or record.state in TERMINAL


def _deadline(wait: float | timedelta) -> int:
    return SYSTEM_CLOCK.monotonic() + milliseconds("wait", wait)


def _left(deadline: int) -> float:
    return max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000


def timed_out(
    storage: Storage, queue: str, job_id: str, wait: float | timedelta, outage: StorageUnavailableError | None
) -> Steps[ResultTimeoutError]:
    """Return the error for a caller that waited too long.

    Args:
        outage: The error of the last read of the job, if the storage did not respond.
    """
    text = NO_ANSWER if outage is not None else (yield in_thread(storage, _explain, storage, queue, job_id))
    time = str(wait) if isinstance(wait, timedelta) else f"{wait:g} s"
    return ResultTimeoutError(
        f"Job {job_id!r} of queue {queue!r} did not finish within {time}, and was not stopped. {text}",
        job_id=job_id,
    )


def _explain(storage: Storage, queue: str, job_id: str) -> str:
    """Return the state of the job and the explanation, if the storage responds at once."""
    record = explanation = None
    try:
        with within(EXPLAIN_TIMEOUT):
            record = storage.reads.jobs(queue, [job_id])[0]
            if record is not None and record.state in PENDING:
                explanation = storage.reads.explain(queue, job_id)
    except DjqueueError as error:
        logger.debug("Could not explain why job %s of queue %r has not finished: %s", job_id, queue, error)
    return NO_ANSWER if record is None else _describe(record, explanation)


def _describe(record: JobRecord, why: Explanation | None) -> str:
    if record.state is State.ACTIVE:
        attempt = f" (attempt {record.attempts})" if record.attempts > 1 else ""
        return f"It is running on worker {record.worker}{attempt}."
    if record.state in TERMINAL:
        return f"It has finished in the meantime ({record.state})."
    if record.failures:
        start = f"Attempt {record.attempts} failed; the next one has not started"
    else:
        start = "It has not started"
    reason = "" if why is None else explain.sentence(why)
    if why is None or not reason:
        return "It is still waiting in its queue."
    return " ".join((f"{start}.", reason, *_evidence(why)))


def _evidence(why: Explanation) -> Iterator[str]:
    if why.unmet:
        listed = (f"{job.id!r} of queue {job.queue!r} ({job.state or 'unknown'})" for job in why.unmet)
        yield f"They are {', '.join(listed)}."
    if why.until is not None:
        yield f"It can start at {to_datetime(why.until).isoformat(timespec='seconds')}."
    if why.before:
        count = f"{why.before:,}" + (" or more" if why.before >= MAX_BEFORE else "")
        yield f"{count} {'job is' if why.before == 1 else 'jobs are'} ahead of it."


class StorageResultReader(ResultReader):
    """Reads results from the storage."""

    def wait(self, result: EnqueueResult, timeout: float | timedelta) -> Any:
        result = enqueued(result)
        return wait_for(storage_of(result), result, timeout)

    async def await_(self, result: EnqueueResult, timeout: float | timedelta) -> Any:
        result = await aenqueued(result)
        return await await_for(storage_of(result), result, timeout)

    def refresh(self, result: EnqueueResult) -> EnqueueResult:
        if is_uncommitted(result):
            return result
        result = enqueued(result)
        storage = storage_of(result)
        record = storage.reads.jobs(result.queue, [result.id])[0]
        if (
            record is None
            and storage.capabilities.transactions.uncommitted_in(result.queue, result.id) is not None
        ):
            return result
        return _refreshed(result, record)

    async def arefresh(self, result: EnqueueResult) -> EnqueueResult:
        if await ais_uncommitted(result):
            return result
        result = await aenqueued(result)
        storage = storage_of(result)
        record = (await storage.reads.ajobs(result.queue, [result.id]))[0]
        if (
            record is None
            and await storage.capabilities.transactions.auncommitted_in(result.queue, result.id) is not None
        ):
            return result
        return _refreshed(result, record)

    def job(self, result: EnqueueResult) -> JobInfo | None:
        result = _answer(result)
        return _info(storage_of(result).reads.jobs(result.queue, [result.id])[0])

    async def ajob(self, result: EnqueueResult) -> JobInfo | None:
        result = _answer(result)
        return _info((await storage_of(result).reads.ajobs(result.queue, [result.id]))[0])


def storage_of(result: EnqueueResult) -> Storage:
    """Return the storage of an enqueued job."""
    return result.storage if isinstance(result, StoredResult) else get_storage()


def _answer(result: EnqueueResult) -> EnqueueResult:
    return result.answer or result if isinstance(result, DeferredResult) else result


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
    return stored_result(fresh, result.storage) if isinstance(result, StoredResult) else fresh


install_result_reader(StorageResultReader())
