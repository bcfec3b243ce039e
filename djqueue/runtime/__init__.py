"""What `runworkers` runs, and what handlers ask: the worker and the job that it is running."""

from .context import JobContext, current_job
from .worker import Worker

__all__ = ["JobContext", "Worker", "current_job"]
