"""Metrics, enqueueing, operations, activity and storage pages, and pages during an outage."""

import csv
import io
import json
import re

import pytest

from djqueue import Queue
from djqueue.client import get_storage, job, registry
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.units import to_datetime
from djqueue.dashboard import rights, tables
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views import history
from djqueue.models import AuditEvent, BulkKind, BulkOperation, BulkState, OutboxJob
from djqueue.operations import bulk
from djqueue.operations.alerts import BEGAN, OVER
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.memory import MemoryStorage
from tests.admin.factories import make_job
from tests.dashboard.acting import complete, fail
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}
READ = ("status", "queues", "queue", "jobs", "errors", "workers", "job_types", "system")


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


@pytest.fixture
def add(monkeypatch):
    """A job that is registered."""
    monkeypatch.setattr(registry, "_types", {})

    @job(name="sums.add", queue="sums")
    def add(first, second=0):
        return first + second

    return add


def shown(client, name, **query):
    response = client.get(address(BY_NAME[name], **query))
    assert response.status_code == 200
    return response


# The storage is away.


@pytest.mark.parametrize("name", READ)
def test_page_responds_during_outage_of_storage(name, client, memory, monkeypatch):
    def away(*_args, **_kwargs):
        raise StorageUnavailableError("nobody is at home")

    storage = get_storage()
    monkeypatch.setattr(storage.workers, "all", away)
    for verb in ("overview", "series", "diagnostics", "cursor_page", "dead_letter_page"):
        monkeypatch.setattr(storage.reads, verb, away)
    response = shown(client, name)
    assert "The storage is unreachable: nobody is at home" in response.content.decode()
    assert response["Djq-Unavailable"] == "1"


def test_partial_request_during_outage_gets_a_notice_and_keeps_the_content(client, memory, monkeypatch):
    def away(*_args, **_kwargs):
        raise StorageUnavailableError("nobody is at home")

    monkeypatch.setattr(get_storage().reads, "overview", away)
    response = client.get(address(BY_NAME["queues"]), headers={"HX-Request": "true"})
    assert (response.status_code, response["Djq-Unavailable"]) == (204, "1")


def test_action_during_outage_is_reported_as_failed(client, memory, monkeypatch):
    def away(*_args, **_kwargs):
        raise StorageUnavailableError("nobody is at home")

    monkeypatch.setattr(get_storage().queues, "pause", away)
    monkeypatch.setattr(get_storage().jobs, "cancel", away)
    for name in ("pause", "cancel", "selected_cancel"):
        response = client.post(address(BY_NAME[name]), {"job": "emails/a"}, follow=True)
        assert "The action failed: nobody is at home" in response.content.decode(), name
    assert not AuditEvent.objects.exists()


# Metrics.


def test_metrics_cover_a_window_by_queue_and_by_job(client, memory):
    Queue("emails").enqueue_many(range(2), ids=["a", "b"])
    Queue("images").enqueue(1)
    complete("a")
    fail("b")
    get_storage().sweep()
    report = shown(client, "job_types", window="day").context["report"]
    assert {row.label: row.now.enqueued for row in report.queues} == {"emails": 2, "images": 1}
    assert (report.total.completed, report.total.failed) == (1, 1)
    assert {row.label: row.failing for row in report.queues}["emails"] == 50
    assert len(report.series) == 96
    one = shown(client, "job_types", queue="images").context["report"]
    assert [row.label for row in one.queues] == ["images"]


def test_metrics_are_exported_as_csv_and_json(client, memory):
    Queue("emails").enqueue_many(range(2))
    get_storage().sweep()
    text = shown(client, "job_types_export", format="csv").content.decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 60
    assert sum(int(row["enqueued"]) for row in rows) == 2
    found = json.loads(shown(client, "job_types_export", format="json").content)
    assert sum(row["enqueued"] for row in found) == 2
    assert found[0].keys() == rows[0].keys()


def test_metrics_of_hidden_queue_are_empty(client, memory, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("emails").enqueue(1)
    get_storage().sweep()
    for query in ({}, {"queue": "emails"}):
        assert shown(client, "job_types", **query).context["report"].total.enqueued == 0


# Enqueue.


def enqueue(client, name="sums.add", **given):
    """Run a job by hand, on the page of its type."""
    return client.post(address(BY_NAME["enqueue_now"]).replace("emails", name), given)


def test_registered_job_is_enqueued_with_its_arguments(client, memory, add):
    response = enqueue(client, args="[1]", kwargs='{"second": 2}', priority="7")
    [record] = get_storage().reads.page("sums", None, 10)
    assert response["Location"].endswith(f"/jobs/sums/{record.id}/")
    assert (record.name, record.options.priority) == ("sums.add", 7)
    event = AuditEvent.objects.get()
    assert (event.action, event.queue, event.job_id) == ("enqueue_now", "sums", record.id)
    assert "second" not in str(event.detail)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"args": "[1, 2, 3]"}, "does not accept these arguments"),
        ({"args": "{}"}, "Enter a JSON list"),
        ({"args": "[1"}, "Invalid JSON at line 1, column 3"),
        ({"name": "os.system", "args": '["ls"]'}, "No job of this name is registered"),
        ({"args": "[1]", "delay": "-1"}, "greater than or equal to 0"),
    ],
)
def test_arguments_that_the_function_does_not_accept_are_rejected(client, memory, add, given, why):
    response = enqueue(client, **{"kwargs": "{}", **given})
    assert response.status_code == 400
    assert why in response.content.decode()
    assert get_storage().queues.names() == []
    assert not AuditEvent.objects.exists()


@pytest.mark.parametrize("queue", ["", "hidden"])
def test_enqueue_into_hidden_queue_is_refused(client, memory, add, settings, queue):
    seen = {"QUEUE_FILTER": lambda _request, name: name == "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    response = enqueue(client, args="[1]", kwargs="{}", queue=queue)
    assert "have access" in response.content.decode()
    assert response.status_code == 400
    assert get_storage().queues.names() == []


def test_refusal_of_unknown_queue_does_not_suggest_a_hidden_one(client, memory, add, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "payroll"}
    queues = {"QUEUES": {"payroll": {}}, "STRICT_QUEUES": True}
    settings.DJQUEUE = {**settings.DJQUEUE, **queues, "DASHBOARD": seen}
    text = enqueue(client, args="[1]", kwargs="{}", queue="payrol").content.decode()
    assert "exist or you don" in text
    assert "payroll" not in text


# Bulk operations.


def test_operation_shows_its_progress_and_skipped_jobs(client, memory):
    row = bulk.begin("default", BulkKind.RETRY, bulk.Selection(("emails",)), user="ann", expected=4)
    BulkOperation.objects.update(
        id=1, state=BulkState.RUNNING, looked_at=2, done=1, refused={"unique_key_taken": 1}
    )
    response = shown(client, "operation")
    assert response.context["share"] == 0.5
    html = response.content.decode()
    assert "unique key in use (1)" in html
    assert "Abort" in html
    assert "ann" in shown(client, "operations").content.decode()
    assert row.kind == BulkKind.RETRY


def test_operation_is_ended_once(client, memory):
    bulk.begin("default", BulkKind.PURGE, bulk.Selection(("emails",)))
    BulkOperation.objects.update(id=1)
    assert "Undo" in shown(client, "operation").content.decode()
    said = [client.post(address(BY_NAME["abort"]), follow=True).content.decode() for _ in range(2)]
    assert "No more jobs are changed" in said[0]
    assert "The operation has already finished." in said[1]
    assert BulkOperation.objects.get().state == BulkState.ABORTED
    assert AuditEvent.objects.get(action="abort").detail == {"operation": 1, "queues": ["emails"]}


def test_unknown_operation_is_not_found(client, memory):
    response = client.get(address(BY_NAME["operation"]))
    assert response.status_code == 404


def test_operation_on_hidden_queue_is_not_found(client, memory, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    bulk.begin("default", BulkKind.PURGE, bulk.Selection(("images", "emails")), user="one of 2")
    BulkOperation.objects.update(id=1)
    seen_too = bulk.begin("default", BulkKind.PURGE, bulk.Selection(("images",)), user="one of 1")
    assert seen_too.pk != 1

    assert client.get(address(BY_NAME["operation"])).status_code == 404
    html = shown(client, "operations").content.decode()
    assert "one of 1" in html
    assert "one of 2" not in html
    assert client.post(address(BY_NAME["abort"])).status_code == 404
    assert client.post(address(BY_NAME["abort"]).replace("/1/", "/999999/")).status_code == 404
    assert shown(client, "history").context["entries"] == []
    assert BulkOperation.objects.get(pk=1).state == BulkState.PLANNED
    assert AuditEvent.objects.filter(action="abort", refused=True).count() == 1


# Activity.


def test_activity_is_listed_newest_first_and_filtered(client, memory):
    at = SYSTEM_CLOCK.now()
    for number, (user, action) in enumerate((("ann", "pause"), ("bob", "resume"), ("ann", "retry"))):
        AuditEvent.objects.create(
            at=to_datetime(at + number), user=user, action=action, queue="emails", refused=number == 2
        )
    assert told(shown(client, "history")) == ["retry", "resume", "pause"]
    assert told(shown(client, "history", user="ann")) == ["retry", "pause"]
    assert "refused: Retry job" in shown(client, "history", action="retry").content.decode()


def test_problem_of_no_queue_is_shown_to_users_who_see_all(client, memory, settings):
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "DASHBOARD": {"QUEUE_FILTER": lambda _request, name: name != "secret"},
    }
    for number, about in enumerate(({}, {"worker": "w1"})):
        AuditEvent.objects.create(at=to_datetime(number + 1), user="-", action=BEGAN, detail=about)
    assert told(shown(client, "history")) == [BEGAN, BEGAN]
    Queue("secret").enqueue(1)
    read_cache.clear()
    assert told(shown(client, "history")) == []


def told(response):
    return [deed.row.action for deed in response.context["entries"]]


def test_every_action_has_a_label_in_list_and_filter(client, memory):
    by_pages = {page.name for page in PAGES if page.method == "POST"}
    assert set(history.ACTION_LABELS) == {*by_pages, BEGAN, OVER}
    AuditEvent.objects.create(at=to_datetime(1), user="ann", action="errors_begin")
    AuditEvent.objects.create(at=to_datetime(2), user="ann", action="of_a_version_to_come")
    html = shown(client, "history", action="of_a_version_to_come").content.decode()
    assert '<option value="of_a_version_to_come" selected>of_a_version_to_come</option>' in html
    html = shown(client, "history").content.decode().partition('id="djq-live"')[2]
    assert "Retry or delete matching dead letters" in html
    assert "errors_begin" not in html


def test_activity_shows_details_in_words_and_links_to_the_operation(client, memory):
    AuditEvent.objects.create(
        at=to_datetime(1),
        user="ann",
        action="limits",
        queue="emails",
        detail={"old": {"rate": None}, "new": {"rate": "5/s"}, "operation": 1, "jobs": [["emails", "job-7"]]},
    )
    response = shown(client, "history")
    [deed] = response.context["entries"]
    assert deed.detail == [("old", "rate -"), ("new", "rate 5/s"), ("jobs", "job-7")]
    assert address(BY_NAME["operation"]) in response.content.decode()


@pytest.mark.parametrize(
    ("key", "text", "sentence", "page"),
    [
        (["health.workers", "emails", "", "", "", ""], "", "Queue emails has no worker.", "queue"),
        (["health.silent", "", "", "w1", "", ""], "", "Worker w1 has stopped sending heartbeats.", "worker"),
        (["problem.overdue", "emails", "night", "", "1", ""], "", "Schedule night is overdue.", "schedule"),
        (
            ["problem.new_errors", "emails", "", "", "", "abc"],
            "ValueError: no",
            "New since the deploy: ValueError: no",
            "error",
        ),
        (
            ["health.handlers", "emails", "emails", "", "", ""],
            "",
            "No worker knows the job emails.",
            "job_type",
        ),
    ],
)
def test_activity_shows_problems_as_sentences_with_links(client, memory, key, text, sentence, page):
    detail = {"key": key, "worker": key[3], "text": text}
    AuditEvent.objects.create(at=to_datetime(1), user="-", action=BEGAN, queue=key[1], detail=detail)
    response = shown(client, "history")
    [deed] = response.context["entries"]
    assert (deed.links, deed.detail) == ([(sentence, address(BY_NAME[page]))], [])


def test_activity_has_no_raw_words_of_actions(client, memory):
    detail = {"kind": "purge", "state": "failed", "older_than": 7, "old": {"paused": False}, "copy": "x"}
    detail |= {
        "what": "completed",
        "how": "updated",
        "dead_letters": {"error_type": "E"},
        "changed": {"timezone": "UTC"},
    }
    AuditEvent.objects.create(at=to_datetime(1), user="ann", action="errors_begin", detail=detail)
    [deed] = shown(client, "history").context["entries"]
    assert dict(deed.detail) == {
        "old": "paused no",
        "kind": "delete dead letters",
        "state": "failed",
        "Older than (s)": "7",
        "Jobs to delete": "Completed jobs",
        "outcome": "replaced before the job started",
        "filter": "Error type E",
        "changed": "time zone UTC",
    }


def test_activity_is_paginated(client, memory, django_assert_max_num_queries):
    AuditEvent.objects.bulk_create(
        AuditEvent(at=to_datetime(0), user="ann", action=str(number)) for number in range(120)
    )
    with django_assert_max_num_queries(6):
        first = shown(client, "history", user="ann")
    assert told(first)[0] == "119"
    second = client.get(first.context["older"])
    assert told(second) == [str(n) for n in range(69, 19, -1)]
    assert told(client.get(second.context["newer"]))[0] == "119"


def test_activity_of_hidden_queue_is_hidden(client, memory, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    AuditEvent.objects.create(at=to_datetime(0), user="ann", action="pause", queue="emails")
    for detail in ({"queues": ["images", "emails"]}, {"jobs": [["images", "a"], ["emails", "b"]]}):
        AuditEvent.objects.create(at=to_datetime(0), user="ann", action="errors_begin", detail=detail)
    assert told(shown(client, "history")) == []
    AuditEvent.objects.create(at=to_datetime(0), user="ann", action="x", detail={"queues": ["images"]})
    assert told(shown(client, "history")) == ["x"]


def test_pages_of_activity_are_full_of_visible_entries(client, memory, settings, monkeypatch):
    monkeypatch.setattr(tables, "VISIBLE_PART", 7)
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    AuditEvent.objects.bulk_create(
        AuditEvent(at=to_datetime(0), user="ann", action=str(n), queue="images" if n % 3 == 0 else "emails")
        for n in range(240)
    )
    for query in ({"queue": "emails"}, {"queue": "unknown"}):
        response = shown(client, "history", **query)
        assert (told(response), response.context["older"], response.context["newer"]) == ([], "", "")
    first = shown(client, "history")
    assert told(first) == [str(n) for n in range(237, 87, -3)]
    second = client.get(first.context["older"])
    assert told(second) == [str(n) for n in range(87, -1, -3)]
    assert second.context["older"] == ""
    back = client.get(second.context["newer"])
    assert (told(back), back.context["newer"]) == (told(first), "")


def test_pages_of_operations_are_full_of_visible_operations(client, memory, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    for number in range(110):
        selection = bulk.Selection(("emails" if number % 2 else "images",))
        bulk.begin("default", BulkKind.PURGE, selection, user=str(number))
    first = shown(client, "operations")
    assert [row.user for row in first.context["rows"]] == [str(n) for n in range(108, 8, -2)]
    second = client.get(first.context["older"])
    assert [row.user for row in second.context["rows"]] == ["8", "6", "4", "2", "0"]
    assert second.context["older"] == ""
    BulkOperation.objects.filter(filter__queues=["images"]).delete()
    response = shown(client, "operations")
    assert (response.context["rows"], response.context["older"]) == ([], "")


# Storage.


def test_storage_page_shows_diagnostics(client, anywhere):
    html = shown(client, "system").content.decode()
    assert get_storage().describe().partition("(")[0].strip() in html.replace("&#x27;", "'")
    assert "No worker is running" in html


def test_redis_outbox_is_shown_with_its_backlog(client, settings, memory, monkeypatch):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": {"emails": {"OUTBOX": True}}}
    assert "Outbox" not in shown(client, "system").content.decode()  # memory has none
    monkeypatch.setattr(MemoryStorage, "capabilities", Capabilities(in_process=True, has_outbox=True))
    diagnostics = get_storage().reads.diagnostics()._replace(backend="redis")
    monkeypatch.setattr(get_storage().reads, "diagnostics", lambda: diagnostics)
    read_cache.clear()
    given = {"queue": "emails", "name": "send", "payload": b"", "options": b""}
    for number in range(2):
        created = to_datetime(SYSTEM_CLOCK.now() - 180_000)
        OutboxJob.objects.create(**given, job_id=f"job-{number}", created_at=created)
    html = shown(client, "system").content.decode()
    assert re.search("Outbox.*Jobs.*>2<.*Oldest job.*3.0 min.*Jobs are not reaching Redis", html, re.DOTALL)


def test_storage_page_shows_no_secrets(client, settings):
    settings.DATABASES["default"]["PASSWORD"] = "hunter2"
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    assert "hunter2" not in shown(client, "system").content.decode()


# A job that is gone.


def test_job_deleted_since_it_was_listed_is_reported(client, anywhere):
    Queue("emails").enqueue(1, id="job-1")
    assert "job-1" in shown(client, "jobs", state="waiting").content.decode()
    get_storage().jobs.remove("emails", ["job-1"])
    read_cache.clear()
    response = client.get(address(BY_NAME["job"]))
    assert response.status_code == 404
    assert "Job job-1 was not found in queue emails" in response.content.decode()


def test_view_permission_alone_opens_each_page(memory):
    make_job(job_id="a")
    viewer = logged_in(one_with(rights.VIEW))
    for name in ("job_types", "operations", "history", "workers"):
        assert shown(viewer, name).content


# Pages that a change shows.


@pytest.mark.parametrize(
    ("page", "given"),
    [
        ("enqueue_now", {"name": "no such job", "args": "[", "kwargs": "{}"}),
        ("schedule_create", {"schedule": "no line", "djq_do": "save"}),
        ("limits", {"rate": "often"}),
        ("errors_begin", {"kind": "retry", "rate": "-1"}),
        ("reveal", {}),
    ],
)
def test_page_shown_by_an_action_is_not_refreshed(client, memory, page, given):
    Queue("emails").enqueue(1, id="job-1")
    response = client.post(address(BY_NAME[page]), given)
    html = response.content.decode()
    assert response.status_code == (200 if page == "reveal" else 400)
    assert 'id="djq-live"' in html
    assert 'hx-get="' not in html
    assert "data-djq-every" not in html
    assert "data-djq-as-of" not in html
    assert '<input type="hidden" name="djq_back" value="">' in html


def test_open_page_is_refreshed(client, memory):
    html = shown(client, "queue").content.decode()
    assert f'hx-get="{address(BY_NAME["queue"])}"' in html
    assert "data-djq-every" in html


def test_action_redirects_to_a_page_that_can_be_opened(client, memory):
    Queue("emails").enqueue(1, id="job-1")
    html = client.post(address(BY_NAME["reveal"])).content.decode()
    back = re.search(r'name="djq_back" value="([^"]*)"', html)[1]
    response = client.post(address(BY_NAME["cancel"]), {"djq_back": back}, follow=True)
    assert response.status_code == 200
