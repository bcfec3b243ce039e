"""Tasks of a worker that handlers do not see.

A handler that cancels all tasks (`asyncio.all_tasks()`) would otherwise end other jobs, and the worker.
"""

import asyncio
from asyncio import AbstractEventLoop, Task, _unregister_task  # documented for authors of tasks
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

T = TypeVar("T", bound=Task[Any])
V = TypeVar("V")

_hidden: "WeakKeyDictionary[AbstractEventLoop, WeakSet[Task[Any]]]" = WeakKeyDictionary()


def hide_tasks_on(loop: AbstractEventLoop) -> None:
    """Let `hidden` hide tasks on a loop that runs nothing but a worker."""
    _hidden[loop] = WeakSet()


def hidden(task: T) -> T:
    """Hide a task of djqueue from handlers, unless the loop is the caller's. Called on the loop."""
    tasks = _hidden.get(task.get_loop())
    if tasks is not None:
        tasks.add(task)
        _unregister_task(task)
    return task


def own_task(
    loop: AbstractEventLoop, coroutine: Coroutine[Any, Any, V], context: Context | None = None
) -> Task[V]:
    """Start a hidden task, without the task factory that a handler may have set. Called on the loop."""
    return hidden(Task(coroutine, loop=loop, context=context))


def all_tasks(loop: AbstractEventLoop) -> set[Task[Any]]:
    """Return the tasks of a loop that have not ended, with the hidden ones. From any thread."""
    tasks = asyncio.all_tasks(loop)
    while loop in _hidden:
        with suppress(RuntimeError):  # The set has changed meanwhile.
            return tasks | {task for task in _hidden[loop] if not task.done()}
    return tasks
