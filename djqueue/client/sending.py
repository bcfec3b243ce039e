"""Batches to a storage, and its answers in a producer's terms."""

from collections.abc import Iterable, Sequence
from functools import partial

from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.collector import spared
from djqueue.core.job import Batch, EnqueueResult, JobRecord
from djqueue.middleware import layers_of, through
from djqueue.signals import job_enqueued
from djqueue.storage.base import Storage

from . import announcing


def send(storage: Storage, batches: Iterable[Batch]) -> list[EnqueueResult]:
    """Enqueue batches, a call of the storage for each; cached results come back decoded."""
    batches = list(batches)
    results: list[EnqueueResult] = []
    with spared(sum(len(batch.payloads) for batch in batches)):
        for batch in batches:
            answers = enqueue(storage, batch)
            if batch.ids is not None and (ids := _with_results(answers)):
                answers = _decoded(answers, storage.jobs(batch.queue, ids), batch)
            results += answers
    return results


async def asend(storage: Storage, batches: Iterable[Batch]) -> list[EnqueueResult]:
    """See `send`."""
    results: list[EnqueueResult] = []
    for batch in batches:
        answers = await aenqueue(storage, batch)
        if batch.ids is not None and (ids := _with_results(answers)):
            answers = _decoded(answers, await storage.ajobs(batch.queue, ids), batch)
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


def _accepted(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    answers = storage.enqueue([batch])
    if job_enqueued.receivers:
        announcing.enqueued(storage, batch, answers)
    return answers


async def _aaccepted(storage: Storage, batch: Batch) -> list[EnqueueResult]:
    answers = await storage.aenqueue([batch])
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
