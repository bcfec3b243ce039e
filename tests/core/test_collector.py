"""The garbage collector is paused while many long-lived objects are made."""

import gc

import pytest

from djqueue.core.threads import MIN_OBJECTS, gc_paused


@pytest.fixture(autouse=True)
def _enabled():
    gc.enable()
    yield
    gc.enable()


def test_garbage_collector_is_paused_until_the_last_pause_ends():
    with gc_paused(MIN_OBJECTS):
        with gc_paused(MIN_OBJECTS):
            assert not gc.isenabled()
        assert not gc.isenabled()

    assert gc.isenabled()


def test_small_batches_do_not_pause_the_garbage_collector():
    with gc_paused(MIN_OBJECTS - 1):
        assert gc.isenabled()


def test_garbage_collector_resumes_after_an_error():
    with pytest.raises(ValueError, match="no"), gc_paused(MIN_OBJECTS):
        raise ValueError("no")

    assert gc.isenabled()


def test_disabled_garbage_collector_stays_disabled():
    gc.disable()

    with gc_paused(MIN_OBJECTS):
        pass

    assert not gc.isenabled()
