"""The policy under which the pages have to work: nothing but the site's own files, nothing inline."""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

STRICT = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"


class StrictPolicy:
    """Middleware that sends it with each answer."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response["Content-Security-Policy"] = STRICT
        return response
