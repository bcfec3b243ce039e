"""The tests' project on PostgreSQL, visited by a line of JSON on standard input.

`path` is asked for; `fresh` closes the connections before; `is_async` serves it as ASGI does.
"""

import json
import sys
import time
import traceback
from typing import Any

import django
from asgiref.sync import async_to_sync
from django.conf import settings


def main() -> None:
    """Prepare the database, then answer each line until the input ends."""
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.core.signals import got_request_exception
    from django.db import connections
    from django.test import AsyncClient, Client

    from djqueue import Queue

    def report(**_: Any) -> None:
        traceback.print_exc()

    got_request_exception.connect(report)
    call_command("migrate", verbosity=0)
    user = User.objects.create_superuser("root")
    Queue("emails").enqueue(1, id="job-1")
    client, async_client = Client(raise_request_exception=False), AsyncClient(raise_request_exception=False)
    client.force_login(user)
    async_client.force_login(user)
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("fresh"):
            connections.close_all()
        began = time.monotonic()
        if asked.get("is_async"):
            response: Any = async_to_sync(async_client.get)(asked["path"], headers=asked.get("headers"))
        else:
            response = client.get(asked["path"], headers=asked.get("headers"))
        took = time.monotonic() - began
        text = "" if response.streaming else response.content.decode()
        say({"status": response.status_code, "took": took, "text": text, "headers": dict(response.headers)})


def say(answer: object) -> None:
    """Answer a line."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
