"""Celery on djqueue's storages, and tasks for existing Celery brokers.

- The broker URL `djqueue://` is a kombu transport (`transport.py`), and `result_backend = "djqueue://"` is a
  result backend (`backend.py`). Both are found through entry points.
- `publish` sends a task to any Celery broker with kombu alone.

Importing this package imports neither kombu nor Celery.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .publishing import publish

__all__ = ["publish"]


def __getattr__(name: str) -> Any:
    if name == "publish":
        from .publishing import publish

        return publish
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
