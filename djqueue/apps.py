"""The app's configuration: checks at start-up, and the projects' `jobs.py` modules."""

from django.apps import AppConfig
from django.conf import settings
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _

from .conf import problems


class DjqueueConfig(AppConfig):
    """`"djqueue"` in INSTALLED_APPS is all that a project needs."""

    name = "djqueue"
    verbose_name = _("Job queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks and import every installed app's `jobs` module."""
        from . import checks  # noqa: F401

        # With a bad setting every @job raises. The checks tell of it better than a traceback here.
        if not problems(getattr(settings, "DJQUEUE", {})):
            autodiscover_modules("jobs")
