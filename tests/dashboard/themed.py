"""The tests' project under a theme of the admin, served until its input ends.

`DJQUEUE_TEST_THEME` is the app of the theme; `DJQUEUE_TEST_NAME` is the database. The first line of output is
JSON: the address, and the session of a superuser.
"""

import json
import os
import sys
import threading

import django
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
settings.INSTALLED_APPS = [os.environ["DJQUEUE_TEST_THEME"], *settings.INSTALLED_APPS]
settings.DATABASES["default"]["NAME"] = os.environ["DJQUEUE_TEST_NAME"]
settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.contrib.staticfiles.handlers import StaticFilesHandler  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.test import Client  # noqa: E402

from djqueue import Queue, chain, group  # noqa: E402
from djqueue.models import CronJob  # noqa: E402
from tests.dashboard.acting import fail  # noqa: E402


class QuietHandler(WSGIRequestHandler):
    """Logs nothing, as nothing reads the log."""

    def log_message(self, *_arguments: object) -> None:
        pass


def main() -> None:
    """Prepare jobs of most states, and serve."""
    call_command("migrate", verbosity=0)
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    queue = Queue("emails")
    queue.enqueue({"to": "ann@example.com"}, id="job-1")
    fail("job-1")
    queue.enqueue_many(range(5))
    chain(queue.node(1, id="flow-1"), group(*(queue.node(number) for number in range(2)))).enqueue()
    CronJob(name="night", job_name="emails", schedule="0 4 * * *").save(force_insert=True)
    server = ThreadedWSGIServer(("127.0.0.1", 0), QuietHandler)
    server.set_app(StaticFilesHandler(get_wsgi_application()))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    session = client.cookies[settings.SESSION_COOKIE_NAME].value
    url = f"http://127.0.0.1:{server.server_port}"
    sys.stdout.write(json.dumps({"url": url, "session": session}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


main()
