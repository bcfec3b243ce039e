"""`manage.py djqueue`: every verb, on every storage."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError

from djqueue import job
from djqueue.client import get_storage, registry
from djqueue.client.declarations import declared
from djqueue.client.storages import close_storage
from djqueue.core.states import State
from djqueue.management.commands import djqueue, runworkers
from djqueue.models import AuditEvent, CronJob
from djqueue.runtime.exits import MISUSED
from djqueue.storage.base import Storage
from djqueue.testing import factories as f
from djqueue.testing.draining import drain
from tests.support import eventually

BACKENDS = ("memory.MemoryStorage", "database.DatabaseStorage", "redis.RedisStorage")
EMAILS = "emails"

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(params=BACKENDS, ids=lambda name: name.partition(".")[0])
def storage(
    request: pytest.FixtureRequest,
    tables: None,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Storage]:
    chosen: dict[str, Any] = {"BACKEND": f"djqueue.storage.{request.param}"}
    if request.param.startswith("redis"):
        server = request.getfixturevalue("redis_server")
        server.run("FLUSHALL")
        chosen["OPTIONS"] = {"URL": server.url}
    settings.DJQUEUE = {"STORAGE": chosen}
    monkeypatch.setattr(declared, "_entries", {})
    monkeypatch.setattr(registry, "_types", {})
    found = get_storage()
    found.connect()
    yield found
    close_storage()


def run(*arguments: str) -> str:
    output = StringIO()
    call_command(djqueue.Command(stderr=StringIO()), *arguments, stdout=output)
    return output.getvalue()


def document(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def add(a: int, b: int = 0) -> int:
    return a + b


def test_stats_counts_the_jobs_of_each_queue(storage: Storage) -> None:
    f.enqueue_many(storage, 3, queue=EMAILS)
    f.a_delayed_job(storage, queue=EMAILS)

    found = document("stats")
    [queue] = found["queues"]

    assert datetime.fromisoformat(found["at"]).tzinfo is not None
    assert queue["name"] == EMAILS
    assert (queue["waiting"], queue["delayed"], queue["active"], queue["failed"]) == (3, 1, 0, 0)
    assert queue["totals"]["enqueued"] == 4
    assert queue["oldest_waiting_seconds"] >= 0
    assert EMAILS in run("stats")


def test_misspelled_queue_gets_a_suggestion(storage: Storage) -> None:
    f.enqueue(storage, queue=EMAILS)

    with pytest.raises(CommandError, match=r"emials.*did you mean 'emails'"):
        run("stats", "--queue", "emials")


def test_jobs_can_be_filtered_by_state_name_and_limit(storage: Storage) -> None:
    first = f.enqueue(storage, queue=EMAILS, name="one")
    second = f.enqueue(storage, queue=EMAILS, name="two")

    assert {row["id"] for row in document("jobs")} == {first, second}
    assert [row["id"] for row in document("jobs", "--name", "two")] == [second]
    assert document("jobs", "--state", "failed") == []
    assert len(document("jobs", "--limit", "1")) == 1
    assert second in run("jobs")


def test_job_shows_why_the_job_is_not_running_and_hides_its_payload(storage: Storage) -> None:
    login = job(name="login", queue=EMAILS)(lambda user, password: None)
    enqueued = login.using(delay=60, headers={"tenant": 7, "token": "hunter3"}).enqueue(
        "ann", password="hunter2"
    )

    shown = document("job", enqueued.id)

    assert shown["state"] == "delayed"
    assert "scheduled for later" in shown["not_running_because"]
    assert shown["headers"]["tenant"] == 7
    assert "hunter" not in run("job", enqueued.id)
    revealed = run("job", enqueued.id, "--show-payload")
    assert "hunter2" in revealed
    assert "hunter3" in revealed
    assert AuditEvent.objects.filter(action="reveal", job_id=enqueued.id).count() == 1


def test_unknown_job_is_an_error(storage: Storage) -> None:
    with pytest.raises(CommandError, match="no queue has a job 'nothing'"):
        run("job", "nothing")


def test_enqueue_passes_arguments_and_options(storage: Storage) -> None:
    job(name="add", queue=EMAILS)(add)

    answer = document("enqueue", "add", "--args", "[1]", "--kwargs", '{"b": 2}', "--priority", "7")

    assert answer["status"] == "queued"
    assert f.job(storage, answer["id"], EMAILS).options.priority == 7
    assert drain().completed == 1
    assert document("wait", answer["id"])[0]["result"] == 3


def test_enqueue_by_name_needs_a_queue(storage: Storage) -> None:
    with pytest.raises(CommandError, match="no job is registered as 'resize'"):
        run("enqueue", "resize", "--payload", "1")

    answer = document("enqueue", "resize", "--payload", "1", "--queue", "images", "--id", "r1")

    assert (answer["id"], answer["queue"]) == ("r1", "images")
    assert document("enqueue", "resize", "--payload", "1", "--queue", "images", "--id", "r1")["status"] == (
        "duplicate"
    )


def test_arguments_that_are_not_a_json_array_are_rejected(storage: Storage) -> None:
    with pytest.raises(CommandError, match="JSON array"):
        run("enqueue", "add", "--args", '{"a": 1}')


def test_wait_fails_for_a_failed_job_and_after_its_timeout(storage: Storage) -> None:
    failed = f.a_failed_job(storage)
    waiting = f.enqueue(storage)

    with pytest.raises(CommandError, match="failed"):
        run("wait", failed)
    with pytest.raises(CommandError, match=waiting):
        run("wait", waiting, "--timeout", "0.05")


def test_jobs_can_be_cancelled_by_id_and_by_filter(storage: Storage) -> None:
    one = f.enqueue(storage, queue=EMAILS)
    others = f.enqueue_many(storage, 3, queue=EMAILS)
    kept = f.enqueue(storage, queue=EMAILS, name="kept")

    assert document("cancel", one) == [{"id": one, "queue": EMAILS, "outcome": "cancelled"}]
    assert document("cancel", "--all", "--name", f.NAME, "--dry-run") == {"matching": 3, "changed": 0}
    answer = document("cancel", "--all", "--name", f.NAME, "--no-input")

    assert answer["changed"] == 3
    assert {f.state(storage, job_id, EMAILS) for job_id in others} == {State.CANCELLED}
    assert f.state(storage, kept, EMAILS) is State.WAITING
    assert AuditEvent.objects.filter(action="all_cancel_begin", count=3).exists()


def test_bulk_change_without_a_terminal_requires_no_input(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO())
    f.enqueue(storage, queue=EMAILS)

    for verb in (["cancel", "--all"], ["clear", EMAILS], ["clean", EMAILS], ["obliterate", EMAILS]):
        with pytest.raises(CommandError, match="--no-input") as refused:
            run(*verb)
        assert refused.value.returncode == MISUSED
    assert f.counts(storage, EMAILS)[State.WAITING] == 1


def test_filters_are_rejected_without_all(storage: Storage) -> None:
    with pytest.raises(CommandError, match="together with --all"):
        run("cancel", f.enqueue(storage), "--name", "x")
    with pytest.raises(CommandError, match="pass --all"):
        run("cancel")


def test_retry_reports_jobs_that_are_not_failed(storage: Storage) -> None:
    failed = f.a_failed_job(storage)

    assert document("retry", failed)[0]["outcome"] == "retried"
    with pytest.raises(CommandError, match=r"not changed: 1 of 1 job$"):
        run("retry", failed)


def test_delayed_job_can_be_promoted_and_moved(storage: Storage) -> None:
    delayed = f.a_delayed_job(storage, queue=EMAILS)
    document("promote", "--all", "--queue", EMAILS, "--no-input")
    assert f.state(storage, delayed, EMAILS) is State.WAITING

    assert document("move", delayed, "--to", "slow")[0]["outcome"] == "moved"
    assert f.state(storage, delayed, "slow") is State.WAITING


def test_queue_can_be_paused_resumed_and_limited(storage: Storage) -> None:
    f.enqueue(storage, queue=EMAILS)

    run("pause", EMAILS)
    assert document("queues")[0]["paused"] is True
    run("resume", EMAILS)
    assert storage.queues.is_paused(EMAILS) is False
    assert document("limit", EMAILS, "--rate", "5/m", "--concurrency", "2") == {
        "queue": EMAILS,
        "rate": "5 per 60 s",
        "concurrency": 2,
    }
    assert document("limit", EMAILS, "--rate", "none")["rate"] is None
    with pytest.raises(CommandError, match="pass --rate"):
        run("limit", EMAILS)
    with pytest.raises(CommandError, match=r"--rate: 'fast' is not a rate: write .* such as 100/s"):
        run("limit", EMAILS, "--rate", "fast")


def test_job_type_can_be_held_and_released(storage: Storage) -> None:
    f.enqueue(storage, queue=EMAILS, name="shop.send")

    held = document("hold", EMAILS, "shop.send", "--for", "2h", "--reason", "the provider is down")
    assert (held["name"], held["reason"]) == ("shop.send", "the provider is down")
    [hold] = storage.reads.overview([EMAILS]).queues[0].holds
    assert abs(hold.until - hold.since - 7_200_000) < 60_000
    assert document("queues")[0]["held"] == ["shop.send"]
    assert f.claim(storage, names=["shop.send"]) == []
    with pytest.raises(CommandError, match=r"emails does not hold 'shop.sent'; did you mean 'shop.send'\?"):
        run("release", EMAILS, "shop.sent")
    run("release", EMAILS, "shop.send")
    assert document("queues")[0]["held"] == []
    run("hold", EMAILS, "shop.send")
    assert storage.reads.overview([EMAILS]).queues[0].holds[0].until is None


def test_wrong_values_exit_with_2(storage: Storage) -> None:
    job(name="add", queue=EMAILS)(add)
    f.enqueue(storage, queue=EMAILS)

    for arguments in (
        ("enqueue", "add", "--args", "[1, 2, 3]"),
        ("enqueue", "add", "--priority", "999999999999"),
        ("enqueue", "add", "--payload", "{}"),
        ("clean", EMAILS, "--state", "active", "--dry-run"),
        ("dead", "list", "--reason", "nope"),
    ):
        with pytest.raises(CommandError) as refused:
            run(*arguments)
        assert refused.value.returncode == MISUSED, arguments


def test_clean_counts_jobs_of_the_given_state_and_age(storage: Storage) -> None:
    f.a_completed_job(storage, queue=EMAILS, retention=60_000)
    f.enqueue_many(storage, 2, queue=EMAILS)

    assert document("clean", EMAILS, "--older-than", "1d", "--dry-run")["matching"] == 0
    assert run("clean", EMAILS, "--dry-run") == f"Would delete 1 job of queue {EMAILS!r}.\n"
    waiting = ("clean", EMAILS, "--state", "waiting", "--dry-run")
    assert document(*waiting, "--limit", "1")["matching"] == 1
    assert document(*waiting, "--older-than", "1d")["matching"] == 0
    eventually(lambda: document(*waiting, "--older-than", "1s")["matching"] == 2)


@pytest.mark.parametrize("command", [["clean", EMAILS], ["dead", "purge"]])
def test_age_of_what_is_deleted_needs_a_unit(command: list[str]) -> None:
    with pytest.raises(CommandError, match="'30' has no unit: add s, m, h, d or w, such as 30d"):
        run(*command, "--older-than", "30", "--no-input")


def test_queue_can_be_cleared_cleaned_and_obliterated(storage: Storage) -> None:
    f.a_completed_job(storage, queue=EMAILS, retention=60_000)
    f.enqueue_many(storage, 2, queue=EMAILS)

    assert document("clear", EMAILS, "--dry-run")["matching"] >= 2
    assert document("clear", EMAILS, "--no-input")["deleted"] == 2
    assert document("clean", EMAILS, "--older-than", "1d", "--no-input")["deleted"] == 0
    assert document("clean", EMAILS, "--state", "completed", "--yes")["deleted"] == 1
    f.enqueue(storage, queue=EMAILS)
    assert document("obliterate", EMAILS, "--no-input")["deleted"] == 1
    assert storage.queues.names() == []


def test_dead_letters_are_listed_counted_retried_and_purged(storage: Storage) -> None:
    failed = [f.a_failed_job(storage, queue=EMAILS) for _ in range(3)]

    assert {row["id"] for row in document("dead", "list")} == set(failed)
    assert document("dead", "stats")[EMAILS]["total"] == 3
    assert document("dead", "list", "--reason", "timeout") == []
    assert document("dead", "retry", "--dry-run")["retried"] == 3
    assert document("dead", "retry", "--limit", "1", "--no-input")["retried"] == 1
    assert document("dead", "purge", "--queue", EMAILS, "--no-input") == {"matching": 2, "deleted": 2}
    assert run("dead", "retry") == "0 retried\n"  # There is nothing to confirm.
    assert storage.reads.dead_letters(EMAILS) == []


def test_unknown_failure_reason_gets_a_suggestion(storage: Storage) -> None:
    f.a_failed_job(storage, queue=EMAILS)

    with pytest.raises(CommandError, match=r"did you mean 'timeout'\? Choose from .*max_attempts_exceeded"):
        run("dead", "list", "--reason", "timeot")


def test_pause_of_a_queue_that_nothing_uses_warns_of_a_typo(storage: Storage) -> None:
    f.enqueue(storage, queue=EMAILS)
    storage.workers.register(f.worker(queues=("reports",)))
    warnings = StringIO()

    command = djqueue.Command(stderr=warnings)
    call_command(command, "pause", EMAILS, "reports", f"{EMAILS}s", "unlike", stdout=StringIO())

    assert warnings.getvalue().splitlines() == [
        f"Warning: queue '{EMAILS}s' has had no jobs, and no worker names it; did you mean {EMAILS!r}?",
        "Warning: queue 'unlike' has had no jobs, and no worker names it.",
    ]
    assert storage.queues.is_paused("unlike")


def test_schedule_can_be_added_run_paused_and_removed(storage: Storage) -> None:
    job(name="add", queue=EMAILS)(add)

    document("cron", "add", "poll", "add", "--every", "5m", "--args", "[1]")
    [row] = document("cron", "list")
    assert (row["every_seconds"], row["enabled"], len(row["next_runs"])) == (300, True, 5)
    [sent] = document("cron", "run", "poll")
    assert f.state(storage, sent["id"], EMAILS) is State.WAITING
    run("cron", "pause", "poll")
    assert CronJob.objects.get().enabled is False
    run("cron", "resume", "poll")
    assert CronJob.objects.get().enabled is True
    assert "poll" in run("schedules")
    assert document("cron", "remove", "poll", "--dry-run") == {"matching": ["poll"], "deleted": []}
    assert CronJob.objects.exists()
    assert document("cron", "remove", "poll")["deleted"] == ["poll"]
    assert not CronJob.objects.exists()


def test_invalid_or_unknown_schedule_is_rejected(storage: Storage) -> None:
    with pytest.raises(CommandError, match="schedule:"):
        run("cron", "add", "bad", "add", "--cron", "61 * * * *")
    with pytest.raises(CommandError, match="unknown schedule 'nightly'"):
        run("cron", "run", "nightly")


def test_schedule_with_arguments_that_its_job_does_not_accept_is_rejected(storage: Storage) -> None:
    job(name="add", queue=EMAILS)(add)

    with pytest.raises(CommandError, match=r"add\(.*unexpected.*'nobody'"):
        run("cron", "add", "bad", "add", "--every", "5m", "--kwargs", '{"nobody": 1}')
    assert not CronJob.objects.exists()


def test_schedule_of_an_unknown_job_is_added_with_a_warning(storage: Storage) -> None:
    job(name="add", queue=EMAILS)(add)
    warning = StringIO()

    command = djqueue.Command(stderr=warning)
    call_command(command, "cron", "add", "poll", "addd", "--every", "5m", stdout=StringIO())

    assert warning.getvalue().strip().endswith("'addd' here; did you mean 'add'?")


def test_workers_are_listed_and_controlled_as_json(storage: Storage) -> None:
    storage.workers.register(f.worker("w1", queues=(EMAILS,)))

    [row] = document("workers")

    assert (row["id"], row["state"], row["queues"], row["jobs"]) == ("w1", "running", [EMAILS], [])
    assert datetime.fromisoformat(row["heartbeat_at"]).tzinfo is not None
    assert document("workers", "--quiet", "w1")["command"] == "quiet"


def test_every_verb_accepts_the_json_option(storage: Storage) -> None:
    parser = djqueue.Command().create_parser("manage.py", "djqueue")
    [actions] = [one for one in parser._actions if one.dest == "action"]
    flags = {name: verb._option_string_actions for name, verb in actions.choices.items()}

    assert [name for name, known in flags.items() if "--json" not in known] == ["dead", "cron", "backup"]
    assert document("mark", "v1.2")["label"] == "v1.2"


def test_unusable_database_is_reported_in_one_sentence(
    tables: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(*_: Any, **__: Any) -> None:
        raise OperationalError("unable to open database file")

    for command, arguments in ((djqueue.Command, ["stats"]), (runworkers.Command, [])):
        monkeypatch.setattr(command, "check", check)
        with pytest.raises(CommandError, match=r"cannot be used: unable to open .* DATABASES"):
            call_command(command(), *arguments, skip_checks=False)
    report = StringIO()
    with suppress(SystemExit):
        call_command(djqueue.Command(), "health", "--json", skip_checks=False, stdout=report)
    assert "status" in json.loads(report.getvalue())


def test_memory_storage_is_rejected_in_a_separate_process(storage: Storage) -> None:
    command = djqueue.Command(stderr=StringIO(), stdout=StringIO())
    command._called_from_command_line = True

    if storage.capabilities.in_process:
        with pytest.raises(CommandError, match="exist only in the process that runs them"):
            call_command(command, "stats")
    call_command(command, "cron", "list")


def test_immediate_mode_is_named_where_jobs_cannot_be_shared(settings: Any) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "IMMEDIATE": True}
    command = djqueue.Command(stderr=StringIO(), stdout=StringIO())
    command._called_from_command_line = True

    with pytest.raises(CommandError, match=r"DJQUEUE\['IMMEDIATE'\] runs each job when it is enqueued"):
        call_command(command, "stats")


def test_docs_list_every_subcommand_with_its_summary() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "command-line.md").read_text()
    table = re.search(r"<!-- table: subcommands -->\n(?:\|.*\n){2}((?:\|.*\n)+)", page)
    assert table is not None
    listed = dict(re.findall(r"\| `(.+?)` \| (.+?) \|", table[1]))

    parser = djqueue.Command().create_parser("manage.py", "djqueue")
    [actions] = [one for one in parser._actions if one.dest == "action"]

    assert listed == {one.dest: one.help for one in actions._choices_actions}
