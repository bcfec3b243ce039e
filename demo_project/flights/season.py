"""Enqueue a season's work: the claims of flights, the charts of airports, the airlines' digests."""

from collections import Counter
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Count

from djqueue import Queue, StorageUnavailableError
from djqueue.models import Job, OutboxJob

from .jobs import OPEN_STATES, assess_claim, close_claims, draw_delay_chart
from .models import Airport, Compensation, DelayChart, Digest, Flight, FlightQuerySet

QUEUES = ("claims", "charts", "digests")

LONG_WAIT_MINUTES = 360
"""Whose passengers waited so long are served first."""


@dataclass(frozen=True, slots=True)
class Season:
    claims: int
    charts: int


def enqueued_before() -> bool:
    """Whether work is open or done; enqueueing is one transaction and never stands half-way."""
    done = any(model.objects.exists() for model in (Compensation, DelayChart, Digest))
    return done or open_jobs() > 0


def open_jobs() -> int:
    return sum(counts(name)[state] for name in QUEUES for state in OPEN_STATES)


def counts(queue: str) -> Counter[str]:
    """Count a queue's jobs by state: jobs in the outbox wait, and the tables have those of a scheduler that
    does not run.
    """
    found: Counter[str] = Counter()
    try:
        found.update(Queue(queue).counts())
    except StorageUnavailableError:
        found.update(dict(Job.objects.filter(queue=queue).values_list("state").annotate(Count("id"))))
    found["waiting"] += OutboxJob.objects.filter(queue=queue).count()
    return found


@transaction.atomic
def enqueue() -> Season:
    """Enqueue everything in one transaction: workers see all of it or nothing."""
    claims = Flight.objects.badly_delayed()
    enqueue_claims(claims.filter(arrival_delay__gte=LONG_WAIT_MINUTES), priority=10)
    enqueue_claims(claims.exclude(arrival_delay__gte=LONG_WAIT_MINUTES), priority=0)
    airports = Airport.objects.filter(code__in=served_airports())
    for airport in airports:
        draw_delay_chart.using(subject=airport).enqueue(airport.code)
    close_claims.enqueue()
    return Season(claims=claims.count(), charts=len(airports))


def enqueue_claims(flights: FlightQuerySet, *, priority: int) -> None:
    ids = flights.values_list("id", flat=True)
    assess_claim.using(priority=priority).enqueue_many([((flight_id,), {}) for flight_id in ids])


def served_airports() -> list[str]:
    """The airports that flights leave from or go to."""
    flights = Flight.objects.order_by()
    origins = set(flights.values_list("origin", flat=True).distinct())
    destinations = set(flights.values_list("destination", flat=True).distinct())
    return sorted(origins | destinations)
