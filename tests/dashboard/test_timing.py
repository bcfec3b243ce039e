"""Rescheduling a job that has not started, and changing its priority."""

import html
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import rights
from djqueue.models import AuditEvent
from djqueue.testing.factories import JOB_IN
from tests.dashboard.visiting import PAGES, address, logged_in, one_with

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}
NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def queue():
    return Queue("emails")


@pytest.fixture
def client():
    return logged_in(one_with(rights.VIEW, rights.EDIT))


def post(client, page, **form):
    return html.unescape(client.post(address(BY_NAME[page]), form, follow=True).content.decode())


def record():
    return get_storage().reads.jobs("emails", ["job-1"])[0]


def test_job_is_rescheduled_in_the_time_zone_of_the_user(queue, client, settings):
    settings.TIME_ZONE = "Asia/Kathmandu"
    queue.enqueue(1, id="job-1", run_at=NOON)
    page = html.unescape(client.get(address(BY_NAME["job"])).content.decode())
    assert 'value="2030-06-01T17:45:00"' in page
    assert "Time zone: +0545" in page or "Time zone: Asia/Kathmandu" in page

    response = post(client, "reschedule", run_at="2030-06-02T17:45")
    assert "Rescheduled to 2030-06-02 17:45:00" in response
    assert to_datetime(record().run_at) == NOON.replace(day=2)
    event = AuditEvent.objects.get()
    assert (event.action, event.detail) == (
        "reschedule",
        {"old": "2030-06-01T12:00:00+00:00", "new": "2030-06-02T12:00:00+00:00"},
    )


def test_job_is_delayed(queue, client):
    queue.enqueue(1, id="job-1")
    before = SYSTEM_CLOCK.now()
    post(client, "reschedule", delay="90.5")
    assert record().state is State.DELAYED
    assert 90_500 <= record().run_at - before <= 120_500


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, "Enter either a time or a delay"),
        ({"run_at": "2030-06-02T17:45", "delay": "5"}, "Enter either a time or a delay"),
        ({"run_at": "soon"}, "Enter a valid date/time"),
        ({"delay": "-1"}, "greater than or equal to 0"),
        ({"delay": "nan"}, "Enter a number"),
        ({"delay": "1e99"}, "less than or equal to"),
    ],
)
def test_invalid_time_is_rejected(queue, client, form, why):
    queue.enqueue(1, id="job-1")
    assert why in post(client, "reschedule", **form)
    assert record().state is State.WAITING
    assert not AuditEvent.objects.exists()


def test_priority_is_changed_and_logged_with_the_old_value(queue, client):
    queue.enqueue(1, id="other", priority=4)
    queue.enqueue(1, id="job-1", priority=3)
    assert "Priority changed to 5" in post(client, "reprioritise", priority="5")
    assert record().options.priority == 5
    event = AuditEvent.objects.get()
    assert (event.action, event.job_id, event.detail) == ("reprioritise", "job-1", {"old": 3, "new": 5})


@pytest.mark.parametrize("priority", ["", "high", "99999999999", "1.5"])
def test_invalid_priority_is_rejected(queue, client, priority):
    queue.enqueue(1, id="job-1")
    assert "Priority: " in post(client, "reprioritise", priority=priority)
    assert record().options.priority == 0


@pytest.mark.parametrize("state", sorted(State))
def test_action_not_allowed_in_the_state_is_disabled_and_refused(client, state):
    JOB_IN[state](get_storage(), queue="emails", id="job-1")
    before = record()
    page = client.get(address(BY_NAME["job"])).content.decode()
    times = state in (State.WAITING, State.DELAYED)
    priorities = times or state is State.BLOCKED
    assert page.count("<fieldset disabled>") == 2 - times - priorities
    refused = page.count(f"Not available for {state} jobs.")
    assert refused == 2 - times - priorities
    if not times:
        assert "Action not applied, because the job has changed" in post(client, "reschedule", delay="60")
    if not priorities:
        assert "Action not applied, because the job has changed" in post(client, "reprioritise", priority="7")
        assert record() == before
        assert not AuditEvent.objects.exists()


@pytest.mark.parametrize(("page", "form"), [("reschedule", {"delay": 5}), ("reprioritise", {"priority": 5})])
def test_missing_job_is_reported(queue, client, page, form):
    response = post(client, page, **form)
    assert "Action not applied, because the job has changed" in response
    assert "Job job-1 was not found" in response


def test_unchanged_time_of_the_form_is_the_time_of_the_job(queue, client, settings):
    settings.TIME_ZONE = "America/New_York"
    at = NOON.replace(second=7)
    queue.enqueue(1, id="job-1", run_at=at)
    with timezone.override(ZoneInfo("America/New_York")):
        shown = timezone.localtime(at).strftime("%Y-%m-%dT%H:%M:%S")
    assert f'value="{shown}"' in client.get(address(BY_NAME["job"])).content.decode()
    post(client, "reschedule", run_at=shown)
    assert record().run_at == to_milliseconds(at)
