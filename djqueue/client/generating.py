"""Recognize generator functions, whose jobs stream items."""

import inspect
from collections.abc import Callable
from typing import Any


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether a function or a callable object is a generator, sync or async."""
    return is_async_generator(function) or _is(inspect.isgeneratorfunction, function)


def is_async_generator(function: Callable[..., Any]) -> bool:
    """Return whether it is an async generator."""
    return _is(inspect.isasyncgenfunction, function)


def _is(test: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - the method is looked at
