"""Health checks on every storage: each condition fails one check until the condition ends."""

import json
import threading
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from djqueue.client import get_storage
from djqueue.conf import HealthSettings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageUnavailableError
from djqueue.operations import doctor, healthchecks
from djqueue.storage.base import Storage
from djqueue.testing import factories as f
from tests.dashboard.visiting import ALL_RIGHTS, logged_in, one_with
from tests.support import PATIENCE, eventually

AT_ONCE = HealthSettings(max_wait=0, lease_grace=0, timeout=60_000)
"""Bounds for tests that don't wait: a job that is due at all has been due for too long."""


@pytest.fixture(autouse=True)
def _fresh_monitor() -> Iterator[None]:
    healthchecks.monitor.forget()
    yield
    healthchecks.monitor.forget()


def failed(bounds: HealthSettings = AT_ONCE) -> list[str]:
    """Return the names of the failed checks."""
    report = healthchecks.HealthRun(bounds).report()
    assert all(check.status != "unknown" for check in report.checks), report
    return [check.name for check in report.checks if check.status == "failed"]


def live(storage: Storage, id: str = f.WORKER, **given: Any) -> None:
    storage.workers.register(f.worker(id, started_at=SYSTEM_CLOCK.now(), **given))


def test_storage_without_jobs_is_healthy(storage: Storage) -> None:
    assert failed() == []


def test_jobs_waiting_without_a_worker_fail_the_workers_check_until_one_starts(storage: Storage) -> None:
    assert failed() == []
    f.enqueue(storage)
    assert failed() == ["workers"]

    live(storage, active=1)  # all its slots are in use
    assert failed() == []


def test_job_waiting_less_than_max_wait_is_healthy(storage: Storage) -> None:
    f.enqueue(storage)

    assert failed(HealthSettings(max_wait=3_600_000, timeout=60_000)) == []


def test_quiet_workers_do_not_count_as_serving_a_queue(storage: Storage) -> None:
    f.enqueue(storage)
    live(storage, state="quiet")

    assert failed() == ["workers"]


def test_paused_queues_are_healthy(storage: Storage) -> None:
    f.enqueue(storage)
    storage.queues.pause(f.QUEUE)
    assert failed() == []

    storage.queues.resume(f.QUEUE)
    assert failed() == ["workers"]


def test_jobs_without_handler_fail_the_handlers_check_until_cancelled(storage: Storage) -> None:
    live(storage)
    assert failed() == []
    job_id = f.enqueue(storage, name="removed.job")
    assert failed() == ["handlers"]

    storage.jobs.cancel(f.QUEUE, [job_id])
    assert failed() == []


def test_jobs_not_claimed_by_free_workers_fail_the_claims_check_until_claimed(storage: Storage) -> None:
    live(storage)
    assert failed() == []
    f.enqueue(storage)
    assert failed() == ["claims"]

    f.claim(storage)
    storage.sweep()
    assert failed() == []


def test_claims_within_the_last_minute_pass_the_claims_check(storage: Storage) -> None:
    live(storage)
    f.enqueue_many(storage, 2)
    assert failed() == ["claims"]

    f.claim_one(storage)
    storage.sweep()
    assert storage.reads.counts(f.QUEUE)["waiting"] == 1
    assert failed() == []


def test_claims_check_fails_at_most_half_a_minute_late() -> None:
    for max_wait in (60_000, 120_000):
        spans = [at - healthchecks.counted_from(at, max_wait) for at in range(600_000, 660_000, 500)]
        assert max_wait - 30_000 <= min(spans)
        assert max(spans) < max_wait + 30_000


@pytest.mark.parametrize("limits", [{"concurrency": 1}, {"rate": "1/h"}], ids=lambda given: next(iter(given)))
def test_jobs_held_back_by_a_limit_are_healthy(storage: Storage, limits: dict[str, Any]) -> None:
    from djqueue import Queue

    live(storage)
    f.enqueue_many(storage, 2)
    Queue(f.QUEUE, storage=storage).set_limits(**limits)
    f.claim_one(storage)

    assert "claims" not in failed()


def test_expired_leases_fail_the_leases_check_until_a_sweep_reclaims_the_jobs(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed() == []
    monkeypatch.setattr(storage.reads, "stale_leases", lambda grace: {f.QUEUE: 2})
    assert failed() == ["leases"]

    monkeypatch.undo()
    assert failed() == []


def test_silent_worker_fails_the_silent_check_until_it_sends_a_heartbeat(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(storage, heartbeat=5_000)
    assert failed() == []
    monkeypatch.setattr("djqueue.core.workers.silent_from", lambda worker: worker.seen_at - 1)
    report = healthchecks.HealthRun(AT_ONCE).report()

    [finding] = report.findings
    assert finding.id == "health.silent"
    assert f"1 worker no longer sends heartbeats: {f.WORKER} (process " in finding.text
    monkeypatch.undo()
    live(storage, heartbeat=5_000)
    assert failed() == []


def test_silent_worker_that_its_supervisor_has_replaced_is_healthy(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = {"killed", "killed, too"}
    for name in silent:
        storage.workers.register(f.worker(name, supervisor=7, heartbeat=5_000))
    monkeypatch.setattr("djqueue.operations.healthchecks.is_silent", lambda worker, at: worker.id in silent)
    monkeypatch.setattr("djqueue.core.workers.is_silent", lambda worker, at: worker.id in silent)
    later = SYSTEM_CLOCK.now() + 60_000
    storage.workers.register(f.worker("of another supervisor", supervisor=8, started_at=later))
    assert failed() == ["silent"]

    for number, expected in enumerate((["silent"], [])):
        storage.workers.register(f.worker(f"replacement {number}", supervisor=7, started_at=later))
        assert failed() == expected


def test_refused_enqueues_fail_the_storage_check_with_the_remedy_of_the_error(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        error = StorageUnavailableError("The disk is full. Free space.")
        error.remedy = "Free space."
        raise error

    monkeypatch.setattr(storage, "probe", refuse)
    report = healthchecks.HealthRun(AT_ONCE).report()

    [finding] = report.findings
    assert (finding.id, finding.hint) == ("health.storage", "Free space.")
    assert finding.text == "the storage cannot be used: The disk is full."


def test_problem_that_the_probe_returns_fails_the_storage_check_beside_the_others(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = healthchecks.Finding("health.storage", "error", "Keys were flushed.", "Restore them.")
    monkeypatch.setattr(storage, "probe", lambda: [lost])
    f.enqueue(storage)

    assert failed() == ["storage", "workers"]
    assert lost in healthchecks.HealthRun(AT_ONCE).report().findings


def test_process_without_threads_answers_that_it_has_none(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        report = healthchecks.HealthRun(AT_ONCE).report()

    [finding] = report.findings
    assert finding.id == "health.storage"
    assert "can't start new thread" in finding.text


def test_unreachable_storage_fails_its_check_and_leaves_the_others_unknown(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise StorageUnavailableError("connection refused")

    monkeypatch.setattr(storage.reads, "overview", unreachable)
    report = healthchecks.HealthRun(AT_ONCE).report()

    assert [check.status for check in report.checks] == ["failed", *["unknown"] * len(healthchecks.CHECKS)]
    assert "connection refused" in report.findings[0].text
    assert failed_after_recovery(monkeypatch) == []


def failed_after_recovery(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.undo()
    return failed()


def test_hanging_check_ends_at_its_timeout_without_adding_threads(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "HEALTH": {"TIMEOUT": 0.2}}
    from djqueue.client import get_storage

    released, calls = threading.Event(), []

    def hanging(*_: object) -> None:
        calls.append(1)
        released.wait(PATIENCE)
        raise StorageUnavailableError("released")

    monkeypatch.setattr(get_storage(), "probe", tuple)
    monkeypatch.setattr(get_storage().reads, "overview", hanging)
    client = Client()
    try:
        began = SYSTEM_CLOCK.monotonic()
        responses = [client.get("/health/") for _ in range(3)]
        took = SYSTEM_CLOCK.monotonic() - began
    finally:
        released.set()

    assert [response.status_code for response in responses] == [503] * 3
    assert responses[0].json()["checks"]["storage"] == "failed"
    assert calls == [1]
    assert took < PATIENCE * 1_000 / 2


def enqueue_and_wait_a_moment(queue: str, name: str) -> None:
    """Enqueue a job, and let it wait for as long as `MAX_WAIT` of these tests."""
    f.enqueue(get_storage(), queue=queue, name=name)
    enqueued = SYSTEM_CLOCK.now()
    eventually(lambda: SYSTEM_CLOCK.now() > enqueued + 1)


def test_health_url_shows_only_check_names_to_the_public(storage: Storage, settings: Any) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "HEALTH": {"MAX_WAIT": 0.001, "TIMEOUT": 60}}
    assert Client().get("/health/").json()["status"] == "ok"
    enqueue_and_wait_a_moment("secret-queue", "secret.job")
    healthchecks.monitor.forget()
    response = Client().get("/health/")

    assert response.status_code == 503
    assert response["Cache-Control"].startswith("max-age=0")
    assert response.json() == {
        "status": "failed",
        "checks": {
            name: "failed" if name == "workers" else "ok"
            for name in (healthchecks.STORAGE, *healthchecks.CHECKS)
        },
    }
    assert b"secret" not in response.content


def test_health_url_shows_findings_to_dashboard_users(storage: Storage, settings: Any) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "HEALTH": {"MAX_WAIT": 0.001, "TIMEOUT": 60}}
    enqueue_and_wait_a_moment("orders", f.NAME)
    [finding] = logged_in(one_with(*ALL_RIGHTS)).get("/health/").json()["findings"]
    without_rights = logged_in(one_with("view_dashboard")).get("/health/").json()

    assert "'orders'" in finding["text"]
    assert "Start a worker with `manage.py runworkers`" in finding["fix"]
    assert "findings" not in without_rights


def test_health_url_accepts_head_and_rejects_post(storage: Storage) -> None:
    assert Client().head("/health/").status_code == 200
    assert Client().post("/health/").status_code == 405


def command(*arguments: str) -> tuple[int, Any]:
    """Return the exit code and the JSON document of `manage.py djqueue`."""
    output = StringIO()
    try:
        call_command("djqueue", *arguments, "--json", stdout=output)
    except SystemExit as end:
        return int(str(end.code)), json.loads(output.getvalue())
    return 0, json.loads(output.getvalue())


def test_health_command_has_exit_code_and_findings(storage: Storage) -> None:
    code, healthy = command("health", "--max-wait", "0", "--timeout", "60")
    assert (code, healthy["status"], healthy["findings"]) == (0, "ok", [])

    f.enqueue(storage)
    code, ill = command("health", "--max-wait", "0", "--timeout", "60")

    assert (code, ill["status"], ill["checks"]["workers"]) == (1, "failed", "failed")
    assert [finding["id"] for finding in ill["findings"]] == ["health.workers"]


def test_a_problem_of_several_queues_is_one_finding(storage: Storage) -> None:
    for queue in ("orders", "emails"):
        f.enqueue(storage, queue=queue)

    _, unserved = command("health", "--max-wait", "0", "--timeout", "60")
    live(storage, names=("other",))
    _, unhandled = command("health", "--max-wait", "0", "--timeout", "60")
    for queue in ("orders", "emails"):
        storage.queues.pause(queue)
    paused = [finding for finding in doctor.diagnose(AT_ONCE) if finding.id == "problem.paused"]

    for [finding] in (unserved["findings"], unhandled["findings"]):
        assert "'orders'" in finding["text"]
        assert "'emails'" in finding["text"]
    assert [finding.hint for finding in paused] == ["Run `manage.py djqueue resume emails orders`."]


def ids(**given: Any) -> set[str]:
    """Return the IDs of the doctor's findings."""
    return {finding.id for finding in doctor.diagnose(HealthSettings(max_wait=0, timeout=60_000, **given))}


def test_doctor_explains_health_checks_paused_queues_and_versions(storage: Storage) -> None:
    before = ids()
    live(storage, version="0.0.1", project="1", active=1)
    live(storage, "w2", version="0.0.1", project="2", active=1)
    f.enqueue(storage, name="removed.job")
    f.enqueue(storage, queue="other")
    storage.queues.pause("other")

    assert ids() - before == {
        "problem.paused",
        "problem.versions",
        "doctor.version",
        "health.handlers",
    }


def test_held_jobs_are_healthy_and_the_doctor_says_how_to_release_them(storage: Storage) -> None:
    before = ids()
    live(storage)
    f.enqueue_many(storage, 2)
    storage.queues.hold(f.QUEUE, f.NAME, None, "the provider is down")
    storage.queues.hold(f.QUEUE, "without.jobs", None, "")

    code, found = command("health", "--max-wait", "0", "--timeout", "60")
    assert (code, found["status"]) == (0, "ok")
    assert ids() - before == {"problem.held"}
    [held] = [finding for finding in doctor.diagnose(AT_ONCE) if finding.id == "problem.held"]
    assert held.hint == f"Run `manage.py djqueue release {f.QUEUE} {f.NAME}` to start them."
    [evidence] = held.evidence
    assert (evidence.name, evidence.size, evidence.text) == (f.NAME, 2, "the provider is down")
    f.enqueue(storage, name="free")
    live(storage, names=("free",), active=1)
    assert ids() - before == {"problem.held", "doctor.slow"}


def test_held_jobs_hide_no_other_job_that_waits(storage: Storage) -> None:
    f.enqueue_many(storage, 30, name="mail")
    storage.queues.hold(f.QUEUE, "mail", None, "")
    assert failed() == []
    other = f.enqueue(storage)
    assert failed() == ["workers"]

    live(storage, names=(f.NAME, "mail"))
    assert failed() == ["claims"]
    storage.jobs.cancel(f.QUEUE, [other])
    assert failed() == []


def test_doctor_explains_why_jobs_of_a_served_queue_wait(storage: Storage) -> None:
    live(storage, active=1)
    f.enqueue(storage)

    found = doctor.diagnose(AT_ONCE)

    [slow] = [finding for finding in found if finding.id == "doctor.slow"]
    assert "free slot" in slow.text


def test_doctor_compares_clocks(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "doctor.clock" not in ids()
    overview = storage.reads.overview
    monkeypatch.setattr(
        storage.reads,
        "overview",
        lambda queues=None: overview(queues)._replace(at=SYSTEM_CLOCK.now() + 40_000),
    )

    [clock] = [finding for finding in doctor.diagnose(AT_ONCE) if finding.id == "doctor.clock"]
    assert clock.level == "error"
    assert "ahead of" in clock.text


def test_doctor_lists_unapplied_migrations(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db.migrations.recorder import MigrationRecorder

    assert "doctor.migrations" not in ids()
    applied = MigrationRecorder.applied_migrations
    monkeypatch.setattr(
        MigrationRecorder,
        "applied_migrations",
        lambda self: {key: one for key, one in applied(self).items() if key[0] != "djqueue"},
    )

    [finding] = [one for one in doctor.diagnose(AT_ONCE) if one.id == "doctor.migrations"]
    assert "djqueue.0001_initial" in finding.text


def test_doctor_reports_wrong_settings_without_stopping(storage: Storage, settings: Any) -> None:
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.nowhere.Storage"}}

    code, found = command("doctor")

    assert code == 1
    fixes = {finding["id"]: finding["fix"] for finding in found["findings"]}
    assert {"djqueue.E002", "health.storage"} <= fixes.keys()
    assert "Correct the setting" in fixes["health.storage"]


def test_doctor_command_has_exit_code(storage: Storage) -> None:
    code, found = command("doctor", "--timeout", "60")
    errors = [finding for finding in found["findings"] if finding["level"] == "error"]
    assert (code, errors) == (0, [])

    f.enqueue(storage)
    assert command("doctor", "--max-wait", "0", "--timeout", "60")[0] == 1
