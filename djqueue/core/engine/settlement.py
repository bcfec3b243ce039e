"""Settlement of an operation after its locks are released: wake-ups, events, incidents, dependencies."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from threading import Lock

from ..enginejob import EngineJob
from ..job import Event, Incident, JobFailure
from ..logs import Log
from ..options import JobKey
from ..states import LIVE, State
from .changes import PendingChanges
from .context import EngineContext
from .queue import JobQueue
from .shard import EventHandler, Shard

Wake = Callable[[], None]
Unsubscribe = Callable[[], None]
logger = Log("djqueue.engine")


class Settlement:
    """Carries out the pending changes of operations, and connects jobs with their dependencies."""

    def __init__(
        self, context: EngineContext, on_incidents: Callable[[list[Incident]], None] | None = None
    ) -> None:
        self._context = context
        self._on_incidents = on_incidents
        self._listeners: list[tuple[frozenset[str] | None, Wake]] = []
        self._listeners_lock = Lock()

    def settle(self, changes: PendingChanges) -> None:
        """Carry out what an operation left to be done without locks."""
        if changes.freed is not None:
            for shared, permits in changes.freed.items():
                shared.release(permits, changes.woken)
        while changes.ended or changes.unbound:
            while changes.unbound:
                self._unbind(*changes.unbound.pop())
            if changes.ended:
                key, state, dependents = changes.ended.popleft()
                for dependent in dependents:
                    if self._resolve(dependent, key, state, changes):
                        self.bind(dependent, [key], into=changes)
        if changes.woken and self._listeners:
            self._wake(changes.woken)
        for event in changes.events:
            self._publish(event)
        if changes.incidents:
            self.announce(changes.incidents)

    @contextmanager
    def changing(self, queue: str, *, is_kept: bool = False) -> Iterator[tuple[JobQueue, PendingChanges]]:
        """Hold the lock of a queue; afterwards, carry out what follows from the changes made meanwhile.

        Args:
            is_kept: create the queue if it was never used; otherwise, such a queue is for reading.
        """
        shard = self._context.shard(queue)
        changes = PendingChanges(self._context.clock.now())
        with shard.lock:
            yield (shard.queue(queue) if is_kept else shard.find(queue)), changes
        self.settle(changes)

    def announce(self, incidents: list[Incident]) -> None:
        """Report what happened to jobs beyond what workers reported."""
        if incidents and self._on_incidents is not None:
            self._on_incidents(incidents)

    def listen(self, queues: Iterable[str] | None, wake: Wake) -> Unsubscribe:
        """Call `wake`, from any thread, when a job of these queues (None: of any) may be claimable."""
        entry = (None if queues is None else frozenset(queues), wake)
        with self._listeners_lock:
            self._listeners = [*self._listeners, entry]
        return lambda: self._unlisten(entry)

    def _unlisten(self, entry: tuple[frozenset[str] | None, Wake]) -> None:
        with self._listeners_lock:
            self._listeners = [other for other in self._listeners if other is not entry]

    def wake_all(self) -> None:
        """Wake all listeners."""
        self._wake({name for shard in self._context.shards for name in list(shard.queues)})

    def _wake(self, woken: set[str]) -> None:
        for queues, wake in self._listeners:
            if queues is None or not queues.isdisjoint(woken):
                try:
                    wake()
                except Exception:
                    # The operation itself succeeded, and must not fail now.
                    logger.exception(
                        "A wake-up callback raised an exception; the storage operation itself succeeded."
                    )

    def _publish(self, event: Event) -> None:
        subscribers = self._context.shard(event.queue).subscribers.get(event.queue, {})
        for handler in (*subscribers.get(None, ()), *subscribers.get(event.id, ())):
            try:
                handler(event)
            except Exception:
                logger.exception(
                    "An event handler of queue %r raised an exception; the event will not be delivered "
                    "again.",
                    event.queue,
                )

    # Dependencies.

    def bind(
        self,
        job: EngineJob,
        dependencies: Iterable[JobKey],
        missing: State = State.CANCELLED,
        into: PendingChanges | None = None,
    ) -> None:
        """Make a blocked job wait for its dependencies; those that have ended are resolved at once.

        Args:
            missing: how a dependency without a record ended.
            into: pending changes of the caller, which are carried out first.
        """
        changes = PendingChanges(self._context.clock.now()) if into is None else into
        for dependency in dependencies:
            key, ended = self._await(dependency, job, missing)
            if ended is not None:
                self._resolve(job, key, ended, changes)
        if into is None:
            self.settle(changes)
        with self._held_shard(job) as shard:
            lives = job.state in LIVE and shard.find(job.queue).is_there(job)
        if not lives:
            # It ended meanwhile, and its dependencies were released before they were all bound.
            self._unbind(job, job.options.depends_on)

    def follow(self, job: EngineJob, key: JobKey) -> JobKey:
        """Return the current key of a blocked job's dependency, which may have been moved."""
        while (new := self._context.shard(key[0]).whereabouts(key)) is not None:
            with self._held_shard(job) as shard:
                if job.state is State.BLOCKED:
                    shard.wait_elsewhere(job, key, new)
            key = new
        return key

    @contextmanager
    def _held_shard(self, job: EngineJob) -> Iterator[Shard]:
        """Hold the lock of a job's shard: while a thread waits for the lock, the job may be moved."""
        while True:
            shard = self._context.shard(job.queue)
            with shard.lock:
                if self._context.shard(job.queue) is shard:
                    yield shard
                    return

    def _await(self, dependency: JobKey, job: EngineJob, missing: State) -> tuple[JobKey, State | None]:
        """Make a job wait for another; return the other's key, and its state if it has ended already."""
        key = dependency
        while True:
            key = self.follow(job, key)
            shard = self._context.shard(key[0])
            with shard.lock:
                queue = shard.queues.get(key[0])
                existing = queue.jobs.get(key[1]) if queue is not None else None
                if queue is None or existing is None:
                    if shard.has_moved(key):
                        continue  # moved since `follow`
                    return key, missing
                # A plain job completes under its processing shard's lock alone.
                with self._context.processing_shard(existing.id).lock:
                    # A failed dependency may be retried and complete: a patient dependent waits for that. So
                    # does a retried dependent, which has the error of its own failure.
                    is_patient = job.options.on_dependency_failure == "wait" or job.error is not None
                    waits = existing.state is State.FAILED and is_patient
                    if existing.state not in LIVE and not waits:
                        if existing.state is not State.FAILED:
                            queue.hold(existing, job)
                        return key, existing.state
                    existing.has_dependents = True
                shard.dependencies.add(key, job)
            return key, None

    def _resolve(self, job: EngineJob, dependency: JobKey, ended: State, changes: PendingChanges) -> bool:
        """Apply the end of a dependency to a job; return whether the job still waits for it."""
        with self._held_shard(job) as shard:
            # The operation that ended the dependency may have begun before the job was enqueued.
            changes.now = self._context.clock.now()
            queue = shard.find(job.queue)
            if job.state is not State.BLOCKED or dependency not in (job.unmet or ()):
                return False
            policy = job.options.on_dependency_failure
            if ended is State.COMPLETED or policy == "ignore":
                queue.unblock(job, dependency, changes)
                return False
            if policy == "wait" and ended is State.FAILED:
                return True
            # Users who may see this job may have no access to the other queue.
            name = (
                f"dependency {dependency[1]!r}"
                if dependency[0] == job.queue
                else "a dependency in another queue"
            )
            text = f"{name} ended as {ended}"
            if policy == "cancel":
                queue.cancel_pending(job, "dependency_failed", changes)
            else:
                error = JobFailure("djqueue.core.errors.JobFailedError", text)
                queue.fail_pending(job, "dependency_failed", error, changes)
        return False

    def _unbind(self, job: EngineJob, dependencies: Iterable[JobKey]) -> None:
        """Release the dependencies of a job that has ended, and their records."""
        now = self._context.clock.now()
        for name, keys in groupby(dependencies, itemgetter(0)):
            shard = self._context.shard(name)
            with shard.lock:
                shard.let_go(keys, job, now)


class EngineEvents:
    """Events of the engine."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of a queue, or of one of its jobs."""
        shard = self._context.shard(queue)
        with shard.lock:
            subscribers = shard.subscribers.setdefault(queue, {})
            subscribers[job_id] = [*subscribers.get(job_id, ()), handler]
            if (job_queue := shard.queues.get(queue)) is not None:
                job_queue.observed = True

        subscribed = True

        def unsubscribe() -> None:
            nonlocal subscribed
            with shard.lock:
                if not subscribed:
                    return
                subscribed = False
                left = subscribers[job_id].copy()
                left.remove(handler)  # Only one, because it may have been subscribed more than once.
                subscribers[job_id] = left
                if not left:
                    del subscribers[job_id]
                if not subscribers:
                    del shard.subscribers[queue]
                    if (job_queue := shard.queues.get(queue)) is not None:
                        job_queue.observed = False

        return unsubscribe
