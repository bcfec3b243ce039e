"""The progress of a job: a bar if its value is a share, otherwise text."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from django.utils.formats import number_format

from . import rendering

PARTS = {"done", "of"}
"""Keys of a mapping that is shown as a bar."""


class Progress(NamedTuple):
    """The progress of a job as a page shows it."""

    text: str
    """The text of a value, or the counts of a bar; empty for a bar with only a percentage."""
    share: str = ""
    """Share from 0 to 1 as HTML writes numbers; empty if there is no bar."""
    percent: int = 0


def shown(value: Any) -> Progress | None:
    """Return the progress of a value.

    A number from 0 to 1 and `{"done": 3, "of": 10}` are bars. None means that no progress was reported.
    """
    if value is None:
        return None
    if _is_number(value) and 0 <= value <= 1:
        return _bar(float(value), "")
    if isinstance(value, Mapping) and value.keys() == PARTS:
        done, of = value["done"], value["of"]
        if _is_number(done) and _is_number(of) and 0 <= done <= of and of > 0:
            return _bar(done / of, f"{_number(done)} / {_number(of)}")
    return Progress(rendering.text(value))


def _bar(share: float, text: str) -> Progress:
    return Progress(text, f"{share:.4f}", int(share * 100))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _number(value: float) -> str:
    return str(number_format(value, force_grouping=True))
