"""Queues and workers in the admin."""

import pytest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime
from djqueue.models import QueueState, WorkerState
from tests.admin.factories import NOON, change_url, list_url, logged_in, make_superuser

pytestmark = pytest.mark.django_db


def test_a_queues_limits_are_shown_in_words() -> None:
    QueueState.objects.create(name="a", rate_capacity=100, rate_per=1_500, concurrency=3)
    QueueState.objects.create(name="b")
    shown = logged_in(make_superuser()).get(list_url("queuestate")).content.decode()
    assert "100 in 1.5 s" in shown
    assert "no limit" in shown


def test_a_worker_that_is_silent_is_said_to_be() -> None:
    now = to_datetime(SYSTEM_CLOCK.now())
    for worker_id, seen in (("lively", now), ("gone", NOON)):
        WorkerState.objects.create(
            worker_id=worker_id,
            host="host",
            pid=1,
            queues=["a", "b"] if worker_id == "gone" else None,
            names=["shop.jobs.send_receipt"],
            concurrency=4,
            started_at=NOON,
            seen_at=seen,
            state="running",
        )
    client = logged_in(make_superuser())
    shown = client.get(list_url("workerstate")).content.decode()
    assert shown.count("silent for more than a minute") == 1
    assert shown.index("lively") < shown.index("gone")
    page = client.get(change_url(WorkerState.objects.get(worker_id="gone"))).content.decode()
    assert "a, b" in page
    assert "shop.jobs.send_receipt" in page
