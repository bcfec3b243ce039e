"""Status: what is wrong, since when, and what can be done."""

import re
from dataclasses import replace
from html import unescape

import pytest
from django.urls import resolve

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.conf.values import HealthSettings
from djqueue.core import workers
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.messages import HiddenOptions
from djqueue.core.metrics import MINUTE
from djqueue.core.overview import Finding, Overview
from djqueue.core.units import to_datetime
from djqueue.core.workers import SILENT_AFTER, RunningJob, WorkerInfo
from djqueue.dashboard import boards, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.redaction import HIDDEN
from djqueue.dashboard.views.system import settings_in_effect
from djqueue.models import Annotation, BulkKind, CronJob
from djqueue.operations import bulk
from djqueue.operations.annotations import annotate
from djqueue.operations.healthchecks import check_silent, facts_of
from tests.dashboard.acting import fail
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


def shown(client):
    response = client.get(address(BY_NAME["status"]))
    assert response.status_code == 200
    return response


def cards(client):
    """Return the problems on the page by id."""
    return {card.id: card for card in shown(client).context["cards"]}


def verdict(client):
    found = shown(client).context["verdict"]
    return found.text, found.level


def test_overview_of_new_project_shows_first_commands(client, anywhere):
    html = shown(client).content.decode()
    assert "python manage.py runworkers" in html
    Queue("emails").enqueue(1)
    read_cache.clear()
    assert "python manage.py runworkers" not in shown(client).content.decode()


def test_status_says_in_its_first_line_that_nothing_is_wrong(client, anywhere):
    assert verdict(client) == ("Nothing is wrong: 0 queues, 0 workers", "ok")
    assert cards(client) == {}


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
    "refused writes": (
        refuse_writes,
        "health.storage",
        "The storage cannot be used: the disk is full.",
        REMEDY,
    ),
    "lost keys": (
        lambda: [LOST],
        "health.storage",
        "Keys were flushed: <jobs> are lost",
        "Restore a backup.",
    ),
    "no worker": (
        let_jobs_wait_without_worker,
        "health.workers",
        "Queue emails has no worker.",
        "manage.py runworkers",
    ),
    "no claims": (
        let_worker_leave_jobs,
        "health.claims",
        "Workers with free slots start no jobs of emails.",
        "Look at the log of a worker",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_pages_show_the_problems_that_health_checks_find(client, anywhere, settings, monkeypatch, problem):
    settings.DJQUEUE = {**settings.DJQUEUE, "HEALTH": {"MAX_WAIT": 0.001, "TIMEOUT": PATIENCE}}
    cause, name, sentence, remedy = PROBLEMS[problem]
    assert verdict(client)[1] == "ok"
    if problem in ("refused writes", "lost keys"):
        monkeypatch.setattr(get_storage(), "probe", cause)
    else:
        cause()
    read_cache.clear()

    response = shown(client)
    [card] = [card for card in response.context["cards"] if card.id == name]
    assert card.is_bad
    assert card.sentence == sentence
    assert remedy in card.hint
    assert response.context["verdict"].level == "bad"
    assert sentence in unescape(response.content.decode()).replace("<wbr>", "")

    html = unescape(client.get(address(BY_NAME["system"])).content.decode())
    [section] = re.findall("<h2>Problems</h2>.*?</section>", html, re.DOTALL)
    assert 'class="djq-level-bad"' in section


def test_problems_of_hidden_queues_or_without_the_storage_permission_are_not_shown(
    client, memory, settings, monkeypatch
):
    monkeypatch.setattr(get_storage(), "probe", lambda: [LOST])
    assert "Keys were flushed" in shown(client).content.decode()
    page = logged_in(one_with(rights.VIEW))
    html = shown(page).content.decode()
    assert "The storage has problems." in html
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
    for name in ("status", "queues"):
        html = client.get(address(BY_NAME[name])).content.decode()
        assert "The table is locked by the session 7" in html
        assert "End it." in html


def test_storage_page_shows_problems_of_the_configuration(client, memory, monkeypatch):
    small = Finding("djqueue.W021", "warning", "The pool has 3 connections.", "Set max_size.")
    monkeypatch.setattr("djqueue.checks._pools", lambda _settings: [small])
    html = client.get(address(BY_NAME["system"])).content.decode()
    assert re.search('class="djq-level-warn"[^>]*>! The pool has 3 connections.*Set max_size', html)


def test_pages_that_only_show_data_are_not_in_a_transaction():
    [changelist, edit] = [resolve(address(BY_NAME[name])).func for name in ("status", "edit_now")]
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
    assert address(BY_NAME["system"]) not in shown(page).content.decode()


def test_overview_counts_and_lists_queues_without_workers(client, anywhere):
    Queue("emails").enqueue_many(range(3))
    response = shown(client)
    numbers = {fact.label: fact.value for fact in response.context["facts"]}
    assert numbers["Waiting"] == 3
    card = cards(client)["health.workers"]
    assert (card.is_bad, card.sentence) == (True, "Queue emails has no worker.")
    [item] = card.items
    assert item.note == "3 jobs waiting"
    assert item.since == card.since == boards.read_board().lines[0].row.oldest_at
    assert [one.label for one in item.actions] == ["Show jobs", "Pause queue"]


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


def test_every_problem_says_since_when_and_links_to_its_objects(client, memory, monkeypatch):
    for name in ("paused", "waiting"):
        Queue(name).enqueue(1)
    Queue("paused").pause()
    board = boards.read_board()
    old = [line._replace(row=line.row._replace(oldest_at=board.at - 65 * MINUTE)) for line in board.lines]
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(lines=tuple(old)))

    found = cards(client)

    assert {name: card.is_bad for name, card in found.items()} == {
        "health.workers": True,
        "problem.paused": False,
    }
    assert {card.since for card in found.values()} == {board.at - 65 * MINUTE}
    urls = {item.label: item.url for card in found.values() for item in card.items}
    assert urls["paused"].endswith("/queues/paused/")
    assert urls["waiting"].endswith("/queues/waiting/")
    assert [fact.label for fact in shown(client).context["facts"] if not fact.url] == []


def test_problem_of_a_paused_queue_names_who_paused_it_and_resumes_it(client, memory):
    Queue("emails").enqueue(1)
    client.post(address(BY_NAME["pause"]))
    [item] = cards(client)["problem.paused"].items
    assert re.fullmatch(r"1 pending job, paused by user-\d+", item.note)
    [resume] = item.actions
    assert (resume.label, resume.is_post) == ("Resume", True)
    client.post(resume.url)
    assert "problem.paused" not in cards(client)


def test_problem_of_a_held_job_type_has_its_reason_and_releases_it(client, memory):
    Queue("emails").enqueue(1)
    client.post(address(BY_NAME["hold"]), {"reason": "the provider <b> is down"})
    assert "problem.held" in cards(client)
    [item] = cards(client)["problem.held"].items
    assert (item.label, item.note) == ("emails", "1 job waiting in emails: the provider <b> is down")
    html = shown(client).content.decode()
    assert "the provider &lt;b&gt; is down" in html
    assert "Hold job type: emails (user-" in html
    [release] = item.actions
    client.post(release.url)
    assert "problem.held" not in cards(client)


def test_rise_of_the_failure_rate_is_a_problem_since_its_first_minute(client, memory, monkeypatch):
    Queue("emails").enqueue(1)
    Queue("emails").pause()
    start = SYSTEM_CLOCK.now() // MINUTE * MINUTE - 59 * MINUTE
    minutes = [
        boards.empty_bucket("emails", start + at * MINUTE, MINUTE)._replace(completed=79 if at > 44 else 99)
        for at in range(60)
    ]
    hour = tuple(one._replace(failed=21 if one.completed == 79 else 1) for one in minutes)
    board = boards.read_board()
    [line] = board.lines
    changed = board._replace(lines=(line._replace(buckets=hour),), past=None)
    monkeypatch.setattr(boards, "read_board", lambda: changed)

    card = cards(client)["problem.failing"]

    assert card.sentence == "21% of the attempts of emails fail."
    assert card.since == start + 45 * MINUTE
    [item] = card.items
    assert item.note == "21% of attempts fail, 1% before"
    assert [one.label for one in item.actions] == ["Show errors", "Pause queue"]
    facts = {fact.label: fact.value for fact in shown(client).context["facts"]}
    assert facts["Failed, last 15 min (before: 1%)"] == "21%"


def test_incidents_of_the_last_hour_are_on_one_time_axis(client, memory):
    Queue("emails").enqueue(1, id="job-1")
    fail("job-1")
    Queue("emails").enqueue_many(range(3))
    client.post(address(BY_NAME["pause"]))
    annotate("default", "v2 <b>")
    begun = bulk.begin("default", BulkKind.RETRY, bulk.Selection(("emails",)), expected=3)
    get_storage().sweep()

    response = shown(client)

    rows = {row.label: row for row in response.context["strip"].rows}
    assert [mark.label for mark in rows["Deploys"].marks] == ["v2 <b>"]
    [pause] = rows["Pauses, limits"].marks
    assert pause.label.startswith("Pause queue: emails (user-")
    assert pause.url == address(BY_NAME["queue"])
    [operation] = rows["Bulk operations"].marks
    assert operation.url.endswith(f"/history/operations/{begun.pk}/")
    assert rows["Backlog"].note == "about 0 to 3"
    assert rows["Failing"].note == "up to 100%"
    assert "v2 &lt;b&gt;" in response.content.decode()


def test_incidents_of_hidden_queues_are_not_shown(client, memory, settings):
    hidden: set[str] = set()
    seen = {"QUEUE_FILTER": lambda _request, name: name not in hidden}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("emails").enqueue(1)
    Queue("other").enqueue(1)
    client.post(address(BY_NAME["pause"]))
    bulk.begin("default", BulkKind.RETRY, bulk.Selection(("emails",)), expected=3)
    assert "problem.paused" in cards(client)
    hidden.add("emails")
    read_cache.clear()
    response = shown(client)
    assert [row.label for row in response.context["strip"].rows if row.marks] == []
    assert "problem.paused" not in cards(client)
    assert "emails" not in response.content.decode()


def test_job_that_runs_for_over_an_hour_is_listed_with_its_worker(client, memory, monkeypatch):
    Queue("emails").enqueue(1, id="job-1")
    board = boards.read_board()
    jobs = tuple(
        RunningJob(queue, f"job-{at}", "shop.send", board.at - at * 70 * MINUTE)
        for at, queue in enumerate(("emails", "emails", "hidden"))
    )
    worker = WorkerInfo("w1", "host", 7, None, ("emails",), 4, board.at, board.at, 2)._replace(jobs=jobs)
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(workers=(worker,)))

    card = cards(client)["problem.stuck"]

    assert card.sentence == "Job shop.send runs for much longer than others."
    [item] = card.items
    assert (item.label, item.note) == ("shop.send", "in emails on w1")
    assert item.since == card.since == board.at - 70 * MINUTE
    assert [one.label for one in item.actions] == ["Dump stacks", "Cancel job"]
    assert item.url.endswith("/jobs/emails/job-1/")


def test_errors_that_are_new_since_the_deploy_are_a_problem(client, memory):
    Queue("emails").enqueue_many([1, 2], ids=["job-1", "job-2"])
    fail("job-1", "before")
    assert "problem.new_errors" not in cards(client)
    rows = Annotation.objects
    rows.create(at=to_datetime(1), label="v1", follows=0)
    rows.create(at=to_datetime(SYSTEM_CLOCK.now() - MINUTE), label="v2", follows=1)
    read_cache.clear()
    card = cards(client)["problem.new_errors"]
    assert card.sentence == "New since the deploy: NoAddressError: before"
    [item] = card.items
    assert item.note == "1 failed attempt in emails"
    assert [one.label for one in item.actions] == ["Retry…", "Show jobs", "Resolve", "Hold job type"]
    assert "all since the deploy" in shown(client).content.decode()
    fail("job-2", "after")
    read_cache.clear()
    assert {one.label for one in cards(client)["problem.new_errors"].items} == {
        "NoAddressError: before",
        "NoAddressError: after",
    }
    rows.filter(label="v2").update(at=to_datetime(SYSTEM_CLOCK.now() + MINUTE))
    read_cache.clear()
    assert "problem.new_errors" not in cards(client)


def test_top_errors_of_dead_letters_are_listed(client, memory):
    for number in range(3):
        Queue("emails").enqueue(1, id=f"job-{number}")
        fail(f"job-{number}", f"no address {number}")
    [group] = shown(client).context["groups"]
    assert (group.group.attempts, group.group.error_type) == (3, "shop.NoAddressError")
    html = shown(client).content.decode()
    assert re.search(r'href="[^"]*errors/emails/\w+/">NoAddressError', html)


def test_late_schedules_are_listed(client, memory):
    row = CronJob(name="night", job_name="emails", schedule="0 * * * *")
    row.save()
    assert "problem.overdue" not in cards(client)
    CronJob.objects.update(next_run_at=to_datetime(SYSTEM_CLOCK.now() - 100_000))
    read_cache.clear()
    card = cards(client)["problem.overdue"]
    assert card.sentence == "Schedule night is overdue."
    assert [one.label for one in card.items[0].actions] == ["Run now"]
    assert (
        f'<a href="/admin/djqueue/dashboard/schedules/{row.pk}/">night</a>' in shown(client).content.decode()
    )


def test_silent_workers_are_listed(client, memory, monkeypatch):
    board = boards.read_board()
    heard = WorkerInfo("w1", "host", 7, None, ("emails",), 4, board.at, board.at, 2)
    quiet = heard._replace(id="w2", seen_at=board.at - SILENT_AFTER - 1, pid=8)
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(workers=(heard, quiet)))
    card = cards(client)["health.silent"]
    assert card.sentence == "Worker w2 has stopped sending heartbeats."
    [item] = card.items
    assert (item.label, item.note, item.since) == ("w2", "2 active jobs", quiet.seen_at)


def test_silent_worker_that_was_replaced_is_no_problem_as_for_the_health_check(client, memory, monkeypatch):
    board = boards.read_board()
    gone = WorkerInfo("w1", "host", 7, None, ("emails",), 4, board.at - MINUTE, board.at - SILENT_AFTER - 1)
    gone = gone._replace(supervisor=1)
    other = gone._replace(id="w2", supervisor=2, pid=8)
    new = gone._replace(id="w3", pid=9, started_at=board.at, seen_at=board.at)
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(workers=(gone, other, new)))
    assert [item.label for item in cards(client)["health.silent"].items] == ["w2"]
    facts = facts_of(get_storage(), Overview(board.at, []), (gone, other, new), HealthSettings())
    assert [one.worker for found in check_silent(facts) for one in found.evidence] == ["w2"]


SECRETS = {
    "MONITORING": {"TOKEN": "hunter2-hunter2-hunter2"},
    "QUEUES": {"hidden-queue": {"OBJECTIVE": 30}},
    "LIMITERS": {"hidden-limiter": {"CONCURRENCY": 3}},
}


def test_settings_in_effect_show_no_secret_and_no_queue_that_the_user_must_not_see(client, memory, settings):
    settings.DJQUEUE = {**SECRETS, "STORAGE": settings.DJQUEUE["STORAGE"], "VERSION": "v7"}
    html = client.get(address(BY_NAME["system"])).content.decode()
    assert "hunter2" not in html
    lines = {line.name: line for line in settings_in_effect(get_settings())}
    assert (lines["VERSION"].value, lines["VERSION"].is_default) == ("v7", False)
    assert lines["MONITORING: TOKEN"].value == HIDDEN
    assert lines["CONCURRENCY"].is_default
    options = HiddenOptions(url="redis://user:hunter2@host/0", password="hunter2")
    shown_options = [
        line.value for line in settings_in_effect(replace(get_settings(), storage_options=options))
    ]
    assert not any("hunter2" in value for value in shown_options)
    assert "hidden-queue" in html
    assert "hidden-limiter" in html

    seen = {"QUEUE_FILTER": lambda _request, name: name != "hidden-queue"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("hidden-queue").enqueue(1)
    read_cache.clear()
    html = client.get(address(BY_NAME["system"])).content.decode()
    assert "v7" in html
    assert "hidden-queue" not in html
    assert "hidden-limiter" not in html


def test_settings_in_effect_show_rates_as_they_are_written(settings):
    settings.DJQUEUE = {"QUEUES": {"reports": {"RATE": "4/s"}}}
    lines = {line.name: line for line in settings_in_effect(get_settings())}
    assert lines["QUEUES"].value == "reports: rate 4/s"


def test_silent_workers_of_hidden_queues_are_neither_listed_nor_counted(
    client, memory, monkeypatch, settings
):
    board = boards.read_board()
    silent = WorkerInfo(
        "w1", "host", 7, ("secret",), ("emails",), 4, board.at, board.at - workers.SILENT_AFTER - 1, 2
    )
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(workers=(silent,)))
    assert cards(client)["health.silent"].sentence == "Worker w1 has stopped sending heartbeats."
    seen = {"QUEUE_FILTER": lambda _request, name: name != "secret"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    assert cards(client) == {}


def test_jobs_unknown_to_every_live_worker_raise_an_alert(client, memory):
    Queue("emails").enqueue_many([1, 2], name="shop.new.pay")
    Queue("emails").enqueue(3, name="emails")
    knowing = WorkerInfo("w1", "host", 7, ("emails",), ("emails",), 4, 1)
    get_storage().workers.register(knowing)
    card = cards(client)["health.handlers"]
    assert card.sentence == "No worker knows the job shop.new.pay."
    [item] = card.items
    assert (item.label, item.note) == ("shop.new.pay", "2 jobs waiting in emails")
    assert "restart manage.py runworkers" in card.hint
    for name in ("queues", "queue"):
        html = client.get(address(BY_NAME[name])).content.decode()
        assert "✖ jobs without a handler" in html
        assert "▶ running" not in html


def test_jobs_known_to_a_live_worker_raise_no_alert(client, memory):
    Queue("emails").enqueue(1, name="emails")
    get_storage().workers.register(WorkerInfo("w1", "host", 7, None, ("emails",), 4, 1))
    assert "health.handlers" not in cards(client)


def test_unknown_jobs_of_hidden_queues_raise_no_alert(client, memory, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "secret"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("secret").enqueue(1, name="shop.hidden")
    get_storage().workers.register(WorkerInfo("w1", "host", 7, None, ("emails",), 4, 1))
    assert cards(client) == {}
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
    assert verdict(client) == ("Unknown: the storage is unreachable.", "bad")


def test_dead_letters_are_counted(client, memory):
    for _number in range(2):
        fail(Queue("emails").enqueue(1).id)
    facts = {fact.label: fact.value for fact in shown(client).context["facts"]}
    assert facts["Dead letters"] == 2
