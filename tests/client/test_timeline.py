"""A job's timeline: its stored history, in order."""

import pytest

from djqueue import Queue
from djqueue.testing.factories import (
    an_active_job,
    cancelling,
    claim_one,
    completing,
    enqueue,
    failing,
    finish,
    releasing,
    retrying,
)


@pytest.fixture
def queue(storage):
    return Queue("default", storage=storage)


def events(queue, job_id):
    return [(moment.event, moment.attempt) for moment in queue.get_job(job_id).timeline]


def test_timeline_of_waiting_job_has_only_the_enqueue(storage, queue):
    job_id = enqueue(storage, queue=queue.name)

    [moment] = queue.get_job(job_id).timeline

    assert (moment.event, moment.at) == ("enqueued", queue.get_job(job_id).created_at)


def test_timeline_has_start_and_end_of_each_attempt(storage, queue):
    job_id = enqueue(storage, queue=queue.name, max_attempts=3)
    for end in (releasing, retrying):
        finish(storage, end(claim_one(storage, queues=[queue.name])))
    claimed = claim_one(storage, queues=[queue.name], worker="anna")

    told = [("enqueued", 0), ("started", 1), ("released", 1), ("started", 1), ("retried", 1), ("started", 2)]
    assert events(queue, job_id) == told

    finish(storage, completing(claimed))
    assert events(queue, job_id) == [*told, ("completed", 2)]
    moments = queue.get_job(job_id).timeline
    assert moments[-1].worker == "anna"
    assert moments[4].error.message == queue.get_job(job_id).history[1].error.message
    assert [moment.at for moment in moments] == sorted(moment.at for moment in moments)


def test_timeline_has_retries_of_dead_letters(storage, queue):
    job_id = enqueue(storage, queue=queue.name)
    told = [("enqueued", 0)]
    for attempt in (1, 2):
        finish(storage, failing(claim_one(storage, queues=[queue.name])))
        queue.retry(job_id)
        told += [("started", attempt), ("failed", attempt), ("requeued", 0)]
        assert events(queue, job_id) == told
    retried_at = queue.get_job(job_id).run_at
    finish(storage, completing(claim_one(storage, queues=[queue.name])))

    assert events(queue, job_id) == [*told, ("started", 3), ("completed", 3)]
    moments = queue.get_job(job_id).timeline
    assert moments[6].at == retried_at
    assert [moment.at for moment in moments] == sorted(moment.at for moment in moments)


@pytest.mark.parametrize(
    ("end", "event", "reason"),
    [(failing, "failed", "explicit_fail"), (cancelling, "cancelled", "cancelled")],
)
def test_last_timeline_entry_has_the_reason(storage, queue, end, event, reason):
    claimed = an_active_job(storage, queue=queue.name)
    finish(storage, end(claimed))

    moments = queue.get_job(claimed.id).timeline

    assert [moment.event for moment in moments] == ["enqueued", "started", event]
    assert moments[-1].reason == reason


def test_timeline_of_job_cancelled_before_its_start_has_the_cancellation(storage, queue):
    job_id = enqueue(storage, queue=queue.name)
    queue.cancel(job_id)

    [_, end] = queue.get_job(job_id).timeline

    assert (end.event, end.attempt, end.reason) == ("cancelled", 0, "cancelled")
