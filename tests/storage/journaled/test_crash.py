"""Real processes, killed at random moments: what was promised is there afterwards, once."""

import threading
from collections import Counter
from random import Random

import pytest
from django.db import connection
from django.db.models import Count

from djqueue import models
from djqueue.core.states import State
from djqueue.storage.journaled.journal import BACKLOG, WINDOW_JOBS
from djqueue.testing.factories import QUEUE, batch, claim, completing, enqueue, enqueue_many, finish
from tests.support import PATIENCE, eventually

BELONGINGS = (models.JobResult, models.DeadLetter, models.JobAttempt, models.JobLog)
ROUNDS = [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2))]


@pytest.fixture
def moments(request):
    """Random moments, the same ones for the same test and seed of the test run."""
    return Random(f"{request.config.getoption('randomly_seed', 0)} {request.node.name}")


@pytest.fixture
def next_scheduler(make_storage):
    """Makes a scheduler of this process, in the place of one that was killed."""

    def make():
        storage = make_storage()
        storage.role.standby = "never"
        storage.connect()
        return storage

    return make


def until_killed(child, moments, *, at_least, within):
    """What a child says that is killed some milliseconds after it has said so many lines."""
    said = [child.hears() for _ in range(at_least)]
    threading.Event().wait(moments.uniform(0, within))
    child.kill()
    return said + child.told()


def numbers_there():
    """The payloads of the jobs in the tables, in the order of their rows."""
    return [int(payload) for payload in models.Job.objects.order_by("id").values_list("payload", flat=True)]


@pytest.mark.dialect
@pytest.mark.parametrize("round_number", ROUNDS)
def test_no_durable_enqueue_is_lost_with_its_process(start_child, next_scheduler, moments, round_number):
    child = start_child("enqueuer", "True")
    child.hears_until("ready")
    said = [int(line) for line in until_killed(child, moments, at_least=20, within=0.2)]

    storage = next_scheduler()

    there = numbers_there()
    assert there == list(range(len(there)))
    assert len(there) - 1 in (said[-1], said[-1] + 1)  # one may be there that was not told of any more
    claimed = claim(storage, len(there) + 1)
    assert [int(one.payload) for one in claimed] == there


@pytest.mark.parametrize("round_number", ROUNDS)
def test_kill_loses_at_most_one_window_of_buffered_enqueues(
    start_child, next_scheduler, moments, round_number
):
    child = start_child("enqueuer", "None")
    child.hears_until("ready")
    said = [int(line) for line in until_killed(child, moments, at_least=500, within=0.2)]

    storage = next_scheduler()

    there = numbers_there()
    assert there == list(range(len(there)))
    assert said[-1] + 1 - len(there) <= BACKLOG + WINDOW_JOBS
    assert [int(one.payload) for one in claim(storage, len(there) + 1)] == there


@pytest.mark.dialect
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_no_committed_job_is_lost_when_producer_or_scheduler_is_killed(
    start_child, next_scheduler, moments, kills
):
    committed = []
    for _ in range(kills):
        scheduler = start_child("scheduler")
        scheduler.hears_until("ready")
        producer = start_child("transactional_enqueuer")
        producer.hears_until("ready")
        said = [int(producer.hears()) for _ in range(10)]
        threading.Event().wait(moments.uniform(0, 0.1))
        scheduler.kill()
        said += [int(line) for line in until_killed(producer, moments, at_least=5, within=0.1)]
        committed.append(said)

    storage = next_scheduler()

    there = numbers_there()
    assert sum(number % 3 == 2 for number in there) == 0, "a job of a transaction that was rolled back"
    counted, expected = Counter(there), Counter(number for said in committed for number in said)
    # Of each producer one may be there that it could not tell of any more.
    assert expected - counted == Counter()
    assert (counted - expected).total() <= kills
    eventually(lambda: not models.Job.objects.filter(inbox=True).exists())
    assert len(claim(storage, 100_000)) == len(there)


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_enqueue_whose_answer_was_lost_is_one_job(start_child, client, next_scheduler, moments, kills):
    """The producer says it again to the tables: the scheduler may have written it before it died."""
    told, over = [], threading.Event()

    def produce():
        try:
            while not over.is_set():
                number = len(told)
                enqueue(client, payload=str(number).encode(), durable=False)
                told.append(number)
        finally:
            connection.close()

    producer = threading.Thread(target=produce)
    losses = 0
    child = start_child("scheduler")
    child.hears_until("ready")
    producer.start()
    try:
        for _ in range(kills):
            reached = len(told) + 50
            eventually(lambda reached=reached: len(told) > reached)
            threading.Event().wait(moments.uniform(0, 0.2))
            child.kill()
            losses += BACKLOG + WINDOW_JOBS
            child = start_child("scheduler")
            child.hears_until("ready")
    finally:
        over.set()
        producer.join(PATIENCE)
    assert not producer.is_alive()
    child.tell("sync")
    assert child.hears() == "done"
    child.kill()

    storage = next_scheduler()

    there = Counter(numbers_there())
    assert set(there.values()) == {1}
    assert len(told) - losses <= len(there) <= len(told)
    eventually(lambda: not models.Job.objects.filter(inbox=True).exists())
    assert len(claim(storage, 100_000)) == len(there)


def test_forked_child_of_scheduler_enqueues_as_client(start_child):
    child = start_child("forker", environment={"PYTHONWARNINGS": "ignore"})
    assert [child.hears(), child.hears()] == ["child durable False", "0 True"]

    def claims():
        child.tell("claim 5")
        return child.hears_until("done")

    claimed = []
    eventually(lambda: claimed.extend(claims()) or len(claimed) == 3)
    assert sorted(claimed) == ["child", "durable", "parent"]


@pytest.mark.parametrize("kills", [3, pytest.param(15, marks=pytest.mark.thorough)])
def test_kills_of_worker_leave_exactly_one_end_of_each_job(
    start_child, next_scheduler, client, moments, kills
):
    initial = [result.id for result in client.enqueue([batch(50, payloads=[b"fails"] * 50)])]
    initial += enqueue_many(client, 250)
    for _ in range(kills):
        child = start_child("worker")
        child.hears_until("ready")
        until_killed(child, moments, at_least=8, within=0.05)

    storage = next_scheduler()
    storage.reads.counts(QUEUE)  # What it has changed of the interrupted jobs is written.
    assert not [name for name in map(broken, rows_of_jobs()) if name]
    while claimed := claim(storage, 50):
        assert all(finish(storage, *map(completing, claimed)))
    counted = storage.reads.counts(QUEUE)
    storage.close()

    assert {state for state, count in counted.items() if count} <= {State.COMPLETED, State.FAILED}
    jobs = rows_of_jobs()
    assert sum(counted.values()) == len(jobs)
    assert {job.job_id for job in jobs} >= set(initial)
    assert not [reason for reason in map(broken, jobs) if reason]
    assert orphans() == {}
    # It has been a test.
    assert sum(job.stalls for job in jobs) > 0
    assert sum(job.failures for job in jobs) > counted[State.FAILED] > 0
    assert len(jobs) > len(initial)


def rows_of_jobs():
    """Every job with what the other tables hold of it."""
    counts = {
        model: {
            (row["queue"], row["job_id"]): row["count"]
            for row in model.objects.values("queue", "job_id").annotate(count=Count("id")).order_by()
        }
        for model in BELONGINGS
    }
    jobs = list(models.Job.objects.all())
    for job in jobs:
        key = job.queue, job.job_id
        job.results = counts[models.JobResult].get(key, 0)
        job.letters = counts[models.DeadLetter].get(key, 0)
        job.ended_runs = counts[models.JobAttempt].get(key, 0)
    return jobs


def broken(job):
    """What is wrong with a job's rows; "" where they agree."""
    if job.results != (job.state == "completed"):
        return f"{job.job_id} is {job.state} and has {job.results} results"
    if job.letters != (job.state == "failed"):
        return f"{job.job_id} is {job.state} and has {job.letters} dead letters"
    running_or_done = job.state in ("active", "completed")
    if job.attempts != job.ended_runs + running_or_done:
        return f"{job.job_id} is {job.state} after {job.attempts} runs, {job.ended_runs} of them noted"
    if job.failures + job.stalls > job.attempts:
        return f"{job.job_id} has more failures and stalls than runs"
    return ""


def orphans():
    """Rows that belong to no job, by table."""
    keys = set(models.Job.objects.values_list("queue", "job_id"))
    found = {model.__name__: set(model.objects.values_list("queue", "job_id")) - keys for model in BELONGINGS}
    return {name: rows for name, rows in found.items() if rows}
