"""Sizes in bytes: as users write them, and of records."""

import re
from typing import Any

from .enginejob import EngineJob
from .errors import OptionError
from .job import JobFailure

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
WRITTEN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
LARGEST = 2**53
"""Maximum in bytes that Lua counts exactly: eight pebibytes."""


def parse_size(name: str, value: Any) -> int:
    """Return the bytes of a whole number or a string such as `"500 MB"` or `"1.5 GiB"`.

    Raises OptionError, naming the option, for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (found := WRITTEN.fullmatch(value)) is not None:
        number, unit = found[1].replace("_", ""), UNITS.get(found[2].lower())
        if unit is None:
            raise OptionError(
                f"{name}: unknown unit {found[2]!r}; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
            )
        size = int(number) * unit if number.isdecimal() else round(float(number) * unit)
    else:
        raise OptionError(f"{name}: expected a number of bytes or a string such as '500 MB', got {value!r}")
    if not 0 <= size <= LARGEST:
        raise OptionError(f"{name}: must be from 0 to {LARGEST} bytes; got {value!r}")
    return size


def size_of(job: EngineJob) -> int:
    """Return the size of an ended job without its result: its payload, and the texts of its error."""
    return len(job.payload) if job.error is None else len(job.payload) + size_of_error(job.error)


def size_of_error(error: JobFailure) -> int:
    """Return the size of an error's texts."""
    return sum(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in error)
