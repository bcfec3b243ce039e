"""The shutdown of a worker: stop claiming, wait, ask running jobs to stop, release them, give up."""

import asyncio
from collections.abc import Callable

from .claiming import ClaimLoop
from .context import WorkerContext
from .executors import Executor
from .runs import Stop

RELEASE_AFTER = 2.0
"""Seconds that jobs have between being asked to stop and being released."""
REPORT_TIMEOUT = 5.0
"""Seconds that an unavailable storage has to accept the last outcomes."""
TICK = 0.1
"""Seconds between checks whether only stuck jobs are left."""
CALL_TIMEOUT = 1.0
"""Seconds after which a storage call that does not return is abandoned."""


class Shutdown:
    """The steps of a shutdown, each with its time limit. All methods are called on the loop."""

    def __init__(self, context: WorkerContext, claim_loop: ClaimLoop, executor: Executor) -> None:
        self._loop = context.loop
        self._runs = context.runs
        self._wake_event = context.wake_event
        self._events = context.events
        self._timeout = context.options.shutdown_timeout / 1_000
        self._claim_loop = claim_loop
        self._executor = executor
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._has_asked = False
        self._has_released = False
        self.abandoned = 0
        """Number of handlers and storage calls that did not end; their threads may still run."""
        self.cancel_claiming: Callable[[], object] = lambda: None
        """Cancels the claim loop, whatever it waits for."""

    def begin(self, *, hurry: bool) -> None:
        """Stop claiming; wait for the running jobs, or with `hurry` ask them to stop at once."""
        if not self._has_begun:
            self._has_begun = True
            self._claim_loop.stopping = True
            self._events.stopping(len(self._runs.executing))
            self._executor.release_waiting()
            self._after(self._timeout, self._ask_to_stop)
            self._wake_event.stop()
        if hurry and not self._has_asked:
            self._ask_to_stop()

    def recycle(self) -> None:
        """Stop, but wait only for jobs that have not exceeded their timeout: the others cannot be stopped."""
        self.begin(hurry=False)
        self._release_stuck()

    def _release_stuck(self) -> None:
        if self._has_released:
            return
        if all(run.overran and not run.in_process for run in self._runs.executing.copy().values()):
            self._release()
        else:
            self._loop.call_later(TICK, self._release_stuck)

    def close(self) -> None:
        """Cancel the next step: the worker has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask_to_stop(self) -> None:
        self._has_asked = True
        executing = list(self._runs.executing.values())
        if executing:
            self._events.asking_to_stop(len(executing))
            for run in executing:
                self._executor.stop(run, Stop.SHUTDOWN)
        self._after(RELEASE_AFTER, self._release)
        self._wake_event.stop()

    def _release(self) -> None:
        self._has_released = True
        # Before another worker may start their jobs.
        self._executor.kill()
        for run in list(self._runs.executing.values()):
            outcome = self._executor.give_up(run)
            if self._runs.settle(run, outcome):
                self.abandoned += 1
                self._events.abandoned(run, outcome)
        self._after(REPORT_TIMEOUT, self._give_up)
        self._wake_event.stop()

    def _give_up(self) -> None:
        self._claim_loop.giving_up = True
        self._wake_event.stop()
        self._after(CALL_TIMEOUT, self._cancel)

    def _cancel(self) -> None:
        self.abandoned += 1
        self.cancel_claiming()

    def _after(self, seconds: float, step: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, step)
