"""The number of workers that autoscalers read."""

import json

import pytest
from django.test import Client

from djqueue.conf import read_settings
from djqueue.contrib.metrics.scaling import scaling
from djqueue.core.metrics import MINUTE, PARTS, Bucket, Histogram
from djqueue.core.overview import NO_TOTALS, Overview, QueueOverview
from djqueue.core.policies import Hold, Rate
from djqueue.core.states import State
from djqueue.testing import factories
from djqueue.testing.contract.insight import stats

from .scraping import TOKEN, scrape

NOW = 1_700_000_000_000
QUEUE = factories.QUEUE


def row(waiting=0, active=0, age=None, *, name=QUEUE, job="job", **given):
    counts = {**dict.fromkeys(State, 0), State.WAITING: waiting, State.ACTIVE: active}
    oldest = None if age is None else NOW - age
    values = {
        "name": name,
        "counts": counts,
        "paused": False,
        "oldest_at": oldest,
        "due_at": None,
        "rate": None,
        "tokens": None,
        "concurrency": None,
        "used": active,
        "key_mode": "optional",
        "key_waiting": 0,
        "names": {job: waiting} if waiting else {},
        "totals": NO_TOTALS,
    }
    return QueueOverview(**{**values, **given})


def bucket(queue=QUEUE, enqueued=0, runs=0, duration=0):
    times = Histogram((runs, *[0] * (PARTS - 1)), runs * duration)
    return Bucket(queue, "", 0, MINUTE, enqueued, 0, 0, 0, 0, 0, 0, times, times)


class Reads:
    """What a storage would answer."""

    def __init__(self, *buckets):
        self.reads, self.buckets = self, buckets

    def series(self, queues, start, end, step):
        assert (end - start, step) == (5 * MINUTE, MINUTE)
        return [one for one in self.buckets if one.queue in queues]


def wanted(*rows, lately=(), ever=(), workers=(), queues=None, objective=30, **settings):
    given = {"QUEUES": {QUEUE: {"OBJECTIVE": objective}}, "CONCURRENCY": 4, **settings}
    overview = Overview(NOW, [*rows])
    return scaling(Reads(*lately), read_settings(given), overview, workers, ever, queues)


def slots(*rows, **given):
    return wanted(*rows, **given).slots


def test_no_worker_is_wanted_without_jobs():
    assert wanted(row()).workers == wanted().workers == 0


def test_held_jobs_want_no_worker():
    held = (Hold("mail", NOW),)
    assert wanted(row(waiting=9, age=0, job="mail", holds=held)).workers == 0
    assert slots(row(waiting=9, active=2, age=0, job="mail", holds=held)) == 2
    names = {"mail": 9, "job": 60}
    [mail, job] = (factories.worker(name, names=(name,)) for name in names)
    lately = [bucket(runs=10, duration=2_000)]
    some = row(waiting=69, age=0, names=names, holds=held)
    assert slots(some, lately=lately, workers=[job]) == 4
    [demand] = wanted(some, workers=[mail, job]).queues
    assert (demand.waiting, demand.oldest_waiting) == (60, 0)


def test_waiting_job_of_unknown_duration_wants_one_worker():
    found = wanted(row(waiting=1, age=0))

    assert (found.workers, found.slots, found.slots_per_worker) == (1, 1, 4)


def test_slots_suffice_to_start_the_backlog_within_the_objective():
    """60 jobs of 2 s, 20 s left: 6 slots; later, with 10 s left, 12."""
    lately = [bucket(runs=10, duration=2_000)]

    assert slots(row(waiting=60, age=10_000), lately=lately) == 6
    assert slots(row(waiting=60, age=20_000), lately=lately) == 12
    assert wanted(row(waiting=60, age=20_000), lately=lately).workers == 3


def test_late_backlog_drains_in_a_quarter_of_the_objective():
    lately = [bucket(runs=10, duration=2_000)]

    assert slots(row(waiting=60, age=30_000), lately=lately) == 16
    assert slots(row(waiting=60, age=3_000_000), lately=lately) == 16


def test_arriving_jobs_add_slots():
    """300 jobs of 3 s in 5 minutes keep 3 slots busy, whatever waits."""
    lately = [bucket(enqueued=300, runs=300, duration=3_000)]

    assert slots(row(waiting=10, age=0), lately=lately) == 4


def test_shorter_objective_wants_more_slots():
    lately = [bucket(runs=1, duration=1_000)]

    found = [slots(row(waiting=600, age=0), lately=lately, objective=one) for one in (600, 60, 6)]

    assert found == [1, 10, 100]


def test_default_objective_is_one_minute():
    found = wanted(row(waiting=600, age=0, name="b"), lately=[bucket("b", runs=1, duration=1_000)])

    assert (found.slots, found.queues[0].objective) == (10, 60_000)


def test_active_jobs_keep_their_workers():
    lately = [bucket(runs=100, duration=5)]

    assert slots(row(active=7), lately=lately) == 7
    assert slots(row(waiting=1, active=7, age=0), lately=lately) == 7
    assert slots(row(active=7, paused=True, waiting=900, age=90_000), lately=lately) == 7


def test_slots_never_exceed_the_number_of_jobs():
    assert slots(row(waiting=3, active=1, age=90_000), lately=[bucket(runs=1, duration=900_000)]) == 4


def test_slots_never_exceed_the_limits_of_the_queue():
    lately = [bucket(runs=1, duration=60_000)]

    assert slots(row(waiting=100, age=90_000, concurrency=5), lately=lately) == 5
    assert slots(row(waiting=100, age=90_000, rate=Rate(10, 60_000)), lately=lately) == 10


def test_slots_for_jobs_of_unknown_duration_increase_step_by_step():
    assert slots(row(waiting=100, active=4, age=10_000)) == 4
    assert slots(row(waiting=100, active=4, age=40_000)) == 8


def test_older_durations_are_used_when_no_job_has_ended_recently():
    assert slots(row(waiting=60, age=10_000), ever=[bucket(runs=9, duration=2_000)]) == 6


def test_jobs_without_a_handler_in_any_live_worker_want_no_slots():
    workers = [factories.worker(names=("known",), queues=None, concurrency=8)]

    assert slots(row(waiting=9, age=0, job="unknown"), workers=workers) == 0
    found = wanted(row(waiting=9, age=0, job="known"), workers=workers)
    assert (found.slots, found.slots_per_worker, found.running) == (1, 8, 1)


def test_only_running_workers_of_the_selected_queues_are_counted():
    workers = [
        factories.worker("a", queues=("other",), concurrency=50),
        factories.worker("b", queues=(QUEUE,), concurrency=2, names=("job",)),
        factories.worker("c", queues=None, concurrency=90, state="quiet"),
    ]

    found = wanted(row(waiting=10, active=3, age=0), workers=workers, queues=[QUEUE])

    assert (found.running, found.slots_per_worker, found.workers) == (1, 2, 2)


@pytest.mark.usefixtures("tables")
def test_scaling_url_returns_the_numbers_of_all_queues_or_one_queue(monitored):
    factories.enqueue_many(monitored, 100)
    factories.enqueue(monitored, queue="emails")
    monitored.workers.record_runs([stats("a", run=[6_000] * 5)])
    monitored.sweep()

    def get(**query):
        response = Client().get("/djqueue/scaling", query, headers={"authorization": f"Bearer {TOKEN}"})
        assert response["Content-Type"] == "application/json"
        return json.loads(response.content)

    found = get()
    assert found["queues"][QUEUE]["duration_seconds"] == 6
    assert found["queues"][QUEUE]["objective_seconds"] == 60
    assert found["queues"]["emails"]["slots"] == 1
    assert found["slots"] == sum(one["slots"] for one in found["queues"].values()) >= 11
    assert found["workers"] == scrape().value("djqueue_workers_wanted") == 2
    only = get(queue="emails")
    assert (only["workers"], [*only["queues"]]) == (1, ["emails"])
