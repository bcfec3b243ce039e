"""Loading the data set into the database."""

from typing import Any

import pytest

from .project import DemoProject


@pytest.fixture(scope="module")
def loaded(loaded_project: DemoProject) -> dict[str, Any]:
    """Counts and values of the loaded database."""
    answer: dict[str, Any] = loaded_project.evaluate(
        """
from demo_project.flights.models import *
first = Flight.objects.values().first()
first["scheduled_departure"] = first["scheduled_departure"].isoformat()
unknown = Flight.objects.filter(plane=None)
answer = {
    "counts": {model.__name__: model.objects.count() for model in (Airline, Airport, Plane, Weather, Flight)},
    "first": first,
    "with_tail_number": unknown.exclude(tail_number="").count(),
    "without_tail_number": unknown.filter(tail_number="").count(),
}
"""
    )
    return answer


def test_slice_of_flights_is_loaded_with_all_related_objects(loaded: dict[str, Any]) -> None:
    # Four airports of this slice are not in airports.csv: BQN, PSE, SJU and STT.
    assert loaded["counts"] == {
        "Airline": 16,
        "Airport": 1458 + 4,
        "Plane": 3322,
        "Weather": 26_115,
        "Flight": 5000,
    }


def test_every_field_of_a_flight_is_loaded(loaded: dict[str, Any]) -> None:
    assert loaded["first"] == {
        "id": 1,
        "airline_id": "UA",
        "number": 1545,
        "tail_number": "N14228",
        "plane_id": "N14228",
        "origin_id": "EWR",
        "destination_id": "IAH",
        "distance": 1400,
        "scheduled_departure": "2013-01-01T10:15:00+00:00",
        "departure_delay": 2,
        "arrival_delay": 11,
    }


def test_flight_of_an_unknown_aircraft_keeps_its_tail_number(loaded: dict[str, Any]) -> None:
    assert loaded["with_tail_number"] > 0
    assert loaded["without_tail_number"] > 0


def test_loading_again_changes_nothing(project: DemoProject) -> None:
    assert "5,000 flights are loaded already." in project.manage("load_flights")


def test_badly_delayed_selects_late_arrivals_and_late_departures_without_an_arrival(
    project: DemoProject,
) -> None:
    numbers = project.evaluate(
        """
from demo_project.flights.models import Flight
delays = {
    1: (0, 179), 2: (0, 180), 3: (179, None), 4: (180, None), 5: (None, None), 6: (300, 100),
}
for pk, (departure, arrival) in delays.items():
    Flight.objects.filter(pk=pk).update(departure_delay=departure, arrival_delay=arrival)
flights = Flight.objects.badly_delayed().filter(pk__in=delays)
answer = [list(flights.values_list("pk", flat=True)),
          list(flights.arrival_unknown().values_list("pk", flat=True))]
"""
    )
    assert numbers == [[2, 4], [4]]
