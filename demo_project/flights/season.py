"""Enqueue a season's work: the claims of flights, the charts of airports, the airlines' digests."""

from dataclasses import dataclass

from django.db import transaction

from djqueue import Queue

from .jobs import OPEN_STATES, assess_claim, close_claims, draw_delay_chart
from .models import Compensation, DelayChart, Digest, Flight

QUEUES = ("claims", "charts", "digests")


@dataclass(frozen=True, slots=True)
class Season:
    claims: int
    charts: int


def enqueued_before() -> bool:
    """Whether work is open or done; enqueueing is one transaction and never stands half-way."""
    done = any(model.objects.exists() for model in (Compensation, DelayChart, Digest))
    return done or open_jobs() > 0


def open_jobs() -> int:
    return sum(Queue(name).counts()[state] for name in QUEUES for state in OPEN_STATES)


@transaction.atomic
def enqueue() -> Season:
    """Enqueue everything in one transaction: workers see all of it or nothing."""
    flights = Flight.objects.badly_delayed().values_list("id", flat=True)
    assess_claim.enqueue_many([((flight,), {}) for flight in flights])
    airports = served_airports()
    draw_delay_chart.enqueue_many([((airport,), {}) for airport in airports])
    close_claims.enqueue()
    return Season(claims=len(flights), charts=len(airports))


def served_airports() -> list[str]:
    """The airports that flights leave from or go to."""
    flights = Flight.objects.order_by()
    origins = set(flights.values_list("origin", flat=True).distinct())
    destinations = set(flights.values_list("destination", flat=True).distinct())
    return sorted(origins | destinations)
