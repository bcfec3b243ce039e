"""The tasks framework of this Django: `django.tasks`, or the backport `django_tasks` before Django 6.0.

The two have classes of the same names that are not interchangeable, so everything here imports them from this
module.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

HAS_TASKS = find_spec("django.tasks") is not None
"""Whether Django has the framework itself."""

if not HAS_TASKS and find_spec("django_tasks") is None:
    raise ImproperlyConfigured(
        "djqueue.contrib.tasks requires django.tasks of Django 6.0 or later, or its backport: run "
        "`pip install 'djqueue[tasks]'`."
    )

if TYPE_CHECKING or HAS_TASKS:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, default_task_backend, task_backends
    from django.tasks import exceptions as _exceptions
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import (
        DEFAULT_TASK_BACKEND_ALIAS,
        DEFAULT_TASK_PRIORITY,
        DEFAULT_TASK_QUEUE_NAME,
        Task,
        TaskError,
    )
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
else:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, default_task_backend, task_backends
    from django_tasks import exceptions as _exceptions
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import (
        DEFAULT_TASK_BACKEND_ALIAS,
        DEFAULT_TASK_PRIORITY,
        DEFAULT_TASK_QUEUE_NAME,
        Task,
        TaskError,
    )
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

if TYPE_CHECKING:
    AnyTask = Task[..., Any]
    AnyTaskContext = TaskContext[Any, Any]
    AnyTaskResult = TaskResult[..., Any]
    GenericTask = Task
else:
    # Generic for type checkers only.
    AnyTask, AnyTaskContext, AnyTaskResult = Task, TaskContext, TaskResult

    class GenericTask:
        """Stands for the class of tasks where that gets type arguments."""

        def __class_getitem__(cls, _: Any) -> type[Task]:
            return Task


# The backport 0.12 has another name for it.
InvalidTask: type[Exception] = getattr(_exceptions, "InvalidTask" if HAS_TASKS else "InvalidTaskError")
TaskResultDoesNotExist = _exceptions.TaskResultDoesNotExist

__all__ = [
    "DEFAULT_TASK_BACKEND_ALIAS",
    "DEFAULT_TASK_PRIORITY",
    "DEFAULT_TASK_QUEUE_NAME",
    "HAS_TASKS",
    "AnyTask",
    "AnyTaskContext",
    "AnyTaskResult",
    "BaseTaskBackend",
    "GenericTask",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "default_task_backend",
    "normalize_json",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]
