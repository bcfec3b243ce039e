"""Django settings of the foreign suites: a project whose jobs are in its database."""

import json
import os

SECRET_KEY = "conformance"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue"]
DATABASES = {"default": json.loads(os.environ["CONFORMANCE_DATABASE"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
# In pytest, jobs would be in the memory of one process, but the workers of the suites are other processes.
DJQUEUE = {"TEST": {"STORAGE": os.environ.get("CONFORMANCE_STORAGE", "real"), "PREFIX": ""}}
