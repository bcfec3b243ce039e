"""Settings for templates with permissions: those of the tests need a temporary directory."""

SECRET_KEY = "not a secret"
INSTALLED_APPS = ["djqueue"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "unused.sqlite3"}}
USE_TZ = True
