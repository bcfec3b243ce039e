"""Whether a measured size keeps growing: medians of its second and its last quarter are compared."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

TOLERANCE = 0.05
"""Share by which a size may grow after the warm-up."""


class Trend(NamedTuple):
    """Medians of a size in bytes after the warm-up and at the end."""

    name: str
    early: float
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
    """Return the trend of a size; None unless there are samples of the second and the last quarter.

    Args:
        samples: Seconds since the start, and bytes.
        length: Seconds of the whole run.
    """
    early = [size for at, size in samples if length / 4 <= at < length / 2]
    late = [size for at, size in samples if at >= length * 3 / 4]
    return Trend(name, median(early), median(late)) if early and late else None
