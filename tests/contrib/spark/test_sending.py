"""Calls of a storage that is away for a while."""

import pytest

from djqueue.contrib.spark.sending import LAST_WAIT, Sending
from djqueue.core.errors import OptionError, StorageUnavailableError


class Flaky:
    """Fails so often, and then answers what it was asked."""

    def __init__(self, failures, error=None):
        self.failures = failures
        self.error = error or StorageUnavailableError("the server loads its data")
        self.asked = []

    def __call__(self, *args, **kwargs):
        self.asked.append((args, kwargs))
        if len(self.asked) <= self.failures:
            raise self.error
        return "answer"


def test_what_is_away_is_asked_again_with_the_same_words():
    naps, storage = [], Flaky(3)

    assert Sending(5, naps.append)(storage, "queue", ids=["a"]) == "answer"

    assert storage.asked == [(("queue",), {"ids": ["a"]})] * 4
    assert [wait <= nap <= 2 * wait for wait, nap in zip((0.5, 1, 2), naps, strict=True)] == [True] * 3


def test_at_last_its_error_is_the_answer():
    naps, storage = [], Flaky(99)

    with pytest.raises(StorageUnavailableError, match="loads its data"):
        Sending(7, naps.append)(storage)

    assert (len(storage.asked), len(naps)) == (8, 7)
    assert max(naps) <= 2 * LAST_WAIT


def test_other_errors_are_not_tried_again():
    storage = Flaky(1, OptionError("priority: 'high' is not a number"))

    with pytest.raises(OptionError):
        Sending(5, pytest.fail)(storage)

    assert len(storage.asked) == 1
