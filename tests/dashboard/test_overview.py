"""The overview: health, stuck queues, errors and alerts."""

import re
from html import unescape

import pytest
from django.urls import resolve

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core import workers
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.metrics import MINUTE
from djqueue.core.overview import Finding
from djqueue.core.units import to_datetime
from djqueue.core.workers import SILENT_AFTER, RunningJob, WorkerInfo
from djqueue.dashboard import boards, rights
from djqueue.dashboard.reading import read_cache
from djqueue.models import CronJob
from djqueue.operations.annotations import annotate
from tests.dashboard.acting import fail
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


def shown(client):
    response = client.get(address(BY_NAME["changelist"]))
    assert response.status_code == 200
    return response


def health(client):
    return {fact.label: (fact.shown, fact.level) for fact in shown(client).context["health"]}


def test_overview_of_new_project_shows_first_commands(client, anywhere):
    html = shown(client).content.decode()
    assert "python manage.py runworkers" in html
    Queue("emails").enqueue(1)
    read_cache.clear()
    assert "python manage.py runworkers" not in shown(client).content.decode()


def test_overview_shows_health_of_storage(client, anywhere):
    found = health(client)
    assert found["Storage"] == ("reachable", "ok")
    assert "Scheduler" not in found
    assert found["Workers"] == ("0", "bad")


REMEDY = "Free <space> on the disk."
LOST = Finding("health.storage", "error", "keys were flushed: <jobs> are lost", "Restore a backup.")


def refuse_writes():
    error = StorageUnavailableError(f"the disk is full. {REMEDY}")
    error.remedy = REMEDY
    raise error


def let_jobs_wait_without_worker():
    Queue("emails").enqueue(1)
    enqueued = SYSTEM_CLOCK.now()
    eventually(lambda: SYSTEM_CLOCK.now() > enqueued + 1)


def let_worker_leave_jobs():
    get_storage().workers.register(WorkerInfo("w1", "host", 7, None, ("emails",), 4, SYSTEM_CLOCK.now()))
    let_jobs_wait_without_worker()


PROBLEMS = {
    "refused writes": (refuse_writes, "The storage cannot be used: the disk is full.", REMEDY),
    "lost keys": (lambda: [LOST], "Keys were flushed: <jobs> are lost", "Restore a backup."),
    "no worker": (let_jobs_wait_without_worker, "No live worker serves queue 'emails'", "--queues emails"),
    "no claims": (let_worker_leave_jobs, "no job has been claimed, although workers", "Look at the log"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_pages_show_the_problems_that_health_checks_find(client, anywhere, settings, monkeypatch, problem):
    settings.DJQUEUE = {**settings.DJQUEUE, "HEALTH": {"MAX_WAIT": 0.001, "TIMEOUT": PATIENCE}}
    cause, reason, remedy = PROBLEMS[problem]
    assert "<h2>Problems</h2>" not in shown(client).content.decode()
    if problem in ("refused writes", "lost keys"):
        monkeypatch.setattr(get_storage(), "probe", cause)
        level = ("has problems", "bad")
    else:
        cause()
        level = ("reachable", "ok")
    read_cache.clear()

    assert health(client)["Storage"] == level
    for name in ("changelist", "storage"):
        html = unescape(client.get(address(BY_NAME[name])).content.decode())
        [section] = re.findall("<h2>Problems</h2>.*?</section>", html, re.DOTALL)
        assert 'class="djq-level-bad"' in section
        assert reason in section.replace("The <", "the <")
        assert remedy in section


def test_problems_of_hidden_queues_or_without_the_storage_permission_are_not_shown(
    client, memory, settings, monkeypatch
):
    monkeypatch.setattr(get_storage(), "probe", lambda: [LOST])
    assert "Keys were flushed" in shown(client).content.decode()
    page = logged_in(one_with(rights.VIEW))
    html = shown(page).content.decode()
    assert "has problems" in html
    assert "Keys were flushed" not in html

    Queue("secret").enqueue(1)
    seen = {"QUEUE_FILTER": lambda _request, name: name != "secret"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    assert "Keys were flushed" not in shown(client).content.decode()


def test_page_without_data_shows_why_the_storage_cannot_be_read(client, memory, monkeypatch):
    def away(*_args, **_kwargs):
        raise StorageUnavailableError("canceled")

    locked = Finding("health.storage", "error", "the table is locked by the session 7", "End it.")
    monkeypatch.setattr(get_storage(), "probe", lambda: [locked])
    monkeypatch.setattr(get_storage().reads, "overview", away)
    for name in ("changelist", "queues"):
        html = client.get(address(BY_NAME[name])).content.decode()
        assert "The table is locked by the session 7" in html
        assert "End it." in html


def test_storage_page_shows_problems_of_the_configuration(client, memory, monkeypatch):
    small = Finding("djqueue.W021", "warning", "The pool has 3 connections.", "Set max_size.")
    monkeypatch.setattr("djqueue.checks._pools", lambda _settings: [small])
    html = client.get(address(BY_NAME["storage"])).content.decode()
    assert re.search('class="djq-level-warn"[^>]*>! The pool has 3 connections.*Set max_size', html)


def test_pages_that_only_show_data_are_not_in_a_transaction():
    [changelist, edit] = [resolve(address(BY_NAME[name])).func for name in ("changelist", "edit_now")]
    assert "default" in changelist._non_atomic_requests
    assert not hasattr(edit, "_non_atomic_requests")


def test_overview_says_that_no_scheduler_is_running(client, settings, tmp_path):
    settings.DJQUEUE = {
        "STORAGE": {
            "BACKEND": "djqueue.storage.scheduler.SchedulerStorage",
            "OPTIONS": {"FOLDER": str(tmp_path / "s")},
        }
    }
    response = shown(client)
    html = response.content.decode()
    assert re.search(r"storage is unreachable: the scheduler has been unavailable for [\d.]+ s: no", html)


def test_storage_details_require_the_storage_permission(memory):
    Queue("emails").enqueue(1)
    page = logged_in(one_with(rights.VIEW))
    assert address(BY_NAME["storage"]) not in shown(page).content.decode()


def test_overview_counts_and_lists_queues_without_workers(client, anywhere):
    Queue("emails").enqueue_many(range(3))
    response = shown(client)
    numbers = {fact.label: fact.value for fact in response.context["facts"]}
    assert numbers["Waiting"] == 3
    assert health(client)["Queues without workers"] == ("1", "bad")


def test_longest_queues_are_in_a_chart_and_a_table(client, memory, monkeypatch):
    for name in ("a", "b", "c", "d", "e", "f"):
        Queue(name).enqueue(1)
    board = boards.read_board()
    old = [
        line._replace(row=line.row._replace(oldest_at=board.at - 60_000 * number))
        for number, line in enumerate(board.lines, 1)
    ]
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(lines=tuple(old)))
    response = shown(client)
    assert [line.name for line in response.context["worst"]] == ["f", "e", "d", "c", "b"]
    minutes = response.context["minutes"]
    assert len(minutes) == boards.CHART_MINUTES
    assert minutes[-1].waits == [
        ((360_000, False), "360.000"),
        ((300_000, False), "300.000"),
        ((240_000, False), "240.000"),
        ((180_000, False), "180.000"),
        ((120_000, False), "120.000"),
    ]
    assert 'id="djq-waits"' in response.content.decode()


def test_everything_red_is_a_link_and_no_problem_has_a_green_tick(client, memory, monkeypatch):
    for name in ("paused", "waiting"):
        Queue(name).enqueue(1)
    Queue("paused").pause()
    board = boards.read_board()
    old = [line._replace(row=line.row._replace(oldest_at=board.at - 65 * MINUTE)) for line in board.lines]
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(lines=tuple(old)))

    facts = shown(client).context["health"]

    levels = {fact.label: fact.level for fact in facts}
    assert levels["Oldest waiting job"] == levels["Paused queues"] == "warn"
    assert levels["Queues without workers"] == "bad"
    assert [fact.label for fact in facts if fact.level != "ok" and not fact.url] == []
    urls = {fact.label: fact.url for fact in facts}
    assert urls["Paused queues"].endswith("/queues/paused/")
    assert urls["Queues without workers"].endswith("/queues/waiting/")


def test_rise_of_the_failure_rate_is_shown(client, memory, monkeypatch):
    Queue("emails").enqueue(1)
    start = SYSTEM_CLOCK.now() // MINUTE * MINUTE - 59 * MINUTE
    minutes = [
        boards.empty_bucket("", start + at * MINUTE, MINUTE)._replace(completed=79 if at > 44 else 99)
        for at in range(60)
    ]
    hour = [one._replace(failed=21 if one.completed == 79 else 1) for one in minutes]
    monkeypatch.setattr(boards.Board, "series", lambda _board: hour)

    facts = {fact.label: fact for fact in shown(client).context["facts"]}

    fact = facts["Failed, last 15 min (before: 1%)"]
    assert (fact.value, fact.level) == ("21%", "bad")


def test_job_that_runs_for_over_an_hour_is_listed_with_its_worker(client, memory, monkeypatch):
    Queue("emails").enqueue(1, id="job-1")
    board = boards.read_board()
    jobs = tuple(
        RunningJob(queue, f"job-{at}", "shop.send", board.at - at * 70 * MINUTE)
        for at, queue in enumerate(("emails", "emails", "hidden"))
    )
    worker = WorkerInfo("w1", "host", 7, None, ("emails",), 4, board.at, board.at, 2)._replace(jobs=jobs)
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(workers=(worker,)))

    html = shown(client).content.decode()

    listed = html[html.index("Jobs that run for much longer") :]
    assert "running for 70 min in emails on" in listed
    assert listed.count("running for") == 1


def test_errors_that_began_with_the_deploy_are_marked(client, memory):
    Queue("emails").enqueue(1, id="job-1")
    fail("job-1", "before")
    assert "all since the deploy" not in shown(client).content.decode()
    annotate("default", "v2", SYSTEM_CLOCK.now() - MINUTE)
    read_cache.clear()
    assert "all since the deploy" in shown(client).content.decode()


def test_top_errors_of_dead_letters_are_listed(client, memory):
    for number in range(3):
        Queue("emails").enqueue(1, id=f"job-{number}")
        fail(f"job-{number}", f"no address {number}")
    [group] = shown(client).context["groups"]
    assert (group.size, group.error_type) == (3, "shop.NoAddressError")
    html = shown(client).content.decode()
    assert re.search(r'href="[^"]*dead-letters/\?fingerprint=\w+">NoAddressError', html)


def test_late_schedules_are_listed(client, memory):
    row = CronJob(name="night", job_name="emails", schedule="0 * * * *")
    row.save()
    assert health(client)["Overdue schedules"] == ("0", "ok")
    CronJob.objects.update(next_run_at=to_datetime(SYSTEM_CLOCK.now() - 100_000))
    read_cache.clear()
    assert health(client)["Overdue schedules"] == ("1", "bad")
    assert f'<a href="/admin/djqueue/dashboard/cron/{row.pk}/">night</a>' in shown(client).content.decode()


def test_silent_workers_are_listed(client, memory, monkeypatch):
    board = boards.read_board()
    heard = WorkerInfo("w1", "host", 7, None, ("emails",), 4, board.at, board.at, 2)
    quiet = heard._replace(id="w2", seen_at=board.at - SILENT_AFTER - 1, pid=8)
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(workers=(heard, quiet)))
    response = shown(client)
    assert [one.pid for one in response.context["silent"]] == [8]
    assert "host:8" in response.content.decode()
    assert "2 active jobs" in response.content.decode()


def test_silent_workers_of_hidden_queues_are_neither_listed_nor_counted(
    client, memory, monkeypatch, settings
):
    board = boards.read_board()
    silent = WorkerInfo(
        "w1", "host", 7, ("secret",), ("emails",), 4, board.at, board.at - workers.SILENT_AFTER - 1, 2
    )
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(workers=(silent,)))
    assert health(client)["Silent workers"] == ("1", "bad")
    seen = {"QUEUE_FILTER": lambda _request, name: name != "secret"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    assert shown(client).context["silent"] == []
    assert health(client)["Silent workers"] == ("0", "ok")


def test_jobs_unknown_to_every_live_worker_raise_an_alert(client, memory):
    Queue("emails").enqueue_many([1, 2], name="shop.new.pay")
    Queue("emails").enqueue(3, name="emails")
    knowing = WorkerInfo("w1", "host", 7, ("emails",), ("emails",), 4, 1)
    get_storage().workers.register(knowing)
    assert health(client)["Jobs without a handler"] == ("2", "bad")
    html = shown(client).content.decode()
    assert "shop.<wbr>new.<wbr>pay" in html
    assert "2 jobs waiting in" in html
    assert "restart <code>manage.py runworkers</code>" in html
    for name in ("queues", "queue"):
        html = client.get(address(BY_NAME[name])).content.decode()
        assert "✖ jobs without a handler" in html
        assert "▶ running" not in html


def test_jobs_known_to_a_live_worker_raise_no_alert(client, memory):
    Queue("emails").enqueue(1, name="emails")
    get_storage().workers.register(WorkerInfo("w1", "host", 7, None, ("emails",), 4, 1))
    assert health(client)["Jobs without a handler"] == ("0", "ok")
    assert "<h2>Jobs without a handler</h2>" not in shown(client).content.decode()


def test_unknown_jobs_of_hidden_queues_raise_no_alert(client, memory, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "secret"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("secret").enqueue(1, name="shop.hidden")
    get_storage().workers.register(WorkerInfo("w1", "host", 7, None, ("emails",), 4, 1))
    assert health(client)["Jobs without a handler"] == ("0", "ok")
    assert "hidden" not in shown(client).context["unhandled"]
    assert "shop" not in shown(client).content.decode()


def test_overview_shows_last_read_during_outage_of_storage(client, memory, monkeypatch):
    Queue("emails").enqueue(1)
    shown(client)

    def away(*_args, **_kwargs):
        raise StorageUnavailableError("nobody is at home")

    monkeypatch.setattr(get_storage().workers, "all", away)
    for verb in ("overview", "diagnostics"):
        monkeypatch.setattr(get_storage().reads, verb, away)
    read_cache.forget()
    response = shown(client)
    assert "The storage is unreachable: nobody is at home" in response.content.decode()
    assert response["Djq-Unavailable"] == "1"
    assert response.context["facts"][0].value == 1
    assert health(client)["Storage"] == ("unreachable", "bad")


def test_dead_letters_are_counted(client, memory):
    for _number in range(2):
        fail(Queue("emails").enqueue(1).id)
    facts = {fact.label: fact.value for fact in shown(client).context["facts"]}
    assert facts["Dead letters"] == 2
