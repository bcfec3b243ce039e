"""What Django imports with the admin at start-up."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys

import django
from django.conf import settings

APPS = [*(f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages")), "djqueue"]
settings.configure(INSTALLED_APPS=APPS)
django.setup()

from django.contrib import admin
from djqueue.admin import DjqueueJobsMixin

print(*sorted(model.__name__ for model in admin.site._registry if model._meta.app_label == "djqueue"))
print(*sorted(name for name in sys.modules if name.startswith("djqueue.") or "." not in name))
"""
LATER = {
    "djqueue.client.jobs",
    "djqueue.core.engine",
    "djqueue.dashboard.outages",
    "djqueue.dashboard.site",
    "djqueue.dashboard.reading",
    "djqueue.dashboard.urls",
    "djqueue.dashboard.views",
    "djqueue.operations",
    "djqueue.runtime",
    "djqueue.storage.base",
    "djqueue.storage.database",
    "djqueue.storage.memory",
    "djqueue.storage.redis",
    "msgpack",
    "pyspark",
    "redis",
}
"""Modules that the first page imports, or nothing does."""


def test_registering_the_admin_imports_neither_views_nor_storages() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    command = [sys.executable, "-c", CODE]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    registered, imported = output.splitlines()

    assert registered == "CronJob Dashboard DeadLetter Job JobResult"
    assert LATER.isdisjoint(imported.split())
