"""The worker that `runworkers` runs, and the context of the job that a handler runs."""

from .runs import JobContext, current_job
from .worker import Worker

__all__ = ["JobContext", "Worker", "current_job"]
