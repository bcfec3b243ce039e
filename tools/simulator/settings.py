"""The Django project of the simulator: one database in memory."""

from tests.settings import *  # noqa: F403

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue"]
DJQUEUE = {"HEARTBEAT": 2}
