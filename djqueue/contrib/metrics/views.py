"""The URLs for Prometheus and for autoscalers. They need a bearer token, unless they are public."""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.crypto import constant_time_compare

from djqueue.client import get_storage
from djqueue.conf import TOKEN_FORM, get_settings, is_token
from djqueue.contrib.metrics.scaling import read_scaling
from djqueue.core.errors import ConfigurationError, StorageError
from djqueue.core.logs import Log

logger = Log("djqueue.metrics")

TOKEN_VARIABLE = "DJQUEUE_MONITORING_TOKEN"  # noqa: S105 - a name
"""Environment variable with the token, if the settings have none."""
METHODS = ("GET", "HEAD")

View = Callable[..., HttpResponseBase]


def token_required(view: View) -> View:
    """Let a view answer only GET requests that send the token of `MONITORING`.

    Without a token, and unless `PUBLIC` is true, every request is refused. Answers are never cached.
    """

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response = _refusal(request) or view(request, *args, **kwargs)
        response.headers["Cache-Control"] = "no-store"
        return response

    # Clients of these URLs do not log in: see LoginRequiredMiddleware.
    guarded.login_required = False  # type: ignore[attr-defined]
    return guarded


def expected_token() -> str | None:
    """Return the token of TOKEN, TOKEN_FILE or the environment; None without one.

    Raises:
        ConfigurationError: The file cannot be read, or the token is malformed. The message does not show it.
    """
    settings = get_settings().monitoring
    if settings.token is not None:
        return settings.token
    if settings.token_file is not None:
        source = f"the file {settings.token_file!r} of MONITORING['TOKEN_FILE']"
        try:
            token = Path(settings.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{source} cannot be read: {error}") from error
    else:
        source = f"the environment variable {TOKEN_VARIABLE}"
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            return None
    if not is_token(token):
        raise ConfigurationError(f"{source} must have {TOKEN_FORM}; got {len(token)} characters")
    return token


def plain(text: str, status: int) -> HttpResponse:
    """Return a plain text answer."""
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")


def _refusal(request: HttpRequest) -> HttpResponse | None:
    """Return the answer to a request without access; None for one with access."""
    if request.method not in METHODS:
        response = plain("Only GET and HEAD are allowed.", 405)
        response.headers["Allow"] = ", ".join(METHODS)
        return response
    if get_settings().monitoring.public:
        return None
    token = expected_token()
    if token is None:
        return plain(
            "This URL needs a token. Set DJQUEUE['MONITORING']['TOKEN'] or ['TOKEN_FILE'], or the "
            f"environment variable {TOKEN_VARIABLE}; or set ['PUBLIC'] to True if anyone may read it.",
            403,
        )
    scheme, _, sent_token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and constant_time_compare(sent_token.strip(), token):
        return None
    response = plain("Send the token in the header Authorization: Bearer TOKEN.", 401)
    response.headers["WWW-Authenticate"] = 'Bearer realm="djqueue"'
    return response


@token_required
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer a scrape, in the format that the client prefers: Prometheus's text or OpenMetrics."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        from .collector import DjqueueCollector
    except ImportError as error:
        logger.error("Could not answer a scrape: %s", error)
        return plain("Metrics need prometheus_client: pip install 'djqueue[metrics]'", 501)
    registry = CollectorRegistry()
    registry.register(DjqueueCollector())
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    try:
        return HttpResponse(encode(registry), content_type=content_type)
    except StorageError as error:
        return _unavailable("a scrape", error)


@token_required
def scaling(request: HttpRequest) -> HttpResponse:
    """Answer with the number of workers wanted; `queue` in the query limits it to some queues."""
    queues = list(dict.fromkeys(request.GET.getlist("queue"))) or None
    try:
        return JsonResponse(read_scaling(get_storage(), get_settings(), queues).as_json())
    except StorageError as error:
        return _unavailable("an autoscaler", error)


def _unavailable(what: str, error: StorageError) -> HttpResponse:
    logger.warning("Could not answer %s, because the storage is unavailable: %s", what, error)
    return plain("The storage of the jobs is unavailable; see the log of the server.", 503)
