"""Steps of the wall clock: detect them, and keep the lengths of delays and time limits.

A length that a caller gave (`delay`, a retry's backoff, `ttl`, `unique_ttl`) is stored as a point in time on
the wall clock. When that clock is set back by an hour, these points would come an hour late; when it is set
forward, jobs would expire at once. The engine compares the wall clock with the monotonic one: when they drift
apart suddenly, it moves these points along. A job with `run_at` stays due at that time of day. While the
machine is suspended, only the wall clock advances: that is not a step.
"""

import logging

from .clock import Clock
from .enginejob import EngineJob
from .states import State

STEP = 10_000
"""Milliseconds. A smaller change is ignored: NTP slews, and a database server's clock is measured."""

logger = logging.getLogger("djqueue.engine")


class StepDetector:
    """Comparison of the two clocks. Not thread-safe; two threads may see the same step: see `follow`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        tick = clock.monotonic()
        self._offset = clock.now() - tick
        self._suspended = clock.elapsed() - tick

    @property
    def offset(self) -> int:
        """Milliseconds from `Clock.elapsed` to the wall clock, as of the last step that was followed."""
        return self._offset - self._suspended

    def look(self, now: int, tick: int) -> bool:
        """Return whether the wall clock was set since the last `follow`; cheap enough for every claim."""
        change = now - tick - self._offset
        if -STEP < change < STEP:
            self._offset += change
            return False
        return True

    def follow(self, now: int, tick: int) -> int:
        """Return the milliseconds by which the wall clock was set, counted once."""
        change = now - tick - self._offset
        suspended = self._clock.elapsed() - tick
        step = change - (suspended - self._suspended)
        self._offset += change
        self._suspended = suspended
        if -STEP < step < STEP:
            return 0
        log_step(step)
        return step


def log_step(step: int) -> None:
    """Log that the wall clock was set by so many milliseconds."""
    logger.warning(
        "The wall clock was set %s by %.1f s; pending jobs keep their remaining delays and time limits.",
        "forward" if step > 0 else "back",
        abs(step) / 1_000,
    )


def keep_lengths(job: EngineJob, step: int) -> bool:
    """Move the times of a live job along with a step; return whether its record has changed."""
    relative = is_relative(job)
    job.stepped += step
    if relative:
        job.run_at += step
    options = job.options
    return relative or options.ttl is not None or options.unique_ttl is not None


def is_relative(job: EngineJob) -> bool:
    """Return whether a pending job waits for a length of time to pass, and not for a point in time."""
    if job.state is not State.DELAYED and job.state is not State.BLOCKED:
        return False
    if job.attempts or job.stalls:
        return True  # It failed and waits for its next attempt.
    enqueued_at = job.created_at + job.stepped
    if job.options.delay is None:
        # Due from its enqueue on: blocked, or delayed because its producer's clock was slightly ahead.
        return job.run_at <= enqueued_at
    return job.run_at == enqueued_at + job.options.delay
