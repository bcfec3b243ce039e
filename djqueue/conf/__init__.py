"""The `DJQUEUE` setting: reading, validation and defaults, all in this package."""

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.hiding import shown_name, without_credentials
from djqueue.core.suggest import nearest

from .readers import RATE_UNITS, READERS, default_policy, parse_rate, read_queues
from .values import DashboardSettings, Settings

__all__ = [
    "RATE_UNITS",
    "READERS",
    "DashboardSettings",
    "Settings",
    "get_settings",
    "has_django",
    "is_wrong",
    "parse_rate",
    "problems",
    "read_settings",
    "unknown_limiters",
]


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Read a `DJQUEUE` mapping.

    Raises:
        ConfigurationError: A key is invalid. The message has the first of `problems`.
    """
    found = problems(given) or unknown_limiters(given)
    if found:
        raise ConfigurationError(found[0])
    values: dict[str, Any] = {}
    for key, value in given.items():
        values.update(READERS[key](key, value))
    if "QUEUES" in given:
        default = default_policy(values.get("storage_options", {}))
        values.update(read_queues("QUEUES", given["QUEUES"], default))
    return Settings(**values)


def problems(given: Mapping[str, Any]) -> list[str]:
    """Return the problems of a `DJQUEUE` mapping, one sentence per invalid key."""
    if not isinstance(given, Mapping):
        return [f"DJQUEUE must be a dict; got {shown_name(given)}"]
    found = []
    for key, value in given.items():
        reader = READERS.get(key)
        if reader is None:
            found.append(f"DJQUEUE[{shown_name(key)}] is not a setting{nearest(str(key), READERS)}")
            continue
        try:
            reader(key, value)
        except (ConfigurationError, OptionError) as error:
            found.append(without_credentials(f"DJQUEUE[{key!r}]: {error}"))
    return found


def is_wrong(given: Mapping[str, Any]) -> bool:
    """Return whether `read_settings` would raise."""
    return bool(problems(given) or unknown_limiters(given))


def unknown_limiters(given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each queue whose limiter is undefined in an otherwise valid mapping."""
    known = given.get("LIMITERS", {})
    queues = given.get("QUEUES", {})
    return [
        f"DJQUEUE['QUEUES']: queue {name!r}: LIMITER {limiter!r} is not one of DJQUEUE['LIMITERS']"
        f"{nearest(limiter, known)}"
        for name, entry in (queues.items() if isinstance(queues, Mapping) else ())
        if (limiter := entry.get("LIMITER")) is not None and limiter not in known
    ]


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Return the settings of the project, cached until a test changes them; the defaults without Django."""
    if not has_django():
        return Settings()
    return read_settings(getattr(django_settings, "DJQUEUE", {}))


def has_django() -> bool:
    """Return whether this process has Django settings. Without them it has no databases."""
    return bool(django_settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ)


def _forget(*, setting: str, **_: object) -> None:
    if setting == "DJQUEUE":
        get_settings.cache_clear()


setting_changed.connect(_forget)
