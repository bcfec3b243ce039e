"""`manage.py djqueue schedules`."""

from djqueue.client import get_storage
from djqueue.management.flags import count
from djqueue.operations.agenda import agenda
from djqueue.operations.scheduling import alias_of

from .base import Options, Output, Verbs

SCHEDULES = """List the schedules, each with its job, its last run and its next runs.

Times are in the schedule's time zone and include its jitter. If the first time is in the past, the run is
due: a worker, which checks about once a second, will enqueue it.

A schedule that is declared in code (@job(cron=...), .schedule(...)) is listed after `runworkers` has started
once. To create, change, disable or run a schedule, use the dashboard.
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verbs.add("schedules", schedules, SCHEDULES, json=False)
    parser.add_argument("names", metavar="NAME", nargs="*", help="Names of the schedules (default: all).")
    parser.add_argument(
        "--next",
        type=count,
        metavar="N",
        default=5,
        help="Number of next runs to list for each schedule (default: 5).",
    )


def schedules(options: Options, output: Output) -> None:
    """List the schedules."""
    for line in agenda(alias_of(get_storage()), options["names"], options["next"]):
        output.line(line)
