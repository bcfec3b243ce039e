"""Metrics for Prometheus, a dashboard for Grafana, and a scaling signal for KEDA.

- `urls` has the URLs `metrics` and `scaling`, which need a token: see `views`.
- `DjqueueCollector` is for projects that serve a registry of their own.
- `python -m djqueue.contrib.metrics` prints the Grafana dashboard.

Importing this package does not import prometheus_client, which the extra `metrics` installs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collector import DjqueueCollector

__all__ = ["DjqueueCollector"]


def __getattr__(name: str) -> Any:
    if name == "DjqueueCollector":
        from .collector import DjqueueCollector

        return DjqueueCollector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
