"""Bring the data set into the database, whole or not at all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import cache
from itertools import islice
from typing import Any

from django.db import connection, models, transaction

from .dataset import Dataset, FlightRecord, WeatherRecord
from .models import Airline, Airport, Flight, Plane, Weather

BATCH = 25_000

Report = Callable[[str, int], None]
"""Called after each batch with the name of a table and the number of its rows so far."""


@transaction.atomic
def load(dataset: Dataset, *, limit: int | None = None, report: Report) -> None:
    """Fill the five tables, with the first `limit` flights or all of them."""
    Airline.objects.bulk_create(Airline(**record._asdict()) for record in dataset.airlines())
    Airport.objects.bulk_create(Airport(**record._asdict()) for record in dataset.airports())
    Plane.objects.bulk_create(Plane(**record._asdict()) for record in dataset.planes())
    load_weather(dataset, report)
    load_flights(islice(dataset.flights(), limit), report)


def load_weather(dataset: Dataset, report: Report) -> None:
    loaded = 0
    for batch in batches(dataset.weather()):
        rows = (record._replace(hour=stored(record.hour)) for record in batch)
        insert(Weather, WeatherRecord._fields, rows)
        loaded += len(batch)
    report("hours of weather", loaded)


def load_flights(records: Iterable[FlightRecord], report: Report) -> None:
    airports = set(Airport.objects.values_list("code", flat=True))
    planes = set(Plane.objects.values_list("tail_number", flat=True))
    loaded = 0
    for batch in batches(records):
        # Flights go to a few airports, all in the Caribbean, that airports.csv does not list.
        unlisted = {code for record in batch for code in (record.origin, record.destination)} - airports
        Airport.objects.bulk_create(Airport(code=code) for code in sorted(unlisted))
        airports |= unlisted
        rows = (flight(record, planes) for record in batch)
        insert(Flight, (*FlightRecord._fields, "plane"), rows)
        loaded += len(batch)
        report("flights", loaded)


def flight(record: FlightRecord, planes: set[str]) -> tuple[Any, ...]:
    plane = record.tail_number if record.tail_number in planes else None
    return (*record._replace(scheduled_departure=stored(record.scheduled_departure)), plane)


@cache
def stored(moment: datetime) -> Any:
    """The moment as the database keeps it; cached, because flights leave at the same times."""
    return connection.ops.adapt_datetimefield_value(moment)


def insert(model: type[models.Model], fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Insert without model instances: a third of a million of them would take most of a minute."""
    quote = connection.ops.quote_name
    columns = ", ".join(quote(model._meta.get_field(name).column) for name in fields)
    values = ", ".join(["%s"] * len(fields))
    with connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO {quote(model._meta.db_table)} ({columns}) VALUES ({values})", rows)


def batches(records: Iterable[Any]) -> Iterator[list[Any]]:
    records = iter(records)
    while batch := list(islice(records, BATCH)):
        yield batch
