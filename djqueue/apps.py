"""The app's configuration: checks at start-up, and the projects' `jobs.py` modules."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from django.apps import AppConfig
from django.conf import settings
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _

from .conf import problems

if TYPE_CHECKING:
    from .storage.base import Storage


class DjqueueConfig(AppConfig):
    """`"djqueue"` in INSTALLED_APPS is all that a project needs."""

    name = "djqueue"
    verbose_name = _("Job queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, have workers fire schedules, import every app's `jobs` module."""
        from . import checks  # noqa: F401
        from .storage.chores import makers

        makers["schedules"] = _schedules
        makers["bulk operations"] = _bulk_operations

        # With a bad setting every @job raises. The checks tell of it better than a traceback here.
        if not problems(getattr(settings, "DJQUEUE", {})):
            autodiscover_modules("jobs")


def _schedules(storage: "Storage") -> "Callable[[], None]":
    from .operations.scheduling import scheduling

    return scheduling(storage)


def _bulk_operations(storage: "Storage") -> "Callable[[], None]":
    from .operations.bulking import bulking

    return bulking(storage)
