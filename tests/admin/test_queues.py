"""Queues and workers in the admin."""

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime
from djqueue.core.errors import StorageUnavailableError
from djqueue.models import QueueState, WorkerState
from tests.admin.factories import NOON, change_url, list_url, logged_in, make_job, make_superuser
from tests.admin.storages import Recorder

pytestmark = pytest.mark.django_db
on_the_database = pytest.mark.django_db(transaction=True)


def post(address: str, **data: Any) -> tuple[Any, list[str]]:
    response = logged_in(make_superuser()).post(address, data)
    return response, [str(message) for message in get_messages(response.wsgi_request)]


@on_the_database
def test_a_queue_that_was_never_paused_is_paused_by_adding_it() -> None:
    make_job(queue="images")
    address = list_url("queuestate") + "add/"
    shown = logged_in(make_superuser()).get(address).content.decode()
    assert '<option value="images">images</option>' in shown

    response, said = post(address, name="images")
    assert response["Location"] == list_url("queuestate")
    assert said == ["1 queue was paused."]
    assert QueueState.objects.get(name="images").paused
    assert LogEntry.objects.get().object_repr == "images"


def test_a_queue_that_nobody_uses_cannot_be_paused_by_a_slip(recorder: type[Recorder]) -> None:
    make_job(queue="images")
    response, _ = post(list_url("queuestate") + "add/", name="imagse")
    assert response.status_code == 200
    assert "imagse is not one of the available choices" in response.content.decode()
    assert recorder.calls == []


def test_a_queue_of_the_settings_can_be_paused_before_its_first_job(
    settings: Any, recorder: type[Recorder]
) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": ["nightly"]}
    post(list_url("queuestate") + "add/", name="nightly")
    assert recorder.calls == [("pause", "nightly", [])]


@on_the_database
def test_queues_are_paused_and_resumed() -> None:
    make_job(queue="images")
    row = QueueState.objects.create(name="images")
    for action, paused, said in (
        ("pause_queues", True, "1 queue was paused."),
        ("resume_queues", False, "1 queue was resumed."),
    ):
        _, told = post(list_url("queuestate"), action=action, index=0, _selected_action=row.pk)
        row.refresh_from_db()
        assert told == [said]
        assert row.paused is paused


def test_the_page_of_a_queue_offers_the_one_of_the_two_that_makes_sense(
    recorder: type[Recorder],
) -> None:
    client = logged_in(make_superuser())
    for paused, offered, other in (
        (True, "resume_queues", "pause_queues"),
        (False, "pause_queues", "resume_queues"),
    ):
        row = QueueState.objects.create(name=str(paused), paused=paused)
        html = client.get(change_url(row)).content.decode()
        assert f'value="{offered}"' in html
        assert f'value="{other}"' not in html


def test_a_storage_that_is_away_is_told_of(recorder: type[Recorder]) -> None:
    row = QueueState.objects.create(name="images")
    recorder.failing = StorageUnavailableError("the scheduler is away")
    _, told = post(list_url("queuestate"), action="pause_queues", index=0, _selected_action=row.pk)
    assert told == ["The storage did not do it: the scheduler is away"]
    assert not LogEntry.objects.exists()


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
