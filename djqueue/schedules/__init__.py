"""Schedules: what a user says of one, and the times that follow from it. Knows no Django."""

from .lines import ALIASES
from .schedule import MISSED, ON_BLACKOUT, OVERLAP, Schedule
from .words import parse_schedule

__all__ = ["ALIASES", "MISSED", "ON_BLACKOUT", "OVERLAP", "Schedule", "parse_schedule"]
