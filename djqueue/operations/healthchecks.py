"""Health checks: whether the storage answers, and whether jobs that are due are being run.

Each check has a stable name and returns findings, which say what is wrong and how to fix it. The URL, the
command line and the doctor share these checks. `HealthRun` runs them within a time limit, whatever hangs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from shlex import quote
from threading import Event, Lock
from typing import Any, Literal, NamedTuple

from django.db import Error, connections, router

from djqueue import models
from djqueue.client import get_storage
from djqueue.conf import HealthSettings, get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import remaining, within
from djqueue.core.errors import ConfigurationError, DjqueueError, StorageUnavailableError
from djqueue.core.explain import BY_WORD
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line, numbered
from djqueue.core.metrics import MINUTE
from djqueue.core.overview import Evidence, Finding, Overview, QueueOverview
from djqueue.core.states import State
from djqueue.core.threads import after_fork, beside, start_daemon
from djqueue.core.workers import WorkerInfo, claiming, is_silent, unhandled, unserved
from djqueue.runtime import problems
from djqueue.storage.base import Storage
from djqueue.storage.tables.leaderlease import MIRROR, stale_holder

from .mirror import is_mirrored

logger = Log("djqueue.health")

MAX_EXPLAINED = 20
"""Maximum waiting jobs of a queue of which is asked why they do not run."""
MAX_PASSED = 1_000
"""Maximum waiting jobs among which those are searched if some are held."""
MAX_NAMED = 20
"""Maximum queues that a finding names."""
WATCH_PATIENCE = 3.0
"""Seconds that a worker's end waits for a run of the checks."""
REPORT_TTL = 1_000
"""Milliseconds for which a monitor answers with the last report."""
START_WORKERS = "Start workers with `manage.py runworkers`, or see why they stopped."
NO_ANSWER = (
    "If the error names no remedy: check that its server is running and can be reached from this machine, "
    "that `manage.py migrate` has been run, and the setting STORAGE."
)
WRONG_SETTING = "Correct the setting. `manage.py djqueue doctor` looks at all of them."


Status = Literal["ok", "failed", "unknown"]


class HealthFacts(NamedTuple):
    """The state of the storage that the checks judge."""

    storage: Storage
    overview: Overview
    workers: Sequence[WorkerInfo]
    """Workers that are live and claim jobs."""
    bounds: HealthSettings
    silent: Sequence[WorkerInfo] = ()
    """Workers that have not sent a heartbeat for long, and have not unregistered."""

    @property
    def at(self) -> int:
        """The storage's time, in UTC milliseconds."""
        return self.overview.at

    def overdue(self) -> list[QueueOverview]:
        """Return the queues that are not paused and have had a job due, that is not held, for longer than
        the bound.
        """
        return [queue for queue in self.overview.queues if self.is_overdue(queue)]

    def is_overdue(self, queue: QueueOverview) -> bool:
        """Return whether a queue is not paused, and has had a job due for longer than the bound."""
        due = [at for at in _times(queue) if at <= self.at]
        return bool(due) and not queue.paused and self.waited(queue) >= self.bounds.max_wait

    def waited(self, queue: QueueOverview) -> int:
        """Return the milliseconds for which the oldest claimable or due job of a queue has waited."""
        return max((self.at - at for at in _times(queue)), default=0)


def _times(queue: QueueOverview) -> list[int]:
    # Without a process that sweeps, a delayed job stays delayed when it is due.
    return [at for at in (queue.oldest_at, queue.due_at) if at is not None]


def read_facts(bounds: HealthSettings) -> HealthFacts:
    """Read the state of the storage. Raises DjqueueError or django.db.Error if the storage can't be used."""
    storage = get_storage()
    with within(bounds.timeout / 1_000):
        overview = storage.reads.overview()
    return facts_of(storage, overview, storage.workers.all(), bounds)


def facts_of(
    storage: Storage, overview: Overview, registered: Sequence[WorkerInfo], bounds: HealthSettings
) -> HealthFacts:
    """Return what the checks judge, from the state of a storage and all its registered workers."""
    workers = claiming(registered, overview.at)
    silent = [worker for worker in registered if is_silent(worker, overview.at)]
    return HealthFacts(storage, overview, workers, bounds, _not_replaced(silent, workers))


def _not_replaced(silent: Iterable[WorkerInfo], live: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """Return the silent workers without those whose supervisor has started another process since: it does so
    when one has ended.
    """
    successors, left = list(live), []
    for worker in silent:
        for other in successors:
            is_sibling = worker.supervisor is not None and other.supervisor == worker.supervisor
            if is_sibling and other.host == worker.host and other.started_at > worker.seen_at:
                successors.remove(other)
                break
        else:
            left.append(worker)
    return left


def unreachable(check: str, error: Exception) -> Finding:
    """Return the finding about a storage that can't be used by a check."""
    text = in_one_line(error)
    remedy = WRONG_SETTING if isinstance(error, ConfigurationError) else NO_ANSWER
    if isinstance(error, StorageUnavailableError) and error.remedy:
        remedy = error.remedy
        text = text.removesuffix(remedy).rstrip()
    return Finding(f"health.{check}", "error", f"the storage cannot be used: {text}", remedy)


def check_mirror(facts: HealthFacts) -> Iterator[Finding]:
    """Find a mirror of Redis whose process was killed or hangs, without a successor."""
    if not is_mirrored(facts.storage):
        return
    alias = router.db_for_write(models.Job)
    holder = stale_holder(alias, MIRROR, facts.at - facts.bounds.lease_grace)
    if holder is not None:
        yield Finding(
            "health.mirror",
            "error",
            f"the process that mirrors Redis ({holder.describe()}) has let its lease expire, and no process "
            "has taken over",
            START_WORKERS,
        )


def check_workers(facts: HealthFacts) -> Iterator[Finding]:
    """Find queues with jobs that are due and without a live worker."""
    overdue = facts.overdue()
    # A queue whose only jobs are due delayed ones has no waiting job yet.
    waiting = [
        queue._replace(counts={**queue.counts, State.WAITING: queue.counts.get(State.WAITING, 0) or 1})
        for queue in overdue
    ]
    if without_worker := unserved(waiting, facts.workers):
        names = quote(",".join(queue.name for queue in without_worker[:MAX_NAMED]))
        # Without any worker, one for all queues is missing.
        queues = f" --queues {names}" if facts.workers else ""
        yield Finding(
            "health.workers",
            "error",
            f"no live worker serves {with_ages(facts, without_worker)}",
            f"Start a worker with `manage.py runworkers{queues}`, or resume a quiet one.",
            of_queues(facts, without_worker),
        )


def check_silent(facts: HealthFacts) -> Iterator[Finding]:
    """Find workers that have stopped sending heartbeats without having ended in order."""
    if facts.silent:
        workers = [
            f"{one.id} (process {one.pid} on {one.host}, for {_seconds(facts.at - one.seen_at)})"
            for one in facts.silent
        ]
        yield Finding(
            "health.silent",
            "error",
            f"{numbered(len(workers), 'worker')} no longer {'sends' if len(workers) == 1 else 'send'} "
            f"heartbeats: {listed(workers)}",
            "See whether the process is stopped or hangs, was killed, or cannot reach the storage. "
            "runworkers replaces processes that do not answer.",
            tuple(Evidence(worker=one.id, size=one.active, since=one.seen_at) for one in facts.silent),
        )


def check_handlers(facts: HealthFacts) -> Iterator[Finding]:
    """Find waiting jobs whose name no live worker of their queue knows."""
    if without_handler := unhandled(facts.overdue(), facts.workers):
        jobs = [
            f"{numbered(one.jobs, 'waiting job')} {one.name!r} of queue {one.queue!r}"
            for one in without_handler
        ]
        yield Finding(
            "health.handlers",
            "error",
            f"no live worker has a handler for {listed(jobs)}",
            "Deploy the code that defines the job to the workers of the queue and restart them, or move or "
            "cancel the jobs.",
            tuple(Evidence(one.queue, one.name, size=one.jobs) for one in without_handler),
        )


def check_claims(facts: HealthFacts) -> Iterator[Finding]:
    """Find queues whose jobs are due and could run in a free slot of a worker, but are not claimed."""
    idle = [one for one in facts.overdue() if not _was_claimed(facts, one) and _is_claimable(facts, one)]
    if idle:
        span = facts.at - counted_from(facts.at, facts.bounds.max_wait)
        yield Finding(
            "health.claims",
            "error",
            f"for {_seconds(span)}, no job has been claimed, although workers have free slots, from "
            f"{with_ages(facts, idle)}",
            "Look at the log of a worker, and at its threads with `manage.py djqueue workers`; then "
            "restart the workers.",
            of_queues(facts, idle),
        )


def check_leases(facts: HealthFacts) -> Iterator[Finding]:
    """Find active jobs whose lease has expired and that no process takes back."""
    if stale := facts.storage.reads.stale_leases(facts.bounds.lease_grace):
        jobs = [f"{numbered(count, 'active job')} of queue {queue!r}" for queue, count in stale.items()]
        yield Finding(
            "health.leases",
            "error",
            f"no process sweeps: leases expired more than {_seconds(facts.bounds.lease_grace)} ago, of "
            f"{listed(jobs)}",
            f"{START_WORKERS} A worker or the scheduler takes such jobs back within seconds.",
            tuple(Evidence(queue, size=count) for queue, count in stale.items()),
        )


def check_restore(facts: HealthFacts) -> Iterator[Finding]:
    """Find a restore whose process was killed, and that left the storage closed to workers and producers."""
    if facts.storage.snapshots.was_interrupted():
        yield Finding(
            "health.restore",
            "error",
            "a restore was interrupted, and the storage accepts no jobs and runs none until it has ended",
            "Run `manage.py djqueue backup restore --latest --force` again, or with the name of the backup. "
            "If the restore had begun to replace the jobs, this completes it first.",
        )


Check = Callable[[HealthFacts], Iterator[Finding]]

STORAGE = "storage"
"""Name of the first check: whether the storage answers."""
CHECKS: dict[str, Check] = {
    "mirror": check_mirror,
    "workers": check_workers,
    "silent": check_silent,
    "handlers": check_handlers,
    "claims": check_claims,
    "leases": check_leases,
    "restore": check_restore,
}
"""The other checks by name."""


def slow_queues(facts: HealthFacts) -> Iterator[tuple[QueueOverview, str]]:
    """Yield the queues with jobs overdue that workers serve, with the reason why the first ones wait."""
    for queue in facts.overdue():
        for verdict in _verdicts(facts, queue):
            if verdict not in ("waiting_turn", "no_worker", "no_handler"):
                yield queue, BY_WORD[verdict].meaning
                break


def _was_claimed(facts: HealthFacts, queue: QueueOverview) -> bool:
    """Return whether attempts started lately."""
    start = counted_from(facts.at, facts.bounds.max_wait)
    buckets = facts.storage.reads.series([queue.name], start, facts.at + 1, MINUTE)
    return any(bucket.started for bucket in buckets)


def counted_from(at: int, max_wait: int) -> int:
    """Return the time from which claims are counted, a whole minute as near to `max_wait` ago as possible."""
    return (at - max_wait + min(max_wait, MINUTE) // 2) // MINUTE * MINUTE


def _is_claimable(facts: HealthFacts, queue: QueueOverview) -> bool:
    return "waiting_turn" in _verdicts(facts, queue)


def _verdicts(facts: HealthFacts, queue: QueueOverview) -> Iterator[str]:
    """Yield why each of the first jobs of a queue that are not held does not run, for jobs that a live worker
    could run.
    """
    serving = [worker for worker in facts.workers if worker.queues is None or queue.name in worker.queues]
    limit = MAX_PASSED if queue.held else MAX_EXPLAINED
    page = facts.storage.reads.cursor_page(queue.name, State.WAITING, limit, newest_first=False)
    for job in [job for job in page.jobs if queue.hold_on(job.name) is None][:MAX_EXPLAINED]:
        able = [worker for worker in serving if job.name in worker.names]
        if not able:
            continue
        if all(worker.active >= worker.concurrency for worker in able):
            yield "workers_busy"
            continue
        explanation = facts.storage.reads.explain(queue.name, job.id)
        if explanation is not None:
            yield explanation.verdict


def listed(texts: Sequence[str]) -> str:
    """Return texts in one line, at most `MAX_NAMED` of them."""
    more = len(texts) - MAX_NAMED
    return ", ".join([*texts[:MAX_NAMED], f"and {more:,} more"] if more > 0 else texts)


def with_ages(facts: HealthFacts, queues: Sequence[QueueOverview]) -> str:
    """Return the names of queues, each with how long its oldest job has been due."""
    rows = [f"{one.name!r} (oldest job due for {_seconds(facts.waited(one))})" for one in queues]
    return f"queue {rows[0]}" if len(rows) == 1 else f"{len(rows):,} queues: {listed(rows)}"


def of_queues(facts: HealthFacts, queues: Sequence[QueueOverview]) -> tuple[Evidence, ...]:
    """Return queues as evidence, those whose jobs have been due for longest first."""
    waits = sorted(((facts.waited(one), one) for one in queues), key=lambda pair: -pair[0])
    return tuple(
        Evidence(one.name, size=one.counts.get(State.WAITING, 0), since=facts.at - wait)
        for wait, one in waits
    )


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1_000:,.0f} s"


class CheckResult(NamedTuple):
    """The result of one health check."""

    name: str
    status: Status
    """ok | failed | unknown (it did not run, because an earlier check failed)"""
    findings: tuple[Finding, ...] = ()


class HealthReport(NamedTuple):
    """The results of all health checks."""

    checks: tuple[CheckResult, ...]
    facts: HealthFacts | None = None
    """State of the storage that the checks judged; None if the storage can't be used."""

    @property
    def is_healthy(self) -> bool:
        """Whether every check passed."""
        return all(check.status == "ok" for check in self.checks)

    def status(self, check: str) -> Status:
        """Return the status of a check."""
        return next(one.status for one in self.checks if one.name == check)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all checks."""
        return [finding for check in self.checks for finding in check.findings]

    def document(self) -> dict[str, Any]:
        """Return the public part of the report as a JSON object."""
        return {
            "status": "ok" if self.is_healthy else "failed",
            "checks": {check.name: check.status for check in self.checks},
        }


class HealthRun:
    """One run of the checks on a thread of its own, which may hang while a server does not answer.

    Callers wait for the thread only until the deadline.
    """

    def __init__(self, bounds: HealthSettings, clock: Callable[[], int] = SYSTEM_CLOCK.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._began = clock()
        self._results: dict[str, CheckResult] = {}
        self._facts: HealthFacts | None = None
        self._step = STORAGE
        try:
            self._done = start_bounded(self._run, "djqueue-health")
        except StorageUnavailableError as error:
            self._results[STORAGE] = CheckResult(STORAGE, "failed", (_no_thread(error),))
            self._done = Event()
            self._done.set()

    @property
    def is_running(self) -> bool:
        """Whether a check has not returned yet, even if no caller waits for it any longer."""
        return not self._done.is_set()

    @property
    def age(self) -> int:
        """Milliseconds since the start."""
        return self._clock() - self._began

    def report(self) -> HealthReport:
        """Wait for the results until the deadline, or the caller's if that is earlier, and return them."""
        left = max(0, self._bounds.timeout - self.age)
        if self._done.wait(remaining(left / 1_000)):
            return HealthReport(self._listed(self._results), self._facts)
        # The thread continues, so that its results may change.
        results, step = dict(self._results), self._step
        if step not in results:
            results[step] = CheckResult(step, "failed", (self._late(step),))
        return HealthReport(self._listed(results), self._facts)

    def _listed(self, results: dict[str, CheckResult]) -> tuple[CheckResult, ...]:
        return tuple(results.get(name) or CheckResult(name, "unknown") for name in (STORAGE, *CHECKS))

    def _late(self, step: str) -> Finding:
        return Finding(
            f"health.{step}",
            "error",
            f"the storage did not answer within {min(self.age, self._bounds.timeout) / 1_000:.1f} s",
            "Check whether its server hangs or is overloaded.",
        )

    def _run(self) -> None:
        with within(self._bounds.timeout / 1_000):
            self._run_checks()

    def _run_checks(self) -> None:
        # First, because it does not read the tables, which may be locked.
        problems = self._checked(STORAGE, self._probe)
        if problems is None:
            return
        if problems:
            self._results[STORAGE] = CheckResult(STORAGE, "failed", problems)
        facts = self._checked(STORAGE, lambda: read_facts(self._bounds), problems or ())
        if facts is None:
            return
        self._facts = facts
        if not problems:
            self._results[STORAGE] = CheckResult(STORAGE, "ok")
        for name, check in CHECKS.items():
            self._step = name
            findings = self._checked(name, partial(_tried, check, facts))
            if findings is not None:
                self._results[name] = CheckResult(name, "failed" if findings else "ok", findings)

    def _probe(self) -> tuple[Finding, ...]:
        # It may wait for a lock; then there must be time left to say whose.
        with within(self._bounds.timeout / 2_000):
            return tuple(get_storage().probe())

    def _checked(self, name: str, read: Callable[[], Any], found: tuple[Finding, ...] = ()) -> Any:
        """Return what `read` returns; None, with the check failed, if the storage can't be used.

        Args:
            name: Name of the check.
            read: What is called.
            found: Findings that explain why it fails.
        """
        try:
            return read()
        except (DjqueueError, Error, OSError) as error:
            finding = unreachable(name, error)
        except Exception as error:
            logger.exception("The health check %r raised an exception.", name)
            finding = unreachable(name, error)
        self._results[name] = CheckResult(name, "failed", found or (finding,))
        return None


def _tried(check: Check, facts: HealthFacts) -> tuple[Finding, ...]:
    return tuple(check(facts))


def _no_thread(error: BaseException) -> Finding:
    return Finding(
        f"health.{STORAGE}",
        "error",
        f"this process cannot start a thread for the checks: {in_one_line(error)}",
        "Raise the limit of processes or memory of this user or container.",
    )


class HealthMonitor:
    """The checks of a process for frequent requests: one run at a time, whose report counts for a second.

    While a run hangs, requests get the report of that run at once, so that they don't add threads.
    """

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = Lock()
        self._current: tuple[HealthSettings, HealthRun] | None = None

    def report(self, bounds: HealthSettings) -> HealthReport:
        """Return the report of the current run, or of a new one."""
        return self.run(bounds).report()

    def run(self, bounds: HealthSettings, ttl: int = REPORT_TTL) -> HealthRun:
        """Return the current run, or a new one if it ended and is older than `ttl` milliseconds."""
        if is_in_transaction():
            return HealthRun(bounds)
        with self._lock:
            if self._current is not None:
                of, run = self._current
                if of == bounds and (run.is_running or run.age < ttl):
                    return run
            run = HealthRun(bounds)
            self._current = (bounds, run)
            return run

    def forget(self) -> None:
        """Let the next request start a new run."""
        with self._lock:
            self._current = None


def finding_document(finding: Finding) -> dict[str, str]:
    """Return a finding as a JSON object."""
    return {"id": finding.id, "level": finding.level, "text": finding.text, "fix": finding.hint}


monitor = HealthMonitor()
"""The monitor of this process."""


WATCH_EVERY = 10.0
"""Seconds between two runs of the checks by a worker."""


def watching_health() -> AbstractContextManager[None]:
    """Context manager: run the checks in this process, for its supervisor, within the block."""
    return beside(_watch, "djqueue-health-watch", WATCH_PATIENCE)


def _watch(stop: Event) -> None:
    while not stop.wait(WATCH_EVERY):
        problems.note("health", monitor.report(get_settings().health).findings)


def is_in_transaction() -> bool:
    """Return whether this thread has a transaction, whose rows no other thread can see."""
    return any(connection.in_atomic_block for connection in connections.all(initialized_only=True))


def start_bounded(work: Callable[[], object], name: str) -> Event:
    """Start work on a daemon thread, and return the event of its end.

    A call to a frozen PostgreSQL server has no time limit of its own. Inside a transaction of the caller, as
    in a `TestCase`, the work runs in the caller's thread.
    """
    done = Event()

    def run_alone() -> None:
        try:
            work()
        finally:
            connections.close_all()
            done.set()

    if is_in_transaction():
        try:
            work()
        finally:
            done.set()
    else:
        start_daemon(name, run_alone)
    return done
