"""The `DJQUEUE` setting: reading, validation and defaults, all in this package.

Django imports this module at start-up, so it imports the others when they are used.
"""

import os
import sys
from collections.abc import Mapping
from datetime import tzinfo
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.signals import setting_changed

from djqueue.core.units import NaiveTimes

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
        SettingsInTests,
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
    "SettingsInTests",
    "get_settings",
    "has_django",
    "is_pytest",
    "is_testing",
    "is_token",
    "is_wrong",
    "parse_rate",
    "problems",
    "read_settings",
    "unknown_limiters",
    "uses_memory_in_tests",
]

VALUES = frozenset(
    {
        *("AlertSettings", "BackupSettings", "DashboardSettings", "HealthSettings", "MonitoringSettings"),
        *("Settings", "SettingsInTests"),
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
    given = getattr(django_settings, "DJQUEUE", {})
    if isinstance(given, Mapping):
        # A test that has its own settings does not have to repeat those about its storage.
        kept = getattr(apps.app_configs.get("djqueue"), "test_settings", None)
        given = given if kept is None else {"TEST": kept, **given}
    return read_settings(given)


def is_testing() -> bool:
    """Return whether this process runs tests: in Django's test environment, or in pytest."""
    # Django has no other mark of its own: some projects set `mail.outbox` and EMAIL_BACKEND without tests.
    state = getattr(sys.modules.get("django.test.utils"), "_TestState", None)
    if hasattr(state, "saved_data"):
        return True
    return is_pytest()


def is_pytest() -> bool:
    """Return whether this process is pytest, and no program that one of its tests has started."""
    return "pytest" in sys.modules and "PYTEST_VERSION" in os.environ


def uses_memory_in_tests() -> bool:
    """Return whether this process runs tests whose jobs are in its memory, whatever STORAGE is."""
    from .values import IN_MEMORY

    return is_testing() and get_settings().test.storage == IN_MEMORY


def has_django() -> bool:
    """Return whether this process has Django settings. Without them it has no databases."""
    return bool(django_settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ)


def _zone_of_naive_times() -> tzinfo | None:
    """Return the time zone of datetimes without one. As in Django, USE_TZ forbids them."""
    if not has_django() or django_settings.USE_TZ:
        return None
    from django.utils.timezone import get_default_timezone

    return get_default_timezone()


def _forget(*, setting: str, **_: object) -> None:
    if setting == "DJQUEUE":
        get_settings.cache_clear()


NaiveTimes.zone = _zone_of_naive_times
setting_changed.connect(_forget)
