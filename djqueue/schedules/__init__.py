"""Schedules: reading their options, and computing their times. Independent of Django."""

from .lines import ALIASES
from .schedule import MISSED, ON_BLACKOUT, OVERLAP, Schedule
from .words import parse_schedule

__all__ = ["ALIASES", "MISSED", "ON_BLACKOUT", "OVERLAP", "Schedule", "parse_schedule"]
