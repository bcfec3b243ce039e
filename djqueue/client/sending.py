"""Send batches to a storage, at once or when the caller's transaction commits, and decode its answers.

`send` and `enqueue` are the hot path, and so are written twice: running them as steps would take 5 % longer.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

from djqueue.codecs import MSGPACK, decode
from djqueue.conf import get_settings
from djqueue.core.job import Batch, EnqueueResult, JobRecord
from djqueue.core.messages import numbered
from djqueue.core.options import JobOptions
from djqueue.core.threads import gc_paused
from djqueue.middleware import layers_of, through
from djqueue.signals import job_enqueued
from djqueue.storage.base import Storage

from . import announcing, envelope, hints
from .steps import Step, Steps, apart, arun, run
from .transactions import When, aopen_alias, defer, open_alias

T = TypeVar("T")

JOBS_PER_CALL = 1_000
"""Jobs of `enqueue_many` in one call of the storage."""


def chunks(entries: Iterable[T], size: int = JOBS_PER_CALL) -> Iterator[list[T]]:
    """Yield the entries of a bulk call in lists of at most `size`."""
    source = iter(entries)
    while chunk := list(islice(source, size)):
        yield chunk


def checked_first(batches: Iterable[Batch], *sources: object) -> Iterable[Batch]:
    """Return batches all of which are made now if their sources have lengths, and each when needed if not.

    Then no job of a list is stored if one is wrong, and an iterator needs no memory for its payloads.
    """
    return list(batches) if all(isinstance(source, Sized) for source in sources) else batches


def send(storage: Storage, batches: Iterable[Batch], when: When = False) -> list[EnqueueResult]:
    """Enqueue batches, a call of the storage for each; cached results come back decoded.

    Batches that come from an iterator are made while earlier ones are sent.

    Args:
        when: The option `enqueue_on_commit`: whether an open transaction has to commit first.
    """
    if when and (alias := open_alias(storage, when)) is not None:
        batches = list(batches)
        if (deferred := defer(storage, batches, alias, send)) is not None:
            return deferred
    results: list[EnqueueResult] = []
    count = sum(len(batch.payloads) for batch in batches) if isinstance(batches, list) else 0
    try:
        with gc_paused(count):
            for batch, answers in _each(storage, batches):
                results += _with_decoded(storage, batch, answers)
    except Exception as error:
        _add_note(error, results)
        raise
    return results


def send_one(storage: Storage, batch: Batch, when: When = False) -> EnqueueResult:
    """Enqueue a batch of one job as `send` does."""
    if when:
        return send(storage, [batch], when)[0]
    return _with_decoded(storage, batch, enqueue(storage, batch))[0]


def _each(storage: Storage, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[EnqueueResult]]]:
    """Enqueue batches, and yield each with its results."""
    if layers_of(get_settings()).enqueue:
        # Each batch passes the middleware before the next one is made.
        for batch in batches:
            yield batch, enqueue(storage, batch)
        return
    for batch, answers in storage.enqueue_each(batches):
        _announce(storage, batch, answers)
        yield batch, answers


async def asend(
    storage: Storage, batches: Iterable[Batch], when: When = False, content_type: str = MSGPACK
) -> list[EnqueueResult]:
    """Async version of `send`.

    Args:
        content_type: That of the payloads, which an iterator encodes.
    """
    if when and (alias := await aopen_alias(storage, when)) is not None:
        made: list[Batch] = await apart(content_type, list, batches)
        if (deferred := await sync_to_async(defer)(storage, made, alias, send)) is not None:
            return deferred
        batches = made
    results: list[EnqueueResult] = []
    try:
        async for batch, answers in _aeach(storage, batches, content_type):
            results += await _awith_decoded(storage, batch, answers)
    except Exception as error:
        _add_note(error, results)
        raise
    return results


async def _aeach(
    storage: Storage, batches: Iterable[Batch], content_type: str
) -> AsyncIterator[tuple[Batch, list[EnqueueResult]]]:
    """Enqueue batches, and yield each with its results."""
    if isinstance(batches, list):
        for batch in batches:
            yield batch, await aenqueue(storage, batch)
        return
    source = iter(batches)
    batch = await apart(content_type, next, source, None)
    while batch is not None:
        following, failure = None, None
        # The next batch is made while this one is in flight, which it is after one turn of the loop.
        sending = asyncio.ensure_future(aenqueue(storage, batch))
        try:
            await asyncio.sleep(0)
            try:
                following = await apart(content_type, next, source, None)
            except Exception as error:
                failure = error
            answers = await sending
        finally:
            sending.cancel()
        yield batch, answers
        if failure is not None:
            raise failure
        batch = following


async def asend_one(storage: Storage, batch: Batch, when: When = False) -> EnqueueResult:
    """Async version of `send_one`."""
    if when:
        return (await asend(storage, [batch], when))[0]
    return (await _awith_decoded(storage, batch, await aenqueue(storage, batch)))[0]


def _add_note(error: Exception, results: Sequence[EnqueueResult]) -> None:
    """Add a note to an error: how many jobs of its call had been accepted before."""
    if results:
        error.add_note(
            f"The first {len(results):,} jobs of this call were enqueued before the error; the last of them "
            f"has the id {results[-1].id!r}."
        )


def send_together(storage: Storage, batches: Sequence[Batch], when: When = False) -> list[EnqueueResult]:
    """Enqueue the batches of a flow in one call of the storage.

    Each batch passes the middleware first, which sees its jobs as queued.
    """
    alias = open_alias(storage, when)
    if alias is not None and (deferred := defer(storage, batches, alias, send_together)) is not None:
        return deferred
    return run(_send_together(storage, batches))


async def asend_together(
    storage: Storage, batches: Sequence[Batch], when: When = False
) -> list[EnqueueResult]:
    """Async version of `send_together`."""
    if (alias := await aopen_alias(storage, when)) is not None:
        deferred = await sync_to_async(defer)(storage, batches, alias, send_together)
        if deferred is not None:
            return deferred
    return await arun(_send_together(storage, batches))


def _send_together(storage: Storage, batches: Sequence[Batch]) -> Steps[list[EnqueueResult]]:
    together = BatchCollector(batches)
    layers = layers_of(get_settings())
    for index, batch in enumerate(batches):
        call = through(layers.enqueue, together.taking(index))
        acall = through(layers.aenqueue, together.ataking(index))
        together.note(index, (yield Step(call, acall, (batch,))))
    together.answered((yield Step(storage.enqueue, storage.aenqueue, (together.batches,))))
    results: list[EnqueueResult] = []
    for batch, answers, is_new in together.each():
        if is_new and hints.is_new(batch):
            yield Step(hints.check, hints.acheck, (storage, batch))
        if is_new and job_enqueued.receivers:
            yield Step(announcing.enqueued, announcing.aenqueued, (storage, batch, answers))
        if ids := _with_results(answers):
            records = yield Step(storage.reads.jobs, storage.reads.ajobs, (batch.queue, ids))
            answers = _decoded(answers, records, batch)
        results += answers
    return results


def enqueue(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    """Enqueue one batch through the middleware, and send `job_enqueued`."""
    layers = layers_of(get_settings()).enqueue
    if not layers:
        return _enqueue_and_announce(storage, batch)
    return answers_of(batch, through(layers, partial(_enqueue_passed, storage, batch.options))(batch))


async def aenqueue(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    """Async version of `enqueue`."""
    layers = layers_of(get_settings()).aenqueue
    if not layers:
        return await _aenqueue_and_announce(storage, batch)
    passed = through(layers, partial(_aenqueue_passed, storage, batch.options))
    return answers_of(batch, await passed(batch))


def answers_of(batch: Batch, returned: Any) -> list[EnqueueResult]:
    """Return what the middleware returned for a batch. Raises TypeError unless each job has a result."""
    count = len(batch.payloads)
    is_list = isinstance(returned, (list, tuple))
    if is_list and len(returned) == count and all(isinstance(one, EnqueueResult) for one in returned):
        return list(returned)
    raise TypeError(
        f"DJQUEUE['MIDDLEWARE'] returned {returned!r:.100} for {numbered(count, 'job')}: `enqueue` and "
        "`aenqueue` must return what call_next(batch) returns, or a list with an EnqueueResult for each job"
    )


class BatchCollector:
    """Collects the batches that pass the middleware, so that one call enqueues them."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._passed: dict[int, Batch] = {}
        """The batches that passed, in order, by the index of the original batch."""
        self._answers: list[list[EnqueueResult]] = [[] for _ in batches]
        self._originals = batches

    @property
    def batches(self) -> list[Batch]:
        """The batches to enqueue."""
        return list(self._passed.values())

    def taking(self, index: int) -> Callable[[Batch], list[EnqueueResult]]:
        """Return the innermost call of the middleware for the batch at an index."""

        def take(batch: Batch) -> list[EnqueueResult]:
            _check_changed(batch, self._originals[index].options)
            self._passed[index] = batch
            return [EnqueueResult(job_id, "queued", batch.queue) for job_id in batch.ids or ()]

        return take

    def ataking(self, index: int) -> Callable[[Batch], Awaitable[list[EnqueueResult]]]:
        """Async version of `taking`."""
        taking = self.taking(index)

        async def take(batch: Batch) -> list[EnqueueResult]:
            return taking(batch)

        return take

    def note(self, index: int, answers: Sequence[EnqueueResult]) -> None:
        """Keep the middleware's answer, which counts for a batch that did not pass."""
        self._answers[index] = answers_of(self._originals[index], answers)

    def answered(self, answers: Iterable[EnqueueResult]) -> None:
        """Distribute the storage's answers."""
        left = iter(answers)
        for index, batch in self._passed.items():
            self._answers[index] = list(islice(left, len(batch.payloads)))

    def each(self) -> Iterable[tuple[Batch, list[EnqueueResult], bool]]:
        """Yield each batch, its answers, and whether the storage gave the answers."""
        for index, original in enumerate(self._originals):
            yield self._passed.get(index, original), self._answers[index], index in self._passed


def _enqueue_passed(storage: Storage, original: JobOptions, batch: Batch) -> list[EnqueueResult]:
    """Enqueue a batch that has passed the middleware; `original` are its options before."""
    _check_changed(batch, original)
    return _enqueue_and_announce(storage, batch)


async def _aenqueue_passed(storage: Storage, original: JobOptions, batch: Batch) -> list[EnqueueResult]:
    """Async version of `_enqueue_passed`."""
    _check_changed(batch, original)
    return await _aenqueue_and_announce(storage, batch)


def _check_changed(batch: Batch, original: JobOptions) -> None:
    """Raise PayloadTooLargeError if options that a middleware added make a job too large."""
    if batch.options is not original:
        envelope.check_size(batch.options, batch.name, batch.payloads)


def _enqueue_and_announce(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    answers = storage.enqueue([batch])
    _announce(storage, batch, answers)
    return answers


def _announce(storage: Storage, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
    if hints.is_new(batch):
        hints.check(storage, batch)
    if job_enqueued.receivers:
        announcing.enqueued(storage, batch, answers)


async def _aenqueue_and_announce(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    answers = await storage.aenqueue([batch])
    if hints.is_new(batch):
        await hints.acheck(storage, batch)
    if job_enqueued.receivers:
        await announcing.aenqueued(storage, batch, answers)
    return answers


def _with_decoded(storage: Storage, batch: Batch, answers: list[EnqueueResult]) -> list[EnqueueResult]:
    """Return a batch's answers with cached results decoded; only given ids can have some."""
    if batch.ids is None or not (ids := _with_results(answers)):
        return answers
    return _decoded(answers, storage.reads.jobs(batch.queue, ids), batch)


async def _awith_decoded(storage: Storage, batch: Batch, answers: list[EnqueueResult]) -> list[EnqueueResult]:
    """Async version of `_with_decoded`."""
    if batch.ids is None or not (ids := _with_results(answers)):
        return answers
    records = await storage.reads.ajobs(batch.queue, ids)
    return await apart(batch.options.content_type, _decoded, answers, records, batch)


def _with_results(answers: Sequence[EnqueueResult]) -> list[str]:
    return [answer.id for answer in answers if answer.result is not None]


def _decoded(
    answers: Sequence[EnqueueResult], records: Sequence[JobRecord | None], batch: Batch
) -> list[EnqueueResult]:
    # The job that ran may have had another codec than the one that found it; its record knows.
    types = {record.id: record.options.content_type for record in records if record is not None}
    accept = get_settings().accept_content

    def decoded(answer: EnqueueResult) -> EnqueueResult:
        if answer.result is None:
            return answer
        content_type = types.get(answer.id, batch.options.content_type)
        return answer._replace(result=decode(answer.result, content_type, accept=accept))

    return [decoded(answer) for answer in answers]
