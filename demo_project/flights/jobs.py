"""The claims office's jobs. Every handler may run twice: it writes the same rows and files."""

from datetime import datetime
from io import BytesIO

from django.core.files.base import ContentFile
from django.db import transaction

from djqueue import Queue, Snooze, UnrecoverableError, current_job, job

from .charts import draw, statistics_of
from .digests import compose
from .models import Airline, Airport, Compensation, DelayChart, Digest, Flight
from .queries import claim_of, samples_at, summary_of
from .rules import UnassessableClaimError, assess

OPEN_STATES = ("waiting", "delayed", "blocked", "active")


@job(queue="claims", max_attempts=3, timeout=30)
def assess_claim(flight_id: int) -> int:
    """Work out what a badly delayed flight owes its passengers, in dollars."""
    return compensate(Flight.objects.select_related("plane").get(pk=flight_id))


@job(queue="claims", max_attempts=3, timeout=30)
def assess_departure(airline: str, number: int, scheduled_departure: datetime) -> int:
    """The same of a flight that is named as its airline names it: Spark knows no row of the database."""
    departures = Flight.objects.filter(airline=airline, number=number)
    return compensate(departures.select_related("plane").get(scheduled_departure=scheduled_departure))


def compensate(flight: Flight) -> int:
    """Note what is owed; UnrecoverableError where the data that the rule needs are missing."""
    try:
        assessment = assess(claim_of(flight))
    except UnassessableClaimError as error:
        raise UnrecoverableError(str(error)) from error
    Compensation.objects.update_or_create(
        flight=flight,
        defaults={
            "band": assessment.band,
            "delay": assessment.delay,
            "seats": assessment.seats,
            "extraordinary": assessment.extraordinary,
            "per_passenger": assessment.per_passenger,
            "total": assessment.total,
        },
    )
    return assessment.total


@job(queue="charts", max_attempts=3, timeout=60)
def draw_delay_chart(airport_code: str) -> str:
    """Draw the delays of an airport's flights; the chart's path under the media directory."""
    airport = Airport.objects.get(pk=airport_code)
    statistics = statistics_of(samples_at(airport_code))
    current_job().log(str(statistics))
    current_job().progress(0.6)
    png = BytesIO()
    draw(str(airport), statistics).save(png, format="PNG")
    current_job().progress(0.9)
    chart, _ = DelayChart.objects.update_or_create(
        airport=airport,
        defaults={
            "flights": statistics.flights,
            "image": ContentFile(png.getvalue(), name=f"{airport_code}.png"),
        },
    )
    return chart.image.name


@job(queue="digests", max_attempts=5, timeout=30)
def close_claims() -> int:
    """Enqueue the digests once no claim is open any more; until then, look again in a second."""
    counts = Queue("claims").counts()
    still_open = sum(counts[state] for state in OPEN_STATES)
    if still_open:
        raise Snooze(f"{still_open} claims are open", delay=1)
    airlines = list(Airline.objects.all())
    for airline in airlines:
        send_digest.using(unique_key=f"digest:{airline.code}", subject=airline).enqueue(airline.code)
    return len(airlines)


@job(queue="digests", max_attempts=5, timeout=30)
def send_digest(airline_code: str) -> bool:
    """Mail an airline the sum of its claims; False if the mail went out before."""
    airline = Airline.objects.get(pk=airline_code)
    summary = summary_of(airline)
    # The row holds off a second mail, and a mail that cannot be sent takes its row back.
    with transaction.atomic():
        _, created = Digest.objects.get_or_create(
            airline=airline,
            defaults={
                "claims": summary.claims,
                "refused": summary.refusals,
                "total": summary.total,
            },
        )
        if created:
            compose(summary).send()
    return created
