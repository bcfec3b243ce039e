"""Tools for test cases of unittest and Django."""

from typing import Any
from unittest import TestCase

from djqueue.runtime.events import Counters
from djqueue.storage.base import Storage

from .assertions import JobAssertions
from .clock import JobClock
from .draining import adrain, drain
from .environment import job_environment


class JobTestMixin(JobAssertions, TestCase):
    """Mix it into a TestCase: each test has an empty storage in memory.

        class OrderTests(JobTestMixin, TestCase):
            def test_an_order_sends_a_receipt(self):
                place_order(42)
                self.assertEnqueued(send_receipt, args=[42], queue="emails", count=1)
                self.drain_jobs()
                self.assertEqual(len(mail.outbox), 1)

    With `immediate_jobs = True`, jobs run when they are enqueued.
    """

    immediate_jobs = False
    """Whether jobs run when they are enqueued."""
    raise_job_failures = True
    """Whether an enqueue raises the exception of a job that has failed, with `immediate_jobs`."""
    use_job_clock = False
    """Whether delays and schedules follow `job_clock`."""

    job_storage: Storage
    """The storage of the current test."""
    job_clock: JobClock
    """The clock of the current test, which advances only when the test moves it, with `use_job_clock`."""

    def setUp(self) -> None:
        """Replace the storage for this test."""
        super().setUp()
        environment = self.enterContext(
            job_environment(
                immediate=self.immediate_jobs,
                clock=self.use_job_clock,
                raise_failures=self.raise_job_failures,
            )
        )
        self.job_storage = environment.storage
        if self.use_job_clock:
            self.job_clock = environment.clock

    def drain_jobs(self, **options: Any) -> Counters:
        """Run all waiting jobs, and the jobs that they enqueue: see `djqueue.testing.draining.drain`."""
        return drain(**options)

    async def adrain_jobs(self, **options: Any) -> Counters:
        """Async version of `drain_jobs`."""
        return await adrain(**options)
