"""`Queue`: the low-level API, for producers and consumers that share no code."""

from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Never

from djqueue.conf import Settings, get_settings
from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import EnqueueOptions, merge_given
from djqueue.storage.base import Storage

from . import envelope, waiting
from .chunking import checked_first, chunks
from .entries import check_arguments, check_name, check_payloads, refuse_function
from .flows import Node
from .foreign import explain_queue_attribute
from .jobs import DEFAULT_WAIT
from .oncommit import asend, asend_one, send, send_one
from .queuecontrols import QueueActions
from .queuedead import DeadLetterActions
from .queuejobs import JobActions
from .results import of_storage
from .streaming import Streaming, Wait
from .transactions import When


class Queue(JobActions, DeadLetterActions, QueueActions):
    """A queue of a storage (by default the configured one), with default options for its jobs."""

    def __init__(self, name: str, *, storage: Storage | None = None, **defaults: Any) -> None:
        super().__init__(name, storage)
        self._defaults = defaults
        self._check_queue(defaults)
        self._resolved: tuple[Settings, EnqueueOptions] | None = None
        envelope.check(defaults, name)

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

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
        **options: Any,
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
        **options: Any,
    ) -> EnqueueResult:
        """Async version of `enqueue`."""
        batch, on_commit = self._single(payload, id, name, options, more)
        return self._results([await asend_one(self.storage, batch, on_commit)])[0]

    def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        name: str | None = None,
        **options: Any,
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
        **options: Any,
    ) -> list[EnqueueResult]:
        """Async version of `enqueue_many`."""
        batches, on_commit = self._many(payloads, ids, name, options)
        return self._results(await asend(self.storage, batches, on_commit))

    def enqueue_and_wait(
        self,
        payload: Any = None,
        *more: Never,
        wait: float | timedelta = DEFAULT_WAIT,
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Enqueue one job, wait for it, and return its result: see `djqueue.client.waiting`."""
        batch, on_commit = self._single(payload, id, name, options, more)
        return waiting.enqueue_and_wait(self.storage, batch, wait, on_commit)

    async def aenqueue_and_wait(
        self,
        payload: Any = None,
        *more: Never,
        wait: float | timedelta = DEFAULT_WAIT,
        id: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Async version of `enqueue_and_wait`."""
        batch, on_commit = self._single(payload, id, name, options, more)
        return await waiting.aenqueue_and_wait(self.storage, batch, wait, on_commit)

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
        """Enqueue one job, and yield its items as they come: see `djqueue.client.streaming`.

        The job is enqueued when the first item is requested.
        """
        batch, on_commit = self._single(payload, id, name, options)
        return Streaming(self.storage, wait, on_restart, on_commit).enqueue(batch)

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
        """Async version of `enqueue_and_stream`: `async for item in queue.aenqueue_and_stream(…)`."""
        batch, on_commit = self._single(payload, id, name, options)
        return Streaming(self.storage, wait, on_restart, on_commit).aenqueue(batch)

    def stream(
        self, id: str, *, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise"
    ) -> Generator[Any, None, Any]:
        """Yield the items of a job, from its first, as `enqueue_and_stream` does; the job may have ended."""
        return Streaming(self.storage, wait, on_restart).of(self.name, id)

    def astream(self, id: str, *, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise") -> AsyncIterator[Any]:
        """Async version of `stream`."""
        return Streaming(self.storage, wait, on_restart).aof(self.name, id)

    def node(
        self, payload: Any = None, *, id: str | None = None, name: str | None = None, **options: Any
    ) -> Node:
        """Return a node of a flow, with the arguments of `enqueue`: see `djqueue.flow`."""
        batch_options = self._options(options)
        return Node(batch_options, self._label(name, [payload]), payload, id, lambda: self.storage)

    def _options(self, options: Mapping[str, Any]) -> EnqueueOptions:
        self._check_queue(options)
        if options:
            return envelope.resolve(merge_given(self._defaults, options), self.name)
        settings = get_settings()
        if self._resolved is None or self._resolved[0] is not settings:
            self._resolved = settings, envelope.resolve(self._defaults, self.name)
        return self._resolved[1]

    def _results(self, answers: list[EnqueueResult]) -> list[EnqueueResult]:
        return answers if self._storage is None else of_storage(answers, self._storage)

    def _check_queue(self, options: Mapping[str, Any]) -> None:
        if "queue" in options:
            raise OptionError(
                f"queue: this object is queue {self.name!r}; to use another queue, create another Queue"
            )

    def _label(self, name: str | None, payloads: Sequence[Any]) -> str:
        if name is None:
            return self.name
        check_arguments(check_name(self.name, name), payloads)
        return name

    def _single(
        self,
        payload: Any,
        job_id: str | None,
        name: str | None,
        options: Mapping[str, Any],
        more: Sequence[Any] = (),
    ) -> tuple[Batch, When]:
        """Return the batch of one job, and the transaction that it waits for."""
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
        """Return the batches of many jobs, and the transaction that they wait for."""
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
            return envelope.batch(options, self._label(name, payloads), payloads, ids)
        except SerializationError:
            refuse_function(self.name, payloads)
            raise


def _paired(payloads: Iterable[Any], ids: Iterable[str]) -> Iterator[tuple[Any, str]]:
    for payload, job_id in zip_longest(payloads, ids, fillvalue=MISSING):
        if payload is MISSING or job_id is MISSING:
            raise OptionError(
                f"ids: expected one id per payload, got {'fewer' if job_id is MISSING else 'more'} ids than "
                "payloads"
            )
        yield payload, job_id


MISSING: Any = object()
