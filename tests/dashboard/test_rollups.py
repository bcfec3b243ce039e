"""Charts of hourly rollups that Spark computed, on the page of metrics."""

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.contrib.spark.models import Rollup
from djqueue.core.units import to_datetime
from djqueue.dashboard.views.jobtypes import HOUR, rollups_within
from tests.dashboard.visiting import PAGES, address, logged_in, make_superuser

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory"), pytest.mark.dialect]

METRICS = next(page for page in PAGES if page.name == "job_types")


def shown(**query):
    response = logged_in(make_superuser()).get(address(METRICS, **query))
    assert response.status_code == 200
    return response


def roll(hour, queue="emails", name="send", **more):
    return Rollup.objects.create(
        hour=to_datetime(hour), queue=queue, name=name, written_at=to_datetime(hour), **more
    )


def test_steps_add_up_counts_and_keep_the_longest_time():
    roll(0, completed=1, wait_p95=10, run_p99=7_000)
    roll(0, name="print", completed=2, failed=1, reasons={"timeout": 1})
    roll(HOUR, completed=4, failed=3, wait_p95=30, reasons={"timeout": 1, "stalled": 2})
    roll(2 * HOUR, "images", enqueued=5)
    roll(3 * HOUR, "secrets", enqueued=9)

    found = rollups_within(0, 4 * HOUR, 2 * HOUR, ["emails", "images"])

    assert found is not None
    first, second = found.steps
    assert (first.counts, second.counts) == ((0, 7, 4, 0), (5, 0, 0, 0))
    assert first.times == (None, 30, None, None, None, 7_000)
    assert found.reasons == [("stalled", 2), ("timeout", 2)]
    assert rollups_within(0, 4 * HOUR, HOUR, ["others"]) is None


def test_window_of_hours_shows_charts_of_rollups_with_tables():
    Queue("emails").enqueue(1)
    get_storage().sweep()
    hour = shown(window="hour").context["report"].end // HOUR * HOUR - 2 * HOUR
    roll(hour, completed=1234, failed=5, run_p50=1_500, reasons={"timeout": 5})
    roll(hour, "images", completed=9)

    response = shown(window="day", queue="emails")
    page = response.content.decode()

    [step] = [one for one in response.context["rolled"].steps if any(one.counts)]
    assert (step.start, step.counts) == (hour, (0, 1234, 5, 0))
    for figure in ("djq-rolled-jobs", "djq-rolled-times", "djq-rolled-reasons"):
        assert f'id="{figure}"' in page
    assert f'<td data-v="{hour // 1_000}">' in page
    assert '<td data-v="1.500">1.5 s</td>' in page


def test_charts_of_rollups_are_absent_without_rollups_and_within_an_hour():
    Queue("emails").enqueue(1)
    roll(shown().context["report"].start // HOUR * HOUR, completed=1)

    for window in ("hour", "quarter"):
        response = shown(window=window)
        assert ("djq-rollups" in response.content.decode()) is (window == "quarter")
    Rollup.objects.all().delete()
    assert shown(window="month").context["rolled"] is None
