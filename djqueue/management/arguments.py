"""Arguments on the command line: parsers of their values, and the formatter of their help."""

import json
import math
import os
from argparse import ArgumentTypeError, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from django.core.management.base import DjangoHelpFormatter

from djqueue.core.errors import OptionError
from djqueue.core.messages import shown
from djqueue.core.states import State
from djqueue.core.suggest import nearest
from djqueue.core.units import MAX_DURATION, parse_size

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
"""Seconds of each unit of a duration."""
MIN_MEMORY = 2**24
"""Bytes below which no worker starts."""


class HelpFormatter(RawDescriptionHelpFormatter, DjangoHelpFormatter):
    """Django's help formatter, but with the paragraphs of descriptions."""


def queue_names(text: str) -> list[str]:
    """Parse a list of names such as `a,b`."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ArgumentTypeError(f"{text!r} contains an empty name; expected NAME,NAME")
    return names


def count(text: str) -> int:
    """Parse a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def processes(text: str) -> int:
    """Parse a number of processes, or `auto` for the usable cores."""
    if text == "auto":
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    try:
        return count(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is neither a positive whole number nor auto") from None


def size(text: str) -> int:
    """Parse a size in bytes, such as `512MB`."""
    try:
        return parse_size("size", text)
    except OptionError as error:
        raise ArgumentTypeError(str(error)) from error


def memory(text: str) -> int:
    """Parse a limit of a worker's memory, such as `512MB`."""
    limit = size(text)
    if limit < MIN_MEMORY:
        raise ArgumentTypeError(
            f"{text!r} is {limit:,} bytes, less than a worker needs to start: did you forget the unit? Give "
            "a size such as 512MB"
        )
    return limit


def seconds(text: str) -> float:
    """Parse a number of seconds that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds of 0 or more")
    return value


def duration(text: str) -> float:
    """Parse a duration such as 90, 30s, 15m, 6h, 7d or 2w; return seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    if not number.isdecimal():
        raise ArgumentTypeError(
            f"{shown(text)} is not a duration: write a number and s, m, h, d or w, such as 7d"
        )
    value = float(number) * UNITS[unit]
    if value * 1_000 > MAX_DURATION:
        raise ArgumentTypeError(f"{shown(text)} is longer than 100 years")
    return value


def age(text: str) -> float:
    """Parse the age of what is deleted, which needs a unit; return seconds."""
    if text.isdecimal() and int(text):
        raise ArgumentTypeError(f"{shown(text)} has no unit: add s, m, h, d or w, such as {text}d")
    return duration(text)


def file_in_a_folder(text: str) -> Path:
    """Parse the path of a file to write, whose folder exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def json_value(text: str) -> Any:
    """Parse a JSON value."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{shown(text)} is not JSON: {error}") from None
    except RecursionError:
        raise ArgumentTypeError(f"{shown(text)} is nested too deeply") from None


def json_list(text: str) -> list[Any]:
    """Parse a JSON array."""
    value = json_value(text)
    if not isinstance(value, list):
        raise ArgumentTypeError(f"expected a JSON array, such as '[1, \"a\"]'; got {shown(text)}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"expected a JSON object, such as '{{\"n\": 1}}'; got {shown(text)}")
    return value


def state(text: str) -> State:
    """Parse the name of a state."""
    try:
        return State(text)
    except ValueError:
        names = [one.value for one in State]
        raise ArgumentTypeError(
            f"unknown state {text!r}{nearest(text, names) or '.'} Choose from {', '.join(names)}."
        ) from None
