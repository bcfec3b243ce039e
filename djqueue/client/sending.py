"""Batches to a storage, and its answers in a producer's terms."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.collector import gc_paused
from djqueue.core.job import Batch, EnqueueResult, JobRecord
from djqueue.middleware import layers_of, through
from djqueue.signals import job_enqueued
from djqueue.storage.base import Storage

from . import announcing, hints


def send(storage: Storage, batches: Iterable[Batch]) -> list[EnqueueResult]:
    """Enqueue batches, a call of the storage for each; cached results come back decoded."""
    batches = list(batches)
    results: list[EnqueueResult] = []
    with gc_paused(sum(len(batch.payloads) for batch in batches)):
        for batch in batches:
            answers = enqueue(storage, batch)
            if batch.ids is not None and (ids := _with_results(answers)):
                answers = _decoded(answers, storage.reads.jobs(batch.queue, ids), batch)
            results += answers
    return results


async def asend(storage: Storage, batches: Iterable[Batch]) -> list[EnqueueResult]:
    """See `send`."""
    results: list[EnqueueResult] = []
    for batch in batches:
        answers = await aenqueue(storage, batch)
        if batch.ids is not None and (ids := _with_results(answers)):
            answers = _decoded(answers, await storage.reads.ajobs(batch.queue, ids), batch)
        results += answers
    return results


def send_together(storage: Storage, batches: Sequence[Batch]) -> list[EnqueueResult]:
    """Enqueue batches in one call of the storage: those of a flow.

    Each goes through the middleware before that, which is told that its jobs are queued.
    """
    together = BatchCollector(batches)
    layers = layers_of(get_settings()).enqueue
    for place, batch in enumerate(batches):
        together.note(place, through(layers, together.taking(place))(batch))
    together.answered(storage.enqueue(together.batches))
    results: list[EnqueueResult] = []
    for batch, answers, is_new in together.each():
        if is_new and hints.is_new(batch):
            hints.check(storage, batch)
        if is_new and job_enqueued.receivers:
            announcing.enqueued(storage, batch, answers)
        if ids := _with_results(answers):
            answers = _decoded(answers, storage.reads.jobs(batch.queue, ids), batch)
        results += answers
    return results


async def asend_together(storage: Storage, batches: Sequence[Batch]) -> list[EnqueueResult]:
    """See `send_together`."""
    together = BatchCollector(batches)
    layers = layers_of(get_settings()).aenqueue
    for place, batch in enumerate(batches):
        together.note(place, await through(layers, together.ataking(place))(batch))
    together.answered(await storage.aenqueue(together.batches))
    results: list[EnqueueResult] = []
    for batch, answers, is_new in together.each():
        if is_new and hints.is_new(batch):
            await hints.acheck(storage, batch)
        if is_new and job_enqueued.receivers:
            await announcing.aenqueued(storage, batch, answers)
        if ids := _with_results(answers):
            answers = _decoded(answers, await storage.reads.ajobs(batch.queue, ids), batch)
        results += answers
    return results


def enqueue(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    """One batch to the storage, through the middleware; receivers of `job_enqueued` are told."""
    layers = layers_of(get_settings()).enqueue
    if not layers:
        return _accepted(storage, batch)
    answers: list[EnqueueResult] = through(layers, partial(_accepted, storage))(batch)
    return answers


async def aenqueue(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    """See `enqueue`."""
    layers = layers_of(get_settings()).aenqueue
    if not layers:
        return await _aaccepted(storage, batch)
    answers: list[EnqueueResult] = await through(layers, partial(_aaccepted, storage))(batch)
    return answers


class BatchCollector:
    """Batches on their way through the middleware, to be enqueued in one call when all have come through."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._passed: dict[int, Batch] = {}
        """What the middleware has let through, in order, by the place of the batch that it was given."""
        self._answers: list[list[EnqueueResult]] = [[] for _ in batches]
        self._given = batches

    @property
    def batches(self) -> list[Batch]:
        """Those to be enqueued."""
        return list(self._passed.values())

    def taking(self, place: int) -> Callable[[Batch], list[EnqueueResult]]:
        """What stands behind the middleware, for the batch of a place."""

        def take(batch: Batch) -> list[EnqueueResult]:
            self._passed[place] = batch
            return [EnqueueResult(job_id, "queued", batch.queue) for job_id in batch.ids or ()]

        return take

    def ataking(self, place: int) -> Callable[[Batch], Awaitable[list[EnqueueResult]]]:
        """See `taking`."""
        taking = self.taking(place)

        async def take(batch: Batch) -> list[EnqueueResult]:
            return taking(batch)

        return take

    def note(self, place: int, answers: Sequence[EnqueueResult]) -> None:
        """Keep what the middleware has answered: it counts for a batch that it has not let through."""
        self._answers[place] = list(answers)

    def answered(self, answers: Iterable[EnqueueResult]) -> None:
        """Note the storage's answers."""
        left = iter(answers)
        for place, batch in self._passed.items():
            self._answers[place] = list(islice(left, len(batch.payloads)))

    def each(self) -> Iterable[tuple[Batch, list[EnqueueResult], bool]]:
        """The batches, their answers, and whether these are the storage's."""
        for place, given in enumerate(self._given):
            yield self._passed.get(place, given), self._answers[place], place in self._passed


def _accepted(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    answers = storage.enqueue([batch])
    if hints.is_new(batch):
        hints.check(storage, batch)
    if job_enqueued.receivers:
        announcing.enqueued(storage, batch, answers)
    return answers


async def _aaccepted(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    answers = await storage.aenqueue([batch])
    if hints.is_new(batch):
        await hints.acheck(storage, batch)
    if job_enqueued.receivers:
        await announcing.aenqueued(storage, batch, answers)
    return answers


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
