"""The settings of a Django project with django-q2 on Redis."""

from mark import REDIS, SLOTS

SECRET_KEY = "not a secret"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django_q"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
Q_CLUSTER = {"name": "bench", "workers": SLOTS, "redis": REDIS}
