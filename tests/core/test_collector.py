"""The garbage collector rests while much is made that stays, and only then."""

import gc

import pytest

from djqueue.core.collector import MANY, gc_paused


@pytest.fixture(autouse=True)
def _enabled():
    gc.enable()
    yield
    gc.enable()


def test_it_rests_until_the_last_who_asked_is_done():
    with gc_paused(MANY):
        with gc_paused(MANY):
            assert not gc.isenabled()
        assert not gc.isenabled()

    assert gc.isenabled()


def test_a_few_objects_are_not_worth_it():
    with gc_paused(MANY - 1):
        assert gc.isenabled()


def test_an_error_does_not_leave_it_resting():
    with pytest.raises(ValueError, match="no"), gc_paused(MANY):
        raise ValueError("no")

    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()

    with gc_paused(MANY):
        pass

    assert not gc.isenabled()
