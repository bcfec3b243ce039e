"""The operations of `Queue` on the queue as a whole: counts, pause, limits, clean-up, events."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from djqueue.conf import parse_rate
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError
from djqueue.core.job import Event
from djqueue.core.options import MAX_INTEGER, check_text
from djqueue.core.policies import GroupLimit, GroupWords
from djqueue.core.states import PENDING, State
from djqueue.core.suggest import nearest
from djqueue.core.units import milliseconds
from djqueue.storage.base import Unsubscribe

from .deadletters import read_limit
from .limiters import UNCHANGED, read_limits
from .queuehandle import QueueHandle

EVENTS = (
    "queued",
    "active",
    "progress",
    "item",
    "failing",
    "released",
    "stalled",
    "completed",
    "failed",
    "cancelled",
    "cancel_requested",
    "promoted",
    "delayed",
    "unblocked",
    "retried",
    "removed",
)
"""The events of `Queue.on`."""
AHEAD = 86_400_000
"""A day, in milliseconds: a margin for a storage whose clock is ahead of this one."""


class QueueActions(QueueHandle):
    """Operations on a queue as a whole."""

    def counts(self) -> dict[str, int]:
        """Count the jobs in each state."""
        return {str(state): count for state, count in self.storage.reads.counts(self.name).items()}

    async def acounts(self) -> dict[str, int]:
        """Async version of `counts`."""
        return await self._acall(self.counts)

    def pause(self) -> None:
        """Pause the queue: no job starts until `resume`, and active jobs continue."""
        self.storage.queues.pause(self.name)

    async def apause(self) -> None:
        """Async version of `pause`."""
        await self._acall(self.pause)

    def resume(self) -> None:
        """Resume the queue."""
        self.storage.queues.resume(self.name)

    async def aresume(self) -> None:
        """Async version of `resume`."""
        await self._acall(self.resume)

    def is_paused(self) -> bool:
        """Return whether the queue is paused."""
        return self.storage.queues.is_paused(self.name)

    async def ais_paused(self) -> bool:
        """Async version of `is_paused`."""
        return await self._acall(self.is_paused)

    def set_limits(self, *, rate: Any = UNCHANGED, concurrency: Any = UNCHANGED) -> None:
        """Set the queue's limits for all workers, immediately; None removes a limit.

        Args:
            rate: Starts per period: `"100/s"`, or (count, seconds).
            concurrency: Maximum number of active jobs.

        Raises:
            OptionError: A limit is invalid, or none is given.
        """
        given = read_limits("set_limits", rate, concurrency)
        self.storage.queues.set_limits(self.name, **given)

    async def aset_limits(self, *, rate: Any = UNCHANGED, concurrency: Any = UNCHANGED) -> None:
        """Async version of `set_limits`."""
        await self._acall(self.set_limits, rate=rate, concurrency=concurrency)

    def set_group_limit(
        self,
        group: str | None,
        concurrency: Any = UNCHANGED,
        *,
        rate: Any = UNCHANGED,
        weight: Any = UNCHANGED,
    ) -> None:
        """Set the limits of a group, or the default for groups without their own limit (group None).

        Limits that are not given are unchanged; None removes a limit.

        Args:
            concurrency: Maximum number of active jobs.
            rate: Starts per period: `"10/s"`, or (count, seconds).
            weight: Jobs started for each job of a group with weight 1; not for the default.

        Raises OptionError.
        """
        if group is not None:
            check_text("group", group)
        limits: GroupWords = {}
        if concurrency is not UNCHANGED:
            limits["concurrency"] = _count("concurrency", concurrency)
        if rate is not UNCHANGED:
            limits["rate"] = None if rate is None else parse_rate(rate)
            if limits["rate"] is not None:
                _count("rate", limits["rate"].capacity)
        if weight is not UNCHANGED:
            if group is None:
                raise OptionError(
                    "weight: requires a group; the default for groups without their own limit has no weight"
                )
            limits["weight"] = _count("weight", weight)
        if not limits:
            raise OptionError("set_group_limit: expected concurrency, rate or weight")
        self.storage.queues.set_group_limit(self.name, group, **limits)

    async def aset_group_limit(
        self,
        group: str | None,
        concurrency: Any = UNCHANGED,
        *,
        rate: Any = UNCHANGED,
        weight: Any = UNCHANGED,
    ) -> None:
        """Async version of `set_group_limit`."""
        await self._acall(self.set_group_limit, group, concurrency, rate=rate, weight=weight)

    def pause_group(self, group: str) -> None:
        """Pause a group: none of its jobs starts until `resume_group`, and active jobs continue."""
        self.storage.queues.pause_group(self.name, check_text("group", group))

    async def apause_group(self, group: str) -> None:
        """Async version of `pause_group`."""
        await self._acall(self.pause_group, group)

    def resume_group(self, group: str) -> None:
        """Resume a group."""
        self.storage.queues.resume_group(self.name, check_text("group", group))

    async def aresume_group(self, group: str) -> None:
        """Async version of `resume_group`."""
        await self._acall(self.resume_group, group)

    def group_limits(self) -> dict[str | None, GroupLimit]:
        """Return the `concurrency`, `paused`, `rate` and `weight` set for each group.

        Under None is the default for groups without their own limit.
        """
        return self.storage.queues.group_limits(self.name)

    async def agroup_limits(self) -> dict[str | None, GroupLimit]:
        """Async version of `group_limits`."""
        return await self._acall(self.group_limits)

    def drain(self, *, delayed: bool = True) -> int:
        """Remove every job that has not started, and return how many were removed.

        Args:
            delayed: Also remove delayed and blocked jobs.
        """
        states = PENDING if delayed else frozenset({State.WAITING})
        return self.storage.queues.clean(self.name, states, SYSTEM_CLOCK.now() + AHEAD)

    async def adrain(self, *, delayed: bool = True) -> int:
        """Async version of `drain`."""
        return await self._acall(self.drain, delayed=delayed)

    def clean(
        self,
        older_than: float | timedelta = 0,
        states: Iterable[str] = ("completed", "failed", "cancelled"),
        limit: int | None = None,
    ) -> int:
        """Remove jobs in some states by age, and return how many were removed.

        Args:
            older_than: Seconds since they ended, or were enqueued if they are pending.
            limit: The maximum number of jobs to remove.
        """
        maximum = read_limit(limit)
        wanted = []
        for name in states:
            if name not in {str(state) for state in State} or name == State.ACTIVE:
                hint = nearest(name, map(str, State))
                raise OptionError(f"states: jobs in state {name!r} cannot be cleaned{hint}")
            wanted.append(State(name))
        age = milliseconds("older_than", older_than)
        # The storage's clock may be ahead of this one, and jobs that have just ended count as ended.
        before = SYSTEM_CLOCK.now() - age + 1 if age else SYSTEM_CLOCK.now() + AHEAD
        return self.storage.queues.clean(self.name, frozenset(wanted), before, maximum)

    async def aclean(
        self,
        older_than: float | timedelta = 0,
        states: Iterable[str] = ("completed", "failed", "cancelled"),
        limit: int | None = None,
    ) -> int:
        """Async version of `clean`."""
        return await self._acall(self.clean, older_than, states, limit)

    def obliterate(self, *, force: bool = False) -> int:
        """Remove the queue with all its jobs, and return how many were removed.

        Raises StorageError if jobs are active, unless forced.
        """
        return self.storage.queues.obliterate(self.name, force=force)

    async def aobliterate(self, *, force: bool = False) -> int:
        """Async version of `obliterate`."""
        return await self._acall(self.obliterate, force=force)

    def on(self, event: str, handler: Callable[[Event], None]) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of this kind in the queue; `*` means every kind.

        Returns a function that ends the subscription.
        """
        if event != "*" and event not in EVENTS:
            raise OptionError(f"event: unknown event {event!r}{nearest(str(event), EVENTS)}")
        if not callable(handler):
            raise OptionError(f"handler: expected a function that takes an event, got {handler!r}")

        def filtered(happened: Event) -> None:
            if event in ("*", happened.event):
                handler(happened)

        return self.storage.events.subscribe(self.name, filtered)

    async def aon(self, event: str, handler: Callable[[Event], None]) -> Unsubscribe:
        """Async version of `on`."""
        return await self._acall(self.on, event, handler)


def _count(name: str, value: Any) -> int | None:
    if value is None or (type(value) is int and 1 <= value <= MAX_INTEGER):
        return value
    raise OptionError(f"{name}: must be a positive whole number; got {value!r}")
