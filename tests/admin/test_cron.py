"""Cron jobs are edited in the admin."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.messages import get_messages

from djqueue.client import get_storage, registry
from djqueue.models import CronJob
from djqueue.storage.memory import MemoryStorage
from tests.admin.factories import change_url, list_url, logged_in, make_superuser, make_user

pytestmark = pytest.mark.django_db

GOOD = {
    "name": "night report",
    "job_name": "shop.jobs.report",
    "queue": "",
    "enabled": "on",
    "schedule": "30 2 * * *",
    "timezone": "Europe/Berlin",
    "every": "",
    "jitter": "",
    "overlap": "allow",
    "missed": "one",
    "missed_window": "1 00:00:00",
    "blackouts": "",
    "on_blackout": "skip",
    "max_executions": "",
    "args": "[1]",
    "kwargs": '{"to": "ann"}',
}


def add(**changes: str) -> Any:
    return logged_in(make_superuser()).post(list_url("cronjob") + "add/", {**GOOD, **changes})


def page(path: str) -> str:
    return logged_in(make_superuser()).get(path).content.decode()


def test_the_form_shows_the_next_runs_by_the_schedules_clocks_and_what_was_left_out() -> None:
    add(timezone="Asia/Kolkata")
    at = datetime(2026, 1, 5, 21, 30, tzinfo=UTC)
    CronJob.objects.update(skipped_at=at, skip_reason="PermissionError: <no>")

    shown = page(change_url(CronJob.objects.get()))

    assert shown.count(" 02:30:00+05:30") == 5
    assert "2026-01-06 03:00:00+05:30: PermissionError: &lt;no&gt;" in shown


def test_a_schedule_that_cannot_be_read_says_so_instead_of_its_runs() -> None:
    add()
    CronJob.objects.update(timezone="Atlantis/Capital")

    assert "&#x27;Atlantis/Capital&#x27; is not the name of a time zone" in page(
        change_url(CronJob.objects.get())
    )


def test_a_new_one_has_no_runs_to_show() -> None:
    assert "Next runs" not in page(list_url("cronjob") + "add/")


def test_arguments_that_are_no_json_are_refused() -> None:
    response = add(args="[NaN]")

    assert "NaN and infinities are no values of JSON." in response.content.decode()
    assert not CronJob.objects.exists()


class Refuses:
    """A middleware that lets nothing pass."""

    def enqueue(self, batch: Any, call_next: Any) -> Any:
        raise PermissionError("not now")

    async def aenqueue(self, batch: Any, call_next: Any) -> Any:
        raise PermissionError("not now")


def test_what_a_middleware_refuses_to_run_now_is_said(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    add()
    backend = "djqueue.storage.memory.MemoryStorage"
    settings.DJQUEUE = {"STORAGE": {"BACKEND": backend}, "MIDDLEWARE": [f"{__name__}.Refuses"]}
    chosen = {"action": "run_now", "_selected_action": [CronJob.objects.get().pk]}

    response = logged_in(make_superuser()).post(list_url("cronjob"), chosen)

    assert told(response) == ["night report: not now"]
    assert get_storage().queues() == []
    assert "The cron job night report was not enqueued." in caplog.text


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
        ("schedule", "", "Give a cron line, or an interval (every)."),
        ("schedule", "0 0 30 2 *", "is not a cron line: Bad day-of-month"),
        ("every", "nan", "Enter a valid duration."),
        ("every", "-1:00:00", "Is not from 1 s to a hundred years."),
        ("jitter", "1 01:00:00", "Is longer than the 86400 seconds between two slots."),
        ("jitter", "-60", "Is not from 0 s to a hundred years."),
        ("missed_window", "99999999 00:00:00", "Is not from 1 s to a hundred years."),
        ("overlap", "perhaps", "is not one of the available choices"),
        ("max_executions", "0", "0 is not a number from 1 on."),
        ("blackouts", "noon", "'noon' is not one of dates"),
        ("blackouts", "00:00-24:00", "No time of the schedule is left."),
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


def test_a_line_and_an_interval_are_refused() -> None:
    errors = add(every="1:00:00").context["adminform"].form.errors
    assert errors == {"schedule": ["Give a cron line or an interval (every), not both."]}


def test_an_end_before_the_start_is_refused() -> None:
    times = {"start_at_0": "2026-12-02", "start_at_1": "0:00", "end_at_0": "2026-12-01", "end_at_1": "0:00"}
    response = add(**times)
    assert response.context["adminform"].form.errors["end_at"] == ["Is not later than start_at."]


def test_a_schedule_that_is_over_already_is_refused_unless_it_is_off() -> None:
    over = {"end_at_0": "2020-12-01", "end_at_1": "0:00"}
    assert "It is over" in add(**over).context["adminform"].form.errors["end_at"][0]
    assert add(**over, enabled="").status_code == 302


def test_all_that_can_be_said_of_a_schedule_is_kept() -> None:
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
        "start_at_0": "2026-01-01",
        "start_at_1": "0:00",
    }
    assert add(**given).status_code == 302
    timing = CronJob.objects.get().timing()
    assert (timing.every, timing.jitter, timing.missed_window) == (900_000, 60_000, 7_200_000)
    assert (timing.overlap, timing.missed, timing.on_blackout) == ("skip", "all", "put_off")
    assert timing.blackouts == ("2026-12-24", "sat,sun 22:00-06:00")
    assert (timing.max_executions, timing.start_at) == (100, 1_767_225_600_000)


# Actions.


def act(action: str, *permissions: str, rows: Any = None) -> Any:
    rows = CronJob.objects.all() if rows is None else rows
    data = {"action": action, "_selected_action": [row.pk for row in rows]}
    return logged_in(make_user("view_cronjob", *permissions)).post(list_url("cronjob"), data)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> MemoryStorage:
    made = MemoryStorage()
    monkeypatch.setattr("djqueue.admin.cron.get_storage", lambda: made)
    return made


def test_a_job_is_run_now_whatever_the_schedule_says(storage: MemoryStorage) -> None:
    row = CronJob.objects.create(name="a", job_name="n", schedule="@yearly", queue="mail", args=[1])
    response = act("run_now", "run_cronjob")
    [job] = storage.page("mail", None, 10)
    assert (job.name, told(response)) == ("n", ["1 job was enqueued."])
    at, row.executions = row.next_run_at, -1
    row.refresh_from_db()
    assert (row.executions, row.next_run_at) == (0, at)


def test_what_cannot_be_enqueued_is_named(storage: MemoryStorage) -> None:
    CronJob.objects.create(name="huge", job_name="n", schedule="@yearly", args=[2**70])
    [said] = told(act("run_now", "run_cronjob"))
    assert said.startswith("huge: ")
    assert storage.queues() == []


def test_schedules_are_switched_off_and_on() -> None:
    for name in "ab":
        CronJob.objects.create(name=name, job_name="n", schedule="@daily")
    assert told(act("disable", "change_cronjob")) == ["2 cron jobs were switched off."]
    assert list(CronJob.objects.values_list("enabled", "next_run_at")) == [(False, None)] * 2
    CronJob.objects.filter(name="a").update(last_run_at=datetime.now(UTC))
    assert told(act("enable", "change_cronjob")) == ["2 cron jobs were switched on."]
    for row in CronJob.objects.all():
        assert row.enabled
        assert row.next_run_at is not None
        assert row.next_run_at > datetime.now(UTC)


@pytest.mark.parametrize(
    ("action", "wrong"),
    [("run_now", "change_cronjob"), ("enable", "run_cronjob"), ("disable", "run_cronjob")],
)
def test_an_action_needs_its_permission(storage: MemoryStorage, action: str, wrong: str) -> None:
    CronJob.objects.create(name="a", job_name="n", schedule="@daily", enabled=action == "disable")
    act(action, wrong)
    assert storage.queues() == []
    assert CronJob.objects.get().enabled == (action == "disable")


def test_what_code_declares_can_only_be_switched() -> None:
    row = CronJob.objects.create(name="a", job_name="n", schedule="@daily", source="code")
    client = logged_in(make_superuser())
    html = client.get(change_url(row)).content.decode()
    assert 'name="schedule"' not in html
    assert 'name="enabled"' in html

    assert client.post(change_url(row), {**GOOD, "enabled": ""}).status_code == 302
    row.refresh_from_db()
    assert (row.name, row.schedule, row.enabled) == ("a", "@daily", False)
    assert client.post(change_url(row).replace("change", "delete"), {"post": "yes"}).status_code == 403


def test_what_code_declares_and_is_over_cannot_be_switched_on() -> None:
    row = CronJob.objects.create(
        name="a", job_name="n", schedule="@daily", source="code", enabled=False, max_executions=1
    )
    CronJob.objects.update(executions=1)
    response = logged_in(make_superuser()).post(change_url(row), {"enabled": "on"})
    assert response.status_code == 200
    errors = response.context["adminform"].form.non_field_errors()
    assert errors == ["max_executions: It is over: there is no further run."]


def test_what_code_declares_no_more_stays_off_and_can_be_deleted() -> None:
    row = CronJob.objects.create(name="a", job_name="n", schedule="@daily", source="withdrawn", enabled=False)
    assert told(act("enable", "change_cronjob"))[0] == "What code declares no more stays off."
    assert not CronJob.objects.get().enabled
    client = logged_in(make_superuser())
    assert client.post(change_url(row).replace("change", "delete"), {"post": "yes"}).status_code == 302
    assert not CronJob.objects.exists()


def test_the_next_run_is_shown_with_its_jitter() -> None:
    at = datetime(2096, 1, 1, tzinfo=UTC)
    CronJob.objects.create(name="a", job_name="n", schedule="@yearly", jitter=timedelta(hours=5))
    CronJob.objects.update(next_run_at=at)
    html = logged_in(make_superuser()).get(list_url("cronjob")).content.decode()
    assert "2096-01-01T00:00:00" not in html
    assert "2096-01-01T0" in html
