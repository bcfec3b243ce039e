"""Progress: a bar if the value is a fraction, text otherwise."""

from decimal import Decimal

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.job import ProgressReport
from djqueue.dashboard import rendering, rights
from tests.dashboard.acting import claim
from tests.dashboard.visiting import PAGES, address, logged_in, one_with

BY_NAME = {page.name: page for page in PAGES}


@pytest.mark.parametrize(
    ("value", "share", "text", "percent"),
    [
        (0, "0.0000", "", 0),
        (0.256, "0.2560", "", 25),
        (1, "1.0000", "", 100),
        ({"done": 3, "of": 10}, "0.3000", "3 / 10", 30),
        ({"done": 1_500, "of": 1_500}, "1.0000", "1,500 / 1,500", 100),
        ({"done": 999, "of": 1_000}, "0.9990", "999 / 1,000", 99),
    ],
)
def test_fraction_is_shown_as_a_bar(value, share, text, percent):
    assert rendering.progress(value) == (text, share, percent)


@pytest.mark.parametrize(
    "value",
    [
        True,
        -0.1,
        1.5,
        float("nan"),
        "half",
        [3, 10],
        {"done": 3},
        {"done": 3, "of": 0},
        {"done": 11, "of": 10},
        {"done": -1, "of": 10},
        {"done": True, "of": 10},
        {"done": "3", "of": 10},
        {"done": 3, "of": float("inf")},
        {"done": 3, "of": 10, "step": "mail"},
        Decimal("0.5"),
    ],
)
def test_other_progress_is_shown_as_text(value):
    found = rendering.progress(value)
    assert found is not None
    assert found.share == ""
    assert found.text == str(value) or repr(value) == found.text


def test_no_progress_shows_nothing():
    assert rendering.progress(None) is None


@pytest.mark.django_db
def test_page_of_job_has_an_accessible_progress_bar_and_its_log_newest_first(memory):
    Queue("emails").enqueue(1, id="job-1")
    [claimed] = claim()
    get_storage().report(
        [
            ProgressReport(
                "emails",
                "job-1",
                claimed.token,
                {"done": 3, "of": 10},
                ((1_000, "first line"), (2_000, "second line")),
            )
        ]
    )
    html = logged_in(one_with(rights.VIEW)).get(address(BY_NAME["job"])).content.decode()
    assert '<progress value="0.3000" max="1" aria-valuetext="3 / 10, 30%">30%</progress>' in html
    assert html.index("second line") < html.index("first line")
    assert "Newest first." in html
