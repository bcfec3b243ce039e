"""Whether a measured size keeps growing: medians of its second and its last quarter are compared."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

TOLERANCE = 0.05
"""Share by which a size may grow after the warm-up."""


class Trend(NamedTuple):
    """Medians of a size in bytes in the second, third and last quarter."""

    name: str
    early: float
    middle: float
    late: float

    @property
    def growth(self) -> float:
        """Share by which the size has grown."""
        return self.late / self.early - 1

    @property
    def is_flat(self) -> bool:
        """Whether the size has grown by no more than the tolerance."""
        return self.growth <= TOLERANCE


def trend(name: str, samples: Sequence[tuple[float, float]], length: float) -> Trend | None:
    """Return the trend of a size; None unless there are samples of every quarter but the first.

    Args:
        samples: Seconds since the start, and bytes.
        length: Seconds of the whole run.
    """
    early = [size for at, size in samples if length / 4 <= at < length / 2]
    middle = [size for at, size in samples if length / 2 <= at < length * 3 / 4]
    late = [size for at, size in samples if at >= length * 3 / 4]
    if not (early and middle and late):
        return None
    return Trend(name, median(early), median(middle), median(late))
