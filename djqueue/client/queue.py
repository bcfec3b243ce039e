"""`Queue`: the low-level API, for producers and consumers that share no code."""

from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime, timedelta
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Never, TypeVar, Unpack

from djqueue.conf import Settings, get_settings, parse_rate
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.job import Batch, CancelResult, DeadLetterRecord, EnqueueResult, Event
from djqueue.core.messages import shown
from djqueue.core.options import PARSERS, EnqueueOptions, check_text, merge_given
from djqueue.core.policies import UNSET, Hold, KeyLimit, KeyLimitChanges, Unset
from djqueue.core.states import PENDING, State
from djqueue.core.suggest import explain_queue_attribute, nearest, nearest_event
from djqueue.core.units import instant, milliseconds
from djqueue.storage.base import Storage, Unsubscribe

from . import envelope, results
from .arguments import check_id, check_ids, check_name, check_payloads, refuse_function
from .deadletters import (
    FILTERS,
    DeadLetterCounts,
    DeadLetterFilter,
    MovedDead,
    RetriedDead,
    check_limit,
    count_dead_letters,
    find_dead_letters,
    move_dead_letters,
    read_filter,
    retry_dead_letters,
)
from .declarations import registry
from .flows import Node
from .info import JobInfo, JobStatus, outcome
from .keywords import QueueKeywords
from .limiters import RateValue, check_count, read_limits
from .results import DEFAULT_WAIT
from .sending import asend, asend_one, checked_first, chunks, send, send_one
from .steps import apart, asynchronous
from .storages import get_storage
from .streaming import OnRestart, Streaming, Wait
from .transactions import When, of_storage

T = TypeVar("T")
EVENTS = (
    "enqueued",
    "started",
    "progress",
    "item",
    "retried",
    "released",
    "stalled",
    "completed",
    "failed",
    "cancelled",
    "cancel_requested",
    "promoted",
    "rescheduled",
    "unblocked",
    "requeued",
    "removed",
)
"""The events of `Queue.on`."""
CLOCK_MARGIN = 86_400_000
"""A day, in milliseconds: a margin for a storage whose clock is ahead of this one."""


class Queue:
    """A queue of a storage (by default the configured one), with default options for its jobs."""

    def __init__(
        self, name: str, *, storage: Storage | None = None, **defaults: Unpack[QueueKeywords]
    ) -> None:
        self.name = check_text("queue", name)
        self._storage = storage
        self._defaults = defaults
        self._check_queue(defaults)
        self._resolved: tuple[Settings, EnqueueOptions] | None = None
        envelope.check(defaults, name)

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

    @property
    def storage(self) -> Storage:
        """The storage of its jobs."""
        return self._storage if self._storage is not None else get_storage()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes. Calls of other job queues get an error that names our call.
            raise AttributeError(explain_queue_attribute(name))

    def enqueue(
        self,
        payload: Any = None,
        *more: Never,
        id: str | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> EnqueueResult:
        """Enqueue one job. A duplicate is reported in the result; it is not an error.

        Args:
            id: The job's id, which makes a repeated call a duplicate; by default a new UUIDv7.
            name: The name of the handler; by default the queue's name.

        Raises OptionError, ArgumentsError, SerializationError, StorageError.
        """
        batch, on_commit = self._single(payload, id, name, options, more)
        return self._results([send_one(self.storage, batch, on_commit)])[0]

    async def aenqueue(
        self,
        payload: Any = None,
        *more: Never,
        id: str | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> EnqueueResult:
        """Async version of `enqueue`."""
        batch, on_commit = await self._apart(options, self._single, payload, id, name, options, more)
        return self._results([await asend_one(self.storage, batch, on_commit)])[0]

    def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> list[EnqueueResult]:
        """Enqueue one job per payload, in order, all with the same options.

        If `payloads` and `ids` have lengths, all payloads are serialized first: nothing is stored if one
        can't be. An iterator is read a thousand payloads at a time while earlier ones are sent; the jobs
        before an error remain enqueued, and a note on the exception says how many.

        Args:
            ids: One id per payload.
        """
        batches, on_commit = self._many(payloads, ids, name, options)
        return self._results(send(self.storage, batches, on_commit))

    async def aenqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> list[EnqueueResult]:
        """Async version of `enqueue_many`."""
        batches, on_commit = await self._apart(options, self._many, payloads, ids, name, options)
        return self._results(await asend(self.storage, batches, on_commit, self._content_type(options)))

    def enqueue_and_wait(
        self,
        payload: Any = None,
        *more: Never,
        wait: float | timedelta = DEFAULT_WAIT,
        id: str | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> Any:
        """Enqueue one job, wait for it, and return its result: see `djqueue.client.results`."""
        batch, on_commit = self._single(payload, id, name, options, more)
        return results.enqueue_and_wait(self.storage, batch, wait, on_commit)

    async def aenqueue_and_wait(
        self,
        payload: Any = None,
        *more: Never,
        wait: float | timedelta = DEFAULT_WAIT,
        id: str | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> Any:
        """Async version of `enqueue_and_wait`."""
        batch, on_commit = await self._apart(options, self._single, payload, id, name, options, more)
        return await results.aenqueue_and_wait(self.storage, batch, wait, on_commit)

    def enqueue_and_stream(
        self,
        payload: Any = None,
        *,
        wait: Wait = DEFAULT_WAIT,
        on_restart: OnRestart = "raise",
        id: str | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> Generator[Any, None, Any]:
        """Enqueue one job, and yield its items as they come: see `djqueue.client.streaming`.

        The job is enqueued when the first item is requested.
        """
        streaming = Streaming(self.storage, wait, on_restart)
        return streaming.enqueue(*self._single(payload, id, name, options))

    def aenqueue_and_stream(
        self,
        payload: Any = None,
        *,
        wait: Wait = DEFAULT_WAIT,
        on_restart: OnRestart = "raise",
        id: str | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> AsyncIterator[Any]:
        """Async version of `enqueue_and_stream`: `async for item in queue.aenqueue_and_stream(…)`."""
        streaming = Streaming(self.storage, wait, on_restart)
        make = partial(self._single, payload, id, name, options)
        return streaming.aenqueue(self._content_type(options), make)

    def stream(
        self, id: str, *, wait: Wait = DEFAULT_WAIT, on_restart: OnRestart = "raise"
    ) -> Generator[Any, None, Any]:
        """Yield the items of a job, from its first, as `enqueue_and_stream` does; the job may have ended."""
        return Streaming(self.storage, wait, on_restart).of(self.name, check_id(id))

    def astream(
        self, id: str, *, wait: Wait = DEFAULT_WAIT, on_restart: OnRestart = "raise"
    ) -> AsyncIterator[Any]:
        """Async version of `stream`."""
        return Streaming(self.storage, wait, on_restart).aof(self.name, check_id(id))

    def node(
        self,
        payload: Any = None,
        *,
        id: str | None = None,
        name: str | None = None,
        **options: Unpack[QueueKeywords],
    ) -> Node:
        """Return a node of a flow, with the arguments of `enqueue`: see `djqueue.flow`."""
        batch_options = self._options(options)
        return Node(batch_options, self._job_name(name, [payload]), payload, id, self._storage)

    # Single jobs.

    def get_job(self, id: str) -> JobInfo | None:
        """Return the job as it is now; None if no job has this id."""
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        return None if record is None else JobInfo(record)

    aget_job = asynchronous(get_job)

    def get_status(self, id: str) -> JobStatus | None:
        """Return the job's status; None if no job has this id."""
        info = self.get_job(id)
        return None if info is None else info.status()

    aget_status = asynchronous(get_status)

    def get_states(self, ids: Iterable[str]) -> dict[str, State | None]:
        """Return the states of many jobs, by id, in one call."""
        wanted = check_ids(ids)
        return dict(zip(wanted, self.storage.reads.states(self.name, wanted), strict=True))

    aget_states = asynchronous(get_states)

    def get_result(self, id: str) -> Any:
        """Return the job's result; None if it has not ended.

        Raises JobNotFoundError, JobFailedError, JobCancelledError.
        """
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        if record is not None and record.state in (*PENDING, State.ACTIVE):
            return None
        return outcome(record, id)

    aget_result = asynchronous(get_result)

    def cancel(self, id: str) -> CancelResult:
        """Cancel a job: a pending job never starts, and an active job is asked to stop."""
        return self.storage.jobs.cancel(self.name, [check_id(id)])[0]

    acancel = asynchronous(cancel)

    def promote(self, id: str) -> bool:
        """Run a delayed job now; return False if it is not delayed."""
        return self.storage.jobs.promote(self.name, [check_id(id)])[0]

    apromote = asynchronous(promote)

    def reschedule(
        self, id: str, *, delay: float | timedelta | None = None, run_at: datetime | None = None
    ) -> bool:
        """Change the start time of a job; return False if it has started or does not exist."""
        if (delay is None) == (run_at is None):
            raise OptionError("reschedule: expected either delay or run_at")
        if run_at is not None:
            at = instant("run_at", run_at)
        else:
            at = SYSTEM_CLOCK.now() + milliseconds("delay", delay)
        return self.storage.jobs.reschedule(self.name, [check_id(id)], at)[0]

    areschedule = asynchronous(reschedule)

    def move(self, ids: str | Iterable[str], to: str) -> dict[str, str]:
        """Move pending jobs and dead letters, with all their data, to another queue.

        Returns the outcome of each id: moved | not_found | active | ended | duplicate (the other queue has a
        job with this id) | unique_key_taken (a live job there has its unique key) |
        concurrency_key_needed (the other queue requires a concurrency key, and the job has none).

        Raises OptionError, UnknownQueueError.
        """
        self._check_target(to)
        wanted = dict.fromkeys(check_ids(ids))
        answers: dict[str, str] = {}
        for chunk in chunks(wanted):
            answers.update(zip(chunk, self.storage.jobs.move(self.name, chunk, to), strict=True))
        return answers

    amove = asynchronous(move)

    def update(self, id: str, *, payload: Any = UNSET, priority: int | None = None) -> bool:
        """Replace the payload or the priority, or both, of a job that has not started.

        Returns False if the job is active, has ended or does not exist. A waiting job is put behind the jobs
        that have its new priority. The payload of a `@job` function is `{"args": [...], "kwargs": {...}}`.

        Raises OptionError, SerializationError.
        """
        new_priority = self._checked_priority(payload, priority)
        if payload is UNSET:
            return self.storage.jobs.update(self.name, [check_id(id)], new_priority)[0]
        # The payload keeps its content type, which the worker expects.
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        if record is None:
            return False
        encoded = envelope.encoder(record.options.content_type, get_settings())(payload)
        envelope.check_size(record.options, record.name, [encoded])
        return self.storage.jobs.update(self.name, [id], new_priority, encoded)[0]

    aupdate = asynchronous(update)

    def retry(self, id: str) -> bool:
        """Retry a dead letter; return False if it is none, its key is taken or a dependency is gone.

        A job that failed because a dependency did is blocked again until its dependencies complete.
        """
        return self.storage.jobs.retry(self.name, [check_id(id)])[0] in ("retried", "blocked_again")

    aretry = asynchronous(retry)

    def remove(self, id: str) -> bool:
        """Remove a job with all its data; return False if it is active or does not exist."""
        return self.storage.jobs.remove(self.name, [check_id(id)])[0]

    aremove = asynchronous(remove)

    # Dead letters.

    def dead_letters(self, /, *, limit: int | None = None, **filters: Any) -> list[DeadLetterRecord]:
        """Return the queue's dead letters, oldest first.

        Args:
            filters: `reason`, `name` (of the job), `error_type`, `fingerprint`, `older_than`, `newer_than`.

        Raises OptionError.
        """
        return list(islice(self._find_dead_letters(filters), check_limit(limit)))

    adead_letters = asynchronous(dead_letters)

    def count_dead(self, /, **filters: Any) -> DeadLetterCounts:
        """Count the dead letters by reason, job name, error type and fingerprint of the error."""
        return count_dead_letters(self.storage, self.name, self._dead_letter_filter(filters))

    acount_dead = asynchronous(count_dead)

    def retry_dead(
        self,
        /,
        ids: Iterable[str] | None = None,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[RetriedDead], object] | None = None,
        **filters: Any,
    ) -> RetriedDead:
        """Retry dead letters, oldest first: those with these ids, those that match the filters, or all.

        A dead letter is not retried while a live job has its unique key.

        Args:
            limit: The maximum number of dead letters to try.
            dry_run: Only count the outcomes.
            progress: Called with the counts so far after every few hundred dead letters.

        Raises OptionError.
        """
        maximum = check_limit(limit)
        if ids is not None and filters:
            raise OptionError("retry_dead: ids and filters can't be combined: remove one of them")
        if ids is None:
            ids = (letter.id for letter in self._find_dead_letters(filters))
        else:
            ids = check_ids(ids)
        return retry_dead_letters(self.storage, self.name, ids, maximum, dry_run=dry_run, progress=progress)

    aretry_dead = asynchronous(retry_dead)

    def move_dead(
        self,
        /,
        to: str,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[MovedDead], object] | None = None,
        **filters: Any,
    ) -> MovedDead:
        """Move dead letters, with their jobs, to another queue, oldest first: all that match the filters.

        Args:
            limit: The maximum number of dead letters to try.
            dry_run: Only count the outcomes.
            progress: Called with the counts so far after every few hundred dead letters.

        Raises OptionError, UnknownQueueError.
        """
        self._check_target(to)
        maximum = check_limit(limit)
        ids = (letter.id for letter in self._find_dead_letters(filters))
        return move_dead_letters(
            self.storage, self.name, to, ids, maximum, dry_run=dry_run, progress=progress
        )

    amove_dead = asynchronous(move_dead)

    # The queue as a whole.

    def counts(self) -> dict[str, int]:
        """Count the jobs in each state."""
        return {str(state): count for state, count in self.storage.reads.counts(self.name).items()}

    acounts = asynchronous(counts)

    def pause(self) -> None:
        """Pause the queue: no job starts until `resume`, and active jobs continue."""
        self.storage.queues.pause(self.name)

    apause = asynchronous(pause)

    def resume(self) -> None:
        """Resume the queue."""
        self.storage.queues.resume(self.name)

    aresume = asynchronous(resume)

    def is_paused(self) -> bool:
        """Return whether the queue is paused."""
        return self.storage.queues.is_paused(self.name)

    ais_paused = asynchronous(is_paused)

    def hold(self, name: str, *, until: datetime | None = None, reason: str = "") -> Hold:
        """Hold the jobs of one name, and return the hold: none of them starts until `release`, and active
        jobs continue.

        Jobs of other names go on. Another hold on the name replaces the first one.

        Args:
            name: Name of the job type.
            until: When the hold ends by itself, an aware datetime.
            reason: Text for those who see the hold, up to 255 characters.

        Raises OptionError.
        """
        now, at = SYSTEM_CLOCK.now(), None if until is None else instant("until", until)
        if at is not None and at <= now:
            raise OptionError(f"until: must be in the future; got {shown(until)}")
        text = "" if reason == "" else check_text("reason", reason)
        hold = Hold(check_name(self.name, name), now, at, text)
        self.storage.queues.hold(self.name, hold.name, at, text)
        return hold

    ahold = asynchronous(hold)

    def release(self, name: str) -> bool:
        """End a hold; return False if there was none."""
        return self.storage.queues.release(self.name, check_name(self.name, name))

    arelease = asynchronous(release)

    def holds(self) -> list[Hold]:
        """Return the holds of the queue, each with `name`, `since`, `until` and `reason`."""
        return list(self.storage.reads.overview([self.name]).queues[0].holds)

    aholds = asynchronous(holds)

    def set_limits(
        self, *, rate: RateValue | Unset | None = UNSET, concurrency: int | Unset | None = UNSET
    ) -> None:
        """Set the queue's limits for all workers, immediately; None removes a limit.

        Args:
            rate: Starts per period: `"100/s"`, or (count, seconds).
            concurrency: Maximum number of active jobs.

        Raises:
            OptionError: A limit is invalid, or none is given.
        """
        self.storage.queues.set_limits(self.name, **read_limits("set_limits", rate, concurrency))

    aset_limits = asynchronous(set_limits)

    def set_key_limit(
        self,
        key: str | None,
        concurrency: int | Unset | None = UNSET,
        *,
        rate: RateValue | Unset | None = UNSET,
        weight: int | Unset | None = UNSET,
    ) -> None:
        """Set the limits of a concurrency key, or the default for keys without their own limit (key None).

        Limits that are not given are unchanged; None removes a limit.

        Args:
            concurrency: Maximum number of active jobs.
            rate: Starts per period: `"10/s"`, or (count, seconds).
            weight: Jobs started for each job of a key with weight 1; not for the default.

        Raises OptionError.
        """
        if key is not None:
            check_text("key", key)
        limits: KeyLimitChanges = {}
        if concurrency is not UNSET:
            limits["concurrency"] = check_count("concurrency", concurrency)
        if rate is not UNSET:
            limits["rate"] = None if rate is None else parse_rate(rate)
            if limits["rate"] is not None:
                check_count("rate", limits["rate"].capacity)
        if weight is not UNSET:
            if key is None:
                raise OptionError(
                    "weight: requires a key; the default for keys without their own limit has no weight"
                )
            limits["weight"] = check_count("weight", weight)
        if not limits:
            raise OptionError("set_key_limit: expected concurrency, rate or weight")
        self.storage.queues.set_key_limit(self.name, key, **limits)

    aset_key_limit = asynchronous(set_key_limit)

    def pause_key(self, key: str) -> None:
        """Pause a concurrency key: none of its jobs starts until `resume_key`, and active jobs continue."""
        self.storage.queues.pause_key(self.name, check_text("key", key))

    apause_key = asynchronous(pause_key)

    def resume_key(self, key: str) -> None:
        """Resume a concurrency key."""
        self.storage.queues.resume_key(self.name, check_text("key", key))

    aresume_key = asynchronous(resume_key)

    def key_limits(self) -> dict[str | None, KeyLimit]:
        """Return the `concurrency`, `paused`, `rate` and `weight` set for each concurrency key.

        Under None is the default for keys without their own limit.
        """
        return self.storage.queues.key_limits(self.name)

    akey_limits = asynchronous(key_limits)

    def clear(self, *, delayed: bool = True) -> int:
        """Remove every job that has not started, and return how many were removed.

        Args:
            delayed: Also remove delayed and blocked jobs.
        """
        states = PENDING if delayed else frozenset({State.WAITING})
        return self.storage.queues.clean(self.name, states, SYSTEM_CLOCK.now() + CLOCK_MARGIN)

    aclear = asynchronous(clear)

    def clean(
        self,
        older_than: float | timedelta = 0,
        states: Iterable[str] = ("completed", "failed", "cancelled"),
        limit: int | None = None,
    ) -> int:
        """Remove jobs in some states by age, and return how many were removed.

        Args:
            older_than: Seconds since they ended, or were enqueued if they are pending.
            limit: The maximum number of jobs to remove.
        """
        maximum = check_limit(limit)
        if isinstance(states, (str, bytes)) or not isinstance(states, Iterable):
            raise OptionError(f"states: expected a list of states, got {shown(states)}")
        wanted = []
        for name in states:
            if name not in list(State) or name == State.ACTIVE:
                others = [state.value for state in State if state is not State.ACTIVE]
                hint = nearest(str(name), others) or f"; choose from {', '.join(others)}"
                raise OptionError(f"states: jobs in state {shown(name)} cannot be cleaned{hint}")
            wanted.append(State(name))
        age = milliseconds("older_than", older_than)
        # The storage's clock may be ahead of this one, and jobs that have just ended count as ended.
        before = SYSTEM_CLOCK.now() - age + 1 if age else SYSTEM_CLOCK.now() + CLOCK_MARGIN
        return self.storage.queues.clean(self.name, frozenset(wanted), before, maximum)

    aclean = asynchronous(clean)

    def obliterate(self, *, force: bool = False) -> int:
        """Remove the queue with all its jobs, and return how many were removed.

        Raises StorageError if jobs are active, unless forced.
        """
        return self.storage.queues.obliterate(self.name, force=force)

    aobliterate = asynchronous(obliterate)

    def on(self, event: str, handler: Callable[[Event], None]) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of this kind in the queue; `*` means every kind.

        Returns a function that ends the subscription.
        """
        if event != "*" and event not in EVENTS:
            raise OptionError(f"event: unknown event {event!r}{nearest_event(str(event), EVENTS)}")
        if not callable(handler):
            raise OptionError(f"handler: expected a function that takes an event, got {handler!r}")

        def filtered(job_event: Event) -> None:
            if event in ("*", job_event.event):
                handler(job_event)

        return self.storage.events.subscribe(self.name, filtered)

    aon = asynchronous(on)

    # Options and batches.

    def _options(self, options: Mapping[str, Any]) -> EnqueueOptions:
        self._check_queue(options)
        if options:
            return envelope.resolve(merge_given(self._defaults, options), self.name)
        settings = get_settings()
        if self._resolved is None or self._resolved[0] is not settings:
            self._resolved = settings, envelope.resolve(self._defaults, self.name)
        return self._resolved[1]

    def _apart(
        self, options: Mapping[str, Any], make: Callable[..., T], *args: Any
    ) -> Coroutine[Any, Any, T]:
        """Return a call that encodes payloads: see `djqueue.client.steps.apart`."""
        return apart(self._content_type(options), make, *args)

    def _content_type(self, options: Mapping[str, Any]) -> str:
        given = options.get("content_type") or self._defaults.get("content_type")
        return str(given or get_settings().codec)

    def _results(self, answers: list[EnqueueResult]) -> list[EnqueueResult]:
        """Return results that read from this queue's own storage, if it has one."""
        return answers if self._storage is None else of_storage(answers, self._storage)

    def _check_queue(self, options: Mapping[str, Any]) -> None:
        if "queue" in options:
            raise OptionError(
                f"queue: this object is queue {self.name!r}; to use another queue, create another Queue"
            )

    def _job_name(self, name: str | None, payloads: Sequence[Any]) -> str:
        if name is None:
            return self.name
        registry.check_arguments(check_name(self.name, name), payloads)
        return name

    def _single(
        self,
        payload: Any,
        job_id: str | None,
        name: str | None,
        options: Mapping[str, Any],
        more: Sequence[Any] = (),
    ) -> tuple[Batch, When]:
        """Return the batch of one job, and its option `enqueue_on_commit`."""
        if more:
            refuse_function(self.name, [payload], more)
        try:
            resolved = self._options(options)
            batch = self._batch(resolved, name, [payload], None if job_id is None else [job_id])
            return batch, resolved.enqueue_on_commit
        except OptionError:
            refuse_function(self.name, [payload])
            raise

    def _many(
        self,
        payloads: Iterable[Any],
        ids: Iterable[str] | None,
        name: str | None,
        options: Mapping[str, Any],
    ) -> tuple[Iterable[Batch], When]:
        """Return the batches of many jobs, and their option `enqueue_on_commit`."""
        payloads, resolved = check_payloads(payloads), self._options(options)
        batches = self._batches(payloads, ids, name, resolved)
        return checked_first(batches, payloads, () if ids is None else ids), resolved.enqueue_on_commit

    def _batches(
        self, payloads: Iterable[Any], ids: Iterable[str] | None, name: str | None, resolved: EnqueueOptions
    ) -> Iterator[Batch]:
        if ids is None:
            for chunk in chunks(payloads):
                yield self._batch(resolved, name, chunk)
            return
        for pairs in chunks(_paired(payloads, ids)):
            yield self._batch(resolved, name, [p for p, _ in pairs], [i for _, i in pairs])

    def _batch(
        self, options: EnqueueOptions, name: str | None, payloads: list[Any], ids: list[str] | None = None
    ) -> Batch:
        try:
            return envelope.batch(options, self._job_name(name, payloads), payloads, ids)
        except SerializationError:
            refuse_function(self.name, payloads)
            raise

    # Checks of arguments.

    def _check_target(self, to: str) -> None:
        envelope.check_queue(check_text("to", to), get_settings())
        if to == self.name:
            raise OptionError(f"to: the jobs are already in queue {to!r}; pass a different queue")

    @staticmethod
    def _checked_priority(payload: Any, priority: int | None) -> int | None:
        if priority is not None:
            return int(PARSERS["priority"]("priority", priority))
        if payload is UNSET:
            raise OptionError("update: expected payload, priority or both")
        return None

    def _find_dead_letters(self, filters: Mapping[str, Any]) -> Iterator[DeadLetterRecord]:
        return find_dead_letters(self.storage, self.name, self._dead_letter_filter(filters))

    @staticmethod
    def _dead_letter_filter(filters: Mapping[str, Any]) -> DeadLetterFilter:
        for name in filters:
            if name not in FILTERS:
                raise OptionError(f"unknown filter {name!r}{nearest(name, FILTERS)}")
        return read_filter(**filters)


def _paired(payloads: Iterable[Any], ids: Iterable[str]) -> Iterator[tuple[Any, str]]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise OptionError(f"ids: expected a list with one id per payload, got {shown(ids)}")
    for payload, job_id in zip_longest(payloads, ids, fillvalue=UNSET):
        if payload is UNSET or job_id is UNSET:
            raise OptionError(
                f"ids: expected one id per payload, got {'fewer' if job_id is UNSET else 'more'} ids than "
                "payloads"
            )
        yield payload, job_id
