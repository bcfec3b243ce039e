"""Functions that can be jobs: workers in other processes have to find them again."""

import inspect
from collections.abc import Callable
from typing import Any

from djqueue.core.errors import JobNameError


def check_importable(function: Callable[..., Any], name: str | None) -> None:
    """Raise JobNameError for a function that another process could not find by its path.

    A given name is enough for a function inside another one, which is registered when that runs; it is
    not enough for a method, which would lack its object, or for a class.
    """
    if isinstance(function, type):
        raise JobNameError(f"{_path(function)} is a class: {MODULE_LEVEL}")
    if isinstance(getattr(function, "name", None), str) and hasattr(function, "enqueue"):
        raise JobNameError(f"{function!r} is a job already: put @job on the function once")
    if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
        raise JobNameError(f"{function!r} is not a function: {MODULE_LEVEL}")
    if inspect.isbuiltin(function) and name is None:
        raise JobNameError(
            f"{_path(function)} is a builtin: define a function at the level of a module that calls it, and "
            "put @job on that"
        )
    qualname = getattr(function, "__qualname__", "")
    container, _, last = qualname.rpartition(".")
    is_inside_class = container and not container.endswith("<locals>")
    if (
        isinstance(function, (staticmethod, classmethod))
        or inspect.ismethod(function)
        or (inspect.isfunction(function) and is_inside_class)
    ):
        raise JobNameError(f"{_path(function)} is a method: {MODULE_LEVEL}")
    if name is not None:
        return
    if not qualname or is_inside_class:
        raise JobNameError(f"{function!r} has no path by which a worker could find it: give the job a name=")
    if last == "<lambda>":
        raise JobNameError(
            f"{_path(function)} is a lambda, which no worker could find by its path: {MODULE_LEVEL}"
        )
    if container:
        raise JobNameError(
            f"{_path(function)} is defined inside a function, where no worker finds it: {MODULE_LEVEL}. If "
            "every worker runs the code around it when it starts, give the job a name="
        )


MODULE_LEVEL = "define a function at the level of a module, and put @job on that"


def _path(function: Any) -> str:
    inner = getattr(function, "__func__", function)
    return f"{inner.__module__}.{getattr(inner, '__qualname__', inner)}"
