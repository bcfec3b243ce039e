"""The form of a schedule: accepted and rejected input, and hidden values."""

from typing import Any

import pytest

from djqueue import job
from djqueue.client import get_storage, registry
from djqueue.models import AuditEvent, CronJob
from tests.dashboard.schedules import GOOD
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}


def send(page: str = "schedule_create", pk: int | None = None, **changes: str) -> Any:
    given = {**GOOD, "djq_do": "save", **changes}
    url = address(BY_NAME[page])
    if pk is not None:
        url = url.replace("/1/", f"/{pk}/")
    return logged_in(one_with(*ALL_RIGHTS)).post(url, given)


def form_page(row: CronJob) -> str:
    url = address(BY_NAME["schedule_edit"]).replace("/1/", f"/{row.pk}/")
    response = logged_in(one_with(*ALL_RIGHTS)).get(url)
    assert response.status_code == 200
    return str(response.content.decode())


def errors(response: Any) -> Any:
    return response.context["form"].errors


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("schedule", "61 * * * *", "is not a valid cron expression: Bad minute"),
        ("schedule", "0 0 1--100000000 * *", "is not a valid cron expression: Bad day-of-month"),
        ("schedule", "@noon", "Unknown alias '@noon'; expected one of @hourly"),
        ("schedule", "", "Enter a cron expression or an interval (every)."),
        ("schedule", "0 0 30 2 *", "is not a valid cron expression: Bad day-of-month"),
        ("every", "nan", "Enter a valid duration."),
        ("every", "-1:00:00", "Must be between 1 s and a hundred years."),
        ("jitter", "1 01:00:00", "Is longer than the 86400 seconds between two runs."),
        ("jitter", "-60", "Must be between 0 s and a hundred years."),
        ("missed_window", "99999999 00:00:00", "Must be between 1 s and a hundred years."),
        ("overlap", "perhaps", "is not one of the available choices"),
        ("max_executions", "0", "Must be at least 1; got 0."),
        ("blackouts", "noon", "'noon' is invalid; expected dates"),
        ("blackouts", "00:00-24:00", "Every run of the schedule is in a blackout."),
        ("timezone", "Europe/Atlantis", "is not the name of a time zone"),
        ("args", '{"a": 1}', "Enter a JSON list."),
        ("args", "[1", "Invalid JSON at line 1, column 3."),
        ("kwargs", "[1]", "Enter a JSON object."),
    ],
)
def test_error_is_shown_at_its_field(field: str, value: str, error: str) -> None:
    response = send(**{field: value})
    assert response.status_code == 400
    assert error in " ".join(errors(response)[field])
    assert not CronJob.objects.exists()


def test_arguments_that_the_job_does_not_accept_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})

    @job(name="pay")
    def pay(amount: int) -> None: ...

    response = send(job_name="pay", args="[]", kwargs='{"amont": 1}')

    assert errors(response)["__all__"][0].endswith("unexpected 'amont'.")
    assert send(job_name="pay", args="[1]", kwargs="{}").status_code == 302


def test_empty_arguments_mean_none() -> None:
    assert send(args="", kwargs="").status_code == 302
    cron = CronJob.objects.get()
    assert (cron.args, cron.kwargs) == ([], {})


def test_registered_job_shows_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {"shop.jobs.report": None})
    assert b"No handler" not in send(djq_do="preview").content


def test_change_of_schedule_moves_the_next_run() -> None:
    send()
    row = CronJob.objects.get()
    assert send("schedule_save", row.pk, schedule="0 3 1 1 *").status_code == 302
    changed = CronJob.objects.get()
    assert changed.next_run_at is not None
    assert (changed.next_run_at.month, changed.next_run_at.day) == (1, 1)


def test_cron_line_and_interval_together_are_rejected() -> None:
    found = errors(send(every="1:00:00"))
    assert found == {"schedule": ["Enter a cron expression or an interval (every), not both."]}


def test_end_before_start_is_rejected() -> None:
    found = errors(send(start_at="2026-12-02T00:00:00", end_at="2026-12-01T00:00:00"))
    assert found["end_at"] == ["Must be later than start_at."]


def test_schedule_that_has_ended_is_rejected_unless_disabled() -> None:
    over = {"end_at": "2020-12-01T00:00:00"}
    assert "no further runs" in errors(send(**over))["end_at"][0]
    assert send(**over, enabled="").status_code == 302


def test_every_option_of_schedule_is_saved() -> None:
    given = {
        "schedule": "",
        "every": "0:15:00",
        "jitter": "0:01:00",
        "overlap": "skip",
        "missed": "all",
        "missed_window": "2:00:00",
        "blackouts": "2026-12-24\r\nsat,sun 22:00-06:00\r\n",
        "on_blackout": "put_off",
        "max_executions": "100",
        "start_at": "2026-01-01T00:00:00",
    }
    assert send(**given).status_code == 302
    timing = CronJob.objects.get().timing()
    assert (timing.every, timing.jitter, timing.missed_window) == (900_000, 60_000, 7_200_000)
    assert (timing.overlap, timing.missed, timing.on_blackout) == ("skip", "all", "put_off")
    assert timing.blackouts == ("2026-12-24", "sat,sun 22:00-06:00")
    assert (timing.max_executions, timing.start_at) == (100, 1_767_225_600_000)


# What is hidden.

SECRET = {"kwargs": {"password": "hunter2", "to": "ann"}}


def kept(**fields: Any) -> CronJob:
    row = CronJob(
        **{"name": "night report", "job_name": "shop.jobs.report", "schedule": "30 2 * * *", **fields}
    )
    row.save()
    return row


def test_secret_arguments_are_shown_as_marks_and_are_kept() -> None:
    row = kept(**SECRET)
    html = form_page(row)
    assert "hunter2" not in html
    assert "•••1" in html
    assert "ann" in html

    text = '{"password": "•••1", "to": "bob"}'
    assert send("schedule_save", row.pk, args="[]", kwargs=text).status_code == 302

    row.refresh_from_db()
    assert row.kwargs == {"password": "hunter2", "to": "bob"}
    detail = AuditEvent.objects.get().detail
    assert "hunter2" not in str(detail)
    assert detail["changed"]["kwargs"] == "changed"


def test_secret_argument_can_be_replaced() -> None:
    row = kept(**SECRET)
    assert send("schedule_save", row.pk, kwargs='{"password": "new"}').status_code == 302
    row.refresh_from_db()
    assert row.kwargs == {"password": "new"}


def test_mark_stands_for_its_secret_only_at_its_path() -> None:
    row = kept(**SECRET)
    response = send("schedule_save", row.pk, kwargs='{"to": "•••1"}')
    assert response.status_code == 400
    assert "only in its original place" in errors(response)["kwargs"][0]
    assert "hunter2" not in response.content.decode()


def test_secrets_are_not_passed_to_another_job() -> None:
    row = kept(**SECRET)
    response = send("schedule_save", row.pk, job_name="shop.jobs.echo", kwargs='{"password": "•••1"}')
    assert response.status_code == 400
    assert "passed to another job" in errors(response)["job_name"][0]


def test_kept_secret_stays_hidden_when_other_arguments_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})

    def hide(value: Any, part: str) -> Any:
        kwargs = value["kwargs"]
        return {"args": [], "kwargs": {**kwargs, "text": "*" if kwargs["private"] else kwargs["text"]}}

    @job(name="shop.jobs.report", redact=hide)
    def report(text: str, private: bool) -> None: ...

    row = kept(kwargs={"text": "the diagnosis", "private": True})
    assert "the diagnosis" not in form_page(row)

    response = send("schedule_save", row.pk, args="[]", kwargs='{"text": "•••1", "private": false}')

    assert response.status_code == 400
    assert "would expose a hidden value" in errors(response)["__all__"][0]
    row.refresh_from_db()
    assert row.kwargs["private"] is True


def test_object_that_resembles_a_date_stays_an_object() -> None:
    text = '{"on": {"$date": "2026-01-01"}}'
    assert send(kwargs=text).status_code == 302
    assert CronJob.objects.get().kwargs == {"on": {"$date": "2026-01-01"}}
    assert "$date" in form_page(CronJob.objects.get())


# Queues that the user may not see.


def hides_payroll(_request: Any, queue: str) -> bool:
    return queue != "payroll"


@pytest.fixture
def filtered(settings: Any) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"QUEUE_FILTER": hides_payroll}}


def test_empty_queue_means_queue_of_job_and_is_rejected_if_hidden(
    filtered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_types", {})

    @job(name="pay", queue="payroll")
    def pay() -> None: ...

    response = send(job_name="pay", queue="", args="[]", kwargs="{}")
    assert response.status_code == 400
    assert errors(response)["queue"] == ["The queue doesn't exist or you don't have access."]
    assert send(job_name="pay", queue="emails", args="[]", kwargs="{}").status_code == 302


def test_empty_queue_of_unknown_job_is_rejected_for_users_with_hidden_queues(
    filtered: None,
) -> None:
    get_storage().queues.pause("payroll")
    response = send(job_name="known.to.the.workers", queue="")
    assert response.status_code == 400
    assert errors(response)["queue"] == ["Enter a queue: this process doesn't know the job's default."]


def test_preview_does_not_tell_names_of_schedules_of_hidden_queues(filtered: None) -> None:
    assert send(name="payday", queue="emails").status_code == 302
    CronJob.objects.update(queue="payroll")

    for name in ("payday", "free"):
        assert send(name=name, queue="emails", djq_do="preview").status_code == 200
    response = send(name="payday", queue="emails")
    assert errors(response)["name"] == ["This name isn't available. Choose another one."]
