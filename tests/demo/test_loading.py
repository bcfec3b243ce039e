"""Loading the data set into the database."""

from .project import DemoProject


def test_slice_of_flights_is_loaded_with_all_related_objects(
    loaded_project: DemoProject,
) -> None:
    counts = loaded_project.evaluate(
        """
from demo_project.flights.models import *
answer = {model.__name__: model.objects.count()
          for model in (Airline, Airport, Plane, Weather, Flight)}
"""
    )
    # Four airports of this slice are not in airports.csv: BQN, PSE, SJU and STT.
    assert counts == {
        "Airline": 16,
        "Airport": 1458 + 4,
        "Plane": 3322,
        "Weather": 26_115,
        "Flight": 5000,
    }


def test_every_field_of_a_flight_is_loaded(loaded_project: DemoProject) -> None:
    first = loaded_project.evaluate(
        """
from demo_project.flights.models import Flight
answer = Flight.objects.values().first()
answer["scheduled_departure"] = answer["scheduled_departure"].isoformat()
"""
    )
    assert first == {
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


def test_flight_of_an_unknown_aircraft_keeps_its_tail_number(loaded_project: DemoProject) -> None:
    flights, without_tail_number = loaded_project.evaluate(
        """
from demo_project.flights.models import Flight
unknown = Flight.objects.filter(plane=None)
answer = [unknown.exclude(tail_number="").count(), unknown.filter(tail_number="").count()]
"""
    )
    assert flights > 0
    assert without_tail_number > 0


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
