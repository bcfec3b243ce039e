"""Handlers that continue after their timeout, in the worker's own process: they cannot be stopped.

A supervised worker finishes its other jobs, reports the stuck ones as timed out, and ends its process, so
that their threads end. Their jobs are retried after that. Any other worker logs them.
"""

from djqueue.core.job import Outcome
from djqueue.runtime.context import WorkerContext
from djqueue.runtime.runs import Run

PATIENCE = 5.0
"""Seconds after its timeout in which a handler should stop."""
EVERY = 60.0
"""Seconds between two log entries about a handler that does not."""
APART = 8_000
"""Minimum of milliseconds until the retry: the process ends before, even if the storage hangs."""


class OverrunWatch:
    """Watches the runs of a worker whose timeout is over. Runs on the loop."""

    def __init__(self, worker: WorkerContext) -> None:
        self._control = worker.control
        self._loop = worker.loop
        self._clock = worker.clock
        self._events = worker.events

    def watch(self, run: Run) -> None:
        """Check later whether a run has ended."""
        self._loop.call_later(PATIENCE, self._check, run)

    def _check(self, run: Run) -> None:
        if run.outcome is not None or self._control.stopping:
            return
        late = run.overran_by(self._clock.monotonic()) / 1_000
        if self._control.is_replaceable:
            self._events.stuck(run, late)
            self._control.recycle()
            return
        self._events.overrunning(run, late)
        self._loop.call_later(EVERY, self._check, run)


def apart(outcome: Outcome) -> Outcome:
    """Return the outcome of a run whose handler still runs, with a delay within which its process ends."""
    return outcome._replace(delay=max(outcome.delay, APART)) if outcome.kind == "retry" else outcome
