"""The winner among several jobs with one unique key."""

import pytest

from djqueue.core.options import ON_DUPLICATE
from djqueue.core.policies import Succession, succession


@pytest.mark.parametrize("on_duplicate", ON_DUPLICATE)
def test_new_job_takes_a_free_unique_key(on_duplicate):
    assert succession(on_duplicate, None, None) == Succession()


@pytest.mark.parametrize(
    ("on_duplicate", "active", "pending", "expected"),
    [
        ("keep", None, "old", None),
        ("replace", None, "old", Succession("old", None, keeps_time=True)),
        ("debounce", None, "old", Succession("old", None, keeps_time=False)),
        ("keep_last_if_active", None, "old", Succession("old", None, keeps_time=True)),
        ("keep", "running", None, None),
        ("replace", "running", None, None),
        ("debounce", "running", None, None),
        ("keep_last_if_active", "running", None, Succession(None, "running", keeps_time=True)),
        ("keep_last_if_active", "running", "next", Succession("next", "running", keeps_time=True)),
    ],
)
def test_on_duplicate_decides_between_the_new_job_and_the_others(on_duplicate, active, pending, expected):
    assert succession(on_duplicate, active, pending) == expected
