"""Who may do what: a page, a button and a forged request agree."""

from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from djqueue.models import DeadLetter, Job, QueueState, WorkerState
from tests.admin.factories import (
    NOON,
    change_url,
    list_url,
    logged_in,
    make_attempt,
    make_job,
    make_log,
    make_result,
    make_superuser,
    make_user,
)
from tests.admin.storages import Recorder

pytestmark = pytest.mark.django_db

ACTIONS = [
    ("job", "cancel_jobs", "cancel_job", "waiting", "cancel"),
    ("job", "promote_jobs", "promote_job", "delayed", "promote"),
    ("job", "retry_jobs", "retry_job", "failed", "retry"),
    ("job", "delete_selected", "delete_job", "completed", "remove"),
    ("deadletter", "retry_jobs", "retry_deadletter", "failed", "retry"),
    ("deadletter", "delete_selected", "delete_deadletter", "failed", "remove"),
    ("queuestate", "pause_queues", "pause_queuestate", "waiting", "pause"),
    ("queuestate", "resume_queues", "pause_queuestate", "waiting", "resume"),
]
RIGHTS = sorted({right for _, _, right, _, _ in ACTIONS})
MODELS = {"job": Job, "deadletter": DeadLetter, "queuestate": QueueState}
VIEWS = tuple(f"view_{model}" for model in MODELS)


def make_row(model: str, state: str) -> Any:
    job = make_job(state)
    if model == "deadletter":
        return DeadLetter.objects.get(job_id=job.job_id)
    return QueueState.objects.create(name=job.queue) if model == "queuestate" else job


def post(client: Client, model: str, action: str, row: Any) -> Any:
    data = {"action": action, "index": "0", "_selected_action": row.pk, "post": "yes"}
    return client.post(list_url(model), data)


def with_rights(right: str) -> User:
    if right == "superuser":
        return make_superuser()
    return make_user(*VIEWS, *([] if right == "view" else [right]))


@pytest.mark.parametrize("right", ["view", *RIGHTS, "superuser"])
@pytest.mark.parametrize(("model", "action", "needed", "state", "verb"), ACTIONS)
def test_an_action_needs_its_own_right(
    model: str,
    action: str,
    needed: str,
    state: str,
    verb: str,
    right: str,
    recorder: type[Recorder],
) -> None:
    row = make_row(model, state)
    client = logged_in(with_rights(right))
    allowed = right in (needed, "superuser")

    shown = client.get(list_url(model)).content.decode()
    assert (f'value="{action}"' in shown) is allowed

    post(client, model, action, row)

    assert [call[0] for call in recorder.calls] == ([verb] if allowed else [])
    assert LogEntry.objects.count() == (1 if allowed else 0)


@pytest.mark.parametrize(("model", "action", "needed", "state", "verb"), ACTIONS)
def test_an_action_checks_the_right_again_itself(
    model: str,
    action: str,
    needed: str,
    state: str,
    verb: str,
    recorder: type[Recorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in a project whose own admin class offers every action to everybody.
    monkeypatch.setattr(
        "django.contrib.admin.ModelAdmin._filter_actions_by_permissions",
        lambda _admin, _request, actions: actions,
    )
    row = make_row(model, state)

    response = post(logged_in(make_user(*VIEWS)), model, action, row)

    assert response.status_code == 403
    assert recorder.calls == []


@pytest.mark.parametrize("model", MODELS)
def test_a_page_needs_the_right_to_view(model: str) -> None:
    row = make_row(model, "failed")
    client = logged_in(make_user("view_cronjob"))
    assert client.get(list_url(model)).status_code == 403
    assert client.get(change_url(row)).status_code == 403


@pytest.mark.parametrize("model", MODELS)
def test_a_stranger_is_sent_to_the_login_page(model: str) -> None:
    response = Client().get(list_url(model))
    assert response.status_code == 302
    assert "/login/" in response["Location"]


@pytest.mark.parametrize("model", ["job", "jobresult", "jobattempt", "joblog", "deadletter", "workerstate"])
def test_rows_of_the_storage_cannot_be_added_by_anybody(model: str) -> None:
    client = logged_in(make_superuser())
    assert client.get(list_url(model) + "add/").status_code == 403
    assert client.post(list_url(model) + "add/", {"queue": "emails"}).status_code == 403


@pytest.mark.parametrize("model", ["jobresult", "jobattempt", "joblog", "workerstate"])
def test_what_belongs_to_a_job_is_not_deleted_without_it(model: str) -> None:
    job = make_job("completed")
    make_result(job, 1)
    make_attempt(job)
    make_log(job, "hello")
    WorkerState.objects.create(
        worker_id="w", host="h", pid=1, concurrency=1, started_at=NOON, seen_at=NOON, state="running"
    )
    client = logged_in(make_superuser())
    kept = apps.get_model("djqueue", model).objects.get()
    post(client, model, "delete_selected", kept)
    refused = client.post(change_url(kept).replace("/change/", "/delete/"), {"post": "yes"})
    assert refused.status_code == 403
    assert type(kept).objects.filter(pk=kept.pk).exists()


def test_rows_of_the_storage_cannot_be_edited_by_anybody() -> None:
    job = make_job("waiting", priority=3)
    response = logged_in(make_superuser()).post(change_url(job), {"priority": "9"})
    job.refresh_from_db()
    assert response.status_code == 403
    assert job.priority == 3


def test_the_delete_page_of_a_job_needs_the_right_to_delete(recorder: type[Recorder]) -> None:
    job = make_job("completed")
    address = change_url(job).replace("/change/", "/delete/")

    refused = logged_in(make_user("view_job")).post(address, {"post": "yes"})
    assert refused.status_code == 403
    assert recorder.calls == []

    logged_in(make_user("view_job", "delete_job")).post(address, {"post": "yes"})
    assert recorder.calls == [("remove", "emails", [job.job_id])]


def test_a_running_job_has_no_delete_page(recorder: type[Recorder]) -> None:
    job = make_job("active")
    address = change_url(job).replace("/change/", "/delete/")
    client = logged_in(make_superuser())
    assert "deletelink" not in client.get(change_url(job)).content.decode()
    assert client.post(address, {"post": "yes"}).status_code == 403
    assert recorder.calls == []


def test_to_pause_a_new_queue_needs_the_right_to_pause(recorder: type[Recorder]) -> None:
    make_job(queue="images")
    address = list_url("queuestate") + "add/"

    refused = logged_in(make_user("view_queuestate", "add_queuestate")).post(address, {"name": "images"})
    assert refused.status_code == 403
    assert recorder.calls == []

    logged_in(make_user("view_queuestate", "pause_queuestate")).post(address, {"name": "images"})
    assert recorder.calls == [("pause", "images", [])]
