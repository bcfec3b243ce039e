"""Callbacks in forked children, for as long as their objects live.

`os.register_at_fork` keeps its callbacks until the process ends, and with a bound method its object.
"""

import os
from collections.abc import Callable
from itertools import count
from types import MethodType
from typing import Any
from weakref import ref

_numbers = count()
_methods: "dict[int, tuple[ref[Any], Callable[[Any], Any]]]" = {}
"""Objects and functions, in the order in which they were registered."""


def after_fork(method: Callable[[], Any]) -> None:
    """Call a bound method in every forked child, without keeping its object alive."""
    assert isinstance(method, MethodType)
    number, methods = next(_numbers), _methods

    def forget(_: object) -> None:
        methods.pop(number, None)

    # `WeakMethod` sometimes fails in the callback of its function while the interpreter ends.
    methods[number] = ref(method.__self__, forget), method.__func__


def registered() -> int:
    """Return the number of methods whose objects are alive."""
    return len(_methods)


def _call_all() -> None:
    for reference, function in list(_methods.values()):
        owner = reference()
        if owner is not None:
            function(owner)


os.register_at_fork(after_in_child=_call_all)
