"""The office's daily business with passengers: letters, payments, and workflows that rate the airports."""

import time

from django.conf import settings
from django.db.models import Avg

from djqueue import job

from .models import Airline, Airport, Flight

FULL_MAILBOX = "MQ"
"""The airline to which no letter can be delivered."""
BROKEN_RELEASE = "2.4.0"
"""The release that cannot pay passengers without a bank account."""


class MailboxFullError(Exception):
    """The mailbox of an airline takes no more letters."""


@job(queue="letters", max_attempts=2, backoff=5, timeout=20)
def write_letter(airline: str, passenger: int) -> str:
    """Write to an airline on behalf of a passenger."""
    name = str(Airline.objects.get(pk=airline))
    work(passenger, longest=0.6)
    if airline == FULL_MAILBOX:
        raise MailboxFullError(f"the mailbox of {name} is full: letter {passenger} was returned")
    return f"Dear {name}, passenger {passenger} asks for compensation."


@job(queue="payments", max_attempts=2, backoff=2, timeout=20)
def pay_passenger(passenger: int, amount: int) -> int:
    """Pay a passenger what an airline owes, in dollars."""
    work(passenger, longest=0.4)
    account = {} if passenger % 5 == 0 else {"iban": f"DE{passenger:020}"}
    if not account and settings.RELEASE == BROKEN_RELEASE:
        return amount if account["iban"] else 0
    return amount


@job(queue="bookings", max_attempts=3, timeout=30)
def find_booking(passenger: int) -> int:
    """Look a booking up."""
    return work(passenger, longest=1.5)


@job(queue="bookings", max_attempts=3, timeout=30)
def check_weather(passenger: int) -> int:
    """Ask whether the weather excuses the delay."""
    return work(passenger * 3, longest=3)


@job(queue="bookings", max_attempts=3, timeout=30)
def close_case(passenger: int) -> int:
    """Close the case of a passenger."""
    return work(passenger, longest=0.3)


@job(queue="ratings", max_attempts=2, timeout=60)
def rate_airport(code: str) -> float | None:
    """Return the mean delay at an airport, in minutes."""
    work(sum(map(ord, code)), longest=1.2)
    delay = Flight.objects.filter(destination=Airport.objects.get(pk=code)).aggregate(
        mean=Avg("arrival_delay")
    )["mean"]
    return None if delay is None else round(delay, 1)


@job(queue="ratings", max_attempts=2, timeout=60)
def publish_ratings(of: str) -> str:
    """Publish the ratings of all airports."""
    time.sleep(1)
    return f"ratings of {of}"


def work(number: int, *, longest: float) -> int:
    """Take some time, the same for the same number."""
    time.sleep(longest * (number * 37 % 100) / 100)
    return number
