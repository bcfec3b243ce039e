"""The events of a worker: each feeds the log, the counters and the signals. Payloads are never logged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from logging import DEBUG, ERROR, INFO, WARNING
from threading import Lock
from typing import Any

from django.dispatch import Signal

from djqueue.client.announcing import announcer
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.errorgroups import tally
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Claimed, Outcome
from djqueue.core.logs import Log, type_name
from djqueue.core.messages import ThrottledLog, hide_row, in_one_line
from djqueue.core.overview import Finding
from djqueue.core.workers import Unhandled
from djqueue.signals import (
    job_cancelled,
    job_completed,
    job_failed,
    job_retried,
    job_started,
)

from . import problems
from .runs import Run
from .tracebacks import exc_info

MAIN_OPERATION = "claim and finish"
"""The operation that a worker repeats all the time. Its success also ends the outage of operations that are
not retried."""
OUTAGE_LOG_DELAY = 5_000
"""Milliseconds after which an outage is logged before it is over: it is longer than a restart."""
CHECK_STORAGE = "`manage.py djqueue doctor` on this machine says more."
"""Remedy for errors that name none."""
RETRIED_WITHIN = 5_000
"""Milliseconds for which a failed operation keeps an outage open, because it may never be retried."""
REPEATED = 60_000
"""Milliseconds between two records about a failure that lasts, or that comes and goes."""

logger = Log("djqueue.worker")


@dataclass(slots=True)
class Counters:
    """Numbers of a worker's attempts since it started, by outcome."""

    claimed: int = 0
    completed: int = 0
    retried: int = 0
    """Attempts that failed and are retried."""
    failed: int = 0
    """Jobs that failed permanently."""
    cancelled: int = 0
    released: int = 0
    """Attempts that do not count: snoozed by the handler, or interrupted by the worker's shutdown."""
    lost: int = 0
    """Attempts that ended after their lease: their results were discarded."""

    @property
    def processed(self) -> int:
        """Attempts whose outcomes the storage accepted."""
        return self.completed + self.retried + self.failed + self.cancelled


def worker_event(level: int, text: str) -> Callable[..., None]:
    """Return a method that logs an event of the worker: the text takes its id and the method's arguments."""

    def log(self: "RunEvents", *values: object) -> None:
        logger.log(level, text, self._worker_id, *values)

    return log


def run_event(level: int, text: str) -> Callable[..., None]:
    """Return a method that logs an event of a run: the text takes its job and the other arguments."""

    def log(self: "RunEvents", run: Run, *values: object) -> None:
        self._log(level, run, text, *values)

    return log


class RunEvents:
    """Counts, logs and announces the events of one worker."""

    def __init__(self, worker_id: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.counters = Counters()
        self._worker_id = worker_id
        self._outages = OutageLog(worker_id, clock.monotonic)
        self._summed = 0
        self._version = get_settings().version
        self._throttled = ThrottledLog(logger, 60.0)

    @property
    def verbose(self) -> bool:
        """Whether the start and end of every job are logged or have signal receivers."""
        return bool(job_started.receivers or job_completed.receivers) or logger.isEnabledFor(DEBUG)

    @property
    def is_behind(self) -> bool:
        """Whether signal receivers are so slow that the worker must not claim more jobs."""
        return announcer.is_behind

    # Outcomes.

    def started(self, run: Run) -> None:
        """Record that a job was handed to its handler."""
        self._log(DEBUG, run, "%s started")
        if job_started.receivers:
            self._announce(job_started, run)

    def completed(self, run: Run, now: int) -> None:
        """Record that the storage accepted a job's completion."""
        self.counters.completed += 1
        if run.overran:
            self._log(WARNING, run, "%s completed %d ms past its timeout", run.overran_by(now))
        elif logger.isEnabledFor(DEBUG):
            self._log(DEBUG, run, "%s completed in %d ms", now - run.since)
        if job_completed.receivers:
            self._announce(job_completed, run, duration=(now - run.since) / 1_000)

    def retried(self, run: Run) -> None:
        """Record that an attempt failed and will be retried."""
        self.counters.retried += 1
        outcome = _outcome(run)
        self._count_error(run, outcome, is_final=False)
        delay = outcome.delay / 1_000
        self._log(
            WARNING,
            run,
            "%s failed (%d of %d attempts), retrying in %.1f s: %s",
            run.claimed.failures + 1,
            run.claimed.options.max_attempts,
            delay,
            _error_text(outcome),
            error=run.error,
        )
        if job_retried.receivers:
            self._announce(job_retried, run, error=outcome.error, delay=delay)

    def failed(self, run: Run) -> None:
        """Record that a job failed permanently and is now a dead letter."""
        self.counters.failed += 1
        outcome = _outcome(run)
        self._count_error(run, outcome, is_final=True)
        self._log(
            ERROR,
            run,
            "%s failed permanently (%s): %s",
            outcome.reason,
            _error_text(outcome),
            error=run.error,
        )
        if job_failed.receivers:
            self._announce(job_failed, run, reason=outcome.reason, error=outcome.error)

    def cancelled(self, run: Run) -> None:
        """Record that a job ended as cancelled."""
        self.counters.cancelled += 1
        self._log(INFO, run, "%s cancelled")
        if job_cancelled.receivers:
            reason = "" if run.outcome is None else run.outcome.reason
            self._send_signal(job_cancelled, run.claimed.name, **_of_job(run), reason=reason)

    def released(self, run: Run) -> None:
        """Record that a job returned to its queue without using up an attempt."""
        self.counters.released += 1
        self._log(INFO, run, "%s released; it runs again later")

    def lost(self, run: Run) -> None:
        """Record that a run ended after its lease was lost."""
        self.counters.lost += 1
        self._log(WARNING, run, "Lost the lease on job %s; its result was discarded")

    # Handlers. Each method that `run_event` returns is called with a run, and with what the text takes.

    def stop_requested(self, run: Run) -> None:
        """Log that a handler was asked to stop, and why."""
        self._log(INFO, run, "%s was asked to stop (%s)", run.stop.name.lower())

    overran = run_event(
        WARNING,
        "%s exceeded its timeout; it runs in a thread and stops only if the handler checks "
        "current_job().cancelled",
    )
    stuck = run_event(
        ERROR,
        "%s is still running %.0f s after its timeout. This process finishes its other jobs and is "
        "replaced; the job then counts as timed out. Choose the executor 'isolated' for such jobs",
    )
    blocked_for_good = run_event(
        ERROR,
        "%s blocks the event loop %.0f s after its timeout. This process ends, and is replaced; the job then "
        "counts as stalled. Choose the executor 'isolated' for such jobs",
    )
    overrunning = run_event(WARNING, "%s is still running %.0f s after its timeout, and keeps its slot")
    called_twice = run_event(
        WARNING, "%s: the handler called done() more than once; only the first call counts"
    )
    denied = run_event(WARNING, "%s was denied access to %s")

    def abandoned(self, run: Run, outcome: Outcome) -> None:
        """Log that a job did not stop, and what becomes of its handler and of the job."""
        self._log(
            WARNING,
            run,
            "%s did not stop when it was asked to: %s, and %s",
            "its process was killed" if run.in_process else "its handler runs on until this process exits",
            "the job returned to its queue" if outcome.kind == "release" else "the attempt failed (timeout)",
        )

    def loop_blocked(self, runs: Sequence[Run], seconds: float) -> None:
        """Log that a handler keeps the event loop from running anything else."""
        names = ", ".join(map(_name, runs)) or "none"
        logger.error(
            "The event loop has been blocked for %.0f s: nothing else starts or ends in this worker. Jobs on "
            "it: %s. Use a function that is not async, or await what takes time",
            seconds,
            names,
        )

    def backoff_failed(self, run: Run, what: str, error: BaseException) -> None:
        """Log that the project's code gave no valid delay until the next attempt of a job.

        what: A sentence about it, without its end.
        """
        name = run.claimed.name
        text = "Job type %s: %s; the backoff of the job's options applies"
        self._throttled.log(ERROR, f"{name} {what}", text, name, what, exc_info=error)

    def cleanup_failed(self, run: Run | None, error: BaseException) -> None:
        """Log that Django's database connections had to be given up after a job or an idle time."""
        logger.warning(
            "%s left database connections that the thread cannot use further: %s. The thread continues",
            f"Worker {self._worker_id}" if run is None else _name(run),
            error,
            exc_info=error,
            extra={} if run is None else _extra(run.claimed),
        )

    def unexpected(self, claimed: Claimed) -> None:
        """Log that the storage returned a job with a name that was not requested."""
        logger.error(
            "The storage returned a job named %r, for which this worker has no handler; the job was released",
            claimed.name,
            extra=_extra(claimed),
        )

    def unhandled(self, jobs: Unhandled) -> None:
        """Log that jobs are waiting which no live worker can run."""
        logger.warning(
            "Jobs named %s are waiting in queue %s (%d), and no live worker has a handler for them. Deploy "
            "the code that defines the job and restart runworkers, or cancel the jobs.",
            jobs.name,
            jobs.queue,
            jobs.jobs,
            extra={"queue": jobs.queue, "job_name": jobs.name},
        )

    # The worker. Each method that `worker_event` returns is called with what the text takes after the id.

    worker_started = worker_event(INFO, "Worker %s started")
    stopping = worker_event(INFO, "Worker %s is stopping; jobs still running: %d")
    asking_to_stop = worker_event(WARNING, "Worker %s: asking its running jobs to stop: %d")
    undelivered = worker_event(
        ERROR,
        "Worker %s could not report the results of jobs to the storage, which will run again: %d",
    )
    worker_stopped = worker_event(INFO, "Worker %s stopped")
    command_received = worker_event(INFO, "Worker %s received the command: %s")
    command_unknown = worker_event(
        WARNING, "Worker %s ignored the unknown command %r; a newer version of djqueue may have sent it"
    )
    template_slow = worker_event(
        WARNING,
        "Worker %s: jobs in processes of their own have waited %.0f s for the import of their modules",
    )
    strays_left = worker_event(
        ERROR, "Worker %s could not kill all processes that jobs have left behind; still running: %d"
    )

    def status_unknown(self, pid: int, error: BaseException) -> None:
        """Log that it is unknown how a process of a job has ended."""
        text = "Worker %s: the template process could not tell how the process %d of a job has ended (%s)"
        logger.warning(text, self._worker_id, pid, type_name(error))

    def template_failed(self, error: BaseException, retry: float) -> None:
        """Log that the template process of jobs in processes of their own failed."""
        logger.error(
            "Worker %s: jobs in processes of their own cannot start, trying again in %g s: %s",
            self._worker_id,
            retry,
            error,
        )

    def no_thread(self, error: BaseException, retry: float) -> None:
        """Log that the system has no thread for a job at the moment."""
        text = "Worker %s cannot start a thread for its jobs: %s. They wait, and it tries again every %g s"
        self._throttled.log(ERROR, "no thread", text, self._worker_id, error, retry)

    def loop_stopped(self, error: BaseException) -> None:
        """Log that a task or a callback of a handler has stopped the worker's event loop."""
        logger.error(
            "Worker %s: a task or a callback that a job has started raised %s on the event loop, or stopped "
            "it; the worker goes on",
            self._worker_id,
            type_name(error),
            exc_info=error,
        )

    def dump_failed(self, error: BaseException) -> None:
        """Log that the stacks of threads and tasks could not be read or saved."""
        logger.error("Worker %s could not save its stack dump", self._worker_id, exc_info=error)

    def ignored(self, subject: str) -> None:
        """Log that a request, or a result of an abandoned handler, came after the worker had ended."""
        logger.debug("Ignored %s, because worker %s has stopped", subject, self._worker_id)

    def summary(self, executing: int) -> None:
        """Log the jobs processed since the last summary, if there are any."""
        counters = self.counters
        processed = counters.processed - self._summed
        if processed:
            self._summed = counters.processed
            logger.info(
                "Jobs since the last summary: %d; running: %d; total: %d completed, %d failed, "
                "%d retried, %d cancelled",
                processed,
                executing,
                counters.completed,
                counters.failed,
                counters.retried,
                counters.cancelled,
            )

    # The storage.

    def storage_failed(self, operation: str, error: BaseException) -> None:
        """Log that an operation of the storage failed, as `OutageLog` does."""
        self._outages.failed(operation, error)

    def storage_silent(self, operation: str, since: int, text: str) -> None:
        """Log that an operation has waited for the storage since a time in monotonic milliseconds."""
        self._outages.failed(operation, StorageUnavailableError(text), since)

    def storage_worked(self, operation: str) -> None:
        """Note that an operation of the storage worked, which may end an outage."""
        self._outages.worked(operation)

    def _log(
        self, level: int, run: Run, text: str, *values: object, error: BaseException | None = None
    ) -> None:
        """Log an event of a run; a traceback begins at its handler."""
        logger.log(level, text, _name(run), *values, exc_info=exc_info(error), extra=_extra(run.claimed))

    def _count_error(self, run: Run, outcome: Outcome, *, is_final: bool) -> None:
        queue, name = run.claimed.queue, run.claimed.name
        tally.add(queue, name, outcome.error, version=self._version, reason=outcome.reason, is_final=is_final)

    def _send_signal(self, signal: Signal, name: str, **about: Any) -> None:
        announcer.announce(signal, name, **about)

    def _announce(self, signal: Signal, run: Run, **about: Any) -> None:
        of_run = {"attempt": run.claimed.attempts, "worker": self._worker_id}
        self._send_signal(signal, run.claimed.name, **_of_job(run), **of_run, **about)


class OutageLog:
    """Logs the failures of a worker's storage. All methods may be called from any thread.

    An unavailable storage, such as a scheduler during its restart, is an outage: one record is logged when it
    is over, and one before that, and again each minute, if it lasts. It is over when every operation that
    failed works again, or has not been retried for a while: a slow or partly unavailable storage still
    answers some calls. Any other error is a fault, and is logged with its traceback, each operation's at most
    once a minute.
    """

    def __init__(self, worker_id: str, monotonic: Callable[[], int]) -> None:
        self._worker_id = worker_id
        self._part = f"storage of {worker_id}"
        self._monotonic = monotonic
        self._lock = Lock()
        self._faulty: dict[str, bool] = {}
        """Operations whose last call raised a fault, with whether that was logged."""
        self._unavailable: dict[str, int] = {}
        """Operations whose last call found the storage unavailable, with the time of that call."""
        self._since = 0
        self._answered_at: int | None = None
        """Time of the first success after the last failure."""
        self._logged_at: int | None = None
        """Time of the last record about the current outage."""
        self._throttled = ThrottledLog(logger, REPEATED / 1_000, lambda: monotonic() / 1_000)
        """Faults of each operation, and ends of short outages, which may come and go all the time."""

    def failed(self, operation: str, error: BaseException, since: int | None = None) -> None:
        """Note that an operation of the storage failed, or has waited since this monotonic millisecond."""
        if isinstance(error, StorageUnavailableError):
            self._note_unavailable(operation, error, since)
            return
        hide_row(error)
        self._note_problem(f"the storage fails ({operation}): {in_one_line(error)}", "")
        was_logged = self._throttled.log(
            ERROR,
            operation,
            "Worker %s: the storage failed (%s); retrying until the operation succeeds: %s",
            self._worker_id,
            operation,
            error,
            exc_info=error,
        )
        with self._lock:
            self._faulty[operation] = was_logged or self._faulty.get(operation, False)

    def worked(self, operation: str) -> None:
        """Note that an operation of the storage worked."""
        if not self._faulty and not self._unavailable:
            return
        with self._lock:
            was_faulty = self._faulty.pop(operation, False)
            ends = operation in self._unavailable or (operation == MAIN_OPERATION and bool(self._unavailable))
            is_over = ends and self._is_over_with(operation)
            if not self._faulty and not self._unavailable:
                problems.note(self._part, ())
        if was_faulty:
            logger.warning("Worker %s: the storage works again (%s)", self._worker_id, operation)
        if is_over:
            log = partial(self._throttled.log, INFO, None) if self._logged_at is None else logger.warning
            log(
                "Worker %s: the storage is available again after %.1f s; reporting the jobs that finished "
                "meanwhile",
                self._worker_id,
                ((self._answered_at or self._since) - self._since) / 1_000,
            )

    def _is_over_with(self, operation: str) -> bool:
        """Note that an operation works again; return whether that ends the outage."""
        now = self._monotonic()
        self._unavailable.pop(operation, None)
        if self._answered_at is None:
            self._answered_at = now
        if any(now - failed_at < RETRIED_WITHIN for failed_at in self._unavailable.values()):
            return False
        self._unavailable.clear()
        return True

    def _note_unavailable(self, operation: str, error: StorageUnavailableError, since: int | None) -> None:
        now = self._monotonic()
        with self._lock:
            if not self._unavailable:
                self._since, self._logged_at = now if since is None else since, None
            self._unavailable[operation] = now
            self._answered_at = None
            has_lasted = now - self._since >= OUTAGE_LOG_DELAY
            lasts = has_lasted and (self._logged_at is None or now - self._logged_at >= REPEATED)
            if lasts:
                self._logged_at = now
            if has_lasted:
                # Within the lock: another thread, whose call works, would end the problem before it is noted.
                lasted = f"{(now - self._since) / 1_000:.0f} s ({operation}): {in_one_line(error)}"
                self._note_problem(f"the storage has been unavailable for {lasted}", error.remedy)
        if lasts:
            logger.warning(
                "Worker %s: the storage has been unavailable for %.1f s (%s: %s); running jobs continue, "
                "and their results are reported when the storage is available again",
                self._worker_id,
                (now - self._since) / 1_000,
                operation,
                error,
            )

    def _note_problem(self, text: str, remedy: str) -> None:
        text = text.removesuffix(remedy).rstrip()
        problems.note(self._part, [Finding("worker.storage", "error", text, remedy or CHECK_STORAGE)])


def _outcome(run: Run) -> Outcome:
    assert run.outcome is not None
    return run.outcome


def _error_text(outcome: Outcome) -> str:
    error = outcome.error
    return "" if error is None else error.summary


def _of_job(run: Run) -> dict[str, Any]:
    return {"queue": run.claimed.queue, "job_id": run.claimed.id}


def _name(run: Run) -> str:
    return f"{run.claimed.name} [{run.claimed.id}]"


def _extra(claimed: Claimed) -> dict[str, Any]:
    return {"job_id": claimed.id, "queue": claimed.queue, "attempt": claimed.attempts}
