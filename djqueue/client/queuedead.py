"""The operations of `Queue` on its dead letters. `djqueue.client.deadletters.read_filter` has the filters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.job import DeadLetterRecord
from djqueue.core.options import check_text
from djqueue.core.suggest import nearest

from .deadletters import (
    DeadLetterCounts,
    DeadLetterFilter,
    MovedDead,
    RetriedDead,
    count_letters,
    letters,
    move_letters,
    read_filter,
    read_limit,
    retry_letters,
)
from .entries import check_ids
from .queuehandle import QueueHandle

FILTERS = tuple(item.name for item in fields(DeadLetterFilter))


class DeadLetterActions(QueueHandle):
    """Operations on the dead letters of a queue."""

    def dead_letters(self, *, limit: int | None = None, **filters: Any) -> list[DeadLetterRecord]:
        """Return the queue's dead letters, oldest first.

        Args:
            filters: `reason`, `name` (of the job), `error_type`, `fingerprint`, `older_than`, `newer_than`.

        Raises OptionError.
        """
        maximum = read_limit(limit)
        return list(islice(self._letters(filters), maximum))

    async def adead_letters(self, *, limit: int | None = None, **filters: Any) -> list[DeadLetterRecord]:
        """Async version of `dead_letters`."""
        return await self._acall(self.dead_letters, limit=limit, **filters)

    def count_dead(self, **filters: Any) -> DeadLetterCounts:
        """Count the dead letters by reason, job name, error type and fingerprint of the error."""
        wanted = self._letter_filter(filters)
        return count_letters(self.storage, self.name, wanted)

    async def acount_dead(self, **filters: Any) -> DeadLetterCounts:
        """Async version of `count_dead`."""
        return await self._acall(self.count_dead, **filters)

    def retry_dead(
        self,
        ids: Iterable[str] | None = None,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[RetriedDead], object] | None = None,
        **filters: Any,
    ) -> RetriedDead:
        """Retry dead letters, oldest first: those with these ids, those that match the filters, or all.

        A dead letter is not retried while a live job has its unique key.

        Args:
            limit: The maximum number of dead letters to try.
            dry_run: Only count the outcomes.
            progress: Called with the counts so far after every few hundred dead letters.

        Raises OptionError.
        """
        maximum = read_limit(limit)
        if ids is not None and filters:
            raise OptionError("retry_dead: ids and filters can't be combined: remove one of them")
        if ids is None:
            ids = (letter.id for letter in self._letters(filters))
        else:
            ids = [check_text("ids", id) for id in check_ids(ids)]
        return retry_letters(self.storage, self.name, ids, maximum, dry_run=dry_run, progress=progress)

    async def aretry_dead(
        self,
        ids: Iterable[str] | None = None,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[RetriedDead], object] | None = None,
        **filters: Any,
    ) -> RetriedDead:
        """Async version of `retry_dead`."""
        return await self._acall(
            self.retry_dead, ids, limit=limit, dry_run=dry_run, progress=progress, **filters
        )

    def move_dead(
        self,
        to: str,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[MovedDead], object] | None = None,
        **filters: Any,
    ) -> MovedDead:
        """Move dead letters, with their jobs, to another queue, oldest first: all that match the filters.

        Args:
            limit: The maximum number of dead letters to try.
            dry_run: Only count the outcomes.
            progress: Called with the counts so far after every few hundred dead letters.

        Raises OptionError, UnknownQueueError.
        """
        self._check_target(to)
        maximum = read_limit(limit)
        ids = (letter.id for letter in self._letters(filters))
        return move_letters(self.storage, self.name, to, ids, maximum, dry_run=dry_run, progress=progress)

    async def amove_dead(
        self,
        to: str,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[MovedDead], object] | None = None,
        **filters: Any,
    ) -> MovedDead:
        """Async version of `move_dead`."""
        return await self._acall(
            self.move_dead, to, limit=limit, dry_run=dry_run, progress=progress, **filters
        )

    def _letters(self, filters: Mapping[str, Any]) -> Iterator[DeadLetterRecord]:
        return letters(self.storage, self.name, self._letter_filter(filters))

    @staticmethod
    def _letter_filter(filters: Mapping[str, Any]) -> DeadLetterFilter:
        for name in filters:
            if name not in FILTERS:
                raise OptionError(f"unknown filter {name!r}{nearest(name, FILTERS)}")
        return read_filter(**filters)
