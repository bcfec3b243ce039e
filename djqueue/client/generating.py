"""What makes a function a generator: its job has items, which those who wait get as they come."""

import inspect
from collections.abc import Callable
from typing import Any


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether what is called, a function or an object, yields."""
    return is_async_generator(function) or _is(inspect.isgeneratorfunction, function)


def is_async_generator(function: Callable[..., Any]) -> bool:
    """Return whether it does so on an event loop."""
    return _is(inspect.isasyncgenfunction, function)


def _is(test: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - the method is looked at
