"""Event streams for open pages, on servers that can keep connections open cheaply: see `streams`."""

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.translation import gettext as _

from djqueue.conf import get_settings
from djqueue.dashboard import rights, streams
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite

pages = Pages()

TEXT = "text/plain; charset=utf-8"


@pages.show("stream", "stream/", rights.VIEW)
def everything(request: HttpRequest, _site: DashboardSite) -> HttpResponseBase:
    """Stream changes of anything."""
    return _stream(request, "")


@pages.show("queue_stream", "stream/<djq:queue>/", rights.VIEW)
def of_queue(request: HttpRequest, _site: DashboardSite, queue: str) -> HttpResponseBase:
    """Stream changes of one queue."""
    return _stream(request, queue)


def _stream(request: HttpRequest, queue: str) -> HttpResponseBase:
    if not get_settings().dashboard.sse:
        return HttpResponse(_("DJQUEUE['DASHBOARD']['SSE'] is off, so pages poll."), TEXT, status=404)
    if not isinstance(request, ASGIRequest):
        text = _("This server uses WSGI, where each stream would occupy a thread, so pages poll.")
        return HttpResponse(text, TEXT, status=501)
    if not streams.watcher.has_room:
        response = HttpResponse(
            _("The limit on open streams has been reached, so pages poll."), TEXT, status=503
        )
        response["Retry-After"] = str(streams.RETRY_AFTER)
        return response
    if request.method == "HEAD":
        return HttpResponse(content_type="text/event-stream")
    stream = StreamingHttpResponse(streams.EventStream(queue), content_type="text/event-stream")
    stream["X-Accel-Buffering"] = "no"
    # Compressing middleware skips responses with an encoding; it would delay the events.
    stream["Content-Encoding"] = "identity"
    return stream
