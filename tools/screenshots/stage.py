"""What the demo does while its pictures are taken: run in the demo project's own environment.

The season is over when this begins. Claims are assessed again, in waves; one queue is paused, and jobs of
all states are there to be looked at.
"""

import random
import time

import django

django.setup()

from demo_project.demo.business import make_schedules  # noqa: E402
from demo_project.flights.jobs import assess_claim, close_claims, draw_delay_chart, send_digest  # noqa: E402
from demo_project.flights.models import Airline, Airport, Compensation  # noqa: E402
from djqueue import Queue, chain, group  # noqa: E402

WAVES, PAUSE = 24, 5.0
"""How often, and seconds between: charts by the minute need some minutes."""


def jobs() -> None:
    """Jobs that wait, as their queue is paused or their time has not come; a flow of which a part has run."""
    for airline in Airline.objects.order_by("code")[:4]:
        send_digest.using(delay=3600, unique_key=f"again:{airline.code}").enqueue(airline.code)
    Queue("charts").pause()
    for airport in Airport.objects.order_by("code")[:12]:
        draw_delay_chart.using(priority=5 if airport.code == "ATL" else 0).enqueue(airport.code)
    Queue("claims").set_limits(rate="500/s")
    first, *others = [flight.flight_id for flight in Compensation.objects.order_by("flight_id")[:4]]
    chain(
        assess_claim.node(first),
        group(*(assess_claim.node(flight) for flight in others)),
        draw_delay_chart.node("JFK"),
        close_claims.node(),
    ).enqueue()


def waves() -> None:
    """Claims assessed again, some more and some less."""
    chance = random.Random(2013)
    flights = list(Compensation.objects.order_by("flight_id").values_list("flight_id", flat=True))
    for number in range(WAVES):
        for flight in chance.sample(flights, min(len(flights), 20 + 15 * (number % 7))):
            assess_claim.enqueue(flight)
        time.sleep(PAUSE)


if __name__ == "__main__":
    make_schedules()
    jobs()
    waves()
