"""Batches: claimed jobs of one name are gathered, and their function is called once for all of them.

Each member is a run of its own, with its own lease, and an end of its own; while it is gathered, and while
the function runs, it waits here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from djqueue.core.errors import UnrecoverableError
from djqueue.runtime.context import CURRENT, JobContext
from djqueue.runtime.handlers import Handler, call_arguments
from djqueue.runtime.runs import Run
from djqueue.runtime.stopping import Stop

from .tasks import TaskExecutor
from .threads import ThreadExecutor


class Raised(NamedTuple):
    """The end of a member that is an error."""

    error: BaseException
    traceback: TracebackType | None


class BatchCall:
    """One call of the function, and the members that wait for it."""

    def __init__(self, members: dict[Run, "asyncio.Future[Any]"]) -> None:
        self.members = members
        self.task: asyncio.Task[None] | None = None

    def end(self, ends: Sequence[Any]) -> None:
        """Tell each member its own."""
        for future, end in zip(self.members.values(), ends, strict=True):
            future.set_result(_raised(end) if isinstance(end, BaseException) else end)

    def is_unwanted(self) -> bool:
        """Whether all its members have been asked to stop."""
        return all(run.stop for run in self.members)


class Batcher:
    """The members of one handler's next call. All methods are called on the loop."""

    def __init__(
        self,
        handler: Handler,
        concurrency: int,
        tasks: TaskExecutor,
        threads: ThreadExecutor,
        *,
        begin: Callable[[Run], None],
        stop: Callable[[Run, Stop], None],
    ) -> None:
        """begin: told of each member whose call begins: its time to run counts from there."""
        assert handler.batch is not None
        self._handler = handler
        self._most = min(handler.batch.size, concurrency)
        self._least = min(handler.batch.min_size, self._most)
        self._wait = handler.batch.wait / 1_000
        self._tasks = tasks
        self._threads = threads
        self._begin_run = begin
        self._stop_run = stop
        self._waiting: dict[Run, asyncio.Future[Any]] = {}
        self._calls: dict[Run, BatchCall] = {}
        self._timer: asyncio.Handle | None = None
        self._closed = False

    async def join(self, run: Run) -> Any:
        """What becomes of a run: what the function returns, or raises, for it."""
        call_arguments(run.payload)  # one that has none is not to fail the others
        if self._closed:
            run.ask_to_stop(Stop.SHUTDOWN)
            raise asyncio.CancelledError
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[run] = ended
        self._look()
        while True:
            try:
                value = await asyncio.shield(ended)
                break
            except asyncio.CancelledError:
                call = self._calls.get(run)
                if call is None or run.outcome is not None:
                    self._leave(run)
                    raise
                # The function is at work with it: a second run beside it must not begin.
                if self._handler.is_async and call.is_unwanted() and call.task is not None:
                    call.task.cancel()
        if isinstance(value, Raised):
            # Several raise the same one: each with what it came with.
            raise value.error.with_traceback(value.traceback)
        return value

    def close(self) -> None:
        """The worker stops: those that are not being worked on are given back at once."""
        self._closed = True
        for run in list(self._waiting):
            self._stop_run(run, Stop.SHUTDOWN)

    def _look(self) -> None:
        """Begin the call, at once or when its time has come."""
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= self._most:
            self._begin()
        elif len(self._waiting) == self._least:
            # The rest of those that were claimed together are to be in it.
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
            self._begin_run(run)
        call.task = asyncio.get_running_loop().create_task(self._run(call))

    async def _run(self, call: BatchCall) -> None:
        # It is nobody's run alone.
        CURRENT.set(None)
        jobs = [run.context for run in call.members]
        try:
            value = await self._call(jobs)
            ends = spread(value, [job.id for job in jobs])
        except GeneratorExit:
            raise
        except BaseException as error:
            call.end([error] * len(jobs))
        else:
            call.end(ends)
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
    """What the function returned, for each member: None for all, a list in order, or a mapping by id.

    Raises UnrecoverableError for anything else: no further run would change it.
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
    return Raised(error, error.__traceback__)


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (list, tuple, Mapping)) else f"a {kind}"
