"""django-q2 on Redis, which keeps its results in the database."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "djangoq_settings")


def touch(n, user, text):
    from mark import mark

    mark()
    return {"ok": True}


def fill():
    from mark import payloads

    django.setup()
    from django.core.management import call_command
    from django_q.tasks import async_task

    call_command("migrate", verbosity=0)
    for payload in payloads():
        async_task("djangoq_app.touch", **payload)


if __name__ == "__main__":
    fill()
