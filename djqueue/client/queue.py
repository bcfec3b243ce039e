"""`Queue`: the low-level face, for producers and consumers that share no code."""

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

from djqueue.conf import Settings, get_settings, parse_rate
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import instant, milliseconds
from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.job import Batch, CancelResult, DeadLetterRecord, EnqueueResult, Event
from djqueue.core.options import MAX_INTEGER, PARSERS, EnqueueOptions, check_text
from djqueue.core.states import PENDING, State
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage, Unsubscribe

from . import deadletters, envelope, waiting
from .deadletters import DeadLetterCounts, DeadLetterFilter, MovedDead, RetriedDead
from .entries import check_arguments, check_id, check_ids, check_name, check_payloads, refuse_function
from .flows import Node
from .foreign import explain_queue_attribute
from .info import JobInfo, JobStatus, outcome
from .jobs import DEFAULT_WAIT, chunks
from .limiters import UNCHANGED, read_limits
from .results import of_storage
from .sending import asend, send
from .storages import get_storage
from .streaming import Streaming, Wait

P = ParamSpec("P")
T = TypeVar("T")

EVENTS = (
    "queued",
    "active",
    "progress",
    "item",
    "failing",
    "released",
    "stalled",
    "completed",
    "failed",
    "cancelled",
    "cancel_requested",
    "promoted",
    "delayed",
    "unblocked",
    "retried",
    "removed",
)
"""What `on` can be asked for."""


class Queue:
    """One queue of a storage (the settings' one unless given), with defaults for its jobs."""

    def __init__(self, name: str, *, storage: Storage | None = None, **defaults: Any) -> None:
        self.name = check_text("queue", name)
        self._storage = storage
        self._defaults = defaults
        self._check_place(defaults)
        self._resolved: tuple[Settings, EnqueueOptions] | None = None
        envelope.check(defaults, name)

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only what is not there: the calls of other job queues get an error that names the call here.
            raise AttributeError(explain_queue_attribute(name))

    @property
    def storage(self) -> Storage:
        """Where its jobs are."""
        return self._storage if self._storage is not None else get_storage()

    # Enqueue.

    def enqueue(
        self,
        payload: Any = None,
        *more: Never,
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> EnqueueResult:
        """Add one job.

        id: the job's, if it is to be the same job each time; else a new UUIDv7.
        name: which handler it is for; else the queue's name.

        Raises OptionError, ArgumentsError, SerializationError, StorageError; a duplicate is an answer.
        """
        return self._results(send(self.storage, [self._batch([payload], id, name, options, more)]))[0]

    async def aenqueue(
        self,
        payload: Any = None,
        *more: Never,
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> EnqueueResult:
        """See `enqueue`."""
        batch = self._batch([payload], id, name, options, more)
        return self._results(await asend(self.storage, [batch]))[0]

    def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> list[EnqueueResult]:
        """Add one job for each payload, all with the same options, in order.

        ids: one for each payload, if they are given.

        If one of them cannot be serialised, none is stored.
        """
        return self._results(send(self.storage, list(self._batches(payloads, ids, name, options))))

    async def aenqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> list[EnqueueResult]:
        """See `enqueue_many`."""
        return self._results(await asend(self.storage, list(self._batches(payloads, ids, name, options))))

    def enqueue_and_wait(
        self,
        payload: Any = None,
        *more: Never,
        wait: float | timedelta = DEFAULT_WAIT,
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Add one job, and return what it returns: see `djqueue.client.waiting`."""
        batch = self._batch([payload], id, name, options, more)
        return waiting.enqueue_and_wait(self.storage, batch, wait)

    async def aenqueue_and_wait(
        self,
        payload: Any = None,
        *more: Never,
        wait: float | timedelta = DEFAULT_WAIT,
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """See `enqueue_and_wait`."""
        batch = self._batch([payload], id, name, options, more)
        return await waiting.aenqueue_and_wait(self.storage, batch, wait)

    def enqueue_and_stream(
        self,
        payload: Any = None,
        *,
        wait: Wait = DEFAULT_WAIT,
        on_restart: str = "raise",
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Generator[Any, None, Any]:
        """Add one job, and give what it yields, as it comes: see `djqueue.client.streaming`.

        It is added when the first item is asked for.
        """
        batch = self._batch([payload], id, name, options)
        return Streaming(self.storage, wait, on_restart).enqueue(batch)

    def aenqueue_and_stream(
        self,
        payload: Any = None,
        *,
        wait: Wait = DEFAULT_WAIT,
        on_restart: str = "raise",
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """See `enqueue_and_stream`: `async for item in queue.aenqueue_and_stream(…)`."""
        batch = self._batch([payload], id, name, options)
        return Streaming(self.storage, wait, on_restart).aenqueue(batch)

    def stream(
        self, id: str, *, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise"
    ) -> Generator[Any, None, Any]:
        """What the job yields, from its first item on, be it over or not: see `enqueue_and_stream`."""
        return Streaming(self.storage, wait, on_restart).of(self.name, id)

    def astream(self, id: str, *, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise") -> AsyncIterator[Any]:
        """See `stream`."""
        return Streaming(self.storage, wait, on_restart).aof(self.name, id)

    def node(
        self, payload: Any = None, *, id: str | None = None, name: str | None = None, **options: Any
    ) -> Node:
        """A job of a flow, as `enqueue` would add it: see `djqueue.flow`."""
        batch_options = self._options(options)
        return Node(batch_options, self._label(name, [payload]), payload, id, lambda: self.storage)

    # Single jobs.

    def get_job(self, id: str) -> JobInfo | None:
        """The job as it is now; None if there is none of this id."""
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        return None if record is None else JobInfo(record)

    async def aget_job(self, id: str) -> JobInfo | None:
        """See `get_job`."""
        return await self._acall(self.get_job, id)

    def get_status(self, id: str) -> JobStatus | None:
        """The job in short; None if there is none of this id."""
        info = self.get_job(id)
        return None if info is None else info.status()

    async def aget_status(self, id: str) -> JobStatus | None:
        """See `get_status`."""
        return await self._acall(self.get_status, id)

    def get_states(self, ids: Iterable[str]) -> dict[str, State | None]:
        """States of many jobs in one call."""
        wanted = check_ids(ids)
        return dict(zip(wanted, self.storage.reads.states(self.name, wanted), strict=True))

    async def aget_states(self, ids: Iterable[str]) -> dict[str, State | None]:
        """See `get_states`."""
        return await self._acall(self.get_states, ids)

    def get_result(self, id: str) -> Any:
        """What the job returned; None if it has not ended.

        Raises JobNotFoundError, JobFailedError, JobCancelledError.
        """
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        if record is not None and record.state in (*PENDING, State.ACTIVE):
            return None
        return outcome(record, id)

    async def aget_result(self, id: str) -> Any:
        """See `get_result`."""
        return await self._acall(self.get_result, id)

    def cancel(self, id: str) -> CancelResult:
        """Take the job back: a pending one never starts, an active one is asked to stop."""
        return self.storage.jobs.cancel(self.name, [check_id(id)])[0]

    async def acancel(self, id: str) -> CancelResult:
        """See `cancel`."""
        return await self._acall(self.cancel, id)

    def promote(self, id: str) -> bool:
        """Have a delayed job run now; False if it is not delayed."""
        return self.storage.jobs.promote(self.name, [check_id(id)])[0]

    async def apromote(self, id: str) -> bool:
        """See `promote`."""
        return await self._acall(self.promote, id)

    def reschedule(
        self, id: str, *, delay: float | timedelta | None = None, run_at: datetime | None = None
    ) -> bool:
        """Put a job that has not started to another time; False if it has started or is not there."""
        if (delay is None) == (run_at is None):
            raise OptionError("reschedule: expected either delay or run_at")
        if run_at is not None:
            at = instant("run_at", run_at)
        else:
            at = SYSTEM_CLOCK.now() + milliseconds("delay", delay)
        return self.storage.jobs.reschedule(self.name, [check_id(id)], at)[0]

    async def areschedule(
        self, id: str, *, delay: float | timedelta | None = None, run_at: datetime | None = None
    ) -> bool:
        """See `reschedule`."""
        return await self._acall(self.reschedule, id, delay=delay, run_at=run_at)

    def move(self, ids: str | Iterable[str], to: str) -> dict[str, str]:
        """Have jobs that have not started wait in another queue, and dead letters lie there, with all that
        is theirs.

        By id: moved | not_found | active | ended | duplicate (that queue has a job of this id) |
        unique_key_taken (a live job there has its unique key) | group_needed (each job there needs a group,
        and it has none). A thousand at a time.

        Raises OptionError, UnknownQueueError.
        """
        self._check_target(to)
        wanted = dict.fromkeys(check_ids(ids))
        answers: dict[str, str] = {}
        for some in chunks(check_text("ids", id) for id in wanted):
            answers.update(zip(some, self.storage.jobs.move(self.name, some, to), strict=True))
        return answers

    def _check_target(self, to: str) -> None:
        envelope.check_queue(check_text("to", to), get_settings())
        if to == self.name:
            raise OptionError(f"to: the jobs are already in queue {to!r}; name another queue")

    async def amove(self, ids: str | Iterable[str], to: str) -> dict[str, str]:
        """See `move`."""
        return await self._acall(self.move, ids, to)

    def update(self, id: str, *, payload: Any = UNCHANGED, priority: int | None = None) -> bool:
        """Give a job that has not started another payload, another priority, or both.

        False if it runs, has ended or is not there. What is not given stays. A waiting job goes behind those
        that have its new priority. The payload of a job of `@job` is `{"args": [...], "kwargs": {...}}`.

        Raises OptionError, SerializationError.
        """
        checked = self._checked_priority(payload, priority)
        if payload is UNCHANGED:
            return self.storage.jobs.update(self.name, [check_id(id)], checked)[0]
        # It stays in the codec that its worker expects.
        record = self.storage.reads.jobs(self.name, [check_id(id)])[0]
        if record is None:
            return False
        encode = envelope.encoder(record.options.content_type, get_settings())
        encoded = encode(payload)
        envelope.check_size(record.options, record.name, [encoded])
        return self.storage.jobs.update(self.name, [id], checked, encoded)[0]

    async def aupdate(self, id: str, *, payload: Any = UNCHANGED, priority: int | None = None) -> bool:
        """See `update`."""
        return await self._acall(self.update, id, payload=payload, priority=priority)

    def retry(self, id: str) -> bool:
        """Retry a dead letter; return False if it is none, its unique key is taken, or a dependency is gone.

        A job that failed because a dependency did is blocked again until its dependencies complete.
        """
        return self.storage.jobs.retry(self.name, [check_id(id)])[0] in ("retried", "blocked_again")

    async def aretry(self, id: str) -> bool:
        """See `retry`."""
        return await self._acall(self.retry, id)

    def remove(self, id: str) -> bool:
        """Forget a job with everything that is its own; False if it is active or not there."""
        return self.storage.jobs.remove(self.name, [check_id(id)])[0]

    async def aremove(self, id: str) -> bool:
        """See `remove`."""
        return await self._acall(self.remove, id)

    # Dead letters. The filters are those of `djqueue.client.deadletters.read_filter`.

    def dead_letters(self, *, limit: int | None = None, **filters: Any) -> list[DeadLetterRecord]:
        """The queue's dead letters, oldest first.

        filters: reason, name (the job's), error_type, fingerprint, older_than, newer_than.

        Raises OptionError.
        """
        most = deadletters.read_limit(limit)
        return list(islice(self._letters(filters), most))

    async def adead_letters(self, *, limit: int | None = None, **filters: Any) -> list[DeadLetterRecord]:
        """See `dead_letters`."""
        return await self._acall(self.dead_letters, limit=limit, **filters)

    def count_dead(self, **filters: Any) -> DeadLetterCounts:
        """How many dead letters there are, by reason, job name, error type and fingerprint of the error."""
        wanted = self._letter_filter(filters)
        return deadletters.count_letters(self.storage, self.name, wanted)

    async def acount_dead(self, **filters: Any) -> DeadLetterCounts:
        """See `count_dead`."""
        return await self._acall(self.count_dead, **filters)

    def retry_dead(
        self,
        ids: Iterable[str] | None = None,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[RetriedDead], object] | None = None,
        **filters: Any,
    ) -> RetriedDead:
        """Have dead letters run again: those of these ids, those that the filters mean, or all.

        Oldest first, some hundreds at a time, each once. One whose unique key
        belongs to a live job stays where it is.

        limit: the most that are tried.
        dry_run: only count what would become of them.
        progress: called after each part with the counts so far.

        Raises OptionError.
        """
        most = deadletters.read_limit(limit)
        if ids is not None and filters:
            raise OptionError("retry_dead: ids and filters can't be combined: remove one of them")
        if ids is None:
            ids = (letter.id for letter in self._letters(filters))
        else:
            ids = [check_text("ids", id) for id in check_ids(ids)]
        return deadletters.retry_letters(
            self.storage, self.name, ids, most, dry_run=dry_run, progress=progress
        )

    async def aretry_dead(
        self,
        ids: Iterable[str] | None = None,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[RetriedDead], object] | None = None,
        **filters: Any,
    ) -> RetriedDead:
        """See `retry_dead`."""
        return await self._acall(
            self.retry_dead, ids, limit=limit, dry_run=dry_run, progress=progress, **filters
        )

    def move_dead(
        self,
        to: str,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[MovedDead], object] | None = None,
        **filters: Any,
    ) -> MovedDead:
        """Have dead letters lie in another queue, with their jobs: those that the filters mean, or all.

        Oldest first, some hundreds at a time, each once: see `move`.

        limit: the most that are tried.
        dry_run: only count what would become of them.
        progress: called after each part with the counts so far.

        Raises OptionError, UnknownQueueError.
        """
        self._check_target(to)
        most = deadletters.read_limit(limit)
        ids = (letter.id for letter in self._letters(filters))
        return deadletters.move_letters(
            self.storage, self.name, to, ids, most, dry_run=dry_run, progress=progress
        )

    async def amove_dead(
        self,
        to: str,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[MovedDead], object] | None = None,
        **filters: Any,
    ) -> MovedDead:
        """See `move_dead`."""
        return await self._acall(
            self.move_dead, to, limit=limit, dry_run=dry_run, progress=progress, **filters
        )

    # The queue.

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state."""
        return {str(state): count for state, count in self.storage.reads.counts(self.name).items()}

    async def acounts(self) -> dict[str, int]:
        """See `counts`."""
        return await self._acall(self.counts)

    def pause(self) -> None:
        """Let no job start until `resume`; running ones go on."""
        self.storage.queues.pause(self.name)

    async def apause(self) -> None:
        """See `pause`."""
        await self._acall(self.pause)

    def resume(self) -> None:
        """End a pause."""
        self.storage.queues.resume(self.name)

    async def aresume(self) -> None:
        """See `resume`."""
        await self._acall(self.resume)

    def is_paused(self) -> bool:
        """Whether the queue is paused."""
        return self.storage.queues.is_paused(self.name)

    async def ais_paused(self) -> bool:
        """See `is_paused`."""
        return await self._acall(self.is_paused)

    def set_limits(self, *, rate: Any = UNCHANGED, concurrency: Any = UNCHANGED) -> None:
        """Change the limits that are given, at once and for all workers; None removes a limit.

        Args:
            rate: Starts per time: `"100/s"`, or (count, seconds).
            concurrency: Jobs active at once.

        Raises:
            OptionError: A limit is wrong, or none is given.
        """
        given = read_limits("set_limits", rate, concurrency)
        self.storage.queues.set_limits(self.name, **given)

    async def aset_limits(self, *, rate: Any = UNCHANGED, concurrency: Any = UNCHANGED) -> None:
        """See `set_limits`."""
        await self._acall(self.set_limits, rate=rate, concurrency=concurrency)

    def set_group_limit(
        self,
        group: str | None,
        concurrency: Any = UNCHANGED,
        *,
        rate: Any = UNCHANGED,
        weight: Any = UNCHANGED,
    ) -> None:
        """Say what counts for a group; None: for every group to which nothing else was said.

        What is not given stays as it is; None takes back what was said.

        concurrency: its jobs active at once.
        rate: its starts in a time: `"10/s"`, or (count, seconds).
        weight: its turns for each one of other groups; of a single group only.

        Raises OptionError.
        """
        if group is not None:
            check_text("group", group)
        said: GroupWords = {}
        if concurrency is not UNCHANGED:
            said["concurrency"] = _count("concurrency", concurrency)
        if rate is not UNCHANGED:
            said["rate"] = None if rate is None else parse_rate(rate)
            if said["rate"] is not None:
                _count("rate", said["rate"].capacity)
        if weight is not UNCHANGED:
            if group is None:
                raise OptionError("weight: requires a group; the default for all groups has no weight")
            said["weight"] = _count("weight", weight)
        if not said:
            raise OptionError("set_group_limit: expected concurrency, rate or weight")
        self.storage.queues.set_group_limit(self.name, group, **said)

    async def aset_group_limit(
        self,
        group: str | None,
        concurrency: Any = UNCHANGED,
        *,
        rate: Any = UNCHANGED,
        weight: Any = UNCHANGED,
    ) -> None:
        """See `set_group_limit`."""
        await self._acall(self.set_group_limit, group, concurrency, rate=rate, weight=weight)

    def pause_group(self, group: str) -> None:
        """Let no job of a group start until `resume_group`; running ones go on."""
        self.storage.queues.pause_group(self.name, check_text("group", group))

    async def apause_group(self, group: str) -> None:
        """See `pause_group`."""
        await self._acall(self.pause_group, group)

    def resume_group(self, group: str) -> None:
        """End a group's pause."""
        self.storage.queues.resume_group(self.name, check_text("group", group))

    async def aresume_group(self, group: str) -> None:
        """See `resume_group`."""
        await self._acall(self.resume_group, group)

    def group_limits(self) -> dict[str | None, GroupLimit]:
        """What was said to groups: `concurrency`, `paused`, `rate`, `weight` of each; under None, to all."""
        return self.storage.queues.group_limits(self.name)

    async def agroup_limits(self) -> dict[str | None, GroupLimit]:
        """See `group_limits`."""
        return await self._acall(self.group_limits)

    def drain(self, *, delayed: bool = True) -> int:
        """Forget every job that has not started; returns how many.

        delayed: also those whose time, or whose dependencies' end, has not come yet.
        """
        states = PENDING if delayed else frozenset({State.WAITING})
        return self.storage.queues.clean(self.name, states, SYSTEM_CLOCK.now() + AHEAD)

    async def adrain(self, *, delayed: bool = True) -> int:
        """See `drain`."""
        return await self._acall(self.drain, delayed=delayed)

    def clean(
        self,
        older_than: float | timedelta = 0,
        states: Iterable[str] = ("completed", "failed", "cancelled"),
        limit: int | None = None,
    ) -> int:
        """Forget jobs in these states that ended, or were enqueued, so many seconds ago; returns how many.

        limit: the most that are forgotten.
        """
        most = deadletters.read_limit(limit)
        wanted = []
        for word in states:
            if word not in {str(state) for state in State} or word == State.ACTIVE:
                hint = nearest(word, map(str, State))
                raise OptionError(f"states: jobs in state {word!r} cannot be cleaned{hint}")
            wanted.append(State(word))
        age = milliseconds("older_than", older_than)
        # The storage's clock may be a moment ahead of this one: what has just ended there has ended.
        before = SYSTEM_CLOCK.now() - age + 1 if age else SYSTEM_CLOCK.now() + AHEAD
        return self.storage.queues.clean(self.name, frozenset(wanted), before, most)

    async def aclean(
        self,
        older_than: float | timedelta = 0,
        states: Iterable[str] = ("completed", "failed", "cancelled"),
        limit: int | None = None,
    ) -> int:
        """See `clean`."""
        return await self._acall(self.clean, older_than, states, limit)

    def obliterate(self, *, force: bool = False) -> int:
        """Forget the queue with all its jobs; returns how many.

        Raises StorageError if some are active, unless forced.
        """
        return self.storage.queues.obliterate(self.name, force=force)

    async def aobliterate(self, *, force: bool = False) -> int:
        """See `obliterate`."""
        return await self._acall(self.obliterate, force=force)

    def on(self, event: str, handler: Callable[[Event], None]) -> Unsubscribe:
        """Call `handler`, from any thread, for each such event of the queue; `*` is every one.

        Returns a function that ends it.
        """
        if event != "*" and event not in EVENTS:
            raise OptionError(f"event: unknown event {event!r}{nearest(str(event), EVENTS)}")
        if not callable(handler):
            raise OptionError(f"handler: expected a function that takes an event, got {handler!r}")

        def filtered(happened: Event) -> None:
            if event in ("*", happened.event):
                handler(happened)

        return self.storage.events.subscribe(self.name, filtered)

    async def aon(self, event: str, handler: Callable[[Event], None]) -> Unsubscribe:
        """See `on`."""
        return await self._acall(self.on, event, handler)

    # Inside.

    def _letters(self, filters: Mapping[str, Any]) -> Iterator[DeadLetterRecord]:
        return deadletters.letters(self.storage, self.name, self._letter_filter(filters))

    @staticmethod
    def _letter_filter(filters: Mapping[str, Any]) -> DeadLetterFilter:
        for name in filters:
            if name not in FILTERS:
                raise OptionError(f"unknown filter {name!r}{nearest(name, FILTERS)}")
        return deadletters.read_filter(**filters)

    def _options(self, options: Mapping[str, Any]) -> EnqueueOptions:
        self._check_place(options)
        if options:
            return envelope.resolve({**self._defaults, **options}, self.name)
        settings = get_settings()
        if self._resolved is None or self._resolved[0] is not settings:
            self._resolved = settings, envelope.resolve(self._defaults, self.name)
        return self._resolved[1]

    def _results(self, answers: list[EnqueueResult]) -> list[EnqueueResult]:
        return answers if self._storage is None else of_storage(answers, self._storage)

    def _check_place(self, options: Mapping[str, Any]) -> None:
        if "queue" in options:
            raise OptionError(
                f"queue: this object is queue {self.name!r}; to use another queue, create another Queue"
            )

    def _checked_priority(self, payload: Any, priority: int | None) -> int | None:
        if priority is not None:
            return int(PARSERS["priority"]("priority", priority))
        if payload is UNCHANGED:
            raise OptionError("update: expected payload, priority or both")
        return None

    def _label(self, name: str | None, payloads: Sequence[Any]) -> str:
        if name is None:
            return self.name
        check_arguments(check_name(self.name, name), payloads)
        return name

    def _batch(
        self,
        payloads: list[Any],
        job_id: str | None,
        name: str | None,
        options: Mapping[str, Any],
        more: Sequence[Any] = (),
    ) -> Batch:
        if more:
            refuse_function(self.name, payloads, more)
        ids = None if job_id is None else [job_id]
        try:
            label = self._label(name, payloads)
            return envelope.batch(self._options(options), label, payloads, ids)
        except (OptionError, SerializationError):
            refuse_function(self.name, payloads)
            raise

    def _batches(
        self,
        payloads: Iterable[Any],
        ids: Iterable[str] | None,
        name: str | None,
        options: Mapping[str, Any],
    ) -> Iterable[Batch]:
        resolved = self._options(options)
        payloads = check_payloads(payloads)
        if ids is None:
            for chunk in chunks(payloads):
                yield self._many(resolved, name, chunk)
            return
        for pairs in chunks(_paired(payloads, ids)):
            yield self._many(resolved, name, [p for p, _ in pairs], [i for _, i in pairs])

    def _many(
        self, options: EnqueueOptions, name: str | None, payloads: list[Any], ids: list[str] | None = None
    ) -> Batch:
        try:
            return envelope.batch(options, self._label(name, payloads), payloads, ids)
        except SerializationError:
            refuse_function(self.name, payloads)
            raise

    async def _acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.storage.acall(method, *args, **kwargs)


def _count(name: str, value: Any) -> int | None:
    if value is None or (type(value) is int and 1 <= value <= MAX_INTEGER):
        return value
    raise OptionError(f"{name}: must be a positive whole number; got {value!r}")


def _paired(payloads: Iterable[Any], ids: Iterable[str]) -> Iterator[tuple[Any, str]]:
    for payload, job_id in zip_longest(payloads, ids, fillvalue=MISSING):
        if payload is MISSING or job_id is MISSING:
            raise OptionError(
                f"ids: expected one id per payload, got {'fewer' if job_id is MISSING else 'more'} ids than "
                "payloads"
            )
        yield payload, job_id


MISSING: Any = object()
FILTERS = tuple(item.name for item in fields(DeadLetterFilter))
AHEAD = 86_400_000
"""A day: room for a storage whose clock is ahead of this one's."""
