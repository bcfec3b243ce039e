"""Schedules: reading their options, and computing their times. Independent of Django."""

from .expressions import ALIASES
from .schedule import (
    MISSED,
    ON_BLACKOUT,
    OVERLAP,
    SCHEDULE_PARSERS,
    Missed,
    OnBlackout,
    Overlap,
    Schedule,
    parse_schedule,
)

__all__ = [
    "ALIASES",
    "MISSED",
    "ON_BLACKOUT",
    "OVERLAP",
    "SCHEDULE_PARSERS",
    "Missed",
    "OnBlackout",
    "Overlap",
    "Schedule",
    "parse_schedule",
]
