"""Warnings of jobs that no worker handles."""

import logging

import pytest

from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.testing.factories import worker


@pytest.fixture
def warnings(url, storage, caplog):
    """Return the warnings of a write of this job."""
    caplog.set_level(logging.WARNING, "djqueue.spark")

    def warnings(job, queue="mail"):
        caplog.clear()
        Write(WriteOptions.read({"url": url, "queue": queue, "job": job}), ["n"])
        return [record.getMessage() for record in caplog.records]

    return warnings


def test_job_that_no_worker_of_the_queue_handles_is_warned_of(storage, warnings):
    storage.workers.register(worker("a", queues=("mail",), names=("shop.send",)))
    storage.workers.register(worker("b", queues=("images",), names=("shop.sent", "shop.resize")))

    [warning] = warnings("shop.sent")
    assert warning.startswith(
        "job: no running worker handles 'shop.sent'; did you mean 'shop.send'? Its jobs"
    )
    assert warnings("shop.send") == []
    assert warnings("shop.resize", queue="images") == []


def test_no_job_is_warned_of_without_workers(warnings):
    assert warnings("shop.sent") == []
