"""Cron jobs are edited in the admin."""

from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.messages import get_messages

from djqueue.client import registry
from djqueue.models import CronJob
from tests.admin.factories import change_url, list_url, logged_in, make_superuser, make_user

pytestmark = pytest.mark.django_db

GOOD = {
    "name": "night report",
    "job_name": "shop.jobs.report",
    "queue": "",
    "enabled": "on",
    "schedule": "30 2 * * *",
    "timezone": "Europe/Berlin",
    "args": "[1]",
    "kwargs": '{"to": "ann"}',
}


def add(**changes: str) -> Any:
    return logged_in(make_superuser()).post(list_url("cronjob") + "add/", {**GOOD, **changes})


def told(response: Any) -> list[str]:
    return [str(message) for message in get_messages(response.wsgi_request)]


def test_a_cron_job_is_added_with_its_next_run() -> None:
    assert add().status_code == 302
    cron = CronJob.objects.get()
    assert (cron.args, cron.kwargs) == ([1], {"to": "ann"})
    assert cron.next_run_at is not None
    assert cron.next_run_at > datetime.now(UTC)


def test_an_unknown_job_is_a_warning_for_the_workers_may_know_it() -> None:
    said = told(add())
    assert any("No handler is registered here as shop.jobs.report" in text for text in said)
    assert CronJob.objects.exists()


def test_a_known_job_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {"shop.jobs.report": None})
    assert not any("No handler" in text for text in told(add()))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("schedule", "61 * * * *", "is not a cron line: Bad minute"),
        ("schedule", "0 0 1--100000000 * *", "is not a cron line: Bad day-of-month"),
        ("schedule", "@noon", "is not known; there are @hourly"),
        ("schedule", "", "This field is required."),
        ("timezone", "Europe/Atlantis", "is not the name of a time zone"),
        ("args", '{"a": 1}', "Expected a list"),
        ("args", "[1", "Enter a valid JSON."),
        ("kwargs", "[1]", "Expected an object"),
    ],
)
def test_what_is_wrong_is_said_at_its_field(field: str, value: str, error: str) -> None:
    response = add(**{field: value})
    assert response.status_code == 200
    assert error in " ".join(response.context["adminform"].form.errors[field])
    assert not CronJob.objects.exists()


def test_empty_arguments_mean_none() -> None:
    assert add(args="", kwargs="").status_code == 302
    cron = CronJob.objects.get()
    assert (cron.args, cron.kwargs) == ([], {})


def test_a_change_of_the_schedule_moves_the_next_run() -> None:
    add()
    cron = CronJob.objects.get()
    logged_in(make_superuser()).post(change_url(cron), {**GOOD, "schedule": "0 3 1 1 *"})
    changed = CronJob.objects.get()
    assert changed.next_run_at is not None
    assert (changed.next_run_at.month, changed.next_run_at.day) == (1, 1)


def test_the_page_shows_the_runs_but_does_not_let_them_be_edited() -> None:
    add()
    cron = CronJob.objects.get()
    html = logged_in(make_superuser()).get(change_url(cron)).content.decode()
    assert "<time datetime=" in html
    assert 'name="executions"' not in html
    assert 'name="next_run_at"' not in html


def test_to_edit_needs_the_right_to_change() -> None:
    add()
    cron = CronJob.objects.get()
    viewer = logged_in(make_user("view_cronjob"))
    assert viewer.post(change_url(cron), {**GOOD, "name": "x"}).status_code == 403
    editor = logged_in(make_user("view_cronjob", "change_cronjob"))
    assert editor.post(change_url(cron), {**GOOD, "name": "x"}).status_code == 302
    assert CronJob.objects.get().name == "x"
