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
        raise JobNameError(f"{function!r} is already a job: apply @job only once")
    if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
        raise JobNameError(f"{function!r} is not a function: {MODULE_LEVEL}")
    if inspect.isbuiltin(function) and name is None:
        raise JobNameError(
            f"{_path(function)} is a builtin: apply @job to a module-level function that calls the builtin"
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
        raise JobNameError(
            f"{function!r} has no import path, so workers cannot find the function: pass name= to @job"
        )
    if last == "<lambda>":
        raise JobNameError(
            f"{_path(function)} is a lambda, so workers cannot find the function by its path: {MODULE_LEVEL}"
        )
    if container:
        raise JobNameError(
            f"{_path(function)} is defined inside a function, so workers cannot import it: "
            f"{MODULE_LEVEL}. If every worker runs the enclosing code at startup, pass name= to @job"
        )


MODULE_LEVEL = "apply @job to a module-level function"


def _path(function: Any) -> str:
    inner = getattr(function, "__func__", function)
    return f"{inner.__module__}.{getattr(inner, '__qualname__', inner)}"
