"""An unmodified Celery app and worker on `djqueue://`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import VERSION, Celery, chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.utils.functional import regen

from djqueue.contrib.celery.storages import close_storages
from djqueue.contrib.celery.values import RESULTS, Values
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.states import State
from tests.contrib.celery.workers import celery_worker
from tests.servers import RedisServer
from tests.support import PATIENCE, eventually

TIMEOUT = PATIENCE


@pytest.fixture
def url(redis_server: RedisServer) -> Iterator[str]:
    redis_server.run("flushall")
    yield f"djqueue://127.0.0.1:{redis_server.port}/0"
    close_storages()


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    """The project's app in this process, which sends tasks."""
    app = Celery("producer", broker=url, backend=url, set_as_current=False)
    app.conf.broker_transport_options = {"lease": 6}
    yield app
    app.backend.result_consumer.stop()
    app.close()


def test_celery_app_and_worker_run_on_redis(app: Celery, url: str, tmp_path: Path) -> None:
    signature = app.signature
    with celery_worker({"CELERY_TEST_URL": url}, tmp_path / "log"):
        add = app.signature("add")
        assert app.send_task("add", (1, 2)).get(timeout=TIMEOUT) == 3
        assert app.send_task("add", (1, 2), countdown=0.2, priority=5).get(timeout=TIMEOUT) == 3
        assert app.send_task("try_again").get(timeout=TIMEOUT) == 2
        assert chain(add.clone((1, 2)), add.clone((3,)), app=app)().get(timeout=TIMEOUT) == 6
        assert group((add.clone((n, n)) for n in range(3)), app=app)().get(timeout=TIMEOUT) == [0, 2, 4]
        one = app.signature("add", (1, 0), immutable=True)
        inner = chain(one, group([one, one], app=app), app=app)
        flow = chain(one, group([one, inner], app=app), one, app=app)
        assert flow().get(timeout=TIMEOUT) == 1
        header = [add.clone((n, n)) for n in range(4)]
        assert chord(header, signature("total"), app=app)().get(timeout=TIMEOUT) == 12

        (answer,) = app.control.ping(timeout=TIMEOUT, limit=1)
        assert list(answer.values()) == [{"ok": "pong"}]
        app.control.revoke("revoked", reply=True, timeout=TIMEOUT, limit=1)
        with pytest.raises(TaskRevokedError):
            app.send_task("add", (1, 2), task_id="revoked").get(timeout=TIMEOUT)


@pytest.mark.thorough
def test_message_of_a_killed_worker_is_delivered_to_the_next_one(
    app: Celery, url: str, tmp_path: Path
) -> None:
    environment = {"CELERY_TEST_URL": url, "CELERY_TEST_LEASE": "3"}
    held = tmp_path / "held"
    held.touch()
    starts = tmp_path / "held.starts"
    with celery_worker(environment, tmp_path / "first") as first:
        result = app.send_task("hold", (str(held),))
        eventually(starts.exists, message="the task has started")
        os.kill(first.pid, signal.SIGKILL)
        first.wait(PATIENCE)
    held.unlink()

    with celery_worker(environment, tmp_path / "second") as second:
        assert result.get(timeout=TIMEOUT) == "released"
    assert {int(pid) for pid in starts.read_text().split()} == {first.pid, second.pid}


@pytest.mark.thorough
def test_message_is_not_delivered_again_while_its_task_runs(app: Celery, url: str, tmp_path: Path) -> None:
    environment = {"CELERY_TEST_URL": url, "CELERY_TEST_LEASE": "6"}
    held = tmp_path / "held"
    held.touch()
    starts = tmp_path / "held.starts"
    with celery_worker(environment, tmp_path / "log"):
        result = app.send_task("hold", (str(held),))
        eventually(starts.exists, message="the task has started")
        storage = app.connection().transport.broker.storage
        moved = [0]

        def lease_has_passed() -> bool:
            storage.sweep()
            (job,) = storage.reads.page("celery", None, 10)
            moved[0] = storage.reads.counts("celery")[State.ACTIVE]
            return job.stalls > 0 or _age(held) > 8

        eventually(lease_has_passed)
        assert moved == [1]
        held.unlink()
        assert result.get(timeout=TIMEOUT) == "released"
    assert len(starts.read_text().split()) == 1


def test_waiting_for_a_result_uses_events(app: Celery, url: str) -> None:
    backend = app.backend
    result = app.AsyncResult("some-task")
    backend.add_pending_result(result)
    backend.result_consumer.drain_events(timeout=4)  # the look right after the subscription

    backend.store_result("some-task", 42, "SUCCESS")
    backend.result_consumer.drain_events(timeout=TIMEOUT)

    assert result._cache["result"] == 42


def test_sending_a_task_subscribes_to_nothing_until_its_result_is_wanted(app: Celery) -> None:
    consumer = app.backend.result_consumer
    result = app.send_task("add", (1, 2))
    assert consumer._subscriptions == {}

    with pytest.raises(CeleryTimeoutError):
        result.get(timeout=0.01)

    assert set(consumer._subscriptions) == {result.id}


def test_garbage_collection_of_results_does_not_wait_for_a_subscription(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, blocked = app.backend.result_consumer, []
    subscribe = Values.subscribe

    def subscribe_while_another_thread_collects(*arguments):
        collector = threading.Thread(target=consumer.cancel_for, args=("first",), daemon=True)
        collector.start()
        collector.join(PATIENCE)
        blocked.append(collector.is_alive())
        return subscribe(*arguments)

    consumer.consume_from("first")
    monkeypatch.setattr(Values, "subscribe", subscribe_while_another_thread_collects)
    consumer.consume_from("second")
    consumer.drain_events(timeout=TIMEOUT)

    assert blocked == [False]
    assert set(consumer._subscriptions) == {"second"}


@pytest.mark.skipif(
    VERSION < (5, 7), reason="Celery before 5.7 takes a timeout of 0 for none, on every backend"
)
def test_join_with_a_timeout_of_0_fails_immediately(app: Celery) -> None:
    results = app.ResultSet([app.AsyncResult(f"never-{number}") for number in range(3)])

    with pytest.raises(CeleryTimeoutError):
        results.join_native(timeout=0, interval=3_600)


def test_results_expire_and_can_be_forgotten(app: Celery, url: str) -> None:
    backend = app.backend
    backend.store_result("first", 1, "SUCCESS")
    backend.store_result("second", 2, "SUCCESS")
    key = backend.get_key_for_task("first")
    backend.expire(key, 0.05)
    backend.forget("second")

    def is_gone() -> bool:
        backend.values.storage.sweep()
        return backend.get(key) is None

    eventually(is_gone)
    assert backend.get(backend.get_key_for_task("second")) is None
    assert backend.values.expired() == [("celery-task-meta-first", backend.values.expired()[0][1])]
    assert backend.values.queue == RESULTS


def test_expired_results_are_removed_when_new_results_are_stored(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djqueue.contrib.celery.backend.CLEANING", 0)
    backend = app.backend
    for number in range(3):
        backend.store_result(f"old-{number}", number, "SUCCESS")
        backend.expire(backend.get_key_for_task(f"old-{number}"), 0.05)

    def only_the_new_one_is_left() -> bool:
        backend.store_result("new", 1, "STARTED")
        counts = backend.values.storage.reads.counts(RESULTS)
        return counts[State.DELAYED] + counts[State.WAITING] == 1

    eventually(only_the_new_one_is_left)
    assert backend.get(backend.get_key_for_task("new")) is not None


def test_chord_that_its_body_applies_again_begins_anew(app: Celery) -> None:
    backend = app.backend
    calls: list[object] = []
    body = app.signature("total")

    def apply() -> None:
        backend.apply_chord(("group", [app.AsyncResult("first")]), body)
        backend.set_chord_size("group", 1)

    def part_returns(result: int) -> None:
        request = SimpleNamespace(id="first", group="group", group_index=0, chord=body)
        backend.on_chord_part_return(request, "SUCCESS", result)

    def run_body(results: object) -> None:
        calls.append(results)
        if len(calls) == 1:
            apply()

    body.delay = run_body
    apply()
    part_returns(10)
    part_returns(20)
    apply()
    part_returns(30)

    assert calls == [[10], [20], [30]]


def test_header_of_a_chord_that_is_a_generator_is_consumed_while_its_tasks_are_sent(app: Celery) -> None:
    consumed: list[int] = []
    header = regen(consumed.append(number) for number in range(3))

    app.backend.apply_chord(("group", header), app.signature("total"))

    assert consumed == []


def test_chord_counts_each_part_once_and_calls_its_body_once(app: Celery, url: str) -> None:
    backend = app.backend
    calls: list[object] = []
    body = app.signature("total")
    body.delay = calls.append
    backend.set_chord_size("group", 2)

    def part_returns(task_id: str, index: int, result: int) -> None:
        request = SimpleNamespace(id=task_id, group="group", group_index=index, chord=body)
        backend.on_chord_part_return(request, "SUCCESS", result)

    part_returns("second", 1, 20)
    part_returns("second", 1, 20)
    assert calls == []
    part_returns("first", 0, 10)
    part_returns("first", 0, 10)  # delivered again after the end

    assert calls == [[10, 20]]
    assert len(backend.values.storage.reads.page(RESULTS, State.DELAYED, 10)) == 1  # that it has ended


def test_storing_a_result_is_retried_until_the_storage_is_available(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = app.backend.values.storage
    failures = [StorageUnavailableError("Redis is restarting")] * 2
    enqueue = storage.enqueue

    def restarting(batches: list[Batch]) -> list[EnqueueResult]:
        if failures:
            raise failures.pop()
        return enqueue(batches)

    monkeypatch.setattr(storage, "enqueue", restarting)
    monkeypatch.setattr(app.backend, "_policy", {"max_retries": 3, "interval_start": 0, "interval_step": 0})
    app.backend.store_result("an-id", 42, "SUCCESS")

    assert app.AsyncResult("an-id").result == 42
    failures[:] = [StorageUnavailableError("Redis is gone")] * 9
    with pytest.raises(StorageUnavailableError, match="gone"):
        app.backend.store_result("another-id", 42, "SUCCESS")


def test_counters_are_exact(app: Celery, url: str) -> None:
    assert [app.backend.incr("chord") for _ in range(3)] == [1, 2, 3]
    app.backend.delete("chord")
    assert app.backend.get("chord") is None


def test_project_switches_to_djqueue_by_changing_only_its_broker_url(tmp_path: Path) -> None:
    database = tmp_path / "db.sqlite3"
    (tmp_path / "project_settings.py").write_text(
        "INSTALLED_APPS = ['djqueue']\n"
        "USE_TZ = True\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', "
        f"'NAME': {str(database)!r}, 'OPTIONS': {{'transaction_mode': 'IMMEDIATE'}}}}}}\n"
    )
    environment = {
        "DJANGO_SETTINGS_MODULE": "project_settings",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]),
        "CELERY_TEST_URL": "djqueue://",
    }
    everything = {**os.environ, **environment}
    subprocess.run([sys.executable, "-m", "django", "migrate", "-v0"], env=everything, check=True)
    producer = (
        "from tests.contrib.celery.app import add, total; from celery import chord; import json; "
        "print(json.dumps([add.delay(1, 2).get(timeout=60), "
        "chord([add.s(n, n) for n in range(3)], total.s())().get(timeout=60)]))"
    )
    with celery_worker(environment, tmp_path / "log"):
        answer = subprocess.run(
            [sys.executable, "-c", producer], env=everything, check=True, capture_output=True
        )

    assert json.loads(answer.stdout) == [3, 6]


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime
