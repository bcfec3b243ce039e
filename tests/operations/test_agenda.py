"""`manage.py djqueue schedules`, and the schedules that `runworkers` declares at its start."""

from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from djqueue import job
from djqueue.client import registry
from djqueue.client.declarations import declared
from djqueue.client.storages import close_storage
from djqueue.management.commands import djqueue, runworkers
from djqueue.management.subcommands import schedules
from djqueue.models import CronJob
from djqueue.operations import cronjobs
from djqueue.testing.clock import FakeClock

NOON = datetime(2026, 3, 28, 12, tzinfo=UTC)
"""The day before clocks go forward in Berlin."""


@pytest.fixture(autouse=True)
def fresh(settings: Any, tables: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
    monkeypatch.setattr(declared, "_entries", {})
    monkeypatch.setattr(registry, "_types", {})
    clock = FakeClock(now=int(NOON.timestamp() * 1_000))
    for module in (cronjobs, schedules):
        monkeypatch.setattr(module, "SYSTEM_CLOCK", clock)
    yield
    close_storage()


def run(*arguments: str) -> list[str]:
    output = StringIO()
    call_command(djqueue.Command(), "schedules", *arguments, stdout=output)
    return output.getvalue().splitlines()


def a_row(name: str = "night", **given: Any) -> None:
    fields = {"job_name": "report", "schedule": "30 2 * * *", "timezone": "Europe/Berlin", **given}
    CronJob.objects.bulk_create([CronJob(name=name, **fields)])


def report() -> None: ...


def test_run_that_is_due_waits_for_a_worker() -> None:
    a_row(next_run_at=NOON - timedelta(days=2))

    assert run("--next", "3")[2:] == [
        "    due since 2026-03-26 13:00:00+01:00, waits for a worker",
        "    next 2026-03-29 03:00:00+02:00",
        "    next 2026-03-30 02:30:00+02:00",
    ]


def test_schedules_are_listed_with_their_next_five_runs() -> None:
    a_row(queue="reports", executions=1_200, last_run_at=NOON - timedelta(hours=10))

    assert run() == [
        "night: 30 2 * * * (Europe/Berlin), report in queue reports",
        "    1,200 executions, the last 2026-03-28 03:00:00+01:00",
        "    next 2026-03-29 03:00:00+02:00",
        "    next 2026-03-30 02:30:00+02:00",
        "    next 2026-03-31 02:30:00+02:00",
        "    next 2026-04-01 02:30:00+02:00",
        "    next 2026-04-02 02:30:00+02:00",
    ]


def test_ending_schedule_lists_fewer_runs() -> None:
    a_row(max_executions=3, executions=1)

    assert len(run("night")) == 2 + 2


def test_named_schedules_are_listed_with_the_requested_number_of_runs() -> None:
    a_row()
    a_row("hourly", schedule="", every=timedelta(hours=1), timezone="UTC")

    assert run("hourly", "--next", "2") == [
        "hourly: every 1:00:00 (UTC), report",
        "    0 executions",
        "    next 2026-03-28 13:00:00+00:00",
        "    next 2026-03-28 14:00:00+00:00",
    ]


def test_disabled_skipped_and_invalid_schedules_show_their_reason() -> None:
    a_row("off", enabled=False)
    a_row("left out", skipped_at=NOON, skip_reason="PermissionError: not now")
    a_row("wrong", schedule="61 * * * *", timezone="Atlantis/Capital", last_run_at=NOON)

    output = run("--next", "1")

    assert "    disabled" in output
    assert "    skipped 2026-03-28 13:00:00+01:00: PermissionError: not now" in output
    assert any(line.startswith("    invalid: ") for line in output)


def test_unknown_schedule_name_is_rejected_with_the_nearest_name() -> None:
    a_row()

    with pytest.raises(CommandError, match=r"unknown schedule 'nigt'; did you mean 'night'\?"):
        run("nigt")


def test_empty_list_of_schedules_is_reported() -> None:
    assert run() == ["There are no schedules."]


def test_undeclared_schedules_are_listed() -> None:
    job(name="report", cron="@daily")(report)

    assert run() == [f"report: {schedules.UNSEEN}"]


@pytest.mark.parametrize("storage", ["memory.MemoryStorage", "database.DatabaseStorage"])
def test_runworkers_declares_schedules_before_its_first_claim(
    settings: Any, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    settings.DJQUEUE = {"STORAGE": {"BACKEND": f"djqueue.storage.{storage}"}}
    seen = []

    def note(_: Any) -> None:
        seen.extend(CronJob.objects.values_list("name", "source"))

    job(name="report", cron="@daily")(report)
    monkeypatch.setattr("djqueue.management.processes.serve", note)

    call_command(runworkers.Command(), "--until-empty", stdout=StringIO(), stderr=StringIO())

    assert seen == [("report", "code")]
