"""The `DJQUEUE` setting: reading, validation and defaults, all in this package.

Django imports this module at start-up, so it imports the others when they are used.
"""

import os
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

if TYPE_CHECKING:
    from .readers import (
        RATE_UNITS,
        READERS,
        TOKEN_FORM,
        is_token,
        is_wrong,
        parse_rate,
        problems,
        read_settings,
        unknown_limiters,
    )
    from .values import (
        AlertSettings,
        BackupSettings,
        DashboardSettings,
        HealthSettings,
        MonitoringSettings,
        Settings,
    )

__all__ = [
    "RATE_UNITS",
    "READERS",
    "TOKEN_FORM",
    "AlertSettings",
    "BackupSettings",
    "DashboardSettings",
    "HealthSettings",
    "MonitoringSettings",
    "Settings",
    "get_settings",
    "has_django",
    "is_token",
    "is_wrong",
    "parse_rate",
    "problems",
    "read_settings",
    "unknown_limiters",
]

VALUES = frozenset(
    {
        *("AlertSettings", "BackupSettings", "DashboardSettings", "HealthSettings", "MonitoringSettings"),
        "Settings",
    }
)
"""Names that are in `values`; the others are in `readers`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(".values" if name in VALUES else ".readers", __name__)
    value = globals()[name] = getattr(module, name)
    return value


@lru_cache(maxsize=1)
def get_settings() -> "Settings":
    """Return the settings of the project, cached until a test changes them; the defaults without Django."""
    from .readers import read_settings
    from .values import Settings

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
