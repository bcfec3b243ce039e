"""What an airline owes the passengers of a badly delayed flight.

The rule is modelled on Regulation (EC) No 261/2004, the European Union's, as if it had held in New
York in 2013:

* A flight is badly delayed when it arrives three hours late or more. One that leaves three hours
  late or more and whose arrival was never recorded counts as badly delayed too, but cannot be
  assessed. A cancelled flight falls under refund and rebooking, not under this rule.
* Each passenger is owed $250 up to 1,500 km, $400 up to 3,500 km, and $600 beyond; beyond 3,500 km
  half of it when the delay stays under four hours.
* Nothing is owed when the weather at the origin, in the hour of the scheduled departure, was
  extraordinary: visibility under one mile or gusts of 40 mph and more. An hour without a weather
  record counts as ordinary.
* The number of passengers is the number of the aircraft's seats, as if every seat were sold.
"""

from dataclasses import dataclass
from enum import StrEnum

BADLY_DELAYED_MINUTES = 180
LONG_HAUL_FULL_MINUTES = 240
KILOMETRES_PER_MILE = 1.609344
LOW_VISIBILITY_MILES = 1.0
STRONG_GUST_MPH = 40.0


class Band(StrEnum):
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


LIMIT_KM = {Band.SHORT: 1_500, Band.MEDIUM: 3_500}
DOLLARS = {Band.SHORT: 250, Band.MEDIUM: 400, Band.LONG: 600}


class Refusal(StrEnum):
    """Why a claim cannot be assessed."""

    ARRIVAL_UNKNOWN = "arrival not on record"
    AIRCRAFT_UNKNOWN = "aircraft not on record"


class UnassessableClaimError(ValueError):
    """The data that the rule needs is missing, and trying again will not bring it."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(f"{refusal}: {detail}")
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The weather of one hour at the origin; None where the station recorded nothing."""

    visibility_miles: float | None
    gust_mph: float | None

    @property
    def extraordinary(self) -> bool:
        fog = self.visibility_miles is not None and self.visibility_miles < LOW_VISIBILITY_MILES
        storm = self.gust_mph is not None and self.gust_mph >= STRONG_GUST_MPH
        return fog or storm


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is known of a badly delayed flight."""

    tail_number: str
    distance_miles: int
    arrival_delay: int | None
    seats: int | None
    weather: Conditions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What the airline owes, in whole US dollars."""

    band: Band
    delay: int
    seats: int
    extraordinary: bool
    per_passenger: int

    @property
    def total(self) -> int:
        return self.seats * self.per_passenger


def assess(claim: Claim) -> Assessment:
    """Apply the rule to a badly delayed flight; UnassessableClaimError where data are missing."""
    if claim.arrival_delay is None:
        raise UnassessableClaimError(Refusal.ARRIVAL_UNKNOWN, "it left three hours late or more")
    if claim.arrival_delay < BADLY_DELAYED_MINUTES:
        raise ValueError(f"a flight {claim.arrival_delay} minutes late is not badly delayed")
    if claim.seats is None:
        raise UnassessableClaimError(Refusal.AIRCRAFT_UNKNOWN, claim.tail_number or "no tail number")
    band = band_of(claim.distance_miles)
    extraordinary = claim.weather is not None and claim.weather.extraordinary
    return Assessment(
        band=band,
        delay=claim.arrival_delay,
        seats=claim.seats,
        extraordinary=extraordinary,
        per_passenger=0 if extraordinary else amount_of(band, claim.arrival_delay),
    )


def band_of(distance_miles: float) -> Band:
    kilometres = distance_miles * KILOMETRES_PER_MILE
    for band, limit in LIMIT_KM.items():
        if kilometres <= limit:
            return band
    return Band.LONG


def amount_of(band: Band, delay: int) -> int:
    """Dollars per passenger for a delay of so many minutes."""
    if band is Band.LONG and delay < LONG_HAUL_FULL_MINUTES:
        return DOLLARS[band] // 2
    return DOLLARS[band]
