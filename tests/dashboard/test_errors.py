"""Dead letters: groups, filters, actions and the export."""

import json

import pytest
from django.urls import reverse

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.client.deadletters import fingerprint
from djqueue.core.errorgroups import MAX_FINGERPRINTS
from djqueue.core.job import DEAD_LETTER_REASONS
from djqueue.core.states import State
from djqueue.dashboard import rendering, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views import errors
from djqueue.models import AuditEvent, BulkOperation, ErrorGroup
from djqueue.operations.bulk import Bulk
from tests.admin.factories import make_job
from tests.dashboard.acting import fail, note_error
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


@pytest.fixture
def letters(memory):
    """Two of one error and one of another; by id."""
    for job_id, message in (("a", "no address 1"), ("b", "no address 2"), ("c", "no paper")):
        Queue("emails").enqueue({"card": "hunter2"}, id=job_id)
        fail(job_id, message)
    return {letter.id: letter for letter in get_storage().reads.dead_letters("emails")}


def shown(client, page="errors", **query):
    response = client.get(address(BY_NAME[page], **query))
    assert response.status_code == 200
    return response


def ids(client, **query):
    return sorted(letter.id for letter in shown(client, **query).context["dead_letters"])


def test_each_reason_has_a_label():
    assert list(rendering.REASONS) == list(DEAD_LETTER_REASONS)


def test_dead_letters_are_grouped_by_error(client, letters):
    groups = shown(client).context["groups"]
    assert [(row.group.attempts, row.group.error_type) for row in groups] == [
        (1, "shop.NoAddressError"),
        (2, "shop.NoAddressError"),
    ]
    assert ids(client, fingerprint=groups[1].fingerprints) == ["a", "b"]
    html = shown(client).content.decode()
    assert "Last 14 days as a table" in html
    assert groups[1].days[-1] == 2


def group_page(client, at=0, **query):
    group = ErrorGroup.objects.order_by("pk")[at]
    response = client.get(reverse("admin:djqueue_dashboard_error", args=[group.queue, group.key]))
    assert response.status_code == 200
    return response


def act_on_group(client, action, **given):
    group = ErrorGroup.objects.order_by("pk").first()
    url = reverse(f"admin:djqueue_dashboard_error_{action}", args=[group.queue, group.key])
    return client.post(url, given, follow=True)


def test_page_of_an_error_shows_its_times_versions_and_hours(client, letters):
    note_error("emails", "no address 4", version="v2 <b>")
    html = group_page(client).content.decode()
    assert "no address 4" in html
    assert "v2 &lt;b&gt;" in html
    assert "Failed attempts per hour" in html
    assert [hour.attempts for hour in group_page(client).context["hours"]][-1] == 3
    assert "Resolve in the next version" in html


def test_error_is_resolved_ignored_and_reopened(client, letters):
    note_error("emails", "no address 4", version="v1")
    html = act_on_group(client, "resolve", version="v1").content.decode()
    assert "The error is resolved." in html
    assert "(v1)" in html
    assert len(shown(client).context["groups"]) == 1
    assert [row.state for row in shown(client, show="resolved").context["groups"]] == ["resolved"]
    note_error("emails", "no address 5", version="v1")
    read_cache.clear()
    assert [row.state for row in shown(client).context["groups"]] == ["back", "open"]
    assert "The error is ignored." in act_on_group(client, "ignore", hours="24").content.decode()
    assert [row.state for row in shown(client, show="ignored").context["groups"]] == ["ignored"]
    assert act_on_group(client, "ignore", hours="x").status_code == 400
    assert "The error is open again." in act_on_group(client, "reopen").content.decode()
    actions = AuditEvent.objects.order_by("pk").values_list("action", "queue")
    assert list(actions) == [(f"error_{one}", "emails") for one in ("resolve", "ignore", "reopen")]
    ErrorGroup.objects.all().delete()
    assert client.get(address(BY_NAME["error"])).status_code == 404
    response = client.post(address(BY_NAME["error_resolve"]), follow=True)
    assert "The error no longer exists." in response.content.decode()


def test_retry_of_a_group_retries_its_dead_letters_alone(client, letters):
    url = group_page(client).context["retry_url"]
    assert "<strong>2</strong> <span>can be retried" in client.get(url).content.decode()


def test_pages_of_an_error_with_many_messages_open(client, letters):
    group = ErrorGroup.objects.order_by("pk").first()
    group.fingerprints += [f"{number:012x}" for number in range(MAX_FINGERPRINTS - len(group.fingerprints))]
    group.save()
    context = group_page(client).context
    for name in ("retry_url", "jobs_url"):
        assert client.get(context[name]).status_code == 200, name


def test_errors_of_hidden_queues_are_hidden(client, letters, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    assert shown(client).context["groups"] == []
    group = ErrorGroup.objects.first()
    url = reverse("admin:djqueue_dashboard_error", args=[group.queue, group.key])
    assert client.get(url).status_code == 403
    assert "no address" not in shown(client).content.decode()


def test_each_filter_narrows_the_list(client, letters):
    assert ids(client) == ["a", "b", "c"]
    assert ids(client, reason="explicit_fail") == ["a", "b", "c"]
    assert ids(client, reason="timeout") == []
    assert ids(client, name="other") == []
    assert ids(client, error_type="shop.NoAddressError", queue="emails") == ["a", "b", "c"]


def test_invalid_filter_lists_no_dead_letters_and_offers_no_action_on_all(client, letters):
    response = client.get(address(BY_NAME["errors"], reason="nonsense"))
    assert response.status_code == 400
    assert response.context["dead_letters"] == []
    html = response.content.decode()
    assert "nonsense" in html
    assert "all matching" not in html


@pytest.mark.dialect
def test_dead_letters_of_the_database_are_shown(client, settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    make_job("failed", job_id="a", error_type="shop.NoAddressError", error_message="no address")
    html = shown(client).content.decode()
    assert ids(client) == ["a"]
    assert "no attempts left" in html
    assert "2096-06-01" in html  # kept until


def test_page_links_to_older_dead_letters(client, memory, monkeypatch):
    monkeypatch.setattr(errors, "DEAD_LETTERS_LISTED", 2)
    for number in range(5):
        Queue("emails").enqueue(1, id=f"job-{number}")
        fail(f"job-{number}")
    found, response = [], shown(client)
    while True:
        found += [letter.id for letter in response.context["dead_letters"]]
        if not response.context["older"]:
            break
        response = client.get(response.context["older"])
    assert sorted(found) == [f"job-{number}" for number in range(5)]


def test_queue_with_many_dead_letters_hides_no_error_of_others(client, letters, monkeypatch):
    monkeypatch.setattr(errors, "MAX_EXAMINED", 3)
    Queue("invoices").enqueue(id="d")
    fail("d", "no sum", queue="invoices")
    page = shown(client)
    assert {row.group.queue for row in page.context["groups"]} == {"emails", "invoices"}
    assert "searched" in page.content.decode()
    assert len(page.context["dead_letters"]) == 3


def test_selected_dead_letters_are_retried(client, letters):
    response = client.post(
        address(BY_NAME["errors_retry"]), {"job": ["emails/a", "emails/gone"]}, follow=True
    )
    html = response.content.decode()
    assert "1 job will be retried." in html
    assert "Skipped: not found (1)." in html
    assert get_storage().reads.states("emails", ["a", "b"]) == [State.WAITING, State.FAILED]
    event = AuditEvent.objects.get()
    assert (event.action, event.queue, event.count, event.detail) == (
        "errors_retry",
        "emails",
        1,
        {"jobs": [["emails", "a"]]},
    )


def test_filter_is_described_in_words(client, letters):
    html = shown(client, "errors_preview", kind="retry", reason="max_attempts_exceeded").content.decode()
    assert "<dt>Reason</dt><dd>no attempts left</dd>" in html


def test_all_matching_dead_letters_are_retried_at_a_rate_after_a_preview(client, letters):
    filters = {"kind": "retry", "fingerprint": fingerprint(letters["a"])}
    html = shown(client, "errors_preview", **filters).content.decode()
    assert "<strong>2</strong> <span>can be retried" in html
    assert '<dt>Error</dt><dd><span class="djq-mono">NoAddressError: no address ' in html
    assert not BulkOperation.objects.exists()

    client.post(address(BY_NAME["errors_begin"]), {**filters, "rate": "5", "expected": "2"})
    row = BulkOperation.objects.get()
    assert (row.rate, row.expected) == (5, 2)
    Bulk(get_storage(), "default").work()
    assert get_storage().reads.states("emails", ["a", "b", "c"]) == [
        State.WAITING,
        State.WAITING,
        State.FAILED,
    ]
    assert AuditEvent.objects.get().detail["dead_letters"] == {"fingerprint": filters["fingerprint"]}


def test_invalid_rate_is_rejected(client, letters):
    response = client.post(address(BY_NAME["errors_begin"]), {"kind": "retry", "rate": "0"})
    assert "greater than or equal to 1" in response.content.decode()
    assert not BulkOperation.objects.exists()


def test_export_has_a_json_line_per_dead_letter_without_payloads(client, letters):
    response = client.get(address(BY_NAME["errors_export"], fingerprint=fingerprint(letters["c"])))
    assert response["Content-Type"] == "application/x-ndjson"
    assert "attachment" in response["Content-Disposition"]
    text = b"".join(response.streaming_content).decode()
    [line] = map(json.loads, text.splitlines())
    assert (line["id"], line["error_message"], line["reason"]) == ("c", "no paper", "explicit_fail")
    assert "hunter2" not in text


def test_retry_is_not_offered_without_permission(letters):
    html = shown(logged_in(one_with(rights.VIEW))).content.decode()
    for words in ("Retry", "Delete", "data-djq-one"):
        assert words not in html.partition('id="djq-live"')[2].partition("djq-announce")[0], words


def test_dead_letters_of_hidden_queues_are_hidden(client, letters, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    storage = settings.DJQUEUE["STORAGE"]
    settings.DJQUEUE = {"STORAGE": storage, "DASHBOARD": seen}
    Queue("emails").enqueue(1, id="a")
    fail("a")
    assert ids(client) == []
    response = client.get(address(BY_NAME["errors_export"]))
    assert b"".join(response.streaming_content) == b""
    client.post(address(BY_NAME["errors_retry"]), {"job": ["emails/a"]})
    assert get_storage().reads.states("emails", ["a"]) == [State.FAILED]
