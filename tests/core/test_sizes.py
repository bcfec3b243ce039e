"""Sizes in bytes, as users write them."""

import pytest

from djqueue.core.enginejob import size_of, size_of_error
from djqueue.core.errors import OptionError
from djqueue.core.job import JobFailure
from djqueue.core.units import MAX_SIZE, parse_size
from tests.core.making import make_job


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (0, 0),
        (1_000, 1_000),
        ("1000", 1_000),
        ("1_000 B", 1_000),
        ("500 MB", 500_000_000),
        ("500mb", 500_000_000),
        (" 2 KiB ", 2_048),
        ("1.5 GiB", 1_610_612_736),
        ("0.1 kb", 100),
        (MAX_SIZE, MAX_SIZE),
    ],
)
def test_sizes_are_read_as_numbers_or_with_units(given, size):
    assert parse_size("BYTES", given) == size


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("5 megs", "unknown unit 'megs'; use B, KB"),
        ("MB", "expected a number of bytes or a string such as '500 MB', got 'MB'"),
        ("-1", "expected a number of bytes"),
        ("1e3", "unknown unit 'e'|expected a number of bytes"),
        (-1, "must be from 0 to .* bytes; got -1"),
        (1.5, "expected a number of bytes"),
        (True, "expected a number of bytes"),
        (None, "expected a number of bytes"),
        (MAX_SIZE + 1, "must be from 0"),
        ("10_000 TB", "must be from 0"),
    ],
)
def test_invalid_size_is_rejected_with_the_option_name(given, problem):
    with pytest.raises(OptionError, match=rf"BYTES: .*({problem})"):
        parse_size("BYTES", given)


def test_size_of_a_job_includes_its_payload_and_error():
    job = make_job()
    job.payload = bytes(10)
    assert size_of(job) == 10

    job.error = JobFailure("T", "\N{SNOWMAN}", "\udc80")

    assert size_of_error(job.error) == 1 + 3 + 3
    assert size_of(job) == 17
