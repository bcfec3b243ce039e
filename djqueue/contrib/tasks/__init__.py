"""Tasks of `django.tasks`, or of its backport, as jobs.

TASKS = {"default": {"BACKEND": "djqueue.contrib.tasks.DjqueueBackend"}}
"""

from .backend import DjqueueBackend
from .definitions import DjqueueTask, task

__all__ = ["DjqueueBackend", "DjqueueTask", "task"]
