"""Batches: how many jobs a function under `@job(batch=…)` takes in one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.units import milliseconds

LIMIT = 10_000
"""Jobs per call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The rule by which a worker calls the function with the jobs that it has collected."""

    size: int
    """Maximum number of jobs per call."""
    min_size: int
    """The worker calls the function as soon as it has this many jobs ..."""
    wait: int
    """... or as soon as the first job has waited for this many milliseconds."""


def parse_batch(given: Any) -> BatchRule:
    """Parse a size, or a mapping of `size`, `min_size` and `wait`. Raises OptionError."""
    named: Mapping[str, Any] = given if isinstance(given, Mapping) else {"size": given}
    unknown = set(named) - {"size", "min_size", "wait"}
    if unknown:
        raise OptionError(f"batch: unknown key {min(unknown, key=str)!r}; expected size, min_size or wait")
    if "size" not in named:
        raise OptionError("batch: size is required")
    size = _count("batch.size", named["size"], LIMIT)
    wait = milliseconds("batch.wait", named.get("wait", 0))
    least = _count("batch.min_size", named.get("min_size", size if wait else 1), size)
    if least > 1 and not wait:
        raise OptionError("batch.min_size: requires wait, the time after which a smaller batch is accepted")
    return BatchRule(size=size, min_size=least, wait=wait)


def _count(name: str, value: Any, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise OptionError(f"{name}: must be a whole number from 1 to {maximum}; got {value!r}")
    return value
