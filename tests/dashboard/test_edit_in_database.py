"""Editing and deleting jobs of the database storage."""

import html
import re

import pytest

from djqueue import Queue, job
from djqueue.client import get_storage
from djqueue.core.states import State
from djqueue.models import BulkOperation, PayloadVersion
from djqueue.operations.bulk import Bulk
from djqueue.testing.factories import a_failed_job
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.dialect]

BY_NAME = {page.name: page for page in PAGES}


@job(name="tests.database.mail", queue="emails")
def mail(to, *, password=None):
    """Registered, so that its arguments can be checked."""


@pytest.fixture
def storage(settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    found = get_storage()
    found.connect()
    return found


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


def edit(client, **typed):
    page = client.get(address(BY_NAME["edit"])).content.decode()
    form = {
        name: html.unescape(value)
        for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)" id="id_', page)
    }
    answer = client.post(address(BY_NAME["edit_now"]), {**form, **typed}, follow=True)
    return html.unescape(answer.content.decode())


def test_job_is_edited_while_pending_and_after_it_failed(storage, client):
    Queue("emails").enqueue({"args": ["ann"], "kwargs": {}}, id="job-1", name="tests.database.mail")
    assert "Arguments changed" in edit(client, args='["bob"]', kwargs='{"password": "x"}')
    payload = storage.reads.jobs("emails", ["job-1"])[0].payload
    storage.jobs.remove("emails", ["job-1"])
    a_failed_job(storage, queue="emails", id="job-1", name="tests.database.mail", payload=payload)

    assert "The job will be retried" in edit(client, args='["eve"]', kwargs='{"password": "•••1"}')

    info = Queue("emails").get_job("job-1")
    assert (info.state, info.payload) == (State.WAITING, {"args": ["eve"], "kwargs": {"password": "x"}})
    assert [row.outcome for row in PayloadVersion.objects.order_by("pk")] == ["updated", "retried"]


def test_job_is_deleted_after_the_undo_period(storage, client):
    Queue("emails").enqueue(1, id="job-1")
    client.post(address(BY_NAME["remove"]))
    Bulk(storage, "default").work()
    assert storage.reads.states("emails", ["job-1"]) == [State.WAITING]
    row = BulkOperation.objects.get()
    BulkOperation.objects.update(start_at=row.created_at)
    Bulk(storage, "default").work()
    assert storage.reads.states("emails", ["job-1"]) == [None]


def test_queue_is_deleted_after_the_undo_period(storage, client):
    a_failed_job(storage, queue="emails", id="job-1")
    Queue("emails").enqueue(1)
    client.post(address(BY_NAME["clean"]), {"what": "obliterate", "confirm": "emails"})
    row = BulkOperation.objects.get()
    BulkOperation.objects.update(start_at=row.created_at)
    Bulk(storage, "default").work()
    assert "emails" not in storage.queues.names()
