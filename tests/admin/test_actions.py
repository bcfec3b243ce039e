"""What the actions do, on the database storage, and what they say."""

from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.messages import get_messages
from django.test import Client

from djqueue.admin import actions
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import CancelResult
from djqueue.models import DeadLetter, Job, JobResult
from tests.admin.factories import (
    change_url,
    list_url,
    logged_in,
    make_attempt,
    make_dead_letter,
    make_job,
    make_log,
    make_result,
    make_superuser,
)
from tests.admin.storages import Recorder

on_the_database = pytest.mark.django_db(transaction=True)
"""The storage writes from a thread of its own."""


def act(action: str, *rows: Any, client: Client | None = None, **data: Any) -> list[str]:
    """Do an action to rows, as from their list; returns what the user is told."""
    client = client or logged_in(make_superuser())
    given = {"action": action, "index": "0", "_selected_action": [row.pk for row in rows], **data}
    response = client.post(list_url(rows[0]._meta.model_name), given)
    assert response.status_code == 302, response.content
    return [str(message) for message in get_messages(response.wsgi_request)]


def state_of(job: Job) -> str:
    return Job.objects.get(pk=job.pk).state


@on_the_database
@pytest.mark.parametrize("state", ["waiting", "delayed", "blocked"])
def test_a_pending_job_is_cancelled(state: str) -> None:
    job = make_job(state)
    assert act("cancel_jobs", job) == ["1 job was cancelled."]
    assert state_of(job) == "cancelled"


@pytest.mark.django_db
def test_a_running_job_is_asked_to_stop(recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Recorder,
        "cancel",
        lambda _self, _queue, ids: [CancelResult(job_id, "requested") for job_id in ids],
    )
    assert act("cancel_jobs", make_job("active")) == ["1 running job was asked to stop."]


@on_the_database
def test_a_delayed_job_is_promoted() -> None:
    job = make_job("delayed")
    assert act("promote_jobs", job) == ["1 job may run now."]
    assert state_of(job) == "waiting"


@on_the_database
def test_a_failed_job_is_retried_and_its_dead_letter_is_gone() -> None:
    job = make_job("failed")
    assert act("retry_jobs", job) == ["1 job will run again."]
    assert state_of(job) == "waiting"
    assert not DeadLetter.objects.exists()


@on_the_database
def test_a_dead_letter_is_retried() -> None:
    job = make_job("failed")
    assert act("retry_jobs", DeadLetter.objects.get()) == ["1 job will run again."]
    assert state_of(job) == "waiting"
    assert not DeadLetter.objects.exists()


@on_the_database
@pytest.mark.parametrize("state", ["waiting", "delayed", "completed", "failed", "cancelled"])
def test_a_job_is_deleted_with_all_that_is_its_own(state: str) -> None:
    job = make_job(state)
    make_result(job, 42)
    make_attempt(job)
    make_log(job, "hello")
    assert act("delete_selected", job, post="yes") == ["1 job was deleted."]
    assert not Job.objects.exists()
    assert not JobResult.objects.exists()
    assert not DeadLetter.objects.exists()


@on_the_database
def test_a_deleted_dead_letter_takes_its_job_along() -> None:
    make_job("failed")
    assert act("delete_selected", DeadLetter.objects.get(), post="yes") == ["1 job was deleted."]
    assert not Job.objects.exists()


@on_the_database
def test_jobs_of_many_states_and_queues_are_told_apart() -> None:
    waiting = [make_job("waiting", queue=queue) for queue in ("a", "b", "a")]
    others = [make_job(state) for state in ("completed", "completed", "failed")]
    assert act("cancel_jobs", *waiting, *others) == [
        "3 jobs were cancelled.",
        "3 jobs were left as they are: 2 completed, 1 failed.",
    ]
    assert {state_of(job) for job in waiting} == {"cancelled"}
    assert [state_of(job) for job in others] == ["completed", "completed", "failed"]


@on_the_database
def test_a_row_that_its_storage_has_forgotten_is_told_of() -> None:
    letter = make_dead_letter(make_job("completed"))
    assert act("retry_jobs", letter) == ["1 job was left as it is: 1 no longer failed."]


@on_the_database
def test_a_selection_that_has_gone_meanwhile_is_told_of() -> None:
    assert act("cancel_jobs", Job(pk=1)) == ["Nothing was done: what was selected is gone."]
    assert not LogEntry.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("action", "state", "flag", "text"),
    [
        ("cancel_jobs", "waiting", CHANGE, "Cancelled."),
        ("promote_jobs", "delayed", CHANGE, "Promoted."),
        ("retry_jobs", "failed", CHANGE, "Retried."),
        ("delete_selected", "completed", DELETION, ""),
    ],
)
def test_every_job_acted_on_is_in_the_admins_log(
    action: str, state: str, flag: int, text: str, recorder: type[Recorder]
) -> None:
    jobs = [make_job(state), make_job(state)]
    untouched = make_job("active" if action != "cancel_jobs" else "completed")
    act(action, *jobs, untouched, post="yes")
    entries = sorted(LogEntry.objects.all(), key=lambda entry: int(str(entry.object_id)))
    assert [(entry.object_id, entry.object_repr) for entry in entries] == [
        (str(job.pk), f"{job.name} {job.job_id}") for job in jobs
    ]
    assert {(entry.action_flag, entry.change_message) for entry in entries} == {(flag, text)}


@pytest.mark.django_db
def test_the_storage_is_asked_queue_by_queue_in_chunks_oldest_first(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "CHUNK", 2)
    jobs = [make_job(queue=queue, job_id=f"{queue}{n}") for n in range(3) for queue in ("b", "a")]
    act("cancel_jobs", *jobs)
    assert recorder.calls == [
        ("cancel", "a", ["a0", "a1"]),
        ("cancel", "a", ["a2"]),
        ("cancel", "b", ["b0", "b1"]),
        ("cancel", "b", ["b2"]),
    ]


@pytest.mark.django_db
def test_a_selection_across_pages_follows_the_filter(recorder: type[Recorder]) -> None:
    mine = [make_job(queue="a") for _ in range(3)]
    make_job(queue="b")
    logged_in(make_superuser()).post(
        list_url("job", queue="a"),
        {
            "action": "cancel_jobs",
            "index": "0",
            "select_across": "1",
            "_selected_action": mine[0].pk,
        },
    )
    assert recorder.calls == [("cancel", "a", [job.job_id for job in mine])]


@pytest.mark.django_db
def test_one_action_takes_no_more_rows_than_are_listed(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "LISTED", 2)
    jobs = [make_job() for _ in range(3)]
    said = act("cancel_jobs", *jobs, select_across="1")
    assert recorder.calls == [("cancel", "emails", [job.job_id for job in jobs[1:]])]
    assert said == [
        "2 jobs were cancelled.",
        "Only the newest 10,000 were looked at; the others are as they were.",
    ]


@pytest.mark.django_db
def test_a_storage_that_is_away_is_told_of_and_nothing_is_logged(
    recorder: type[Recorder],
) -> None:
    recorder.failing = StorageUnavailableError("the scheduler is away")
    assert act("cancel_jobs", make_job()) == ["The storage did not do it: the scheduler is away"]
    assert not LogEntry.objects.exists()


@pytest.mark.django_db
def test_a_deletion_asks_first_and_its_answer_keeps_the_selection(
    recorder: type[Recorder],
) -> None:
    jobs = [make_job("completed", queue="a") for _ in range(22)]
    client = logged_in(make_superuser())
    data = {"action": "delete_selected", "index": "0", "select_across": "1"}
    address = list_url("job", queue="a")
    page = client.post(address, {**data, "_selected_action": jobs[0].pk}).content.decode()
    assert "delete 22 jobs" in page
    assert "and 2 more" in page
    assert recorder.calls == []
    assert '<input type="hidden" name="select_across" value="1">' in page
    assert f'<input type="hidden" name="_selected_action" value="{jobs[0].pk}">' in page

    answer = {"action": "delete_selected", "select_across": "1", "post": "yes"}
    client.post(address, {**answer, "_selected_action": jobs[0].pk})
    assert [len(ids) for _verb, _queue, ids in recorder.calls] == [22]


@pytest.mark.django_db
def test_a_job_that_would_not_go_is_not_said_to_be_deleted(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "remove", lambda _self, _queue, ids: [False for _ in ids])
    job = make_job("completed")
    response = logged_in(make_superuser()).post(
        change_url(job).replace("/change/", "/delete/"), {"post": "yes"}
    )
    assert response["Location"] == change_url(job)
    said = [str(message) for message in get_messages(response.wsgi_request)]
    assert said == ["1 job was left as it is: 1 running or gone."]
    assert not LogEntry.objects.exists()


@on_the_database
def test_the_page_of_a_job_offers_what_its_state_allows() -> None:
    client = logged_in(make_superuser())
    offered = {
        "waiting": {"cancel_jobs"},
        "delayed": {"cancel_jobs", "promote_jobs"},
        "blocked": {"cancel_jobs"},
        "active": {"cancel_jobs"},
        "completed": set(),
        "failed": {"retry_jobs"},
        "cancelled": set(),
    }
    for state, expected in offered.items():
        page = client.get(change_url(make_job(state))).content.decode()
        buttons = {name for name in ("cancel_jobs", "promote_jobs", "retry_jobs") if name in page}
        assert buttons == expected, state


@on_the_database
def test_a_button_leads_back_to_the_page_of_its_job() -> None:
    job = make_job("delayed")
    response = logged_in(make_superuser()).post(
        list_url("job"),
        {"action": "promote_jobs", "index": "0", "_selected_action": job.pk, "djq_row": job.pk},
    )
    assert response["Location"] == change_url(job)
    assert state_of(job) == "waiting"
