"""Schedules in the admin: a read-only list with links to the dashboard."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.urls import reverse

from djqueue.models import CronJob
from tests.admin.factories import change_url, list_url, logged_in, make_superuser

pytestmark = pytest.mark.django_db


def schedule(**fields: Any) -> CronJob:
    given = {"name": "night report", "job_name": "shop.jobs.report", "schedule": "30 2 * * *"}
    return CronJob.objects.create(**{**given, **fields})


def page(path: str) -> str:
    response = logged_in(make_superuser()).get(path)
    assert response.status_code == 200
    return str(response.content.decode())


def test_the_page_shows_runs_in_the_schedules_time_zone() -> None:
    row = schedule(timezone="Asia/Kolkata")
    at = datetime(2026, 1, 5, 21, 30, tzinfo=UTC)
    CronJob.objects.update(skipped_at=at, skip_reason="PermissionError: <no>")

    shown = page(change_url(row))

    assert shown.count(" 02:30:00 IST</time>") == 5
    assert "2026-01-06 03:00:00 IST</time>: PermissionError: &lt;no&gt;" in shown


def test_an_invalid_schedule_shows_the_error_instead_of_its_runs() -> None:
    row = schedule()
    CronJob.objects.update(timezone="Atlantis/Capital")

    assert "&#x27;Atlantis/Capital&#x27; is not the name of a time zone" in page(change_url(row))
    assert "night report" in page(list_url("cronjob"))


def test_the_next_run_is_shown_with_its_jitter() -> None:
    at = datetime(2096, 1, 1, tzinfo=UTC)
    schedule(schedule="@yearly", jitter=timedelta(hours=5))
    CronJob.objects.update(next_run_at=at)
    html = page(list_url("cronjob"))
    assert "2096-01-01T00:00:00" not in html
    assert "2096-01-01T0" in html


def test_run_that_is_due_waits_for_a_worker() -> None:
    row = schedule(schedule="@yearly")
    CronJob.objects.update(next_run_at=datetime(2026, 1, 1, tzinfo=UTC))

    assert "due, waits for a worker" in page(list_url("cronjob"))
    assert "due, waits for a worker<br>" in page(change_url(row))


def test_secret_arguments_are_hidden() -> None:
    row = schedule(args=["who knows"], kwargs={"password": "hunter2", "to": "ann"})
    html = page(change_url(row))
    assert "hunter2" not in html
    assert "who knows" not in html  # no handler is registered that names the first parameter
    assert "ann" in html


def test_the_page_is_read_only_and_links_to_the_dashboard() -> None:
    row = schedule()
    html = page(change_url(row))
    assert f'href="{reverse("admin:djqueue_dashboard_schedule", args=[row.pk])}"' in html
    assert 'name="_save"' not in html
    client = logged_in(make_superuser())
    assert client.post(change_url(row), {"name": "x"}).status_code == 403
    assert client.get(list_url("cronjob") + "add/").status_code == 403
    assert client.post(change_url(row).replace("/change/", "/delete/"), {"post": "yes"}).status_code == 403
    assert CronJob.objects.get().name == "night report"
