"""What `django.tasks` promises, on every storage."""

import dataclasses
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.contrib.tasks.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    default_task_backend,
    task_enqueued,
    task_finished,
    task_started,
)
from tests.support import PATIENCE, eventually

from . import sample
from .conftest import BACKEND

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    sample.seen.clear()


def test_enqueued_task_runs_and_returns_its_result(backend: Any, run: Any) -> None:
    result = sample.add.enqueue(1, two=2)

    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [1], {"two": 2})
    assert result.attempts == 0
    assert 0 < len(result.id) < 64
    with pytest.raises(ValueError, match="has not finished"):
        _ = result.return_value
    run()
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.return_value == 3
    assert result.attempts == 1
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert result.errors == []


def test_result_read_from_the_backend_equals_the_enqueued_result(backend: Any) -> None:
    result = sample.add.enqueue(1)

    assert dataclasses.asdict(backend.get_result(result.id)) == dataclasses.asdict(result)


async def test_async_task_can_be_enqueued_and_read_with_async_methods(backend: Any, run: Any) -> None:
    result = await sample.add_async.aenqueue(1, two=4)

    await in_thread(run)
    await result.arefresh()
    assert result.return_value == 5
    found = await sample.add_async.aget_result(result.id)
    assert found.task == sample.add_async


@pytest.mark.parametrize("task", [sample.fail, sample.fail_async])
def test_task_that_raises_fails_after_one_attempt(task: Any, backend: Any, run: Any) -> None:
    result = task.enqueue()

    run()
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.attempts == 1
    [error] = result.errors
    assert error.exception_class is ValueError
    assert "no such order" in error.traceback
    assert result.finished_at is not None


def test_system_exit_fails_only_its_task(backend: Any, run: Any) -> None:
    first, second = sample.leave.enqueue(), sample.add.enqueue(1)

    run()
    first.refresh()
    second.refresh()
    assert first.errors[0].exception_class is SystemExit
    assert second.return_value == 1


def test_return_values_are_normalized_to_json(backend: Any, run: Any) -> None:
    good, bad = sample.return_bytes.enqueue(), sample.return_function.enqueue()

    run()
    good.refresh()
    bad.refresh()
    assert good.return_value == {"name": "café", "pair": [1, 2]}
    assert bad.status == TaskResultStatus.FAILED
    assert bad.errors[0].exception_class is TypeError


def test_arguments_are_normalized_before_the_task_is_enqueued(backend: Any) -> None:
    assert sample.note.enqueue((1, b"a")).args == [[1, "a"]]
    with pytest.raises(TypeError, match="Unsupported type"):
        sample.note.enqueue(timezone.now())
    assert sum(get_storage().reads.counts("default").values()) == 1


def test_context_contains_the_running_result(backend: Any, run: Any) -> None:
    result = sample.describe.enqueue("a", "b")

    run()
    result.refresh()
    assert result.return_value == [1, result.id, result.worker_ids, ["a", "b"], "RUNNING"]


def test_result_has_the_error_of_each_failed_attempt(backend: Any, run: Any) -> None:
    result = sample.fail_twice.enqueue()

    run()
    run()
    run()
    result.refresh()
    assert result.return_value == 3
    assert result.attempts == 3
    assert [error.exception_class for error in result.errors] == [ValueError, ValueError]
    assert result.started_at <= result.last_attempted_at
    assert sample.seen == [(1, []), (2, ["builtins.ValueError"]), (3, ["builtins.ValueError"] * 2)]


def test_async_task_sees_the_workers_of_its_earlier_attempts(backend: Any, run: Any) -> None:
    result = sample.fail_once_async.enqueue()

    run()
    run()
    result.refresh()
    assert result.return_value == 2


def test_higher_priorities_run_first(backend: Any, run: Any) -> None:
    for priority in (0, -100, 100):
        sample.note.using(priority=priority).enqueue(priority)

    run()
    assert sample.seen == [100, 0, -100]


def test_run_after_delays_the_task(backend: Any, run: Any) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)

    result = sample.add.using(run_after=at).enqueue(1)

    assert run().claimed == 0
    found = backend.get_result(result.id)
    assert found.status == TaskResultStatus.READY
    assert found.task.run_after == at


def test_queue_missing_from_queues_is_rejected(settings: Any, backend: Any) -> None:
    result = sample.add.using(queue_name="emails").enqueue(1)
    assert backend.get_result(result.id).task.queue_name == "emails"

    settings.TASKS = {"default": {"BACKEND": settings.TASKS["default"]["BACKEND"], "QUEUES": ["default"]}}
    with pytest.raises(InvalidTask, match="Queue 'emails' is not valid"):
        sample.add.using(queue_name="emails")
    # The result exists all the same.
    assert default_task_backend.get_result(result.id).task.queue_name == "emails"


@pytest.mark.parametrize("wrong", ["", "no-such-id", "x" * 300, "a\0b", "\ud800", None, 7])
def test_malformed_id_has_no_result(wrong: Any, backend: Any) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(wrong)


def test_job_that_is_not_a_task_has_no_result(backend: Any) -> None:
    job = Queue("default").enqueue({"args": [], "kwargs": {}}, name="os.getcwd")

    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(job.id)


def test_result_can_be_read_from_another_thread(backend: Any, run: Any) -> None:
    result = sample.add.enqueue(5)
    run()
    found: list[Any] = []

    thread = threading.Thread(target=lambda: found.append(default_task_backend.get_result(result.id)))
    thread.start()
    thread.join(PATIENCE)

    assert found[0].return_value == 5


def test_result_names_the_backend_that_enqueued_the_task(backend: Any, run: Any) -> None:
    sample.describe.enqueue()
    result = sample.describe.using(backend="other").enqueue()

    run()
    assert backend.get_result(result.id).backend == "other"
    assert backend.get_result(result.id).task == sample.describe.using(backend="other")


def test_cancelled_task_has_the_status_failed(backend: Any) -> None:
    result = sample.add.enqueue(1)
    get_storage().jobs.cancel("default", [result.id])

    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class.__name__ == "JobCancelledError"


def test_worker_sends_the_signals_of_django_tasks(backend: Any, run: Any) -> None:
    events: list[tuple[str, Any, str, str]] = []

    def listen(name: str) -> Any:
        def receive(sender: Any, task_result: Any, **_: Any) -> None:
            events.append((name, sender, task_result.id, str(task_result.status)))

        return receive

    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = {name: listen(name) for name in signals}
    for name, signal in signals.items():
        signal.connect(receivers[name])
    try:
        good = sample.add_async.enqueue(1)
        run()
        retried = sample.fail_twice.enqueue()
        run()
        run()
        run()
    finally:
        for name, signal in signals.items():
            signal.disconnect(receivers[name])

    kind = type(backend)
    assert events[:3] == [
        ("enqueued", kind, good.id, "READY"),
        ("started", kind, good.id, "RUNNING"),
        ("finished", kind, good.id, "SUCCESSFUL"),
    ]
    # An attempt that another one follows does not finish the task.
    assert [event[0] for event in events[3:]] == ["enqueued", "started", "started", "started", "finished"]
    assert events[-1][2:] == (retried.id, "SUCCESSFUL")


def test_task_enqueued_is_sent_before_the_task_runs_in_the_immediate_mode(
    settings: Any, djqueue_immediate: Any
) -> None:
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": []}}
    events: list[str] = []

    def receive(signal: Any, task_result: Any, **_: Any) -> None:
        events.append(str(task_result.status))

    for signal in (task_enqueued, task_started, task_finished):
        signal.connect(receive)
    try:
        result = sample.add.enqueue(1)
    finally:
        for signal in (task_enqueued, task_started, task_finished):
            signal.disconnect(receive)

    result.refresh()
    assert events == ["READY", "RUNNING", "SUCCESSFUL"]
    assert result.return_value == 1


def test_wrong_arguments_are_refused_when_a_task_is_enqueued(backend: Any) -> None:
    for wrong in ({"args": [], "kwargs": {}}, {"args": [1], "kwargs": {"three": 3}}):
        with pytest.raises(TypeError, match=r"add\(one: int, two: int = 0\)"):
            sample.add.enqueue(*wrong["args"], **wrong["kwargs"])
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'context'"):
        sample.describe.enqueue(context=1)
    assert backend.get_result(sample.describe.enqueue("a").id).args == ["a"]


@pytest.mark.parametrize("task", [sample.fail, sample.fail_async])
def test_failed_task_logs_its_traceback(
    task: Any, backend: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task.enqueue()

    run()

    [record] = [
        record for record in caplog.records if record.levelname == "ERROR" and record.name.endswith("tasks")
    ]
    assert "no such order" in str(record.exc_info[1])  # type: ignore[index]


def test_failing_signal_receiver_does_not_fail_the_task(
    backend: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def receive(**_: Any) -> None:
        raise RuntimeError("a broken receiver")

    task_started.connect(receive)
    try:
        result = sample.add.enqueue(1)
        run()
    finally:
        task_started.disconnect(receive)

    result.refresh()
    assert result.return_value == 1
    assert "a broken receiver" in caplog.text


@pytest.mark.dialect
def test_result_can_be_read_in_the_transaction_that_enqueued_the_task(backend: Any, run: Any) -> None:
    with transaction.atomic():
        result = sample.add.enqueue(1)
        assert backend.get_result(result.id).status == TaskResultStatus.READY

    eventually(lambda: run().completed, message="the scheduler has taken in the committed job")
    assert backend.get_result(result.id).return_value == 1


@pytest.mark.dialect
def test_rollback_discards_tasks_that_are_enqueued_on_commit(backend: Any, settings: Any, run: Any) -> None:
    path = settings.TASKS["default"]["BACKEND"]
    settings.TASKS = {"default": {"BACKEND": path, "OPTIONS": {"enqueue_on_commit": True}}}
    with transaction.atomic():
        kept = sample.note.enqueue("kept")
        with suppress(LookupError), transaction.atomic():
            lost = sample.note.enqueue("lost")
            assert default_task_backend.get_result(lost.id).status == TaskResultStatus.READY
            raise LookupError
        with pytest.raises(TaskResultDoesNotExist):
            default_task_backend.get_result(lost.id)
        assert default_task_backend.get_result(kept.id).status == TaskResultStatus.READY

    assert run().completed == 1
    assert sample.seen == ["kept"]
    assert default_task_backend.get_result(kept.id).status == TaskResultStatus.SUCCESSFUL


async def in_thread(function: Any) -> Any:
    from asgiref.sync import sync_to_async

    return await sync_to_async(function, thread_sensitive=False)()
