"""What happens in the demo as long as it stays up: a little business with its good and bad hours."""

import os
import signal
from collections.abc import Callable
from random import Random

from demo_project.flights.jobs import close_claims, draw_delay_chart
from demo_project.flights.models import Airline, Airport
from demo_project.flights.passengers import (
    BROKEN_RELEASE,
    FULL_MAILBOX,
    check_weather,
    close_case,
    find_booking,
    pay_passenger,
    publish_ratings,
    rate_airport,
    write_letter,
)
from djqueue import Queue, chain, group
from djqueue.client import get_storage
from djqueue.models import CronJob

ARCHIVE = "archive"
"""The queue that is paused."""
FIRST_RELEASE, MENDED_RELEASE = "2.3.4", "2.4.1"
RELEASES = {90: BROKEN_RELEASE, 600: MENDED_RELEASE}
"""When which release is deployed, in seconds."""
RATED = 84
"""Airports in the workflow that rates them, of 86 jobs in all."""


class Business:
    """Does what is due, second by second.

    deploy: Restarts the workers with another release of the project.
    """

    def __init__(self, deploy: Callable[[str], None]) -> None:
        self._deploy = deploy
        self._random = Random(2013)
        self._airlines = sorted(Airline.objects.values_list("code", flat=True))
        self._airports = sorted(Airport.objects.values_list("code", flat=True))[:RATED]
        self._second = 0
        self._passenger = 1_000

    def begin(self) -> None:
        """Make the schedules, set limits at run time, and leave a queue paused."""
        make_schedules()
        archive = Queue(ARCHIVE)
        if not archive.is_paused():
            archive.pause()
            for code in self._airports[:12]:
                draw_delay_chart.using(queue=ARCHIVE, unique_key=f"archive:{code}").enqueue(code)
        Queue("payments").set_limits(concurrency=2)

    def go_on(self) -> None:
        """Do the work of a second."""
        self._write_letters()
        self._pay()
        if self._second % 20 == 0:
            self._open_case()
        if self._second % 600 == 30:
            self._rate_airports()
        if self._second % 240 == 150:
            kill_a_worker()
        if self._second in RELEASES:
            self._deploy(RELEASES[self._second])
        self._second += 1

    def _write_letters(self) -> None:
        # The airline in trouble gets more letters than its turn.
        for airline in self._random.choices([*self._airlines, FULL_MAILBOX, FULL_MAILBOX], k=3):
            letter = write_letter.using(concurrency_key=airline, headers={"tenant": airline})
            letter.enqueue(airline, self._next_passenger())

    def _pay(self) -> None:
        for _ in range(self._random.randrange(4)):
            pay_passenger.enqueue(self._next_passenger(), amount=self._random.choice([250, 400, 600]))

    def _open_case(self) -> None:
        passenger = self._next_passenger()
        chain(
            find_booking.node(passenger),
            group(check_weather.node(passenger), write_letter.node(self._airlines[0], passenger)),
            pay_passenger.node(passenger, 400),
            close_case.node(passenger),
        ).enqueue()

    def _rate_airports(self) -> None:
        first, *others = self._airports
        chain(
            rate_airport.node(first),
            group(*(rate_airport.node(code) for code in others)),
            publish_ratings.node("2013"),
            close_case.node(self._next_passenger()),
        ).enqueue()

    def _next_passenger(self) -> int:
        self._passenger += 1
        return self._passenger


def make_schedules() -> None:
    """Make four schedules, one of which is switched off."""
    for name, job, schedule, options in (
        ("delays at Newark, nightly", draw_delay_chart, "30 4 * * *", {"args": ["EWR"]}),
        ("close the week's claims", close_claims, "0 6 * * 1", {}),
        ("ratings of the hour", publish_ratings, "0 * * * *", {"args": ["the hour"]}),
        (
            "delays at JFK, by the hour",
            draw_delay_chart,
            "5 * * * *",
            {"args": ["JFK"], "enabled": False},
        ),
    ):
        CronJob.objects.get_or_create(
            name=name,
            defaults={
                "job_name": job.name,
                "schedule": schedule,
                "timezone": "America/New_York",
                **options,
            },
        )


def kill_a_worker() -> None:
    """Kill a worker process; its supervisor starts another one, which runs its jobs again."""
    for worker in get_storage().workers.all():
        if worker.kind == "runworkers":
            try:
                os.kill(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # It has ended since its last heartbeat.
            return
