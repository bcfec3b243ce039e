"""The options that tasks have besides those of Django, and the checks of the backend."""

import pickle
from dataclasses import fields
from typing import Any

import pytest
from django.db import transaction

from djqueue import Permissions
from djqueue.client import get_storage, registry
from djqueue.client.declarations import declared
from djqueue.contrib.tasks import DjqueueTask, task
from djqueue.contrib.tasks.compat import InvalidTask, task_backends
from djqueue.contrib.tasks.definitions import PER_ENQUEUE, PER_TASK
from djqueue.core.options import PARSERS
from djqueue.core.states import State
from djqueue.testing.assertions import assert_enqueued, assert_not_enqueued

from . import sample
from .conftest import BACKEND


@pytest.fixture
def storage(settings: Any, djqueue_memory: Any) -> Any:
    return djqueue_memory


def scheduled() -> None:
    """Run every hour."""


def guarded() -> None:
    """Run in a process of its own."""


def retried() -> None:
    """Run up to five times."""


OF_DJANGO = {"priority", "queue", "run_at", "delay", "enqueue_on_commit"}
"""Options that tasks have under names of Django, or in the settings of their backend."""
NOT_OF_TASKS = {"depends_on", "on_dependency_failure", "lifo", "durable", "content_type"}
"""Options of flows and of the storage."""


def test_tasks_have_each_option_of_jobs_or_none_by_decision() -> None:
    assert {*PER_ENQUEUE} | OF_DJANGO | NOT_OF_TASKS == PARSERS.keys()


def test_type_checkers_know_exactly_the_options_of_a_task() -> None:
    of_django = {"func", "priority", "backend", "queue_name", "run_after", "takes_context"}

    assert {*PER_ENQUEUE, *PER_TASK} == {item.name for item in fields(DjqueueTask)} - of_django


def test_options_reach_the_job(backend: Any) -> None:
    made = task(max_attempts=5, timeout=30, tags=["a"])(retried)

    result = made.using(unique_key="k", priority=7, headers={"tenant": 3}).enqueue()

    [record] = get_storage().reads.jobs("default", [result.id])
    assert record is not None
    options = record.options
    assert (options.max_attempts, options.timeout, options.unique_key) == (5, 30_000, "k")
    assert options.headers == {"tenant": 3}
    assert (options.priority, options.tags, options.result_ttl) == (7, ("a",), 86_400_000)


def test_repr_of_a_task_hides_the_values_of_its_headers(backend: Any) -> None:
    made = task(max_attempts=5)(retried).using(headers={"authorization": "Bearer hush"})

    assert "hush" not in repr(made)
    assert "hush" not in repr(made.enqueue())
    assert "max_attempts=5, headers=['authorization'])" in repr(made)
    assert "UNSET" not in repr(made)


def test_assertions_accept_tasks(storage: Any, backend: Any) -> None:
    made = task(retried)
    assert_not_enqueued(made)

    made.enqueue()

    assert_enqueued(made, args=[], queue="default", count=1)
    assert_not_enqueued(task(scheduled))


@pytest.mark.django_db
def test_captured_on_commit_callbacks_enqueue_the_task(
    settings: Any, djqueue_immediate: Any, django_capture_on_commit_callbacks: Any
) -> None:
    settings.TASKS = {"default": {"BACKEND": BACKEND, "OPTIONS": {"enqueue_on_commit": True}}}
    with django_capture_on_commit_callbacks(execute=True):
        result = task(scheduled).enqueue()
        result.refresh()
        assert result.status == "READY"

    result.refresh()
    assert result.status == "SUCCESSFUL"


def test_task_decorator_of_django_accepts_the_options(backend: Any) -> None:
    try:
        from django.tasks import task as django_task
    except ImportError:
        from django_tasks import task as django_task  # type: ignore[no-redef, import-not-found, unused-ignore]
    try:
        made = django_task(max_attempts=5)(retried)
    except TypeError:
        pytest.skip("task() of Django 6.0 has no further options")

    assert isinstance(made, DjqueueTask)
    assert made.max_attempts == 5


def test_duplicate_unique_key_returns_the_result_of_the_first_task(backend: Any) -> None:
    first = sample.add.using(unique_key="order-1").enqueue(1)

    second = sample.add.using(unique_key="order-1").enqueue(2)

    assert second.id == first.id
    assert second.args == [1]


def test_invalid_option_is_rejected_with_a_suggestion(backend: Any) -> None:
    with pytest.raises(InvalidTask, match="did you mean 'max_attempts'"):
        task(max_atempts=3)(retried)
    with pytest.raises(InvalidTask, match="max_attempts: must be from 1"):
        task(max_attempts=0)(retried)
    with pytest.raises(InvalidTask, match=r"set the option on the task: @task\(executor="):
        sample.add.using(executor="isolated")
    with pytest.raises(InvalidTask, match="use queue_name"):
        sample.add.using(queue="emails")
    with pytest.raises(TypeError, match="run_after cannot be set on a task"):
        task(run_after=None)(retried)


def test_cron_option_declares_a_schedule(backend: Any) -> None:
    made = task(cron="0 * * * *", timezone="Europe/Vienna")(scheduled)

    assert made.module_path in declared.of([made.module_path])


def test_executor_and_permissions_belong_to_the_job_type(backend: Any) -> None:
    made = task(permissions=Permissions(net=[]))(guarded)

    job_type = registry.get(made.module_path)
    assert job_type.executor == "isolated"
    assert job_type.permissions == Permissions(net=[])


def test_backoff_function_belongs_to_the_job_type(backend: Any) -> None:
    made = task(max_attempts=2, backoff=lambda failures, error: 5.0)(retried)
    made.enqueue()

    assert registry.get(made.module_path).backoff_function is not None
    with pytest.raises(InvalidTask, match="must be set on the task"):
        made.using(backoff=lambda failures, error: 5.0)


def test_task_can_be_hashed_and_pickled(backend: Any) -> None:
    assert hash(sample.fail_twice) == hash(sample.fail_twice.using(priority=0))
    if hasattr(DjqueueTask, "_reconstruct"):
        assert pickle.loads(pickle.dumps(sample.fail_twice)) == sample.fail_twice


def test_options_of_the_backend_are_defaults_of_its_tasks(backend: Any, settings: Any) -> None:
    settings.TASKS = {
        "default": {"BACKEND": BACKEND, "OPTIONS": {"max_attempts": 4, "result_ttl": 60}},
    }

    result = sample.add.enqueue(1)

    [record] = get_storage().reads.jobs("default", [result.id])
    assert record is not None
    assert (record.options.max_attempts, record.options.result_ttl) == (4, 60_000)


@pytest.mark.django_db(transaction=True)
@pytest.mark.dialect
def test_enqueue_on_commit_setting_of_djqueue_does_not_delay_tasks(backend: Any, settings: Any) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "ENQUEUE_ON_COMMIT": True}

    with transaction.atomic():
        result = sample.add.enqueue(1)
        assert get_storage().reads.states("default", [result.id]) == [State.WAITING]


def test_checks_report_invalid_options(backend: Any, settings: Any) -> None:
    settings.TASKS = {
        "default": {
            "BACKEND": BACKEND,
            "OPTIONS": {"max_atempts": 4, "enqueue_on_commit": 1, "timeout": -1},
        }
    }

    found = task_backends["default"].check()

    assert [message.id for message in found] == ["djqueue.E012"] * 3
    assert "did you mean 'max_attempts'?" in found[0].msg
    assert "must be True, False or the alias of a database; got 1" in found[1].msg


def test_checks_report_an_undeclared_queue(backend: Any, settings: Any) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": ["emails"], "STRICT_QUEUES": True}
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": ["emails", "email"]}}

    [message] = task_backends["default"].check()

    assert message.id == "djqueue.E009"
    assert "did you mean 'emails'?" in message.msg


def test_checks_report_nothing_for_valid_settings(backend: Any) -> None:
    assert task_backends["default"].check() == []


def test_enqueue_validates_the_task_again(backend: Any, settings: Any) -> None:
    made = sample.add.using(queue_name="emails")
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": ["default"]}}

    with pytest.raises(InvalidTask, match="Queue 'emails' is not valid"):
        made.enqueue(1)
