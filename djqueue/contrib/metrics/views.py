"""The URLs for Prometheus and for autoscalers."""

import logging

from django.http import HttpRequest, HttpResponse, JsonResponse

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.errors import StorageError

from .gate import plain, token_required
from .scaling import read_scaling

logger = logging.getLogger("djqueue.metrics")


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
