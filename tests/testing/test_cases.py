"""The test case mixin for Django, in a transaction that is never committed."""

# ruff: noqa: PT009, PT027 - unittest's own way

from django.contrib.auth.models import User
from django.db import transaction
from django.test import SimpleTestCase, TestCase, override_settings

from djqueue import job
from djqueue.testing.cases import JobTestMixin
from tests.testing.shop import aname_of, name_of


@override_settings(ROOT_URLCONF="tests.testing.shop")
class ImmediateTests(JobTestMixin, TestCase):
    immediate_jobs = True

    def setUp(self):
        super().setUp()
        self.user = User.objects.create(username="joe")

    def test_view_can_wait_for_a_job(self):
        for kind in ("sync", "async", "mixed"):
            with self.subTest(kind=kind):
                answer = self.client.get(f"/{kind}/{self.user.pk}")
                self.assertEqual(answer.json(), {"name": "joe"})

    async def test_async_client_gets_the_same_response(self):
        for kind in ("sync", "async", "mixed"):
            with self.subTest(kind=kind):
                answer = await self.async_client.get(f"/{kind}/{self.user.pk}")
                self.assertEqual(answer.json(), {"name": "joe"})

    async def test_async_test_shares_its_transaction_with_jobs(self):
        self.assertEqual(await aname_of().aenqueue_and_wait(self.user.pk), "joe")
        self.assertEqual(await name_of().aenqueue_and_wait(self.user.pk), "joe")

    def test_jobs_of_commit_callbacks_run_with_the_callbacks(self):
        rename = self.rename()
        with self.captureOnCommitCallbacks(execute=True):
            transaction.on_commit(lambda: rename.enqueue(self.user.pk))
            self.assertEqual(User.objects.get().username, "joe")
        self.assertEqual(User.objects.get().username, "jim")

    def test_jobs_enqueued_on_commit_run_with_the_callbacks(self):
        with self.captureOnCommitCallbacks(execute=True):
            self.rename(enqueue_on_commit=True).enqueue(self.user.pk)
            self.assertEqual(User.objects.get().username, "joe")
        self.assertEqual(User.objects.get().username, "jim")

    def test_failed_job_raises_in_the_test(self):
        with self.assertRaises(User.DoesNotExist):
            name_of().using(max_attempts=1).enqueue(self.user.pk + 1)

    def rename(self, **options):
        @job(name="rename", **options)
        def rename(pk):
            User.objects.filter(pk=pk).update(username="jim")

        return rename


class QuietTests(JobTestMixin, SimpleTestCase):
    immediate_jobs = True
    raise_job_failures = False

    def test_failed_job_is_recorded_without_raising(self):
        @job(name="fail", max_attempts=1)
        def fail():
            raise KeyError("no")

        self.assertEqual(fail.enqueue().job().state, "failed")


class DrainTests(JobTestMixin, TestCase):
    use_job_clock = True

    def test_drain_shares_the_transaction_of_the_test(self):
        user = User.objects.create(username="joe")
        answer = name_of().enqueue(user.pk)
        self.assertEqual(self.drain_jobs().completed, 1)
        self.assertEqual(answer.wait(0), "joe")

    def test_drained_jobs_run_when_they_are_due(self):
        name = name_of()
        self.assertNotEnqueued(name)
        name.using(delay=60, max_attempts=1).enqueue(7)
        self.assertEnqueued(name, args=[7], queue="default", count=1)
        self.assertEnqueued("name-of")
        self.assertEqual(self.drain_jobs().claimed, 0)
        self.job_clock.advance(60)
        self.assertEqual(self.drain_jobs().failed, 1)

    def test_assertion_error_lists_enqueued_jobs(self):
        name = name_of()
        name.enqueue(7)
        with self.assertRaisesRegex(AssertionError, r"expected 2, found 1; enqueued jobs: name-of\(7\) in"):
            self.assertEnqueued(name, count=2)

    async def test_async_test_can_drain(self):
        user = await User.objects.acreate(username="joe")
        answer = await aname_of().aenqueue(user.pk)
        self.assertEqual((await self.adrain_jobs()).completed, 1)
        self.assertEqual(await answer.await_(0), "joe")

    def test_each_test_has_its_own_storage(self):
        self.assertEqual(self.job_storage.queues.names(), [])
