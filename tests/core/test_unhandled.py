"""Waiting jobs that no live worker can run."""

from djqueue.contrib.celery import values
from djqueue.core.engine import Engine
from djqueue.core.overview import QueueOverview
from djqueue.core.policies import Hold
from djqueue.core.workers import CELERY_RECORDS, WorkerInfo, unhandled


def queue(name, **names) -> QueueOverview:
    return Engine().reads.overview([name]).queues[0]._replace(names=names)


def worker(*names, queues=None, state="running") -> WorkerInfo:
    return WorkerInfo("w1", "host", 7, queues, names, 4, 1, state=state)


def test_unhandled_names_are_listed_by_number_of_jobs():
    rows = [queue("emails", known=5, new=1), queue("reports", known=2, old=3)]
    found = unhandled(
        rows, [worker("known", queues=("emails",)), worker("known", "new", queues=("reports",))]
    )
    assert found == [("reports", "old", 3), ("emails", "new", 1)]


def test_worker_of_all_queues_counts_for_each_queue():
    assert unhandled([queue("emails", new=1)], [worker("other", queues=("emails",)), worker("new")]) == []


def test_queue_without_workers_has_no_unhandled_names():
    assert unhandled([queue("emails", new=1)], []) == []
    assert unhandled([queue("emails", new=1)], [worker("other", queues=("reports",))]) == []


def test_quiet_worker_handles_its_names_and_stopping_worker_does_not():
    rows, other = [queue("emails", new=1)], worker("other")
    assert unhandled(rows, [worker("new", state="quiet"), other]) == []
    assert unhandled(rows, [worker("new", state="stopping"), other]) == [("emails", "new", 1)]


def test_held_name_needs_no_handler_yet():
    held = queue("emails", new=1, mail=2)._replace(holds=(Hold("mail", 0),))
    assert unhandled([held], [worker("other")]) == [("emails", "new", 1)]


def test_values_of_celery_need_no_worker():
    assert values.DECLARED_QUEUE in CELERY_RECORDS
    assert values.EXCHANGE in CELERY_RECORDS
    assert values.RESULT in CELERY_RECORDS
    rows = [queue("celery.results", **dict.fromkeys(CELERY_RECORDS, 1))]
    assert unhandled(rows, [worker("other")]) == []


def test_names_without_jobs_are_left_out():
    assert unhandled([queue("emails", new=0)], [worker("other")]) == []
