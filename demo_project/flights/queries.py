"""What the jobs read from the database, handed over as the plain records of the pure modules."""

from collections.abc import Iterator

from django.db.models import QuerySet, Sum
from django.utils.timezone import get_current_timezone, localtime

from .charts import Sample
from .digests import Line, Summary
from .models import Airline, Compensation, Flight, Weather
from .rules import Claim, Conditions, Refusal

LARGEST_CLAIMS = 10


def claim_of(flight: Flight) -> Claim:
    return Claim(
        tail_number=flight.tail_number,
        distance_miles=flight.distance,
        arrival_delay=flight.arrival_delay,
        seats=flight.plane.seats if flight.plane else None,
        weather=weather_at_departure(flight),
    )


def weather_at_departure(flight: Flight) -> Conditions | None:
    hour = flight.scheduled_departure.replace(minute=0)
    weather = Weather.objects.filter(airport=flight.origin_id, hour=hour).first()
    if weather is None:
        return None
    return Conditions(visibility_miles=weather.visibility, gust_mph=weather.wind_gust)


def samples_at(airport: str) -> Iterator[Sample]:
    """Every flight from or to the airport."""
    zone = get_current_timezone()
    flights = Flight.objects.touching(airport).order_by().values_list("scheduled_departure", "arrival_delay")
    for scheduled_departure, arrival_delay in flights.iterator(chunk_size=10_000):
        local = scheduled_departure.astimezone(zone)
        yield Sample(local.month, local.hour, arrival_delay)


def summary_of(airline: Airline) -> Summary:
    """The state of the airline's claims once each of them is assessed or refused."""
    compensations = Compensation.objects.filter(flight__airline=airline)
    unassessed = Flight.objects.badly_delayed().filter(airline=airline, compensation=None)
    return Summary(
        code=airline.code,
        airline=airline.name,
        flights=airline.flights.count(),
        assessed=compensations.count(),
        extraordinary=compensations.filter(extraordinary=True).count(),
        total=compensations.aggregate(total=Sum("total", default=0))["total"],
        refused={
            Refusal.ARRIVAL_UNKNOWN: unassessed.arrival_unknown().count(),
            Refusal.AIRCRAFT_UNKNOWN: unassessed.aircraft_unknown().count(),
        },
        largest=tuple(line_of(compensation) for compensation in largest(compensations)),
    )


def largest(compensations: QuerySet[Compensation]) -> QuerySet[Compensation]:
    return compensations.filter(total__gt=0).select_related("flight")[:LARGEST_CLAIMS]


def line_of(compensation: Compensation) -> Line:
    flight = compensation.flight
    return Line(
        date=localtime(flight.scheduled_departure).date(),
        flight=f"{flight.airline_id} {flight.number}",
        route=f"{flight.origin_id}-{flight.destination_id}",
        delay=compensation.delay,
        total=compensation.total,
    )
