"""A job's progress as a bar where its value says how much is done, and else as text."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from django.utils.formats import number_format

from . import rendering

PARTS = {"done", "of"}
"""The keys of a mapping that is a bar."""


class Progress(NamedTuple):
    """What a page shows of a job's progress."""

    text: str
    """Of a bar: how much of how much is done, or empty where the percentage says it."""
    share: str = ""
    """Of a bar: from 0 to 1, as HTML writes numbers; empty: it is no bar."""
    percent: int = 0


def shown(value: Any) -> Progress | None:
    """A bar for a number from 0 to 1 and for `{"done": 3, "of": 10}`; None if no progress was reported."""
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
