"""Payloads of functions under `@job`: `{"args": [...], "kwargs": {...}}`."""

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_call(payload: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a decoded payload has the arguments of a call.

    A producer may send any value, so both keys are checked for their types, too.
    """
    return (
        isinstance(payload, Mapping)
        and payload.keys() == {"args", "kwargs"}
        and isinstance(payload["args"], (list, tuple))
        and isinstance(payload["kwargs"], Mapping)
    )
