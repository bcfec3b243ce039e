"""Checks of single values of settings. Each raises ConfigurationError, whose message names the value."""

from collections.abc import Mapping
from typing import Any

from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import shown_name
from djqueue.core.options import MAX_INTEGER
from djqueue.core.suggest import nearest
from djqueue.core.units import milliseconds


def mapping(value: Any, known: set[str], where: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where}must be a dict; got {value!r}")
    for key in value:
        if key not in known:
            raise ConfigurationError(f"{where}unknown key {shown_name(key)}{nearest(str(key), known)}")
    return value


def flag(value: Any, where: str = "") -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{where}must be True or False; got {value!r}")
    return value


def one_of(value: Any, words: tuple[str, ...], where: str) -> str:
    if value not in words:
        raise ConfigurationError(f"{where}: {value!r} is not one of {', '.join(words)}")
    return str(value)


def lasting(value: Any, where: str) -> int:
    found = milliseconds(where, value)
    if not found:
        raise ConfigurationError(f"{where}: must be positive; got {value!r}")
    return found


def positive(value: Any, where: str) -> int:
    if integer(value, where) < 1:
        raise ConfigurationError(f"{where}: must be positive; got {value!r}")
    return int(value)


def integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INTEGER:
        raise ConfigurationError(f"{where}: must be an integer from 0 to {MAX_INTEGER}; got {value!r}")
    return value
