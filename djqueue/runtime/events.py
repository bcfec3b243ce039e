"""What a worker tells of itself: a function for each event, which feeds log, counters and signals."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

from djqueue.client.announcing import announcer
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.job import Claimed
from djqueue.core.unhandled import Unhandled
from djqueue.signals import (
    job_cancelled,
    job_completed,
    job_dead,
    job_failed,
    job_retrying,
    job_started,
)

from .outages import OutageLog
from .tracebacks import exc_info

if TYPE_CHECKING:
    from .runs import Run

logger = logging.getLogger("djqueue.worker")


@dataclass(slots=True)
class Counters:
    """What became of a worker's runs, since it started."""

    claimed: int = 0
    completed: int = 0
    retried: int = 0
    """Failed, with attempts left."""
    failed: int = 0
    """Failed for good."""
    cancelled: int = 0
    released: int = 0
    """Given back unused: snoozed by the handler, or cut off by the worker's end."""
    lost: int = 0
    """Ended after their lease: what they did does not count."""

    @property
    def processed(self) -> int:
        """Runs that came to an end here and count."""
        return self.completed + self.retried + self.failed + self.cancelled


class RunEvents:
    """Counts and logs. Payloads are never logged."""

    def __init__(self, worker_id: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.counters = Counters()
        self._worker_id = worker_id
        self._outages = OutageLog(worker_id, clock.monotonic)
        self._summed = 0

    @property
    def verbose(self) -> bool:
        """Whether somebody wants to know of the start and the end of every single job."""
        return bool(job_started.receivers or job_completed.receivers) or logger.isEnabledFor(logging.DEBUG)

    @property
    def is_behind(self) -> bool:
        """Whether receivers of signals are so slow that nothing more is to be claimed."""
        return announcer.is_behind

    # Runs.

    def started(self, run: "Run") -> None:
        """A job has been handed to its handler."""
        logger.debug("%s started", _name(run), extra=_extra(run.claimed))
        if job_started.receivers:
            self._announce(job_started, run)

    def completed(self, run: "Run", now: int) -> None:
        """A job's completion has been accepted."""
        self.counters.completed += 1
        if run.overran:
            logger.warning(
                "%s completed %d ms past its timeout", _name(run), run.overran_by(now),
                extra=_extra(run.claimed),
            )  # fmt: skip
        elif logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s completed in %d ms", _name(run), now - run.since, extra=_extra(run.claimed))
        if job_completed.receivers:
            self._announce(job_completed, run, duration=(now - run.since) / 1_000)

    def retried(self, run: "Run") -> None:
        """A run has failed, and another one will follow."""
        self.counters.retried += 1
        outcome = run.outcome
        assert outcome is not None
        options = run.claimed.options
        logger.warning(
            "%s failed (%d of %d attempts), retrying in %.1f s: %s",
            _name(run),
            run.claimed.failures + 1,
            options.max_attempts,
            outcome.delay / 1_000,
            _error_text(run),
            exc_info=exc_info(run.error),
            extra=_extra(run.claimed),
        )
        if job_failed.receivers:
            self._announce(job_failed, run, error=outcome.error)
        if job_retrying.receivers:
            self._announce(job_retrying, run, error=outcome.error, delay=outcome.delay / 1_000)

    def failed(self, run: "Run") -> None:
        """A job has become a dead letter."""
        self.counters.failed += 1
        outcome = run.outcome
        assert outcome is not None
        logger.error(
            "%s failed permanently (%s): %s",
            _name(run),
            outcome.reason,
            _error_text(run),
            exc_info=exc_info(run.error),
            extra=_extra(run.claimed),
        )
        if job_failed.receivers:
            self._announce(job_failed, run, error=outcome.error)
        if job_dead.receivers:
            about = {"reason": outcome.reason, "error": outcome.error}
            announcer.announce(job_dead, run.claimed.name, **_of_job(run), **about)

    def cancelled(self, run: "Run") -> None:
        """A job has ended as cancelled."""
        self.counters.cancelled += 1
        logger.info("%s cancelled", _name(run), extra=_extra(run.claimed))
        if job_cancelled.receivers:
            reason = "" if run.outcome is None else run.outcome.reason
            announcer.announce(job_cancelled, run.claimed.name, **_of_job(run), reason=reason)

    def released(self, run: "Run") -> None:
        """A run has been given back unused."""
        self.counters.released += 1
        logger.info("%s released; it runs again later", _name(run), extra=_extra(run.claimed))

    def lost(self, run: "Run") -> None:
        """A run has ended after its lease."""
        self.counters.lost += 1
        logger.warning(
            "Lost the lease on job %s; its result was discarded",
            _name(run),
            extra=_extra(run.claimed),
        )

    def unhandled(self, claimed: Claimed) -> None:
        """The storage gave out a job that was not asked for."""
        logger.error(
            "The storage returned a job named %r, for which this worker has no handler; the job was released",
            claimed.name,
            extra=_extra(claimed),
        )

    # Handlers.

    def stop_asked(self, run: "Run") -> None:
        """A handler has been asked to stop."""
        logger.info(
            "%s was asked to stop (%s)",
            _name(run),
            run.stop.name.lower(),
            extra=_extra(run.claimed),
        )

    def no_worker_knows(self, found: Unhandled) -> None:
        """Jobs wait that no live worker can run."""
        logger.warning(
            "%d job(s) named %s are waiting in queue %s, and no live worker has a handler for that name. "
            "Deploy the code that defines the job and restart runworkers, or cancel the jobs.",
            found.jobs,
            found.name,
            found.queue,
            extra={"queue": found.queue, "job_name": found.name},
        )

    def overran(self, run: "Run") -> None:
        """A handler in a thread has run longer than its timeout: it can only be asked to stop."""
        logger.warning(
            "%s exceeded its timeout; it runs in a thread and stops only if the handler checks "
            "current_job().cancelled",
            _name(run),
            extra=_extra(run.claimed),
        )

    def bad_backoff(self, run: "Run", error: BaseException) -> None:
        """A job type's own backoff function failed."""
        logger.error(
            "%s: the backoff function raised an exception; using the default backoff",
            _name(run),
            exc_info=error,
            extra=_extra(run.claimed),
        )

    def cleanup_failed(self, run: "Run | None", error: BaseException) -> None:
        """Django's database connections could not be cleaned after a job, or after an idle time."""
        logger.warning(
            "%s: closing the thread's database connections failed; the thread goes on",
            f"Worker {self._worker_id}" if run is None else _name(run),
            exc_info=error,
            extra={} if run is None else _extra(run.claimed),
        )

    def called_twice(self, run: "Run") -> None:
        """A callback handler has called `done` again."""
        logger.warning(
            "%s: the handler called done() more than once; only the first call counts",
            _name(run),
            extra=_extra(run.claimed),
        )

    def too_late(self, what: str) -> None:
        """A handler that was given up has said something after its worker's end."""
        logger.debug("Ignored %s, because worker %s has stopped", what, self._worker_id)

    # The worker.

    def worker_started(self) -> None:
        """The worker claims its first jobs."""
        logger.info("Worker %s started", self._worker_id)

    def stopping(self, executing: int) -> None:
        """The worker claims no more."""
        logger.info("Worker %s is stopping; %d jobs are still running", self._worker_id, executing)

    def steered(self, command: str) -> None:
        """Somebody has told the worker something by way of the storage."""
        logger.info("Worker %s received the command: %s", self._worker_id, command)

    def not_understood(self, command: str) -> None:
        """A command is of another version."""
        logger.warning(
            "Worker %s ignored the unknown command %r; a newer version of djqueue may have sent it",
            self._worker_id,
            command,
        )

    def dump_failed(self, error: BaseException) -> None:
        """The stacks of threads and tasks could not be read, or not be kept."""
        logger.error("Worker %s could not save its stack dump", self._worker_id, exc_info=error)

    def cutting_off(self, executing: int) -> None:
        """The time for running jobs is over."""
        logger.warning(
            "Worker %s: asking %d jobs that are still running to stop",
            self._worker_id,
            executing,
        )

    def abandoned(self, executing: int) -> None:
        """Jobs that did not stop are given back."""
        logger.warning(
            "Worker %s: %d jobs did not stop and were released; they run again on another worker",
            self._worker_id,
            executing,
        )

    def undelivered(self, runs: int) -> None:
        """The worker ends and could not tell the storage of its last runs."""
        logger.error(
            "Worker %s could not report the results of %d jobs to the storage; the jobs will run again",
            self._worker_id,
            runs,
        )

    def worker_stopped(self) -> None:
        """The worker has ended."""
        logger.info("Worker %s stopped", self._worker_id)

    def summary(self, executing: int) -> None:
        """A line on what has happened since the last such line, if anything has."""
        counters = self.counters
        news = counters.processed - self._summed
        if news:
            self._summed = counters.processed
            logger.info(
                "Processed %d jobs since the last summary; %d running; total: %d completed, %d failed, "
                "%d retried, %d cancelled",
                news,
                executing,
                counters.completed,
                counters.failed,
                counters.retried,
                counters.cancelled,
            )

    # The storage.

    def away(self, part: str, error: BaseException) -> None:
        """An operation of the storage failed. See `OutageLog`."""
        self._outages.failed(part, error)

    def back(self, part: str) -> None:
        """An operation of the storage worked."""
        self._outages.worked(part)

    def _announce(self, signal: Signal, run: "Run", **about: Any) -> None:
        of_run = {"attempt": run.claimed.attempts, "worker": self._worker_id}
        announcer.announce(signal, run.claimed.name, **_of_job(run), **of_run, **about)


def _of_job(run: "Run") -> dict[str, Any]:
    return {"queue": run.claimed.queue, "job_id": run.claimed.id}


def _name(run: "Run") -> str:
    return f"{run.claimed.name} [{run.claimed.id}]"


def _error_text(run: "Run") -> str:
    error = run.outcome.error if run.outcome is not None else None
    return "" if error is None else f"{error.type}: {error.message}"


def _extra(claimed: Claimed) -> dict[str, Any]:
    return {"job_id": claimed.id, "queue": claimed.queue, "attempt": claimed.attempts}
