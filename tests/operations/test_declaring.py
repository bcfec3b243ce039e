"""Schedules declared in code become rows."""

from datetime import timedelta
from typing import Any

import pytest

from djqueue import job
from djqueue.client import registry
from djqueue.client.declarations import declared
from djqueue.core.units import to_datetime
from djqueue.models import CronJob
from djqueue.operations.cronjobs import declare
from djqueue.operations.firing import Firing
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import claim

pytestmark = pytest.mark.django_db

NOW = 1_700_000_000_000


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_entries", {})
    monkeypatch.setattr(registry, "_types", {})


def report() -> None: ...


def code_says(name: str = "report", **options: Any) -> None:
    """As after a restart with this code."""
    declared._entries.clear()
    registry._types.clear()
    if options:
        job(name=name, **options)(report)
    declare("default", NOW)


def rows() -> list[tuple[str, str, bool]]:
    return list(CronJob.objects.order_by("name").values_list("name", "source", "enabled"))


def test_declared_schedule_becomes_a_row() -> None:
    code_says(
        cron="*/5 * * * *",
        timezone="Europe/Berlin",
        start_at=to_datetime(NOW),
        end_at=to_datetime(NOW + 10**9),
        max_executions=7,
        jitter=9.5,
        overlap="skip",
        missed="all",
        missed_window=timedelta(hours=2),
        blackouts=["sat,sun", "2026-12-24"],
        on_blackout="put_off",
        queue="reports",
    )
    row = CronJob.objects.get()
    assert (row.name, row.job_name, row.queue, row.source) == ("report", "report", "", "code")
    assert row.timing() == declared.of(["report"])["report"].schedule


def test_interval_becomes_a_row_and_fires_with_the_options_of_its_job() -> None:
    clock, storage = FakeClock(now=NOW), MemoryStorage()
    code_says(every=60, queue="reports", priority=3)
    firing = Firing(storage, "default", clock=clock)
    firing.fire()
    clock.advance(60_000)
    assert firing.fire() == 1

    [claimed] = claim(storage, names=["report"])
    assert (claimed.queue, claimed.options.priority) == ("reports", 3)
    row = CronJob.objects.get()
    assert (row.executions, row.last_run_at) == (1, to_datetime(NOW + 40_000))


def test_job_can_have_several_schedules_with_arguments() -> None:
    report_job = job(name="report", check_arguments=False)(report)
    report_job.schedule("report of Europe", cron="@daily", args=["eu"], kwargs={"deep": True})
    report_job.schedule("report of Asia", cron="@daily", timezone="Asia/Tokyo", args=("asia",))
    declare("default", NOW)
    found = {row.name: (row.job_name, row.args, row.kwargs) for row in CronJob.objects.all()}
    assert found == {
        "report of Europe": ("report", ["eu"], {"deep": True}),
        "report of Asia": ("report", ["asia"], {}),
    }


def test_declaring_an_unchanged_schedule_changes_nothing() -> None:
    code_says(cron="@daily")
    CronJob.objects.update(next_run_at=to_datetime(NOW), executions=5, enabled=False)
    before = CronJob.objects.values().get()
    code_says(cron="@daily")
    assert CronJob.objects.values().get() == before


def test_changed_declaration_takes_effect_and_keeps_the_count() -> None:
    code_says(cron="@daily")
    CronJob.objects.update(next_run_at=to_datetime(NOW), executions=5)
    code_says(cron="@hourly")
    row = CronJob.objects.get()
    assert (row.schedule, row.next_run_at, row.executions, row.enabled) == ("@hourly", None, 5, True)


def test_manually_disabled_schedule_stays_disabled_when_the_code_changes() -> None:
    code_says(cron="@daily")
    CronJob.objects.update(enabled=False)
    code_says(cron="@hourly")
    assert rows() == [("report", "code", False)]


def test_ended_schedule_continues_when_the_code_allows_more_runs() -> None:
    code_says(cron="@daily", max_executions=2)
    CronJob.objects.update(enabled=False, executions=2)
    code_says(cron="@daily", max_executions=3)
    assert rows() == [("report", "code", True)]


def test_removed_declaration_disables_its_schedule_until_declared_again() -> None:
    code_says(cron="@daily")
    CronJob.objects.update(executions=4)
    code_says()
    assert rows() == [("report", "withdrawn", False)]
    code_says(cron="@daily")
    assert rows() == [("report", "code", True)]
    assert CronJob.objects.get().executions == 4


def test_manually_created_rows_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    CronJob.objects.create(name="report", job_name="other", schedule="@yearly")
    CronJob.objects.create(name="second", job_name="other", schedule="@yearly")
    before = list(CronJob.objects.order_by("name").values())
    code_says(cron="@daily")
    code_says()
    assert list(CronJob.objects.order_by("name").values()) == before
    assert (
        "Schedule report: ignored the declaration in code; a schedule created by hand has this name."
        in caplog.text
    )


def test_schedules_of_former_jobs_are_ignored() -> None:
    job(name="report", cron="@daily")(report)
    registry._types.clear()
    declare("default", NOW)
    assert rows() == []
