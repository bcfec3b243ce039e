"""Workers on their caller's thread, until nothing is left to run, and the immediate mode that uses them.

In the immediate mode, for tests and development, an enqueue runs its jobs before it returns. A real worker
claims the jobs from a memory storage and reports their outcomes, so payloads and results pass their codecs,
and retries, unique keys, limits, workflows and middleware work as they do with `runworkers`. The worker runs
on the enqueuing call:

- Plain functions run on the caller's thread, and so do the database calls of async functions. They use the
  caller's connections, and see what its open transaction has written.
- Async functions run on the caller's event loop, or on one that ends with the call.
- The jobs that a job enqueues run before that enqueue returns, too.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from asgiref.sync import async_to_sync
from django.dispatch import Signal

from djqueue.client import registry
from djqueue.conf import has_django
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadlines import Outage
from djqueue.core.engine import EngineEvents
from djqueue.core.errors import JobFailedError
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    Swept,
)
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.policies import DEFAULT_POLICY, LimiterPolicy, QueuePolicy
from djqueue.storage.base import EventHandler, P, Storage, T, Unsubscribe
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.memory import MemoryStorage

from .context import WorkerContext
from .events import RunEvents
from .executors import Executor, InlineExecutor
from .executors.connections import close_connections
from .executors.threads import CallerThread
from .handlers import Handlers
from .outcomes import timed_out
from .reports import Reports
from .runs import Run
from .worker import Worker

MAX_NESTING = 30
"""Maximum number of jobs that run within each other. More would exceed the recursion limit of Python, and a
job that enqueues itself without end would never return to the caller."""

_nesting: ContextVar[int] = ContextVar("djqueue_immediate", default=0)
"""Number of jobs of an immediate storage that wait for the current code."""


class UntilIdle(Storage):
    """Another storage, whose worker stops when nothing is running and nothing was claimed."""

    worker: Worker
    wait: int | None = None
    """Milliseconds after which the next claim may find a job, as the last claim has answered."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.jobs, self.queues, self.limiters = storage.jobs, storage.queues, storage.limiters
        self.workers, self.reads, self.events = storage.workers, storage.reads, storage.events
        self.snapshots = storage.snapshots
        self.on_incidents = storage.on_incidents

    @property
    def capabilities(self) -> Capabilities:
        return self._storage.capabilities

    @property
    def outage(self) -> Outage | None:
        return self._storage.outage

    def connect(self) -> None:
        self._storage.connect()

    def describe(self) -> str:
        return self._storage.describe()

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method as the storage does."""
        return await self._storage.acall(method, *args, **kwargs)

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return self._storage.enqueue(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return await self._storage.aenqueue(batches)

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self._storage.finish(outcomes, then)

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """Finish and claim; stop the worker if nothing was claimed and nothing runs."""
        finished = await self._storage.afinish(outcomes, then)
        if then is not None:
            self.wait = finished.claims.wait
            if not finished.claims.jobs and not self.worker.running:
                self.worker.stop()
        return finished

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return self._storage.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        return self._storage.report(reports)

    def emit(self, emissions: Sequence[Emission]) -> Sequence[bool | None]:
        return self._storage.emit(emissions)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self._storage.listen(queues, wake)

    def sweep(self) -> Swept:
        return self._storage.sweep()


class CallersWorker(Worker):
    """A worker that runs plain functions, one at a time, on its caller's thread and connections.

    on_failure: Called with each run whose job has failed permanently.
    """

    def __init__(
        self,
        storage: UntilIdle,
        queues: Iterable[str] | str | None = None,
        handlers: Handlers | None = None,
        *,
        connect: bool = True,
        on_failure: Callable[[Run], None] | None = None,
    ) -> None:
        super().__init__(
            storage, queues, handlers, concurrency=1, maintain=False, connect=connect, inline=True
        )
        self._caller = CallerThread()
        self.events = CallersEvents(self.options.worker_id, self.clock, self._caller, on_failure)

    async def run(self) -> None:
        """Run jobs until nothing can be claimed, and the receivers of their signals."""
        await super().run()
        await self._caller.join()

    def _make_executor(self, context: WorkerContext, reports: Reports) -> Executor:
        return InlineExecutor(context, self._caller)


class CallersEvents(RunEvents):
    """Sends signals on the caller's thread, and does not log the worker's start and end."""

    def __init__(
        self,
        worker_id: str,
        clock: Clock,
        caller: CallerThread,
        on_failure: Callable[[Run], None] | None,
    ) -> None:
        super().__init__(worker_id, clock)
        self._caller = caller
        self._on_failure = on_failure

    def worker_started(self) -> None:
        """Log nothing."""

    def worker_stopped(self) -> None:
        """Log nothing."""

    def failed(self, run: Run) -> None:
        """Record that a job failed permanently."""
        super().failed(run)
        if self._on_failure is not None:
            self._on_failure(run)

    def _send_signal(self, signal: Signal, name: str, **about: Any) -> None:
        sender = registry.find(name)
        self._caller.submit(lambda _: signal.send_robust(sender=sender, name=name, **about), None)


class Failure(NamedTuple):
    """A job that failed permanently."""

    queue: str
    id: str
    name: str
    attempt: int
    error: BaseException


class ImmediateStorage(MemoryStorage):
    """A memory storage that runs jobs as soon as they can be claimed, on the call that made them claimable.

    Delays are skipped: those of enqueues, those before retries, and the rates of queues and limiters. A
    snoozed job stays delayed, because a job may snooze without end.

    Args:
        keep_time: Skip no delay. Jobs that are due run at the next enqueue, or when `run_waiting` is called
            after `clock` was moved.
    """

    has_worker = True
    handlers: Handlers | None = None
    """Functions by job name, as for `djqueue.Worker`; None serves every `@job` function."""
    raise_failures = False
    """Whether an enqueue raises the exception of a job that has failed permanently.

    A job that the caller waits for raises only where it waits, and a job enqueued by another job raises from
    the outermost enqueue.
    """

    def __init__(
        self,
        *,
        policies: Mapping[str, QueuePolicy] | None = None,
        default_policy: QueuePolicy = DEFAULT_POLICY,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
        metrics: Tiers = DEFAULT_TIERS,
        keep_time: bool = False,
    ) -> None:
        self._keep_time = keep_time
        if not keep_time:
            default_policy = _without_rates(default_policy)
            policies = {name: _without_rates(policy) for name, policy in (policies or {}).items()}
            limiters = {name: replace(policy, rate=None) for name, policy in (limiters or {}).items()}
        super().__init__(
            policies=policies,
            default_policy=default_policy,
            limiters=limiters,
            clock=clock,
            random=random,
            metrics=metrics,
        )
        self.events = self._watched = WatchedEvents(self.engine.events)
        self._failures: list[Failure] = []
        self._call = _Call()
        self.listen(None, self._on_wake)

    def describe(self) -> str:
        return "immediate (jobs run when they are enqueued; this process only, not persistent)"

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        _check_nesting(batches)
        with self.hold():
            results = super().enqueue(self._due(batches))
        if not self._call.held:
            self.run_waiting()
        return results

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        _check_nesting(batches)
        with self.hold():
            results = self.engine.enqueue(self._due(batches))
        await self.arun_waiting()
        return results

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method, and then the jobs that it has made claimable."""
        with self.hold():
            result = method(*args, **kwargs)
        if self._call.woken:
            await self.arun_waiting()
        return result

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        if not self._keep_time:
            outcomes = [each._replace(delay=0) if each.kind == "retry" else each for each in outcomes]
        return super().finish(outcomes, then)

    def sweep(self) -> Swept:
        with self.hold():
            swept = super().sweep()
        if self._call.woken and not self._call.held:
            self.run_waiting()
        return swept

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self.finish(outcomes, then)

    def run_waiting(self) -> int | None:
        """Run all jobs that can be claimed, and those that they enqueue.

        Returns the milliseconds until a delayed job is due, if there is one. Raises the exception of a job
        that has failed, with `raise_failures`.

        In the thread of a running event loop, the jobs run on another thread, which has its own connections:
        use `aenqueue` and `arun_waiting` there.
        """
        wait = self._run_jobs()
        self._raise_failure()
        return wait

    async def arun_waiting(self) -> int | None:
        """Async version of `run_waiting`."""
        # A task of its own keeps its context variables from the caller.
        wait = await asyncio.create_task(self._drain())
        self._raise_failure()
        return wait

    def _run_jobs(self) -> int | None:
        if not has_running_loop():
            return async_to_sync(self._drain)()
        with ThreadPoolExecutor(1, "djqueue-immediate") as pool:
            return pool.submit(self._run_apart, _nesting.get()).result()

    def _run_apart(self, nesting: int) -> int | None:
        _nesting.set(nesting)
        try:
            return async_to_sync(self._drain)()
        finally:
            if has_django():
                close_connections()

    async def _drain(self) -> int | None:
        # `async_to_sync` brings changed context variables back to its caller.
        token = _nesting.set(_nesting.get() + 1)
        try:
            self._call.woken = False
            watched = _Drained(self)
            worker = watched.worker = CallersWorker(
                watched, handlers=self.handlers, connect=False, on_failure=self._note_failure
            )
            await worker.run()
            return watched.wait
        finally:
            _nesting.reset(token)

    def _due(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        return batches if self._keep_time else [batch._replace(delay=None, run_at=None) for batch in batches]

    # Wake-ups.

    def _on_wake(self) -> None:
        """Run the jobs that a call other than an enqueue has made claimable, such as a retry."""
        self._call.woken = True
        # A worker's own calls come in on its loop, and it claims what they bring.
        if self._call.held or has_running_loop():
            return
        self._run_jobs()
        if not _nesting.get():
            # They are recorded and logged: the operation itself has succeeded, and must not raise.
            self._failures.clear()

    @contextmanager
    def run_after(self) -> Iterator[None]:
        """Run the jobs that the block enqueues on this thread at its end."""
        held = self._call.held
        with self.hold():
            yield
        if not held:
            self.run_waiting()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Run no jobs on this thread until the end of the block, and none at its end."""
        held, self._call.held = self._call.held, True
        try:
            yield
        finally:
            self._call.held = held

    # Failures.

    def _note_failure(self, run: Run) -> None:
        claimed, error = run.claimed, run.error
        if (
            self.raise_failures
            and error is not None
            and not self._watched.is_watched(claimed.queue, claimed.id)
        ):
            if run.outcome is not None and run.outcome.reason == "timeout":
                error = timed_out(claimed, error)
            attempt = claimed.failures + 1
            self._failures.append(Failure(claimed.queue, claimed.id, claimed.name, attempt, error))

    def _raise_failure(self) -> None:
        if _nesting.get() or not self._failures:
            return
        failures, self._failures = self._failures, []
        first, *others = failures
        note = f"Job {first.name} ({first.id!r} in queue {first.queue!r}) failed permanently"
        note += f" in attempt {first.attempt}."
        if others:
            note += f" {len(others)} more jobs failed: {', '.join(each.name for each in others[:10])}."
        if isinstance(first.error, Exception):
            first.error.add_note(note)
            raise first.error
        raise JobFailedError(note) from first.error


def has_running_loop() -> bool:
    """Return whether an event loop is running in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class WatchedEvents:
    """The events of an engine, which knows the jobs that have subscribers of their own."""

    def __init__(self, events: EngineEvents) -> None:
        self._events = events
        self._jobs: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def is_watched(self, queue: str, job_id: str) -> bool:
        """Return whether someone subscribes to the events of this job."""
        with self._lock:
            return self._jobs[queue, job_id] > 0

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of a queue, or of one of its jobs."""
        unsubscribe = self._events.subscribe(queue, handler, job_id)
        if job_id is None:
            return unsubscribe
        with self._lock:
            self._jobs[queue, job_id] += 1
        subscribed = True

        def end() -> None:
            nonlocal subscribed
            unsubscribe()
            with self._lock:
                if subscribed:
                    subscribed = False
                    self._jobs[queue, job_id] -= 1

        return end


class _Drained(UntilIdle):
    """An immediate storage for its own worker, whose calls must not run jobs."""

    def __init__(self, storage: ImmediateStorage) -> None:
        super().__init__(storage)
        # The worker subscribes to the jobs that it runs; that is not a caller who waits.
        self.events = storage.engine.events

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return method(*args, **kwargs)


class _Call(threading.local):
    """State of the current thread in an immediate storage."""

    held = False
    """Whether the current operation runs the jobs that it makes claimable by itself."""
    woken = False
    """Whether jobs have become claimable since the last drain."""


def _check_nesting(batches: Sequence[Batch]) -> None:
    """Refuse jobs that would run within too many others."""
    if _nesting.get() >= MAX_NESTING and batches:
        raise RecursionError(
            f"cannot enqueue {batches[0].name or batches[0].queue!r} in the immediate mode: it would run "
            f"within {MAX_NESTING} jobs, each enqueued by the one before. If a job enqueues itself, test it "
            "with djqueue_memory and djqueue_drain"
        )


def _without_rates(policy: QueuePolicy) -> QueuePolicy:
    return replace(policy, rate=None, key_rate=None)
