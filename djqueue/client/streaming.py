"""Stream the items of a generator's job: subscribe first, then read, and read on at each event."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing
from datetime import timedelta
from threading import Event as ThreadEvent
from typing import Any, Literal, NamedTuple, get_args

from djqueue.codecs import PLAIN, decode
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import JobNotFoundError, OptionError, StorageUnavailableError, StreamRestartedError
from djqueue.core.job import Batch, Event, ItemMark, ItemPage
from djqueue.core.states import TERMINAL, State
from djqueue.core.units import milliseconds
from djqueue.storage.base import Storage

from .envelope import with_ids
from .results import CHECK_EVERY, ENDINGS, RETRY_INTERVAL, has_ended, read_outcome, timed_out
from .sending import aenqueue, enqueue
from .steps import LoopSignal, Signal, Step, Steps, apart, in_thread
from .transactions import When, acheck_waiting, check_waiting, refuse_uncommitted

OnRestart = Literal["raise", "continue"]
ON_RESTART: tuple[str, ...] = get_args(OnRestart)
WAKING_EVENTS = ENDINGS | {"item", "started"}
"""Events after which items may be available."""
NO_MORE = object()
"""Stands for the end of the items of a page."""

Wait = float | timedelta | None


class Items(NamedTuple):
    """Values for the caller, between two steps of a stream."""

    values: Iterator[Any]
    content_type: str


StreamSteps = Generator[Step | Items, Any, Any]


class Streaming:
    """The options of a stream, and the streams with them. Raises OptionError if an option is wrong.

    Args:
        wait: Seconds, or a timedelta, within which the job has to end; None waits without a limit.
        on_restart: `raise` StreamRestartedError when the job restarts after some of its items were
            returned, or `continue` with the items of the new attempt, from its first.

    A stream begins when its first item is requested. After the items, it raises the errors of
    `enqueue_and_wait`, and JobNotFoundError for items that have expired.
    """

    def __init__(self, storage: Storage, wait: Wait, on_restart: str) -> None:
        if on_restart not in ON_RESTART:
            raise OptionError(f"on_restart: {on_restart!r} is not one of {', '.join(ON_RESTART)}")
        self._storage = storage
        self._limit = None if wait is None else milliseconds("wait", wait)
        self._wait = wait
        self._raises = on_restart == "raise"

    def of(self, queue: str, job_id: str) -> Generator[Any, None, Any]:
        """Yield a job's items, and return its result."""
        return _run(lambda signal: self._read(queue, job_id, self._find(queue, job_id), signal))

    def aof(self, queue: str, job_id: str) -> AsyncIterator[Any]:
        """Async version of `of`."""
        return _arun(lambda signal: self._read(queue, job_id, self._find(queue, job_id), signal))

    def enqueue(self, batch: Batch, on_commit: When = False) -> Generator[Any, None, Any]:
        """Enqueue one job, and yield its items; those of the existing job if this is a duplicate."""
        return _run(self._enqueueing(batch, on_commit))

    def aenqueue(self, content_type: str, make: Callable[[], tuple[Batch, When]]) -> AsyncIterator[Any]:
        """Async version of `enqueue`.

        Args:
            content_type: That of the payload.
            make: Returns the arguments of `enqueue`. If the codec is the project's, it is called apart, when
                the first item is requested; otherwise now.
        """
        if content_type in PLAIN:
            return _arun(self._enqueueing(*make()))
        return self._aenqueue_apart(content_type, make)

    async def _aenqueue_apart(
        self, content_type: str, make: Callable[[], tuple[Batch, When]]
    ) -> AsyncIterator[Any]:
        batch, on_commit = await apart(content_type, make)
        async with aclosing(_arun(self._enqueueing(batch, on_commit))) as values:
            async for value in values:
                yield value

    def _enqueueing(self, batch: Batch, on_commit: When) -> Callable[[Signal], StreamSteps]:
        batch = with_ids(batch)
        assert batch.ids is not None
        queue, job_id = batch.queue, batch.ids[0]
        return lambda signal: self._read(queue, job_id, self._enqueue(batch, on_commit), signal)

    def _find(self, queue: str, job_id: str) -> Steps[str]:
        storage = self._storage
        transactions = storage.capabilities.transactions
        alias = yield Step(transactions.uncommitted_in, transactions.auncommitted_in, (queue, job_id))
        refuse_uncommitted(queue, job_id, alias, can_leave=transactions.can_leave)
        return job_id

    def _enqueue(self, batch: Batch, on_commit: When) -> Steps[str]:
        storage = self._storage
        yield Step(check_waiting, acheck_waiting, (storage, batch, on_commit))
        [result] = yield Step(enqueue, aenqueue, (storage, batch))
        enqueued_id: str = result.id
        return enqueued_id

    def _read(self, queue: str, job_id: str, begin: Steps[str], signal: Signal) -> StreamSteps:
        storage, deadline = self._storage, self._deadline()
        handler = _on_news(signal.set)
        unsubscribe = yield in_thread(storage, storage.events.subscribe, queue, handler, job_id)
        try:
            if (actual := (yield from begin)) != job_id:
                unsubscribe()
                job_id = actual
                unsubscribe = yield in_thread(storage, storage.events.subscribe, queue, handler, job_id)
            position = StreamPosition(job_id, raises=self._raises)
            while True:
                signal.clear()
                outage = page = record = None
                try:
                    [page] = yield Step(storage.reads.items, storage.reads.aitems, (queue, [position.mark]))
                    if _is_last(page):
                        [record] = yield Step(storage.reads.jobs, storage.reads.ajobs, (queue, [job_id]))
                except StorageUnavailableError as error:
                    outage = error
                else:
                    if page is not None:
                        yield Items(position.take(page), page.content_type)
                    if _is_last(page) and has_ended(record):
                        return (yield read_outcome(record, job_id))
                    if _has_more(page):
                        continue
                if _is_over(deadline):
                    raise (yield from timed_out(storage, queue, job_id, self._wait or 0, outage)) from outage
                yield Step(signal.wait, signal.wait, (_pause(deadline, outage),))
        finally:
            unsubscribe()

    def _deadline(self) -> int | None:
        return None if self._limit is None else SYSTEM_CLOCK.monotonic() + self._limit


def _run(begin: Callable[[Signal], StreamSteps]) -> Generator[Any, None, Any]:
    """Run a stream on this thread."""
    steps = begin(ThreadEvent())
    try:
        step = next(steps)
        while True:
            if isinstance(step, Items):
                yield from step.values
                step = next(steps)
                continue
            try:
                answer = step.call(*step.args)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


async def _arun(begin: Callable[[Signal], StreamSteps]) -> AsyncGenerator[Any, None]:
    """Run a stream on the running event loop."""
    steps = begin(LoopSignal())
    try:
        step = next(steps)
        while True:
            if isinstance(step, Items):
                while (value := await apart(step.content_type, next, step.values, NO_MORE)) is not NO_MORE:
                    yield value
                step = next(steps)
                continue
            try:
                answer = await step.acall(*step.args)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration:
        return
    finally:
        steps.close()


class StreamPosition:
    """A reader's position in a stream."""

    def __init__(self, job_id: str, *, raises: bool) -> None:
        self.mark = ItemMark(job_id)
        self._raises = raises

    def take(self, page: ItemPage) -> Iterator[Any]:
        """Yield the values of a page that was read after the mark, and move the mark.

        Raises StreamRestartedError, and JobNotFoundError if items have expired.
        """
        restarted = page.run != self.mark.run if page.run else page.state is State.COMPLETED
        if restarted:
            returned, self.mark = self.mark.start, ItemMark(self.mark.id, page.run)
            if returned and self._raises:
                raise StreamRestartedError(
                    f"job {self.mark.id!r} was restarted; {returned} items of its previous attempt were "
                    "already returned",
                    job_id=self.mark.id,
                )
        if not page.items and page.sent > self.mark.start and page.state in TERMINAL:
            raise JobNotFoundError(
                f"job {self.mark.id!r} is {page.state}; its items have expired", job_id=self.mark.id
            )
        self.mark = self.mark._replace(start=self.mark.start + len(page.items))
        accept = get_settings().accept_content
        for data in page.items:
            yield decode(data, page.content_type, accept=accept)


def _is_last(page: ItemPage | None) -> bool:
    """Return whether no page follows this one."""
    return page is None or (page.state in TERMINAL and page.start + len(page.items) >= page.sent)


def _has_more(page: ItemPage | None) -> bool:
    """Return whether the next page can be read at once."""
    return page is not None and bool(page.items) and page.start + len(page.items) < page.sent


def _on_news(wake: Callable[[], None]) -> Callable[[Event], None]:
    def handler(event: Event) -> None:
        if event.event in WAKING_EVENTS:
            wake()

    return handler


def _is_over(deadline: int | None) -> bool:
    return deadline is not None and deadline <= SYSTEM_CLOCK.monotonic()


def _pause(deadline: int | None, outage: StorageUnavailableError | None) -> float:
    """Return the seconds until the next read if no event comes: one may be lost with a connection."""
    pause = CHECK_EVERY if outage is None else RETRY_INTERVAL
    if deadline is None:
        return pause
    return min(pause, max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000)


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether a function or a callable object is a generator, sync or async."""
    return is_async_generator(function) or _holds(inspect.isgeneratorfunction, function)


def is_async_generator(function: Callable[..., Any]) -> bool:
    """Return whether a function or a callable object is an async generator."""
    return _holds(inspect.isasyncgenfunction, function)


def _holds(test: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - the method is looked at
