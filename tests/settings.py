"""A plain Django project for the tests.

`DJQUEUE_TEST_DB` chooses the database: `sqlite` (default), or `postgresql` on the server that the
URL `DJQUEUE_TEST_PG` names. Threads and child processes see the same database, so SQLite's is a
file. conftest.py makes its folder and removes it; `DJQUEUE_TEST_DIR` hands it down to the children.
"""

import os
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(
    os.environ.setdefault("DJQUEUE_TEST_DIR", f"{tempfile.gettempdir()}/djqueue-tests-{os.getpid()}")
)
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")


def sqlite() -> dict[str, object]:
    name = str(BASE_DIR / f"{WORKER}.sqlite3")
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "TEST": {"NAME": name}}


def postgresql() -> dict[str, object]:
    if "DJQUEUE_TEST_PG" not in os.environ:
        raise ImproperlyConfigured(
            "DJQUEUE_TEST_DB=postgresql needs a server's URL in DJQUEUE_TEST_PG; "
            "`python -m tests.servers postgresql COMMAND` starts one for a command."
        )
    url = urlsplit(os.environ["DJQUEUE_TEST_PG"])
    name = f"djqueue_{WORKER}"
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": url.hostname,
        "PORT": url.port or 5432,
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "NAME": name,
        "TEST": {"NAME": name},
    }


DATABASES = {
    "default": {"sqlite": sqlite, "postgresql": postgresql}[os.environ.get("DJQUEUE_TEST_DB", "sqlite")]()
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "djqueue",
    "djqueue.contrib.spark",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
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

# The suite tests the storages themselves, and its child processes use the same keys.
DJQUEUE = {"TEST": {"STORAGE": "real", "PREFIX": ""}}

ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "tests.urls"
SECRET_KEY = "not a secret"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True
