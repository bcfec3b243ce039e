"""`manage.py runworkers --celery`: Celery's messages in a worker of djqueue."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.project import WorkerProcess
from tests.support import eventually

from .project import CeleryProject

pytestmark = pytest.mark.slow

SETTINGS = """
    DJQUEUE = {{"STORAGE": {{"BACKEND": "{backend}", "OPTIONS": {options}}}}}
    DATABASES = {{
        "default": {{
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": "{folder}/db.sqlite3",
            "OPTIONS": {{"transaction_mode": "IMMEDIATE"}},
        }}
    }}
    CELERY_BROKER_URL = "djqueue://"
    CELERY_RESULT_BACKEND = "djqueue://"
    CELERY_TASK_SERIALIZER = "json"
    LOGGING = {{
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {{"stderr": {{"class": "logging.StreamHandler"}}}},
        "loggers": {{"celery": {{"handlers": ["stderr"]}}}},
    }}
"""


@pytest.fixture(scope="module", params=["redis", pytest.param("database", marks=pytest.mark.thorough)])
def storage_settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "database":
        return {"backend": "djqueue.storage.database.DatabaseStorage", "options": {}}
    server = request.getfixturevalue("redis_server")
    server.run("FLUSHALL")
    return {"backend": "djqueue.storage.redis.RedisStorage", "options": {"URL": server.url, "LEASE": 5}}


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, storage_settings: dict[str, Any]
) -> Iterator[CeleryProject]:
    folder = tmp_path_factory.mktemp("project")
    with CeleryProject(folder, SETTINGS.format(folder=folder, **storage_settings)) as made:
        made.run(
            """
            from django.core.management import call_command
            result = call_command("migrate", verbosity=0)
            """
        )
        yield made


@pytest.fixture(scope="module")
def worker(project: CeleryProject) -> Iterator[WorkerProcess]:
    with project.start("--celery", "proj:app") as running:
        running.says(" started")
        yield running


def test_task_returns_its_result_and_no_signal_handler_fails(
    project: CeleryProject, worker: WorkerProcess
) -> None:
    assert project.run("result = add.delay(1, 2).get(timeout=60)") == 3
    assert "Signal handler" not in worker.output


def test_rate_limits_of_tasks_are_warned_about(worker: WorkerProcess) -> None:
    worker.says("rate limits of tasks are not applied: shop.tasks.limited (10/m). Set RATE of their queues")


def test_task_request_has_the_properties_of_its_message(
    project: CeleryProject, worker: WorkerProcess
) -> None:
    sent, (seen, key, origin, eager) = project.run("r = about.delay(); result = [r.id, r.get(timeout=60)]")

    assert (seen, key, eager) == (sent, "celery", False)
    assert "@" in origin


def test_chain_group_chord_and_link_return_their_results(
    project: CeleryProject, worker: WorkerProcess
) -> None:
    assert project.run(
        """
        result = [
            chain(add.s(1, 2), add.s(10)).delay().get(timeout=60),
            group(add.s(i, i) for i in range(4)).delay().get(timeout=60),
            chord([add.s(i, 1) for i in range(4)], total.s()).delay().get(timeout=60),
            add.apply_async((1, 1), link=touch.si("linked")).get(timeout=60),
        ]
        """
    ) == [13, [0, 2, 4, 6], 10, 2]
    eventually((project.folder / "linked").exists)


def test_retried_task_runs_again_after_its_countdown(project: CeleryProject, worker: WorkerProcess) -> None:
    assert project.run("result = third_time.delay().get(timeout=60)") == 2


def test_failure_reaches_the_caller_the_errback_and_the_dead_letters(
    project: CeleryProject, worker: WorkerProcess
) -> None:
    failed, state, letters = project.run(
        """
        from djqueue import Queue
        sent = broken.apply_async(("boom",), link_error=on_error.s())
        try:
            sent.get(timeout=60)
        except ValueError as error:
            failed = str(error)
        def dead_letters():
            return [one.error_message for one in Queue("celery").dead_letters(name="kombu.message")]

        letters = eventually(lambda: "ValueError: boom" in (found := dead_letters()) and found)
        result = [failed, sent.state, letters]
        """
    )

    assert (failed, state) == ("boom", "FAILURE")
    assert "ValueError: boom" in letters
    written = project.folder / "on_error.txt"
    assert "boom" in eventually(lambda: written.exists() and written.read_text())


def test_countdown_delays_a_task_and_an_expired_task_is_revoked(
    project: CeleryProject, worker: WorkerProcess
) -> None:
    took, state = project.run(
        """
        began = time.time()
        add.apply_async((1, 1), countdown=0.5).get(timeout=60)
        took = time.time() - began
        late = add.apply_async((1, 1), countdown=0.4, expires=0.1)
        try:
            late.get(timeout=60)
        except Exception as error:
            name = type(error).__name__
        result = [took, name]
        """
    )

    assert took >= 0.5
    assert state == "TaskRevokedError"


def test_time_limits_interrupt_tasks_in_python_code(project: CeleryProject, worker: WorkerProcess) -> None:
    soft, hard = project.run(
        """
        soft = slow.delay().get(timeout=60)
        try:
            stubborn.delay().get(timeout=60)
        except Exception as error:
            hard = type(error).__name__
        result = [soft, hard]
        """
    )

    assert (soft, hard) == ("soft", "TimeLimitExceeded")


def test_revoked_task_never_starts(project: CeleryProject, worker: WorkerProcess) -> None:
    state, answers = project.run(
        """
        answers = app.control.ping(timeout=60, limit=1)
        app.control.revoke("revoked", reply=True, timeout=60, limit=1)
        sent = touch.apply_async(("revoked",), task_id="revoked")
        try:
            sent.get(timeout=60)
        except Exception as error:
            name = type(error).__name__
        result = [name, answers]
        """
    )

    assert state == "TaskRevokedError"
    assert [list(one.values()) for one in answers] == [[{"ok": "pong"}]]
    assert not (project.folder / "revoked").exists()


def test_unknown_tasks_and_rejected_messages_fail(project: CeleryProject, worker: WorkerProcess) -> None:
    unknown, letters = project.run(
        """
        from djqueue import Queue
        try:
            app.send_task("shop.tasks.nothing").get(timeout=60)
        except Exception as error:
            unknown = type(error).__name__
        rejecting.delay()

        def dead_letters():
            return [one.error_message for one in Queue("celery").dead_letters(name="kombu.message")]

        wanted = ("rejected its message", "has no task")
        letters = eventually(lambda: all(word in str(dead_letters()) for word in wanted) and dead_letters())
        result = [unknown, letters]
        """
    )

    assert unknown == "NotRegistered"
    assert any("has no task" in text for text in letters)
    assert any("rejected its message" in text for text in letters)


def test_malformed_messages_fail_without_retries(project: CeleryProject, worker: WorkerProcess) -> None:
    assert project.run(
        """
        from djqueue import Queue
        from djqueue.client import get_storage
        from djqueue.core.job import Batch
        from djqueue.core.options import JobOptions

        raw = [b"nope", b"[]", b'{"properties": 1}', b'{"properties": {}, "body": {}, "headers": [1]}']
        options = JobOptions(content_type="application/json", max_attempts=100)
        ids = ["raw-1", "raw-2", "raw-3", "raw-4"]
        get_storage().enqueue([Batch("celery", "kombu.message", options, raw, ids)])
        bodies = {"[1, 2, 3]": None, "null": None, "[[1, 2], {}]": None, "[[1, 2], {}, {}]": "x"}
        with app.connection_for_write() as connection:
            for body, limit in bodies.items():
                headers = {"task": "shop.tasks.add", "id": "malformed", "timelimit": limit}
                connection.Producer().publish(
                    body, routing_key="celery", headers=headers, content_type="application/json",
                    content_encoding="utf-8",
                )

        def malformed():
            letters = Queue("celery").dead_letters(name="kombu.message")
            raw = {one.id for one in letters if one.reason == "invalid_payload"} & set(ids)
            others = [one for one in letters if one.id not in ids]
            return len(raw) + sum("the message is not a task" in one.error_message for one in others)

        result = eventually(lambda: malformed() == 8)
        """
    )


def test_worker_serves_the_queues_of_celery_and_keeps_running(
    project: CeleryProject, worker: WorkerProcess
) -> None:
    assert worker.process.poll() is None
    assert "celery" in worker.output


def pid_of(project: CeleryProject, name: str) -> int:
    """Return the process that runs the task `hold` with this name, or 0."""
    path = project.folder / f"{name}.pid"
    return int(path.read_text() or 0) if path.exists() else 0


def test_only_late_acknowledged_tasks_run_again_after_a_crash(
    project: CeleryProject, worker: WorkerProcess
) -> None:
    held = project.folder / "held"
    held.touch()
    early = project.run("hold.delay('late'); result = hold_early.delay('early').id")
    pids = eventually(
        lambda: (one := pid_of(project, "late")) and (two := pid_of(project, "early")) and {one, two}
    )
    [pid] = pids
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: (project.folder / "late").read_text() == "xx", message="the task runs again")
    held.unlink()

    lost = project.run(
        f"""
        try:
            app.AsyncResult({early!r}).get(timeout=60)
        except Exception as error:
            result = type(error).__name__
        """
    )

    assert lost == "WorkerLostError"
    assert (project.folder / "early").read_text() == "x"


def test_redelivered_task_that_has_succeeded_does_not_fail(project: CeleryProject) -> None:
    stalled = project.run(
        """
        from types import SimpleNamespace
        from djqueue.contrib.celery.worker import CeleryTasks
        from djqueue.runtime.runs import run_of
        import djqueue.contrib.celery.worker as native

        class Stalled(CeleryTasks):
            def _run(self, request):
                raise AssertionError("the task ran again")

        tasks = Stalled(app)
        headers = {"task": "shop.tasks.add", "id": "succeeded", "ignore_result": False}
        message = {"body": "[[1, 2], {}, {}]", "properties": {}, "headers": headers,
                   "content-type": "application/json", "content-encoding": "utf-8"}
        import json
        native.run_of = lambda job: SimpleNamespace(claimed=job)
        job = SimpleNamespace(id="1", attempts=2, stalls=1, payload=json.dumps(message).encode())
        app.backend.mark_as_done("succeeded", 3)
        result = [tasks(job), app.AsyncResult("succeeded").state]
        """
    )

    assert stalled == [None, "SUCCESS"]


def test_missing_celery_app_exits_with_2(project: CeleryProject) -> None:
    for app in ("nowhere:app", "proj:nothing"):
        with project.start("--celery", app, log="refused.txt") as refused:
            assert refused.ends() == 2
            assert "no Celery app was found" in refused.output
