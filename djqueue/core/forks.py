"""Callbacks in forked children, for as long as their objects live.

`os.register_at_fork` keeps its callbacks until the process ends, and with a bound method its object.
"""

import os
from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakMethod

_numbers = count()
_methods: dict[int, "WeakMethod[Callable[[], Any]]"] = {}
"""In the order in which they were registered."""


def after_fork(method: Callable[[], Any]) -> None:
    """Call a bound method in every forked child, without keeping its object alive."""
    number = next(_numbers)

    def forget(_: object) -> None:
        _methods.pop(number, None)

    _methods[number] = WeakMethod(method, forget)


def registered() -> int:
    """Return the number of methods whose objects are alive."""
    return len(_methods)


def _call_all() -> None:
    for reference in list(_methods.values()):
        method = reference()
        if method is not None:
            method()


os.register_at_fork(after_in_child=_call_all)
