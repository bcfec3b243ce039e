"""Enqueueing the jobs of a season, without workers."""

from .project import DemoProject


def test_season_has_a_claim_per_delayed_flight_and_a_chart_per_airport(project: DemoProject) -> None:
    answer = project.evaluate(
        """
from demo_project.flights import season
from demo_project.flights.models import Flight
from djqueue.models import Job
work = season.enqueue()
claims = Job.objects.filter(queue="claims")
flights = Flight.objects.badly_delayed()
answer = {
    "claims": [work.claims, claims.count(), flights.count()],
    "urgent": [
        claims.filter(priority=10).count(), flights.filter(arrival_delay__gte=360).count()
    ],
    "charts": [
        work.charts, Job.objects.filter(queue="charts").count(), len(season.served_airports())
    ],
    "names": list(Job.objects.filter(queue="digests").values_list("name", flat=True)),
}
"""
    )
    for numbers in (answer["claims"], answer["urgent"], answer["charts"]):
        assert len(set(numbers)) == 1
        assert numbers[0] > 0
    assert answer["names"] == ["demo_project.flights.jobs.close_claims"]


def test_season_is_enqueued_only_once(project: DemoProject) -> None:
    first, second = project.evaluate(
        """
from io import StringIO
from django.core.management import call_command
answer = []
for output in (StringIO(), StringIO()):
    call_command("enqueue_claims", stdout=output)
    answer.append(output.getvalue())
"""
    )
    assert "claims to assess" in first
    assert "The season's work is enqueued already." in second


def test_rolled_back_season_enqueues_no_jobs(project: DemoProject) -> None:
    jobs = project.evaluate(
        """
from django.db import transaction
from demo_project.flights import season
from djqueue.models import Job
with transaction.atomic():
    season.enqueue()
    transaction.set_rollback(True)
answer = [Job.objects.count(), season.enqueued_before()]
"""
    )
    assert jobs == [0, False]
