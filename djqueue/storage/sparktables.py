"""Access to the tables of `djqueue.contrib.spark`, an app that a project may leave out."""

from typing import Any

from django.apps import apps

SPARK_APP = "djqueue.contrib.spark"
REMEDY = f"add {SPARK_APP!r} to INSTALLED_APPS of the Django project and run manage.py migrate"


def are_installed() -> bool:
    """Return whether the project has the app."""
    return apps.is_installed(SPARK_APP)


def spark_model(name: str) -> Any:
    """Return a model of the app. Storages and dashboard are below it and must not import it."""
    return apps.get_model("djqueue_spark", name)
