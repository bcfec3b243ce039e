"""Deletions on the dashboard: they start after 30 seconds and can be undone until then."""

import html
import re

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.job import ClaimRequest
from djqueue.core.states import State
from djqueue.core.workers import WorkerInfo
from djqueue.dashboard import rights, tables
from djqueue.models import AuditEvent, BulkOperation, BulkState
from djqueue.operations.bulk import UNDO_TIME, Bulk
from djqueue.testing.factories import a_failed_job
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with, one_without

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def queue():
    return Queue("emails")


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


def row():
    return BulkOperation.objects.get()


def in_half_a_minute():
    """The workers do what there is to do by then."""
    for one in BulkOperation.objects.all():
        assert one.start_at.timestamp() - one.created_at.timestamp() == UNDO_TIME / 1_000
        BulkOperation.objects.filter(pk=one.pk).update(start_at=one.created_at)
    Bulk(get_storage(), "default").work()


def text(response):
    return html.unescape(response.content.decode())


def post(client, page, **form):
    return client.post(address(BY_NAME[page]), form, follow=True)


def undo(client, response):
    """Press the button that is beside the message."""
    [action] = re.findall(
        r'<form method="post" action="([^"]+)" class="djq-undo">', response.content.decode()
    )
    return client.post(action, follow=True)


def test_job_is_deleted_after_30_seconds_and_its_page_shows_the_pending_deletion(queue, client):
    queue.enqueue(1, id="job-1")
    response = post(client, "remove")
    assert "The job will be deleted in 30 seconds" in text(response)
    assert "A worker will delete this job" in text(response)
    assert "The job may start until then" in text(response)
    assert queue.get_job("job-1") is not None
    listed = client.get(address(BY_NAME["queue"], state="waiting"))
    assert "deletion pending" in text(listed)
    [event] = AuditEvent.objects.all()
    assert (event.action, event.job_id, event.detail) == ("remove", "job-1", {"operation": row().pk})

    in_half_a_minute()
    assert queue.get_job("job-1") is None
    assert client.get(address(BY_NAME["job"])).status_code == 404
    assert "deletion pending" not in text(client.get(address(BY_NAME["queue"])))


def test_deletion_is_undone_by_the_button_in_the_message(queue, client):
    queue.enqueue(1, id="job-1")
    response = undo(client, post(client, "remove"))
    assert "Undone. No jobs were deleted." in text(response)
    in_half_a_minute()
    assert queue.get_job("job-1").state is State.WAITING
    assert "will be deleted" not in text(client.get(address(BY_NAME["job"])))
    assert AuditEvent.objects.filter(action="undo").count() == 1


def test_started_deletion_cannot_be_undone_and_the_page_says_so(queue, client):
    queue.enqueue(1, id="job-1")
    response = post(client, "remove")
    in_half_a_minute()
    assert "Too late to undo" in text(undo(client, response))
    assert row().state == BulkState.DONE


def test_second_deletion_is_reported_and_retried_job_is_kept(queue, client):
    storage = get_storage()
    a_failed_job(storage, queue="emails", id="job-1")
    post(client, "remove")
    assert "The job is already marked for deletion" in text(post(client, "remove"))
    post(client, "retry")
    in_half_a_minute()
    assert queue.get_job("job-1").state is State.WAITING
    assert row().refused == {"changed": 1}


def test_active_job_is_not_deleted(queue, client):
    queue.enqueue(1, id="job-1")
    get_storage().claim(ClaimRequest("w1", 1, frozenset({"emails"}), ("emails",)))
    assert "the job has changed: active" in text(post(client, "remove"))
    assert not BulkOperation.objects.exists()


def test_page_warns_that_no_worker_is_running(queue, client):
    queue.enqueue(1, id="job-1")
    assert "No worker is running" in text(post(client, "remove"))
    BulkOperation.objects.all().delete()
    get_storage().workers.register(WorkerInfo("w1", "host", 1, None, ("emails",), 1, 0))
    assert "No worker is running" not in text(post(client, "remove"))


def test_selected_dead_letters_are_deleted_unless_retried_meanwhile(queue, client):
    storage = get_storage()
    for name in ("job-1", "job-2", "job-3"):
        a_failed_job(storage, queue="emails", id=name)
    response = post(client, "errors_delete", job=["emails/job-1", "emails/job-2"])
    assert "2 dead letters of emails will be deleted in 30 seconds" in text(response)
    assert text(response).count("deletion pending</span>") == 2
    storage.jobs.retry("emails", ["job-2"])
    in_half_a_minute()
    assert storage.reads.states("emails", ["job-1", "job-2", "job-3"]) == [None, State.WAITING, State.FAILED]
    assert "No dead letters were selected" in text(post(client, "errors_delete"))


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("clear", [State.FAILED]),
        ("failed", [State.WAITING, State.DELAYED]),
        ("obliterate", []),
    ],
)
def test_queue_is_cleaned_after_30_seconds_and_its_page_shows_the_pending_deletion(queue, client, what, left):
    storage = get_storage()
    a_failed_job(storage, queue="emails", id="dead")
    queue.enqueue(1)
    queue.enqueue(1, delay=60)
    response = post(client, "clean", what=what, confirm="emails")
    assert "will be deleted in 30 seconds" in text(response)
    assert "A worker will delete" in text(response)
    told = text(client.get(f"/admin/djqueue/dashboard/history/operations/{row().pk}/"))
    assert ("States" in told) is (what != "obliterate")
    assert len(storage.reads.page("emails", None, 10)) == 3
    in_half_a_minute()
    assert sorted(job.state for job in storage.reads.page("emails", None, 10)) == sorted(left)
    assert ("emails" in storage.queues.names()) is (what != "obliterate")


def test_deletion_of_queue_is_undone(queue, client):
    queue.enqueue(1)
    undo(client, post(client, "clean", what="obliterate", confirm="emails"))
    in_half_a_minute()
    assert len(get_storage().reads.page("emails", None, 10)) == 1


def test_queue_with_active_jobs_is_not_deleted_and_the_page_says_so(queue, client):
    queue.enqueue(1)
    get_storage().claim(ClaimRequest("w1", 1, frozenset({"emails"}), ("emails",)))
    assert "The queue has active jobs" in text(post(client, "clean", what="obliterate", confirm="emails"))
    assert not BulkOperation.objects.exists()


def test_undo_requires_permission_for_the_deletion(queue, client):
    queue.enqueue(1, id="job-1")
    post(client, "remove")
    begun = row().pk
    pages = {
        name: f"/admin/djqueue/dashboard/history/operations/{begun}/{name}/"
        for name in ("undo", "undo-clean")
    }
    assert logged_in(one_without(rights.DELETE)).post(pages["undo"]).status_code == 403
    assert client.post(pages["undo-clean"]).status_code == 403, "it is no cleaning of a queue"
    assert row().state == BulkState.PLANNED
    assert AuditEvent.objects.filter(refused=True).count() == 2


def test_undo_is_refused_for_hidden_queue(queue, client, settings):
    queue.enqueue(1, id="job-1")
    post(client, "remove")
    hidden = {"QUEUE_FILTER": lambda request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": hidden}
    assert client.post(f"/admin/djqueue/dashboard/history/operations/{row().pk}/undo/").status_code == 404
    assert client.post("/admin/djqueue/dashboard/history/operations/999999/undo/").status_code == 404
    assert row().state == BulkState.PLANNED
    assert client.get("/admin/djqueue/dashboard/history/").context["entries"] == []
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {}}
    assert client.post(f"/admin/djqueue/dashboard/history/operations/{row().pk}/undo/").status_code == 302
    assert AuditEvent.objects.latest("pk").detail["queues"] == ["emails"]


def test_undo_is_refused_on_read_only_dashboard(queue, client, settings):
    queue.enqueue(1, id="job-1")
    post(client, "remove")
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"READ_ONLY": True}}
    assert client.post(f"/admin/djqueue/dashboard/history/operations/{row().pk}/undo/").status_code == 403
    assert row().state == BulkState.PLANNED


@pytest.mark.parametrize("page", ["remove", "errors_delete", "clean", "edit_now"])
def test_forged_request_of_viewer_changes_nothing_and_is_logged(queue, page):
    queue.enqueue(1, id="job-1")
    viewer = logged_in(one_with(rights.VIEW))
    assert post(viewer, page, job=["emails/job-1"], what="clear", confirm="emails").status_code == 403
    assert not BulkOperation.objects.exists()
    assert AuditEvent.objects.get().refused


class ReplicaRouter:
    """Reads from a replica, and writes to the default database."""

    def db_for_read(self, model, **_):
        return "replica"

    def db_for_write(self, model, **_):
        return "default"


def test_rows_are_read_and_written_where_workers_find_them(queue, settings):
    settings.DATABASE_ROUTERS = ["tests.dashboard.test_deletions.ReplicaRouter"]

    assert tables.alias_of(BulkOperation) == "default"
