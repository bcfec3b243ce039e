"""Batches: claimed jobs of one name are collected, and their function is called once for all of them.

Each member is a run with its own lease and its own outcome, which waits here for the function.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from djqueue.core.errors import UnrecoverableError
from djqueue.core.logs import frames_of
from djqueue.runtime.handlers import Handler, call_arguments
from djqueue.runtime.owntasks import own_task
from djqueue.runtime.runs import CURRENT, JobContext, Run, Stop

from .execution import isolate_context
from .tasks import TaskExecutor, is_discarded
from .threads import ThreadExecutor


class Raised(NamedTuple):
    """An exception as the result of a member."""

    error: BaseException
    traceback: TracebackType | None


class BatchCall:
    """One call of the function, with the members that wait for it."""

    def __init__(self, members: dict[Run, "asyncio.Future[Any]"]) -> None:
        self.members = members
        self.task: asyncio.Task[None] | None = None

    def end(self, results: Sequence[Any]) -> None:
        """Give each member its result, or its exception."""
        for future, result in zip(self.members.values(), results, strict=True):
            is_error = issubclass(type(result), BaseException)  # `isinstance` may run code of the result.
            future.set_result(_raised(result) if is_error else result)

    def is_unwanted(self) -> bool:
        """Return whether all members have been asked to stop."""
        return all(run.stop for run in self.members)


class Batcher:
    """Collects the members of a handler's next call. All methods are called on the loop."""

    def __init__(
        self,
        handler: Handler,
        concurrency: int,
        tasks: TaskExecutor,
        threads: ThreadExecutor,
        *,
        stop: Callable[[Run, Stop], None],
        set_deadline: Callable[[Run], None],
    ) -> None:
        assert handler.batch is not None
        self._handler = handler
        self._max_size = min(handler.batch.size, concurrency)
        self._min_size = min(handler.batch.min_size, self._max_size)
        self._wait = handler.batch.wait / 1_000
        self._tasks = tasks
        self._threads = threads
        self._stop = stop
        self._set_deadline = set_deadline
        self._waiting: dict[Run, asyncio.Future[Any]] = {}
        self._calls: dict[Run, BatchCall] = {}
        self._timer: asyncio.Handle | None = None
        self._closed = False

    async def join(self, run: Run) -> Any:
        """Return or raise what the function returns or raises for this run."""
        call_arguments(run.payload)  # An invalid payload must not fail the other members.
        if self._closed:
            run.ask_to_stop(Stop.SHUTDOWN)
            raise asyncio.CancelledError
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[run] = ended
        self._schedule()
        while True:
            try:
                value = await asyncio.shield(ended)
                break
            except asyncio.CancelledError:
                call = self._calls.get(run)
                if call is None or run.outcome is not None:
                    self._leave(run)
                    raise
                # The function is processing it: the job must not run again meanwhile.
                if self._handler.is_async and call.is_unwanted() and call.task is not None:
                    call.task.cancel()
        if isinstance(value, Raised):
            # Several members raise the same exception, each with the original traceback.
            raise value.error.with_traceback(value.traceback)
        return value

    def close(self) -> None:
        """Return the members that have not been called to their queues, because the worker stops."""
        self._closed = True
        for run in list(self._waiting):
            self._stop(run, Stop.SHUTDOWN)

    def _schedule(self) -> None:
        """Begin the call now, or at the end of the waiting time."""
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= self._max_size:
            self._begin()
        elif len(self._waiting) == self._min_size:
            # The batch includes the rest of the jobs that were claimed together.
            self._set_timer(loop.call_soon(self._begin))
        elif len(self._waiting) == 1:
            self._set_timer(loop.call_later(self._wait, self._begin))

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _leave(self, run: Run) -> None:
        if self._waiting.pop(run, None) is not None and not self._waiting:
            self._set_timer(None)

    def _begin(self) -> None:
        self._set_timer(None)
        members, self._waiting = self._waiting, {}
        call = BatchCall(members)
        for run in members:
            self._calls[run] = call
            # The timeout counts from the call.
            self._set_deadline(run)
        call.task = own_task(asyncio.get_running_loop(), self._run(call))

    async def _run(self, call: BatchCall) -> None:
        # A batch has no single current job.
        CURRENT.set(None)
        isolate_context()
        jobs = [run.context for run in call.members]
        try:
            # The function may change its list.
            value = await self._call(jobs.copy())
            results = spread(value, [job.id for job in jobs])
        except BaseException as error:
            if is_discarded(error):
                raise
            call.end([error] * len(jobs))
        else:
            call.end(results)
        finally:
            for run in call.members:
                del self._calls[run]

    async def _call(self, jobs: list[JobContext]) -> Any:
        function = self._handler.function
        if self._handler.is_async:
            return await self._tasks.call(function, jobs)
        value = await self._threads.call(None, function, jobs)
        return await value if hasattr(value, "__await__") else value


def spread(value: Any, ids: Sequence[str]) -> list[Any]:
    """Return each member's result, from None for all, a list in order, or a mapping by ID.

    Raises UnrecoverableError for any other value, because a retry would not change it.
    """
    if value is None:
        return [None] * len(ids)
    if isinstance(value, Mapping) and value.keys() <= set(ids):
        return [value.get(job_id) for job_id in ids]
    if isinstance(value, (list, tuple)) and len(value) == len(ids):
        return list(value)
    error = UnrecoverableError(
        f"the function of a batch of {len(ids)} jobs must return a list of as many results, a dict of "
        f"results by id, or None; got {_described(value)}"
    )
    error.reason = "invalid_result"
    raise error


def _raised(error: BaseException) -> Raised:
    return Raised(error, frames_of(error))


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (list, tuple, Mapping)) else f"a {kind}"
