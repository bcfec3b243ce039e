"""Hold what Spark and the jobs have counted against the database, and against each other."""

from collections.abc import Iterator
from dataclasses import dataclass

from django.db.models import Sum

from demo_project.demo.tally import OTHER, Count, dead_letters_by_reason
from demo_project.flights.models import Compensation, Flight, FlightQuerySet
from demo_project.flights.rules import Refusal
from djqueue import Queue
from djqueue.contrib.spark.models import Rollup
from djqueue.models import Job, JobState

QUEUE = "claims"
NAME = "demo_project.flights.jobs.assess_departure"


@dataclass(kw_only=True)
class Account:
    """What the steps say of themselves."""

    kept: int = 0
    """Flights that were not badly delayed."""
    delayed: int = 0
    inserted: int = 0
    """Jobs that this run has brought, or an earlier one."""
    duplicates: int = 0
    repeated: int = 0
    """Jobs that the same write brought when it was made again."""
    archived: int = 0
    """Rows of the archive, as read from its files."""


def tally(account: Account, month: int | None) -> Iterator[Count]:
    """All the counts of a finished run."""
    flights = of_month(month)
    delayed = flights.badly_delayed()
    refused, seatless = delayed.arrival_unknown().count(), delayed.aircraft_unknown().count()
    letters = dead_letters_by_reason()
    completed, dead = finished_jobs()
    rolled_up = Rollup.objects.filter(name=NAME).aggregate(
        completed=Sum("completed", default=0), dead=Sum("failed", default=0)
    )
    yield Count("flights read", flights.count(), account.kept + account.delayed)
    yield Count("  badly delayed", delayed.count(), account.delayed)
    yield Count("jobs inserted, or there before", account.delayed, account.inserted + account.duplicates)
    yield Count("  brought by the same write again", 0, account.repeated)
    yield Count("jobs completed, or dead", account.inserted, completed + dead)
    yield Count("  assessed", delayed.count() - refused - seatless, Compensation.objects.count())
    yield Count(f"  dead letter: {Refusal.ARRIVAL_UNKNOWN}", refused, letters[Refusal.ARRIVAL_UNKNOWN])
    yield Count(f"  dead letter: {Refusal.AIRCRAFT_UNKNOWN}", seatless, letters[Refusal.AIRCRAFT_UNKNOWN])
    yield Count(f"  dead letter: {OTHER}", 0, letters[OTHER])
    yield Count("jobs in the archive", completed + dead, account.archived)
    yield Count("jobs completed, in the rollups", completed, rolled_up["completed"])
    yield Count("jobs dead, in the rollups", dead, rolled_up["dead"])


def of_month(month: int | None) -> FlightQuerySet:
    flights = Flight.objects.order_by()
    return flights if month is None else flights.filter(scheduled_departure__month=month)


def queued_jobs() -> int:
    """Jobs that Redis knows, in whatever state."""
    return sum(Queue(QUEUE).counts().values())


def finished_jobs() -> tuple[int, int]:
    """Claims that have completed, and dead ones, as the history has them."""
    claims = Job.objects.filter(name=NAME)
    return (
        claims.filter(state=JobState.COMPLETED).count(),
        claims.filter(state=JobState.FAILED).count(),
    )
