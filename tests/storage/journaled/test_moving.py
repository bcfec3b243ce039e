"""Jobs moved to another queue, in the tables: over a restart, by clients, and where no scheduler runs."""

import pytest

from djqueue import models
from djqueue.core.states import State
from djqueue.storage.journaled import JournaledStorage
from djqueue.testing.factories import (
    QUEUE,
    UPSTREAM,
    a_failed_job,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    failing,
    finish,
    job,
    report_of,
    retrying,
    state,
)

from .conftest import MakeStorage

pytestmark = pytest.mark.dialect

TO = "elsewhere"


def restarted(make_storage: MakeStorage, scheduler: JournaledStorage) -> JournaledStorage:
    scheduler.close()
    storage = make_storage()
    storage.connect()
    return storage


def test_moved_job_and_its_dependents_survive_restart(
    make_storage: MakeStorage, scheduler: JournaledStorage
) -> None:
    enqueue(scheduler, id="first", unique_key="k", priority=2, group="g")
    claimed = claim_one(scheduler)
    scheduler.report([report_of(claimed, {"done": 1}, [(1, "line")])])
    finish(scheduler, retrying(claimed))
    enqueue(scheduler, id="next", queue=UPSTREAM, depends_on=((QUEUE, "first"),))
    assert scheduler.jobs.move(QUEUE, ["first"], TO) == ["moved"]
    before = [job(scheduler, "first", TO), job(scheduler, "next", UPSTREAM)]

    again = restarted(make_storage, scheduler)

    assert [job(again, "first", TO), job(again, "next", UPSTREAM)] == before
    assert state(again, "next", UPSTREAM) is State.BLOCKED
    assert models.Job.objects.filter(queue=QUEUE).count() == 0
    for model in (models.JobAttempt, models.JobLog):
        assert list(model._default_manager.values_list("queue", flat=True)) == [TO]
    row = models.Job.objects.get(queue=TO)
    assert (row.unique_key, row.priority, row.group) == ("k", 2, "g")
    finish(again, completing(claim_one(again)))
    assert claim_ids(again) == ["next"]


def test_client_moves_jobs(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    enqueue(client, id="written by the client")
    enqueue(scheduler, id="kept", unique_key="k")
    enqueue(scheduler, queue=TO, id="owner", unique_key="k")

    assert client.jobs.move(QUEUE, ["written by the client", "kept", "nobody"], TO) == [
        "moved",
        "unique_key_taken",
        "not_found",
    ]
    assert claim_ids(scheduler, 9, queues=[TO]) == ["owner", "written by the client"]


def test_jobs_are_moved_without_scheduler(
    make_storage: MakeStorage, scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    a_failed_job(scheduler, queue=TO, id="dead")
    enqueue(scheduler, queue=UPSTREAM, id="before all")
    enqueue(scheduler, id="first", depends_on=((UPSTREAM, "before all"),))
    enqueue(scheduler, id="next", depends_on=((QUEUE, "first"),))
    enqueue(scheduler, queue=TO, id="taken")
    enqueue(scheduler, id="taken")
    enqueue(scheduler, queue=TO, id="owner", unique_key="k")
    enqueue(scheduler, id="rival", unique_key="k")
    enqueue(scheduler, id="dead")
    scheduler.close()

    answers = client.jobs.move(QUEUE, ["first", "taken", "rival", "dead", "nobody"], TO)

    assert answers == ["moved", "duplicate", "unique_key_taken", "moved", "not_found"]
    again = make_storage()
    again.connect()
    assert counts(again, TO) == {State.WAITING: 3, State.BLOCKED: 1}
    assert again.reads.dead_letters(TO) == []
    assert state(again, "next") is State.BLOCKED
    finish(again, completing(claim_one(again, queues=[UPSTREAM])))
    finish(again, completing(claim_first(again)))
    assert state(again, "next") is State.WAITING


def claim_first(storage: JournaledStorage):
    """The claim of the job `first`."""
    while (claimed := claim_one(storage, queues=[TO])).id != "first":
        pass
    return claimed


@pytest.mark.parametrize("is_client", [False, True])
def test_queue_is_not_moved_to_itself(
    scheduler: JournaledStorage, client: JournaledStorage, is_client: bool
) -> None:
    with pytest.raises(ValueError, match=QUEUE):
        (client if is_client else scheduler).jobs.move(QUEUE, ["a"], QUEUE)


def test_moved_dead_letter_outlives_scheduler(make_storage: MakeStorage, scheduler: JournaledStorage) -> None:
    enqueue(scheduler, id="order:1", unique_key="k", priority=2)
    claimed = claim_one(scheduler)
    scheduler.report([report_of(claimed, {"done": 1}, [(1, "line")])])
    finish(scheduler, failing(claimed))
    enqueue(
        scheduler,
        id="next",
        queue=UPSTREAM,
        depends_on=((QUEUE, "order:1"),),
        on_dependency_failure="wait",
    )
    assert scheduler.jobs.move(QUEUE, ["order:1"], TO) == ["moved"]
    before = [job(scheduler, "order:1", TO), job(scheduler, "next", UPSTREAM)]
    letters = scheduler.reads.dead_letters(TO)

    again = restarted(make_storage, scheduler)

    assert [job(again, "order:1", TO), job(again, "next", UPSTREAM)] == before
    assert again.reads.dead_letters(TO) == letters
    assert models.Job.objects.filter(queue=QUEUE).count() == 0
    for model in (models.JobAttempt, models.JobLog, models.DeadLetter):
        assert list(model._default_manager.values_list("queue", flat=True)) == [TO]
    assert again.jobs.retry(TO, ["order:1"]) == ["retried"]
    finish(again, completing(claim_one(again)))
    assert claim_ids(again) == ["next"]


def test_client_moves_dead_letters_with_and_without_scheduler(
    make_storage: MakeStorage, scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    for job_id in "ab":
        a_failed_job(scheduler, id=job_id)
    letters = scheduler.reads.dead_letters(QUEUE)
    assert client.jobs.move(QUEUE, ["a"], TO) == ["moved"]
    scheduler.close()

    assert client.jobs.move(QUEUE, ["a", "b"], TO) == ["not_found", "moved"]

    assert client.reads.dead_letters(TO) == [letter._replace(queue=TO) for letter in letters]
    assert counts(client, QUEUE) == {}
    storage = make_storage()
    storage.connect()
    assert storage.jobs.retry(TO, ["a", "b"]) == ["retried", "retried"]
    assert storage.jobs.move(TO, ["a"], QUEUE) == ["moved"]
