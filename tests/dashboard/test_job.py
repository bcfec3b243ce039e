"""The page of one job."""

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.job import ClaimRequest, JobFailure, Outcome
from djqueue.core.states import State
from djqueue.dashboard import rendering, rights
from djqueue.models import AuditEvent
from djqueue.testing.factories import worker
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with, visit
from tests.statements import recorded

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}
SECRET = {"to": "ann", "password": "hunter2"}


@pytest.fixture
def queue():
    return Queue("emails")


def fail(queue, job_id="job-1"):
    storage = get_storage()
    [claimed] = storage.claim(ClaimRequest("w1", 1, frozenset({"emails"}), ("emails",))).jobs
    error = JobFailure("shop.NoAddressError", "<b>no</b> address", "Traceback: line 3")
    storage.finish([Outcome("emails", job_id, claimed.token, "fail", None, 0, error, "explicit_fail")])


def page(client, name="job"):
    return client.get(address(BY_NAME[name])).content.decode()


def test_page_shows_events_of_job_with_reasons(queue):
    queue.enqueue(SECRET, id="job-1")
    fail(queue)
    html = page(logged_in(one_with(rights.VIEW)))
    assert "NoAddressError: &lt;b&gt;no&lt;/b&gt; address" in html
    assert "Traceback: line 3" in html
    assert "failed permanently" in html


def test_attempts_are_not_compared_with_the_number_of_failures_allowed(queue):
    queue.enqueue(SECRET, id="job-1", max_attempts=1)
    for _ in range(2):
        fail(queue)
        assert queue.retry("job-1")
    client = logged_in(one_with(rights.VIEW))

    assert "Attempts: 2 · Failures: 0 of 1" in page(client)
    assert ">2/1<" not in page(client, "jobs")


def test_headers_are_shown_except_those_with_secret_names(queue):
    headers = {"traceparent": "00-1-2-01", "authorization": "Bearer hunter2", "sent": {"api_key": "hunter3"}}
    queue.enqueue(1, id="job-1", headers=headers)
    viewer, keeper = logged_in(one_with(rights.VIEW)), logged_in(one_with(rights.VIEW, rights.VIEW_PAYLOAD))

    html = page(viewer)
    assert "<h3>Headers</h3>" in html
    assert "00-1-2-01" in html
    assert "authorization" in html
    assert "hunter" not in html
    assert "Reveal values" in page(keeper)
    html = visit(keeper, BY_NAME["reveal"]).content.decode()
    assert "Bearer hunter2" in html
    assert "hunter3" in html


def test_job_without_headers_shows_none(queue):
    queue.enqueue(1, id="job-1")

    assert "Headers" not in page(logged_in(one_with(rights.VIEW)))


def test_secrets_are_revealed_only_with_permission_and_logged(queue):
    queue.enqueue(SECRET, id="job-1")
    viewer, keeper = logged_in(one_with(rights.VIEW)), logged_in(one_with(rights.VIEW, rights.VIEW_PAYLOAD))
    assert "hunter2" not in page(viewer)
    assert "Reveal values" not in page(viewer)
    assert "hunter2" not in page(keeper)
    assert visit(viewer, BY_NAME["reveal"]).status_code == 403
    assert AuditEvent.objects.filter(action="reveal", refused=True).count() == 1

    html = visit(keeper, BY_NAME["reveal"]).content.decode()
    assert "hunter2" in html
    event = AuditEvent.objects.get(action="reveal", refused=False)
    assert (event.queue, event.job_id) == ("emails", "job-1")
    assert "hunter2" not in str(event.detail)


def test_two_users_retry_job_once(queue):
    queue.enqueue(1, id="job-1")
    fail(queue)
    clients = [logged_in(one_with(rights.VIEW, rights.RETRY)) for _ in range(2)]
    for client in clients:
        assert visit(client, BY_NAME["retry"]).status_code == 302
    assert queue.get_job("job-1").state is State.WAITING
    assert "will be retried" in page(clients[0])
    late = page(clients[1])
    assert "no longer failed" in late
    event = AuditEvent.objects.get(action="retry")
    assert f"Already retried by {event.user} at {rendering.local(event.at)}" in late


def test_second_retry_names_the_user_who_retried_job_in_bulk(queue):
    queue.enqueue(1, id="job-1")
    fail(queue)
    first, second = (logged_in(one_with(rights.VIEW, rights.RETRY)) for _ in range(2))
    first.post(address(BY_NAME["errors_retry"]), {"job": ["emails/job-1"]})
    visit(second, BY_NAME["retry"])
    event = AuditEvent.objects.get(action="errors_retry")
    assert f"Already retried by {event.user}" in page(second)


@pytest.mark.parametrize("action", ["retry", "promote", "cancel", "remove"])
def test_action_on_missing_job_is_reported(action):
    client = logged_in(one_with(*ALL_RIGHTS))
    assert visit(client, BY_NAME[action]).status_code == 302
    html = page(client)
    assert "Action not applied, because the job has changed" in html
    assert "Job job-1 was not found" in html
    assert not AuditEvent.objects.exists()


@pytest.mark.parametrize("action", ["retry", "promote", "cancel", "remove"])
def test_forged_request_of_viewer_changes_nothing_and_is_logged(queue, action):
    queue.enqueue(1, id="job-1", delay=60)
    assert visit(logged_in(one_with(rights.VIEW)), BY_NAME[action]).status_code == 403
    assert queue.get_job("job-1").state is State.DELAYED
    event = AuditEvent.objects.get()
    assert (event.action, event.refused, event.job_id) == (action, True, "job-1")


def test_traceback_is_shown_in_full_and_without_library_frames():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/srv/venv/lib/python3.11/site-packages/djqueue/runtime/handlers.py", line 1, in run\n'
        "    handler()\n"
        '  File "/srv/shop/mail.py", line 7, in send\n'
        "    raise NoAddressError(\n"
        "    ^^^^^^\n"
        '  File "<frozen importlib._bootstrap>", line 3, in load\n'
        "shop.NoAddressError: no address\n"
        "  on two lines"
    )
    found = rendering.app_frames(text)
    assert found is not None
    assert "site-packages" not in found
    assert "frozen" not in found
    assert found.startswith("Traceback (most recent call last):\n  …\n")
    assert '"/srv/shop/mail.py", line 7, in send\n    raise NoAddressError(\n    ^^^^^^\n  …\n' in found
    assert found.endswith("shop.NoAddressError: no address\n  on two lines")
    assert rendering.app_frames(found) is None, "there is nothing to leave out"
    assert rendering.app_frames("whatever") is None
    only_others = text.replace("/srv/shop/mail.py", "/usr/lib/python3.11/json/decoder.py")
    assert rendering.app_frames(only_others) is None, "nothing would be left"


def test_actions_not_allowed_in_the_state_are_disabled(queue):
    queue.enqueue(1, id="job-1")
    html = page(logged_in(one_with(*ALL_RIGHTS)))
    assert 'disabled data-djq-why title="Not available for waiting jobs">Retry' in html
    assert ">Cancel</button>" in html


def test_blocking_job_of_hidden_queue_is_not_named(settings, monkeypatch):
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "QUEUES": {name: {"LIMITER": "mail"} for name in ("emails", "secret")},
        "LIMITERS": {"mail": {"CONCURRENCY": 1}},
    }
    storage = get_storage()
    storage.workers.register(worker("w1", queues=None, names=("emails",), concurrency=9))
    Queue("secret").enqueue(1, name="emails", id="other-1")
    [_] = storage.claim(ClaimRequest("w1", 1, frozenset({"emails"}), ("secret",))).jobs
    Queue("emails").enqueue(1, id="job-1")
    viewer = logged_in(one_with(rights.VIEW))
    assert "other-1" in page(viewer)

    monkeypatch.setattr(rights, "sees", lambda _request, name: name == "emails")
    html = page(viewer)
    assert "The shared limiter" in html
    for name in ("other-1", "secret"):
        assert name not in html


def test_dependency_in_hidden_queue_is_not_named(monkeypatch):
    first = Queue("secret").enqueue(1, id="before")
    Queue("emails").enqueue(1, id="job-1", depends_on=[first])
    viewer = logged_in(one_with(rights.VIEW))
    assert "before" in page(viewer)

    monkeypatch.setattr(rights, "sees", lambda _request, name: name == "emails")
    html = page(viewer)
    assert "The job waits for unfinished dependencies." in html
    assert "secret" not in html


def test_page_of_deleted_job_says_so(queue):
    queue.enqueue(1, id="job-1")
    client = logged_in(one_with(*ALL_RIGHTS))
    queue.remove("job-1")
    response = client.get(address(BY_NAME["job"]))
    assert response.status_code == 404
    assert "Job job-1 was not found in queue emails" in response.content.decode()


def test_a_page_takes_few_queries(queue):
    queue.enqueue(1, id="job-1")
    client = logged_in(one_with(*ALL_RIGHTS))
    with recorded() as statements:
        page(client)
    assert len(statements) <= 6, statements


def test_durations_of_options_have_units(queue):
    queue.enqueue(1, id="job-1", timeout=30, ttl=3600, delay=90, backoff={"kind": "fixed", "base": 5})
    html = page(logged_in(one_with(rights.VIEW)))
    for text in (">30 s<", ">1 h<", ">90 s<", "kind fixed, base 5 s"):
        assert text in html


def test_list_of_delayed_jobs_shows_when_each_is_due(queue):
    queue.enqueue(1, id="job-1", delay=3600)
    queue.enqueue(2, id="job-2")
    client = logged_in(one_with(rights.VIEW))
    assert (
        'class="djq-note">due <time' in client.get(address(BY_NAME["jobs"], state="delayed")).content.decode()
    )
    assert ">due <" not in client.get(address(BY_NAME["jobs"], state="waiting")).content.decode()


def test_options_do_not_name_jobs_of_hidden_queues(settings):
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"},
        "DASHBOARD": {"QUEUE_FILTER": lambda request, queue: queue != "payroll"},
    }
    hidden = Queue("payroll").enqueue(1, id="raise-for-ann")
    shown = Queue("emails").enqueue(1, id="before")
    Queue("emails").enqueue(1, id="job-1", depends_on=[hidden, shown])

    html = page(logged_in(one_with(rights.VIEW)))

    assert "before" in html
    assert "payroll" not in html
    assert "raise-for-ann" not in html
