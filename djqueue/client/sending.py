"""Batches to a storage, and its answers in a producer's terms."""

from collections.abc import Iterable, Sequence
from itertools import islice

from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.collector import spared
from djqueue.core.job import Batch, EnqueueResult, JobRecord
from djqueue.storage.base import Storage


def send(storage: Storage, batches: Iterable[Batch]) -> list[EnqueueResult]:
    """Enqueue batches, a call of the storage for each; cached results come back decoded."""
    batches = list(batches)
    results: list[EnqueueResult] = []
    with spared(sum(len(batch.payloads) for batch in batches)):
        for batch in batches:
            answers = storage.enqueue([batch])
            if batch.ids is not None and (ids := _with_results(answers)):
                answers = _decoded(answers, storage.jobs(batch.queue, ids), batch)
            results += answers
    return results


async def asend(storage: Storage, batches: Iterable[Batch]) -> list[EnqueueResult]:
    """See `send`."""
    results: list[EnqueueResult] = []
    for batch in batches:
        answers = await storage.aenqueue([batch])
        if batch.ids is not None and (ids := _with_results(answers)):
            answers = _decoded(answers, await storage.ajobs(batch.queue, ids), batch)
        results += answers
    return results


def send_together(storage: Storage, batches: Sequence[Batch]) -> list[EnqueueResult]:
    """Enqueue batches in one call of the storage: those of a flow."""
    results: list[EnqueueResult] = []
    for batch, answers in _by_batch(batches, storage.enqueue(batches)):
        if ids := _with_results(answers):
            answers = _decoded(answers, storage.jobs(batch.queue, ids), batch)
        results += answers
    return results


async def asend_together(storage: Storage, batches: Sequence[Batch]) -> list[EnqueueResult]:
    """See `send_together`."""
    results: list[EnqueueResult] = []
    for batch, answers in _by_batch(batches, await storage.aenqueue(batches)):
        if ids := _with_results(answers):
            answers = _decoded(answers, await storage.ajobs(batch.queue, ids), batch)
        results += answers
    return results


def _by_batch(
    batches: Sequence[Batch], answers: Iterable[EnqueueResult]
) -> Iterable[tuple[Batch, list[EnqueueResult]]]:
    left = iter(answers)
    return ((batch, list(islice(left, len(batch.payloads)))) for batch in batches)


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
