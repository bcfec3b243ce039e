"""The compensation owed for a badly delayed flight."""

import pytest

from demo_project.flights.rules import (
    Band,
    Claim,
    Conditions,
    Refusal,
    UnassessableClaimError,
    amount_of,
    assess,
    band_of,
)


def claim(
    *,
    tail_number: str = "N14228",
    distance_miles: int = 1400,
    arrival_delay: int | None = 200,
    seats: int | None = 149,
    weather: Conditions | None = None,
) -> Claim:
    return Claim(
        tail_number=tail_number,
        distance_miles=distance_miles,
        arrival_delay=arrival_delay,
        seats=seats,
        weather=weather,
    )


@pytest.mark.parametrize(
    ("miles", "band"),
    [
        (17, Band.SHORT),
        (932, Band.SHORT),  # 1,499.9 km
        (933, Band.MEDIUM),  # 1,501.5 km
        (2174, Band.MEDIUM),  # 3,498.7 km
        (2175, Band.LONG),  # 3,500.3 km
        (4983, Band.LONG),
    ],
)
def test_band_depends_on_the_distance_in_kilometers(miles: int, band: Band) -> None:
    assert band_of(miles) is band


@pytest.mark.parametrize(
    ("band", "delay", "dollars"),
    [
        (Band.SHORT, 180, 250),
        (Band.SHORT, 900, 250),
        (Band.MEDIUM, 180, 400),
        (Band.MEDIUM, 900, 400),
        (Band.LONG, 180, 300),
        (Band.LONG, 239, 300),
        (Band.LONG, 240, 600),
    ],
)
def test_only_a_long_flight_less_than_four_hours_late_owes_half(band: Band, delay: int, dollars: int) -> None:
    assert amount_of(band, delay) == dollars


def test_total_is_the_amount_of_the_band_for_every_seat() -> None:
    assessment = assess(claim(distance_miles=1400, arrival_delay=200, seats=149))
    assert assessment.band is Band.MEDIUM
    assert assessment.per_passenger == 400
    assert assessment.total == 149 * 400


def test_flight_exactly_three_hours_late_is_badly_delayed() -> None:
    assert assess(claim(arrival_delay=180)).delay == 180


def test_assessing_a_flight_that_is_not_badly_delayed_raises_an_error() -> None:
    with pytest.raises(ValueError, match="179 minutes late is not badly delayed"):
        assess(claim(arrival_delay=179))


@pytest.mark.parametrize(
    "weather",
    [
        Conditions(visibility_miles=0.99, gust_mph=None),
        Conditions(visibility_miles=10.0, gust_mph=40.0),
    ],
)
def test_airline_owes_nothing_in_extraordinary_weather(weather: Conditions) -> None:
    assessment = assess(claim(weather=weather))
    assert assessment.extraordinary
    assert assessment.total == 0


@pytest.mark.parametrize(
    "weather",
    [
        None,
        Conditions(visibility_miles=None, gust_mph=None),
        Conditions(visibility_miles=1.0, gust_mph=39.9),
    ],
)
def test_airline_owes_compensation_in_ordinary_or_unrecorded_weather(weather: Conditions | None) -> None:
    assessment = assess(claim(weather=weather))
    assert not assessment.extraordinary
    assert assessment.total > 0


def test_flight_without_a_recorded_arrival_cannot_be_assessed() -> None:
    with pytest.raises(UnassessableClaimError, match=r"^arrival not on record: ") as raised:
        assess(claim(arrival_delay=None))
    assert raised.value.refusal is Refusal.ARRIVAL_UNKNOWN


def test_flight_of_an_unknown_aircraft_cannot_be_assessed() -> None:
    with pytest.raises(UnassessableClaimError, match=r"^aircraft not on record: N3ALAA$") as raised:
        assess(claim(tail_number="N3ALAA", seats=None))
    assert raised.value.refusal is Refusal.AIRCRAFT_UNKNOWN


def test_missing_arrival_is_reported_before_a_missing_aircraft() -> None:
    with pytest.raises(UnassessableClaimError) as raised:
        assess(claim(arrival_delay=None, seats=None))
    assert raised.value.refusal is Refusal.ARRIVAL_UNKNOWN
