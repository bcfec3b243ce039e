"""The address that an open page follows, where the server can keep it open at no cost: see `streams`."""

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
    """Whether anything has changed."""
    return _stream(request, "")


@pages.show("queue_stream", "stream/<djq:queue>/", rights.VIEW)
def of_queue(request: HttpRequest, _site: DashboardSite, queue: str) -> HttpResponseBase:
    """Whether something of a queue has."""
    return _stream(request, queue)


def _stream(request: HttpRequest, queue: str) -> HttpResponseBase:
    if not get_settings().dashboard.sse:
        return HttpResponse(_("DJQUEUE['DASHBOARD']['SSE'] is off, so pages poll."), TEXT, status=404)
    if not isinstance(request, ASGIRequest):
        said = _("This server uses WSGI, where each stream would occupy a thread, so pages poll.")
        return HttpResponse(said, TEXT, status=501)
    if not streams.watcher.has_room:
        response = HttpResponse(_("The limit of open streams is reached, so pages poll."), TEXT, status=503)
        response["Retry-After"] = str(streams.RETRY_AFTER)
        return response
    if request.method == "HEAD":
        return HttpResponse(content_type="text/event-stream")
    stream = StreamingHttpResponse(streams.EventStream(queue), content_type="text/event-stream")
    stream["X-Accel-Buffering"] = "no"
    # What compresses answers leaves alone what says how it is encoded; it would hold the lines back.
    stream["Content-Encoding"] = "identity"
    return stream
