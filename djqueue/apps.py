"""The app's configuration. Starting Django imports nothing else that a project without jobs does not need."""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import checks
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules, import_string, module_has_submodule
from django.utils.translation import gettext_lazy as _

from djqueue.core.logs import Log

if TYPE_CHECKING:
    from .storage.base import Storage


logger = Log("djqueue")

TAG = "djqueue"
"""Tag of the system checks."""
MODULE = "jobs"
"""Module of every app, or package of modules, that is imported when Django starts."""
TASKS_MODULE = "tasks"
"""Module of every app that is imported, too, if a task backend is djqueue's."""
TASK_BACKEND = "djqueue.contrib.tasks.DjqueueBackend"


class DjqueueConfig(AppConfig):
    """`"djqueue"` in INSTALLED_APPS is all that a project needs."""

    name = "djqueue"
    verbose_name = _("Job queue")
    default_auto_field = "django.db.models.BigAutoField"
    test_settings: Any = None
    """TEST in the settings with which Django started. A test whose own DJQUEUE has no TEST keeps it."""

    def ready(self) -> None:
        """Import the modules that define jobs, and register what workers do besides running jobs."""
        from .storage.chores import makers

        given = getattr(settings, "DJQUEUE", {})
        if self.test_settings is None and isinstance(given, Mapping):
            type(self).test_settings = given.get("TEST", {})
        post_migrate.connect(_after_flush, sender=self)
        makers["schedules"] = _schedules
        makers["bulk operations"] = _bulk_operations
        makers["errors"] = _errors
        makers["alerts"] = _alerts

        if not _may_define_jobs(given):
            return
        from .conf import get_settings, is_wrong

        # With invalid settings, importing a project's modules may raise any error. Check E001 reports them.
        if not is_wrong(given):
            _import_jobs(get_settings().modules)


def _after_flush(using: str, **_: Any) -> None:
    """Close the storage after `migrate`, and after `flush`, with which a TransactionTestCase ends."""
    if "djqueue.client" in sys.modules:
        from .client.storages import close_storage_of

        close_storage_of(using)


def _may_define_jobs(given: Any) -> bool:
    if "djqueue.client" in sys.modules or (isinstance(given, Mapping) and "MODULES" in given):
        return True
    if has_task_backend():
        return True
    return any(module_has_submodule(app.module, MODULE) for app in apps.get_app_configs() if app.module)


def has_task_backend() -> bool:
    """Return whether the setting TASKS has a `DjqueueBackend`, or a subclass of it."""
    for path in _task_backends():
        if path == TASK_BACKEND:
            return True
        # Importing the other backends of Django would cost projects that have nothing else of ours.
        if not path.startswith(("django.", "django_tasks.")):
            try:
                backend = import_string(path)
            except ImportError:
                continue  # A check of django.tasks reports it.
            if getattr(backend, "runs_djqueue_jobs", False):
                return True
    return False


def _task_backends() -> Iterator[str]:
    given = getattr(settings, "TASKS", {})
    for entry in given.values() if isinstance(given, Mapping) else ():
        path = entry.get("BACKEND") if isinstance(entry, Mapping) else None
        if isinstance(path, str):
            yield path


def _import_jobs(names: tuple[str, ...]) -> None:
    """Import `jobs` and the names in MODULES from every app, and the dotted paths in MODULES.

    If TASKS has a backend of djqueue, `tasks` is imported from every app, too.
    """
    from .client import registry

    wanted = (MODULE, TASKS_MODULE) if has_task_backend() else (MODULE,)
    autodiscover_modules(*wanted, *(name for name in names if "." not in name))
    for config in apps.get_app_configs():
        for name in wanted:
            _import_parts(f"{config.name}.{name}")
    missing_modules.clear()
    for name in names:
        if "." in name:
            _import_named(name)
    registry.discovered = frozenset(registry.names())


def _import_parts(name: str) -> None:
    """Import the modules in a package of jobs, such as `jobs/mail.py`, except tests and private ones."""
    package = sys.modules.get(name)
    for part in iter_modules(getattr(package, "__path__", ())):
        if not part.name.startswith(("_", "test")):
            import_module(f"{name}.{part.name}")
            _import_parts(f"{name}.{part.name}")


def _import_named(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        # Any other missing module is an import within the named module: an error of the project.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        missing_modules[name] = str(error)
        logger.error("DJQUEUE['MODULES']: %r cannot be imported: %s. Its jobs are unknown here.", name, error)


missing_modules: dict[str, str] = {}
"""Entries of MODULES that do not exist, with the error. Check E010 reports them."""


def _schedules(storage: "Storage") -> "Callable[[], None]":
    from djqueue.operations.sweeps import scheduling

    return scheduling(storage)


def _bulk_operations(storage: "Storage") -> "Callable[[], None]":
    from djqueue.operations.sweeps import bulking

    return bulking(storage)


def _errors(storage: "Storage") -> "Callable[[], None]":
    from djqueue.operations.errorgroups import recording

    return recording(storage)


def _alerts(storage: "Storage") -> "Callable[[], None]":
    from djqueue.operations.alerts import alerting

    return alerting(storage)


def _check(name: str) -> Callable[..., list[checks.CheckMessage]]:
    def run(**kwargs: Any) -> list[checks.CheckMessage]:
        found: list[checks.CheckMessage] = getattr(import_module("djqueue.checks"), name)(**kwargs)
        return found

    return run


checks.register(_check("check_settings"), TAG)
checks.register(_check("check_servers"), TAG, checks.Tags.database)
checks.register(_check("check_servers_to_deploy"), TAG, deploy=True)
checks.register(_check("check_jobs_to_deploy"), TAG, deploy=True)
