"""The tasks that this process has defined, each registered as a job type of the name `module_path`."""

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from django.utils.module_loading import autodiscover_modules

from djqueue.client import job

from .attempts import runner_of
from .compat import AnyTask
from .types import options_per_enqueue, options_per_task

MODULES = ("jobs", "tasks")
"""Modules of every app that may define tasks."""


class RegisteredTasks:
    """Tasks by name, as they were defined."""

    def __init__(self) -> None:
        self._tasks: dict[str, AnyTask] = {}
        self._lock = Lock()
        self._discovered = False

    def add(self, task: AnyTask, defaults: Mapping[str, Any]) -> None:
        """Register a task's function as a job type, unless it is.

        Args:
            defaults: Default job options of its backend.

        Raises:
            OptionError: An option of the task is invalid.
        """
        name = task.module_path
        known = self._tasks.get(name)
        if known is not None and known.func is task.func:
            return
        register: Callable[[Callable[..., Any]], Any] = job(
            name=name,
            check_arguments=False,
            queue=task.queue_name,
            priority=task.priority,
            **{**defaults, **options_per_enqueue(task)},
            **options_per_task(task),
        )
        register(runner_of(task))
        self._tasks[name] = task

    def find(self, name: str) -> AnyTask | None:
        """Return a task by name; None if no app defines it.

        Imports the apps' modules if the name is unknown, and never one that the name stands for.
        """
        found = self._tasks.get(name)
        if found is None and not self._discovered:
            with self._lock:
                autodiscover_modules(*MODULES)
                self._discovered = True
            found = self._tasks.get(name)
        return found


registered_tasks = RegisteredTasks()
