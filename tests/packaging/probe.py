"""Runs in the new project of test_wheel.py: migrates, checks, and opens the admin's pages as a superuser."""

import os

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
django.setup()

from django.contrib import admin  # noqa: E402
from django.contrib.auth import get_user_model  # noqa: E402
from django.contrib.staticfiles import finders  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.template.loader import render_to_string  # noqa: E402
from django.test import Client  # noqa: E402
from django.urls import reverse  # noqa: E402
from django.utils import translation  # noqa: E402

call_command("migrate", verbosity=0)
call_command("check")
call_command("makemigrations", check_changes=True)

assert finders.find("djqueue/djqueue.css")
assert "djq-state-failed" in render_to_string("djqueue/state_badge.html", {"state": "failed"})
with translation.override("de"):
    assert translation.gettext("Why this job is not running") == "Warum dieser Auftrag nicht läuft"

client = Client(SERVER_NAME="localhost")
client.force_login(get_user_model().objects.create_superuser("admin"))


def render(page: str) -> str:
    response = client.get(page)
    assert response.status_code == 200, (page, response.status_code)
    return response.content.decode()


index = render(reverse("admin:index"))
for model in admin.site._registry:
    if model._meta.app_label == "djqueue":
        changelist = reverse(f"admin:djqueue_{model._meta.model_name}_changelist")
        is_dashboard = model._meta.model_name == "dashboard"
        assert (changelist in index) is is_dashboard, (
            f"{changelist}: the admin's index links to the dashboard only"
        )
        render(changelist)
        print("rendered", model._meta.label)
