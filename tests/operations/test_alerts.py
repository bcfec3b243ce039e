"""Alerts: one message when a problem begins, and one when it is over."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import django
import pytest
from django.core import mail
from django.db import OperationalError

from djqueue import Queue, signals
from djqueue.client.storages import close_storage, get_storage
from djqueue.conf import AlertSettings
from djqueue.conf import problems as wrong_settings
from djqueue.core.overview import Evidence, Finding
from djqueue.core.workers import WorkerInfo
from djqueue.models import AuditEvent
from djqueue.operations import alerts
from djqueue.operations.alerts import LOOK_EVERY, OVER_AFTER, RULES, TITLES, Alerts, ProblemMessage
from djqueue.operations.healthchecks import monitor
from djqueue.testing.clock import FakeClock
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("tables")
AFTER = 30_000


@pytest.fixture(params=["memory.MemoryStorage", "database.DatabaseStorage"])
def storage(request: pytest.FixtureRequest, settings: Any) -> Iterator[Any]:
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": f"djqueue.storage.{request.param}"},
        "HEALTH": {"MAX_WAIT": 0.001, "TIMEOUT": 60},
        "ALERTS": {"MAIL": ["ops@example.com"], "AFTER": AFTER / 1_000},
    }
    # Later versions of Django have no default.
    settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    yield get_storage()
    close_storage()


class Watching:
    """The alerts of one process, whose time the test moves."""

    def __init__(self, storage: Any, clock: FakeClock) -> None:
        self.alerts = Alerts(storage, clock)
        self.clock = clock

    def pass_time(self, milliseconds: int) -> list[str]:
        """Look again and again for a time; return the subjects of the mails."""
        for _ in range(milliseconds // LOOK_EVERY + 1):
            monitor.forget()
            self.alerts.look()
            self.alerts._calls.flush(60)
            self.clock.advance(LOOK_EVERY)
        subjects = [one.subject for one in mail.outbox]
        mail.outbox.clear()
        return subjects


@pytest.fixture
def watching(storage: Any, clock: FakeClock) -> Iterator[Watching]:
    made = Watching(storage, clock)
    yield made
    made.alerts._calls.flush(60)


def serve(queue: str = "emails") -> None:
    get_storage().workers.register(WorkerInfo("w1", "host", 7, (queue,), ("send",), 4, 1))


def wait_without_worker(name: str = "emails") -> None:
    Queue(name).enqueue(1, name="send")
    overview = get_storage().reads.overview
    eventually(lambda: (row := overview([name])).at > (row.queues[0].oldest_at or 0) + 1)


def test_problem_is_announced_once_and_when_it_is_over(watching: Watching) -> None:
    wait_without_worker()
    assert watching.pass_time(AFTER - LOOK_EVERY) == []
    assert watching.pass_time(10 * LOOK_EVERY) == ["[djqueue] Began: No worker: 'emails'"]
    serve()
    assert watching.pass_time(OVER_AFTER - 2 * LOOK_EVERY) == []
    assert watching.pass_time(10 * LOOK_EVERY) == ["[djqueue] Over: No worker: 'emails'"]
    rows = AuditEvent.objects.order_by("pk").values_list("action", "queue", "user")
    assert list(rows) == [("problem", "emails", "-"), ("problem_over", "emails", "-")]


def test_error_is_not_called_over_because_of_another_deploy() -> None:
    one = Evidence("emails", error="abc", text="ValueError: no")
    began = ProblemMessage("problem.new_errors", is_over=False, hint="", objects=(one,))
    assert began.text == "Began: New error since the deploy: 'ValueError: no' in 'emails'"
    assert began._replace(is_over=True).text == "No longer new since the deploy: 'ValueError: no' in 'emails'"


def test_problem_that_lasts_for_a_moment_is_not_announced(watching: Watching) -> None:
    wait_without_worker()
    assert watching.pass_time(LOOK_EVERY) == []
    serve()
    assert watching.pass_time(10 * LOOK_EVERY) == []


def test_another_process_announces_nothing_again(watching: Watching, storage: Any) -> None:
    wait_without_worker()
    assert len(watching.pass_time(10 * LOOK_EVERY)) == 1
    other = Watching(storage, watching.clock)
    watching.clock.advance(alerts.FOLLOW_EVERY)
    watching.alerts.look()
    other.alerts.look()
    assert not other.alerts._lease.number
    watching.alerts._lease.release()
    watching.clock.advance(alerts.FOLLOW_EVERY)
    assert other.pass_time(10 * LOOK_EVERY) == []
    serve()
    assert other.pass_time(10 * LOOK_EVERY) == ["[djqueue] Over: No worker: 'emails'"]


def test_objects_with_the_same_problem_share_a_message(watching: Watching) -> None:
    for name in ("emails", "letters"):
        wait_without_worker(name)
    [subject] = watching.pass_time(10 * LOOK_EVERY)
    assert subject in (
        "[djqueue] Began: No worker: 'emails', 'letters'",
        "[djqueue] Began: No worker: 'letters', 'emails'",
    )


def test_message_that_cannot_be_sent_is_sent_later(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_without_worker()
    with monkeypatch.context() as patch:
        patch.setattr(
            "django.core.mail.backends.locmem.EmailBackend.send_messages", lambda *_: {}["no server"]
        )
        assert watching.pass_time(10 * LOOK_EVERY) == []
    assert not AuditEvent.objects.exists()
    assert len(watching.pass_time(LOOK_EVERY)) == 1


def test_channel_that_fails_repeats_no_other(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fail(message: Any, _wanted: Any) -> None:
        calls.append(message.text)
        raise alerts.WebhookError("away")

    wait_without_worker()
    with monkeypatch.context() as patch:
        patch.setattr(alerts, "CHANNELS", (alerts.send_mail, fail))
        assert len(watching.pass_time(10 * LOOK_EVERY)) == 1
        assert len(calls) == 10 * LOOK_EVERY // AFTER
        wait_without_worker("letters")
        assert watching.pass_time(10 * LOOK_EVERY) == ["[djqueue] Began: No worker: 'letters'"]
    assert watching.pass_time(AFTER) == []
    assert AuditEvent.objects.filter(action="problem").count() == 2


@pytest.mark.parametrize("is_over", [False, True])
def test_channel_that_was_told_of_a_change_is_told_of_its_end_whatever_another_channel_lacks(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    is_away = not is_over

    def fail(_message: Any, _wanted: Any) -> None:
        if is_away:
            raise alerts.WebhookError("away")

    monkeypatch.setattr(alerts, "CHANNELS", (alerts.send_mail, fail))
    began, over = (f"[djqueue] {word}: No worker: 'emails'" for word in ("Began", "Over"))
    wait_without_worker()
    assert watching.pass_time(10 * LOOK_EVERY) == [began]
    is_away = True
    serve()
    assert watching.pass_time(10 * LOOK_EVERY) == [over]
    if is_over:
        get_storage().workers.unregister("w1")
        assert watching.pass_time(10 * LOOK_EVERY) == [began]
        assert [*AuditEvent.objects.values_list("action", flat=True)] == ["problem"]
    else:
        is_away = False
        assert watching.pass_time(10 * LOOK_EVERY) == []
        assert not AuditEvent.objects.exists()


def test_failure_to_record_repeats_no_message(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_without_worker()
    with monkeypatch.context() as patch:
        patch.setattr(Alerts, "_record", lambda *_: {}["away"])
        assert len(watching.pass_time(10 * LOOK_EVERY)) == 1
    assert watching.pass_time(AFTER) == []
    assert AuditEvent.objects.count() == 1


def test_outage_of_the_storage_ends_no_problem(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_without_worker()
    assert len(watching.pass_time(10 * LOOK_EVERY)) == 1
    with monkeypatch.context() as patch:
        report = monitor.report
        patch.setattr(monitor, "report", lambda *about: report(*about)._replace(facts=None))
        assert watching.pass_time(10 * LOOK_EVERY) == []
    assert watching.pass_time(10 * LOOK_EVERY) == []


def test_process_that_cannot_read_what_was_announced_leaves_the_work_to_others(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_without_worker()
    with monkeypatch.context() as patch:
        patch.setattr(alerts, "announced", lambda *_: {}["away"])
        with pytest.raises(KeyError):
            watching.alerts.look()
    assert not watching.alerts._lease.number
    assert len(watching.pass_time(10 * LOOK_EVERY)) == 1


def test_message_that_found_no_thread_is_sent_after_a_later_look(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_without_worker()
    with monkeypatch.context() as patch:
        patch.setattr(watching.alerts._calls, "_start", lambda: None)
        assert watching.pass_time(4 * LOOK_EVERY) == []
    assert len(watching.pass_time(LOOK_EVERY)) == 1


def test_alerts_wait_for_their_tables(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(_self: Alerts) -> None:
        looks.append(1)
        raise OperationalError("no such table: djqueue_leaderlease")

    monkeypatch.setattr(Alerts, "look", look)
    watch = alerts.alerting(storage)
    watch()
    watch()
    assert looks == [1]


def test_mail_server_that_hangs_is_left(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    smtp = "django.core.mail.backends.smtp.EmailBackend"
    monkeypatch.setattr(f"{smtp}.send_messages", lambda backend, _messages: waits.append(backend.timeout))
    settings.MAILERS = {"default": {"BACKEND": smtp, "OPTIONS": {"host": "127.0.0.1"}}}
    if django.VERSION < (6, 1):
        settings.EMAIL_BACKEND = smtp
    message = ProblemMessage("problem.late", is_over=False, hint="", objects=(Evidence("emails"),))
    alerts.send_mail(message, AlertSettings(mail=("ops@example.com",)))
    assert waits == [alerts.TIMEOUT]


@pytest.mark.parametrize(("status", "expected"), [(302, "status 302"), (500, "status 500")])
def test_webhook_that_refuses_or_redirects_is_an_error(status: int, expected: str) -> None:
    asked: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    message = ProblemMessage("problem.late", is_over=False, hint="", objects=(Evidence("emails"),))
    try:
        wanted = AlertSettings(webhook=f"http://127.0.0.1:{server.server_port}/secret")
        with pytest.raises(alerts.WebhookError, match=expected) as caught:
            alerts.call_webhook(message, wanted)
    finally:
        server.shutdown()
        server.server_close()
    assert asked == ["/secret"]
    assert "secret" not in str(caught.value)


def test_signal_and_webhook_have_the_objects(watching: Watching, settings: Any) -> None:
    received: list[Any] = []
    told: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    def receiver(**about: Any) -> None:
        told.append(about)

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    signals.problem.connect(receiver)
    try:
        hook = {"WEBHOOK": f"http://127.0.0.1:{server.server_port}/x", "AFTER": 0, "RULES": ["no_worker"]}
        settings.DJQUEUE = {**settings.DJQUEUE, "ALERTS": hook}
        wait_without_worker()
        assert watching.pass_time(3 * LOOK_EVERY) == []
    finally:
        signals.problem.disconnect(receiver)
        server.shutdown()
        server.server_close()
    [document] = received
    assert (document["problem"], document["status"]) == ("health.workers", "began")
    assert document["text"] == "Began: No worker: 'emails'"
    assert document["objects"][0]["queue"] == "emails"
    [about] = told
    assert (about["id"], about["is_over"], about["objects"][0].queue) == ("health.workers", False, "emails")


def test_only_chosen_rules_are_announced(watching: Watching, settings: Any) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "ALERTS": {"MAIL": ["ops@example.com"], "RULES": ["late"]}}
    wait_without_worker()
    assert watching.pass_time(10 * LOOK_EVERY) == []


def test_nothing_is_read_without_a_receiver(
    storage: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DJQUEUE = {"STORAGE": settings.DJQUEUE["STORAGE"]}
    monkeypatch.setattr(alerts, "Alerts", lambda *_: {}["not made"])
    alerts.alerting(storage)()


def test_every_rule_has_titles_and_every_key_is_read_back(tables: None) -> None:
    assert {id for ids in RULES.values() for id in ids} == set(TITLES)
    one = Evidence("emails", "night", worker="w1", schedule=7, error="abc,def", text="ValueError: no")
    key = alerts.key_of("problem.overdue", one)
    finding = Finding("problem.overdue", "error", "", "", (one,))
    AuditEvent.objects.create(at=1, user="-", action="problem", detail={"key": list(key)})
    [(found, stored)] = alerts.announced("default").items()
    assert found == key == alerts.key_of(finding.id, stored)


@pytest.mark.parametrize(
    "given",
    [
        *({"MAIL": "ops"}, {"MAIL": ["ops"]}, {"WEBHOOK": "file:///x"}),
        *(
            {"WEBHOOK": f"https://{rest}"}
            for rest in ("u:sesame@h/x", "/sesame", "h:x/sesame", "[::1/sesame")
        ),
        *({"WEBHOOK": f"https://h/{rest}"} for rest in ("a sesame", "a\nsesame", "sésame")),
        *({"RULES": ["x"]}, {"AFTER": -1}, {"NO": 1}),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any]) -> None:
    [problem] = wrong_settings({"ALERTS": given})
    assert "ALERTS" in problem
    assert "file:" not in problem
    assert "same" not in problem
