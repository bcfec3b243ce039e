"""The app's configuration: checks at start-up, and the modules that define the project's jobs."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from django.apps import AppConfig
from django.conf import settings
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _

from .conf import MODULE, get_settings, is_wrong

if TYPE_CHECKING:
    from .storage.base import Storage


logger = logging.getLogger("djqueue")


class DjqueueConfig(AppConfig):
    """`"djqueue"` in INSTALLED_APPS is all that a project needs."""

    name = "djqueue"
    verbose_name = _("Job queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, have workers fire schedules, import the modules that define jobs."""
        from . import checks  # noqa: F401
        from .storage.chores import makers

        makers["schedules"] = _schedules
        makers["bulk operations"] = _bulk_operations

        # With a wrong setting, importing a project's modules may raise anything. The checks name it (E001).
        given = getattr(settings, "DJQUEUE", {})
        if not is_wrong(given):
            _import_jobs(get_settings().modules)


def _import_jobs(names: tuple[str, ...]) -> None:
    """Import `jobs`, and the modules of the setting MODULES: of every app, or by their whole path."""
    from .client import registry

    autodiscover_modules(MODULE, *(name for name in names if "." not in name))
    missing_modules.clear()
    for name in names:
        if "." in name:
            _import_named(name)
    registry.discovered = frozenset(registry.names())


def _import_named(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        # Any other missing module is an import of the named module itself: an error of the project.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        missing_modules[name] = str(error)
        logger.error("DJQUEUE['MODULES']: %r cannot be imported: %s. Its jobs are unknown here.", name, error)


missing_modules: dict[str, str] = {}
"""Entries of MODULES that do not exist, and why: reported by the system checks (E010)."""


def _schedules(storage: "Storage") -> "Callable[[], None]":
    from .operations.scheduling import scheduling

    return scheduling(storage)


def _bulk_operations(storage: "Storage") -> "Callable[[], None]":
    from .operations.bulking import bulking

    return bulking(storage)
