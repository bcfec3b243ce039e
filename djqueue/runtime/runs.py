"""Claimed jobs on their way through this worker: executing, ended, told."""

from asyncio import Task, TimerHandle
from collections import deque
from threading import Lock
from typing import Any

from djqueue.core.job import Claimed, Lease, Outcome

from .cancelled import Cancelled
from .context import JobContext
from .emitting import RunItems
from .handlers import Handler
from .reports import Reports
from .stopping import Stop


class Run:
    """One claimed job. What few runs need is a default of the class until it is set."""

    payload: Any = None
    """Decoded, once the run has begun."""
    stop = Stop.NO
    task: "Task[None] | None" = None
    timer: TimerHandle | None = None
    deadline: int | None = None
    """UTC milliseconds."""
    ended = 0
    """Monotonic milliseconds at which the loop saw that it had ended."""
    outcome: Outcome | None = None
    error: BaseException | None = None
    """What the handler raised; kept until the outcome has been told."""
    items: RunItems | None = None
    """What its handler yields, should that be a generator at work."""
    _cancelled: Cancelled | None = None

    def __init__(self, claimed: Claimed, handler: Handler, reports: Reports, since: int) -> None:
        self.claimed = claimed
        self.handler = handler
        self.reports = reports
        self.since = since
        """Monotonic milliseconds of its dispatch."""

    @property
    def context(self) -> JobContext:
        """What its handler sees."""
        # Kept nowhere: each would keep the other alive until the garbage collector comes.
        return JobContext(self)

    @property
    def cancelled(self) -> Cancelled:
        """The event that asks its handler to stop."""
        with _stopping:
            if self._cancelled is None:
                self._cancelled = Cancelled()
                if self.stop:
                    self._cancelled.set()
            return self._cancelled

    @property
    def overran(self) -> bool:
        """Whether it was asked to stop for running too long."""
        return self.stop is Stop.TIMEOUT

    def overran_by(self, now: int) -> int:
        """Milliseconds by which it is past its timeout at a monotonic time."""
        return now - self.since - (self.claimed.options.timeout or 0)

    def ask_to_stop(self, reason: Stop) -> bool:
        """Note a reason and set the handler's event; False if a higher one was there."""
        with _stopping:
            if reason <= self.stop:
                return False
            self.stop = reason
            if self._cancelled is not None:
                self._cancelled.set()
        if (items := self.items) is not None:
            items.wake()
        return True


# Taken for the few runs that are stopped or look at their event: one for all is enough.
_stopping = Lock()


class Runs:
    """The runs of one worker."""

    def __init__(self) -> None:
        self.executing: dict[Run, Run] = {}
        """Each takes a slot. By themselves: two queues may give the same token."""
        self.ended: deque[Run] = deque()
        """Ended, and not on their way to the storage yet."""
        self.untold: dict[Run, Run] = {}
        """To be told to the storage, until it has answered."""

    def settle(self, run: Run, outcome: Outcome) -> bool:
        """End a run, from any thread; False if it has been ended already: then this word is too late."""
        # The pop is what makes this atomic against another thread that ends the run, too.
        if self.executing.pop(run, None) is None:
            return False
        run.outcome = outcome
        self.ended.append(run)
        return True

    def collect(self) -> list[Run]:
        """The ended runs; called by the claim loop alone."""
        ended = self.ended
        runs = [ended.popleft() for _ in range(len(ended))]
        for run in runs:
            if run.timer is not None:
                run.timer.cancel()
        return runs

    def held(self) -> list[Run]:
        """Every run whose lease is still wanted, from any thread."""
        # In the order in which a run moves on, so that none is missed.
        runs = [*self.executing.copy().values(), *self.ended.copy(), *self.untold.copy()]
        return [run for run in runs if run.stop is not Stop.LOST]


def lease_of(run: Run) -> Lease:
    """What renews a run's claim."""
    claimed = run.claimed
    return Lease(claimed.queue, claimed.id, claimed.token)
