"""The items of a generator's job as they come: subscribed first, then read, and read on at each event."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from datetime import timedelta
from threading import Event as ThreadEvent
from typing import Any

from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import milliseconds
from djqueue.core.errors import (
    JobNotFoundError,
    OptionError,
    StorageUnavailableError,
    StreamRestartedError,
)
from djqueue.core.job import Batch, Event, ItemMark, ItemPage
from djqueue.core.states import TERMINAL, State
from djqueue.storage.base import Storage

from .info import outcome
from .sending import aenqueue, enqueue
from .timeouts import atoo_late, too_late
from .waiting import CHECK_EVERY, ENDINGS, RETRY, has_ended, refuse_in_vain, refuse_uncommitted, with_id

ON_RESTART = ("raise", "continue")
NEWS = ENDINGS | {"item", "active"}
"""Events after which there may be something to read."""

Wait = float | timedelta | None


class Streaming:
    """How a caller wants a stream: what is wrong with that is said at once, raising OptionError.

    wait: seconds, or a timedelta, within which the job has to end; None: as long as it takes.
    on_restart: `raise` StreamRestartedError when the job begins anew after items of it were given, or
        `continue` with the items of the new run, from its first.

    What is returned begins when its first item is asked for. It raises, after the items that came: what
    `enqueue_and_wait` raises, and JobNotFoundError for items that are no longer kept.
    """

    def __init__(self, storage: Storage, wait: Wait, on_restart: str) -> None:
        if on_restart not in ON_RESTART:
            raise OptionError(f"on_restart: {on_restart!r} is not one of {', '.join(ON_RESTART)}")
        self._storage = storage
        self._patience = None if wait is None else milliseconds("wait", wait)
        self._wait = wait
        self._raises = on_restart == "raise"

    def of(self, queue: str, job_id: str) -> Generator[Any, None, Any]:
        """A job's items; the generator returns what the job returns."""

        def begin() -> str:
            refuse_uncommitted(
                queue, job_id, self._storage.capabilities.transactions.uncommitted_in(queue, job_id)
            )
            return job_id

        return self._read(queue, job_id, begin)

    def aof(self, queue: str, job_id: str) -> AsyncIterator[Any]:
        """See `of`."""

        async def begin() -> str:
            refuse_uncommitted(
                queue, job_id, await self._storage.capabilities.transactions.auncommitted_in(queue, job_id)
            )
            return job_id

        return self._aread(queue, job_id, begin)

    def enqueue(self, batch: Batch) -> Generator[Any, None, Any]:
        """Enqueue one job, and give its items; those of the job that is there, if this is a duplicate."""
        batch = with_id(batch)
        assert batch.ids is not None

        def begin() -> str:
            refuse_in_vain(batch, self._storage.capabilities.transactions.alias_for(batch))
            return enqueue(self._storage, batch)[0].id

        return self._read(batch.queue, batch.ids[0], begin)

    def aenqueue(self, batch: Batch) -> AsyncIterator[Any]:
        """See `enqueue`."""
        batch = with_id(batch)
        assert batch.ids is not None

        async def begin() -> str:
            refuse_in_vain(batch, await self._storage.capabilities.transactions.aalias_for(batch))
            return (await aenqueue(self._storage, batch))[0].id

        return self._aread(batch.queue, batch.ids[0], begin)

    def _read(self, queue: str, job_id: str, begin: Callable[[], str]) -> Generator[Any, None, Any]:
        storage, news, deadline = self._storage, ThreadEvent(), self._deadline()
        handler = _on_news(news.set)
        unsubscribe = storage.events.subscribe(queue, handler, job_id)
        try:
            if (found := begin()) != job_id:
                unsubscribe()
                job_id = found
                unsubscribe = storage.events.subscribe(queue, handler, job_id)
            place = StreamPosition(job_id, raises=self._raises)
            while True:
                news.clear()
                away = page = record = None
                try:
                    [page] = storage.reads.items(queue, [place.mark])
                    if _is_last(page):
                        [record] = storage.reads.jobs(queue, [job_id])
                except StorageUnavailableError as error:
                    away = error
                else:
                    yield from place.take(page)
                    if _is_last(page) and has_ended(record):
                        return outcome(record, job_id)
                    if _has_more(page):
                        continue
                if _is_over(deadline):
                    raise too_late(storage, queue, job_id, self._wait or 0, away) from away
                news.wait(_patience(deadline, away))
        finally:
            unsubscribe()

    async def _aread(
        self, queue: str, job_id: str, begin: Callable[[], Awaitable[str]]
    ) -> AsyncIterator[Any]:
        storage, news, deadline = self._storage, asyncio.Event(), self._deadline()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # The loop may be gone by the time that a late event comes in on another thread.
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        handler = _on_news(wake)
        unsubscribe = await storage.acall(storage.events.subscribe, queue, handler, job_id)
        try:
            if (found := await begin()) != job_id:
                unsubscribe()
                job_id = found
                unsubscribe = await storage.acall(storage.events.subscribe, queue, handler, job_id)
            place = StreamPosition(job_id, raises=self._raises)
            while True:
                news.clear()
                away = page = record = None
                try:
                    [page] = await storage.reads.aitems(queue, [place.mark])
                    if _is_last(page):
                        [record] = await storage.reads.ajobs(queue, [job_id])
                except StorageUnavailableError as error:
                    away = error
                else:
                    for item in place.take(page):
                        yield item
                    if _is_last(page) and has_ended(record):
                        outcome(record, job_id)
                        return
                    if _has_more(page):
                        continue
                if _is_over(deadline):
                    raise await atoo_late(storage, queue, job_id, self._wait or 0, away) from away
                try:
                    await asyncio.wait_for(news.wait(), _patience(deadline, away))
                except TimeoutError:
                    continue
        finally:
            unsubscribe()

    def _deadline(self) -> int | None:
        return None if self._patience is None else SYSTEM_CLOCK.monotonic() + self._patience


class StreamPosition:
    """How far a reader has come."""

    def __init__(self, job_id: str, *, raises: bool) -> None:
        self.mark = ItemMark(job_id)
        self._raises = raises

    def take(self, page: ItemPage | None) -> Iterator[Any]:
        """The values of a page that was read behind the mark, which moves on.

        Raises StreamRestartedError, and JobNotFoundError if items are missing for good.
        """
        if page is None:
            return
        restarted = page.run != self.mark.run if page.run else page.state is State.COMPLETED
        if restarted:
            given, self.mark = self.mark.start, ItemMark(self.mark.id, page.run)
            if given and self._raises:
                raise StreamRestartedError(
                    f"job {self.mark.id!r} was restarted; {given} items of its previous attempt were "
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
    """Whether nothing comes behind a page."""
    return page is None or (page.state in TERMINAL and page.start + len(page.items) >= page.sent)


def _has_more(page: ItemPage | None) -> bool:
    """Whether there is something behind a page already."""
    return page is not None and bool(page.items) and page.start + len(page.items) < page.sent


def _on_news(tell: Callable[[], None]) -> Callable[[Event], None]:
    def handler(event: Event) -> None:
        if event.event in NEWS:
            tell()

    return handler


def _is_over(deadline: int | None) -> bool:
    return deadline is not None and deadline <= SYSTEM_CLOCK.monotonic()


def _patience(deadline: int | None, away: StorageUnavailableError | None) -> float:
    """Seconds until the next look, should no event come: one may have been lost with a connection."""
    patience = CHECK_EVERY if away is None else RETRY
    if deadline is None:
        return patience
    return min(patience, max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000)
