"""A worker's end: claim no more, drain, ask to stop, give back; each step when its time has come."""

import asyncio
from collections.abc import Callable

from .claiming import ClaimLoop
from .executors import InlineExecutor
from .outcomes import release
from .stopping import Stop
from .workercontext import WorkerContext

GRACE = 2.0
"""Seconds that jobs have between being asked to stop and being given back."""
DELIVERY = 5.0
"""Seconds that a storage which is away has to take the last outcomes."""
CUT = 1.0
"""Seconds after which a call of the storage that does not return is left to itself."""


class Shutdown:
    """The steps of a worker's end. All methods are called on the loop."""

    def __init__(
        self, worker_context: WorkerContext, timeout: int, claims: ClaimLoop, executor: InlineExecutor
    ) -> None:
        self._loop = worker_context.loop
        self._runs = worker_context.runs
        self._wake_event = worker_context.wake_event
        self._tell = worker_context.tell
        self._timeout = timeout
        self._claims = claims
        self._executor = executor
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False
        self._hurried = False
        self.abandoned = 0
        """Handlers, and calls of the storage, that did not end; those in threads may still be at it."""
        self.cut_off: Callable[[], object] = lambda: None
        """Ends the claim loop in the middle of what it does."""

    def begin(self, *, hurry: bool) -> None:
        """Claim no more; wait for running jobs, or hurry and ask them to stop at once."""
        if not self._begun:
            self._begun = True
            self._claims.stopping = True
            self._tell.stopping(len(self._runs.executing))
            self._executor.give_back_gathered()
            self._after(self._timeout / 1_000, self._ask_all)
            self._wake_event.stop()
        if hurry and not self._hurried:
            self._ask_all()

    def close(self) -> None:
        """The worker has ended: no further step is needed."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask_all(self) -> None:
        self._hurried = True
        executing = list(self._runs.executing.values())
        if executing:
            self._tell.cutting_off(len(executing))
            for run in executing:
                self._executor.stop(run, Stop.SHUTDOWN)
        self._after(GRACE, self._give_back)
        self._wake_event.stop()

    def _give_back(self) -> None:
        executing = list(self._runs.executing.values())
        given = sum(self._runs.settle(run, release(run.claimed)) for run in executing)
        if given:
            self.abandoned = given
            self._tell.abandoned(given)
        self._after(DELIVERY, self._give_up)
        self._wake_event.stop()

    def _give_up(self) -> None:
        self._claims.giving_up = True
        self._wake_event.stop()
        self._after(CUT, self._cut)

    def _cut(self) -> None:
        self.abandoned += 1
        self.cut_off()

    def _after(self, seconds: float, step: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, step)
