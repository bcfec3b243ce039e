"""Settings of the demo project: SQLite, files, and the limits of a few queues.

`make demo ARGS="--storage …"` puts another storage in their place.
"""

import os
from pathlib import Path
from typing import Any

BASE_DIR = Path(__file__).resolve().parent

# Everything the project writes lies in one directory: delete it and the project is as new.
VAR_DIR = Path(os.environ.get("DJQUEUE_DEMO_VAR") or BASE_DIR / "var").resolve()
VAR_DIR.mkdir(parents=True, exist_ok=True)

DEBUG = os.environ.get("DJANGO_DEBUG", "1") == "1"
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "django-insecure-demo-on-this-machine-only")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "djqueue",
    "djqueue.contrib.spark",
    "demo_project.flights",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

ROOT_URLCONF = "demo_project.urls"
WSGI_APPLICATION = "demo_project.wsgi.application"
ASGI_APPLICATION = "demo_project.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": VAR_DIR / "db.sqlite3",
        "OPTIONS": {
            # Web server and workers write to one file: readers never wait for a writer, and
            # a writer waits its turn at BEGIN instead of failing half-way through a transaction.
            # The cache of 32 MB holds the indexes of the flights.
            "init_command": ("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-32000"),
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LANGUAGE_CODE = "en-us"
TIME_ZONE = "America/New_York"
USE_TZ = True

STATIC_URL = "static/"
MEDIA_URL = "media/"
MEDIA_ROOT = VAR_DIR / "media"
STORAGES = {
    # A chart that is drawn again takes its old file's place.
    "default": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"allow_overwrite": True},
    },
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    "djqueue_backups": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {
            "location": VAR_DIR / "backups",
            "file_permissions_mode": 0o600,
            "directory_permissions_mode": 0o700,
        },
    },
}

EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
EMAIL_FILE_PATH = VAR_DIR / "mail"
DEFAULT_FROM_EMAIL = "claims@flights.example"

# The release that is deployed; the demo's command deploys others as time goes by.
RELEASE = os.environ.get("DJQUEUE_DEMO_RELEASE", "2.3.4")

DJQUEUE: dict[str, Any] = {
    "VERSION": RELEASE,
    "MODULES": ["passengers"],
    "QUEUES": {
        "letters": {"RATE": "4/s", "KEY_CONCURRENCY": 1},
        "ratings": {"CONCURRENCY": 3},
    },
}

# Set by the demo's command, which starts the server.
STORAGE = os.environ.get("DJQUEUE_DEMO_STORAGE", "sqlite")
PORT = os.environ.get("DJQUEUE_DEMO_PORT", "")
if STORAGE == "postgres":
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "HOST": "127.0.0.1",
        "PORT": PORT,
        "USER": "djqueue",
    }
elif STORAGE == "redis":
    DJQUEUE["STORAGE"] = {
        "BACKEND": "djqueue.storage.redis.RedisStorage",
        "OPTIONS": {"URL": f"redis://127.0.0.1:{PORT}/0"},
    }
elif STORAGE == "scheduler":
    DJQUEUE["STORAGE"] = {"BACKEND": "djqueue.storage.scheduler.SchedulerStorage"}
