"""Schedules that code declares: they become rows where jobs are run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.options import check_text
from djqueue.schedules import SCHEDULE_PARSERS, Schedule, parse_schedule

MAX_NAME = 200
"""Characters: a job's id has the name of its schedule in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One schedule of a job."""

    name: str
    job_name: str
    schedule: Schedule
    args: list[Any]
    kwargs: dict[str, Any]


class Declarations:
    """The schedules that imported modules declare, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, Declared] = {}

    def check(
        self,
        name: str,
        job_name: str,
        when: Mapping[str, Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Declared:
        """Check a schedule. Raises OptionError if it is wrong, or if another job's schedule has its name."""
        if len(check_text("name", name)) > MAX_NAME:
            raise OptionError(
                f"name: a schedule's name must have at most {MAX_NAME} characters; got {len(name)}"
            )
        there = self._entries.get(name)
        if there is not None and there.job_name != job_name:
            raise OptionError(
                f"name: job {there.job_name!r} already has a schedule named {name!r}; use another name"
            )
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise OptionError(f"args: expected a list, got {args!r}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise OptionError(f"kwargs: expected a dict, got {kwargs!r}")
        return Declared(
            name=name,
            job_name=job_name,
            schedule=parse_schedule(when),
            args=_plain("args", list(args)),
            kwargs=_plain("kwargs", dict(kwargs or {})),
        )

    def add(self, entry: Declared) -> None:
        """Declare a schedule; it replaces one of the same name."""
        self._entries[entry.name] = entry

    def of(self, job_names: Iterable[str]) -> dict[str, Declared]:
        """Return the schedules of some jobs, by name."""
        names = set(job_names)
        return {name: entry for name, entry in self._entries.items() if entry.job_name in names}


def split_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take what says when a job runs by itself out of the options of `@job`. Raises OptionError."""
    when = {name: options.pop(name) for name in SCHEDULE_PARSERS if name in options}
    if when.get("cron") is None and when.get("every") is None:
        for name in sorted(when.keys() - {"cron", "every"}):
            raise OptionError(f"{name}: requires cron or every")
        return {}
    return when


def _plain(name: str, value: Any) -> Any:
    """Return a value as the row will return it."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name}: the values of a schedule must be JSON-serializable: {error}") from None


declared = Declarations()
