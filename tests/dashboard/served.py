"""The tests' project with streams, for a server to run: `DJQUEUE_TEST_STREAMS` is how many may be open."""

import os

import django
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
settings.DJQUEUE = {
    "STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"},
    "DASHBOARD": {"SSE": True, "POLL": 60},
}
settings.MIDDLEWARE = ["django.middleware.gzip.GZipMiddleware", *settings.MIDDLEWARE]
settings.DATABASES["default"]["NAME"] = os.environ["DJQUEUE_TEST_NAME"]
django.setup()

from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402
from django.http import JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402

from djqueue.dashboard.views import streams  # noqa: E402
from tests import urls  # noqa: E402

streams.MAX_STREAMS = int(os.environ["DJQUEUE_TEST_STREAMS"])
streams.HEARTBEAT = 0.5


async def followers(_request: object) -> JsonResponse:
    """How many streams there are, and whether a thread looks for them."""
    return JsonResponse({"streams": streams.watcher.subscribers, "watching": streams.watcher.is_watching})


urls.urlpatterns.append(path("followers/", followers))
application = ASGIStaticFilesHandler(get_asgi_application())
