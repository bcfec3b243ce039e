"""`manage.py djqueue stats` and `queues`."""

from typing import Any

from djqueue.client import get_storage
from djqueue.core.overview import Overview, QueueOverview
from djqueue.core.states import State
from djqueue.core.units import to_datetime

from .arguments import used_queue
from .base import Options, Output, Verbs

STATS = """Count the jobs of each queue, by state.

With --json, the document has `queues`, a list of objects with the name, a count for each state, the age in
seconds of the oldest job that could run now (`oldest_waiting_seconds`), and the totals since the queue began.

    manage.py djqueue stats
    manage.py djqueue stats --queue emails --json
"""

QUEUES = """List the queues with their limits, and whether they are paused."""


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    for name, run, text in (("stats", stats, STATS), ("queues", queues, QUEUES)):
        parser = verbs.add(name, run, text)
        parser.add_argument(
            "--queue", metavar="NAME", action="append", help="Only this queue; may be repeated."
        )


def stats(options: Options, output: Output) -> None:
    """Count the jobs of each queue."""
    overview = _overview(options)
    rows = [_described(one, overview.at) for one in overview.queues]
    output.document({"at": to_datetime(overview.at), "queues": rows})
    states = [state.value for state in State]
    output.table(
        ["queue", *states, "oldest", "paused"],
        [
            [
                row["name"],
                *[row[state] for state in states],
                None if row["oldest_waiting_seconds"] is None else f"{row['oldest_waiting_seconds']:.0f} s",
                row["paused"],
            ]
            for row in rows
        ],
    )
    if not rows:
        output.line("No queue has been used yet.")


def queues(options: Options, output: Output) -> None:
    """List the queues."""
    overview = _overview(options)
    rows = [
        {
            "name": queue.name,
            "paused": queue.paused,
            "rate": None if queue.rate is None else f"{queue.rate.capacity} per {queue.rate.per / 1_000:g} s",
            "concurrency": queue.concurrency,
            "active": queue.counts.get(State.ACTIVE, 0),
            "group_mode": queue.group_mode,
            "waiting_by_name": queue.names,
        }
        for queue in overview.queues
    ]
    output.document(rows)
    columns = ["name", "paused", "rate", "concurrency", "active", "group_mode"]
    output.table(
        [name.replace("_", " ") for name in columns], [[row[name] for name in columns] for row in rows]
    )


def _overview(options: Options) -> Overview:
    storage = get_storage()
    names = [used_queue(storage, name) for name in options["queue"] or ()]
    return storage.reads.overview(names or None)


def _described(queue: QueueOverview, at: int) -> dict[str, Any]:
    oldest = None if queue.oldest_at is None else max(0, at - queue.oldest_at) / 1_000
    return {
        "name": queue.name,
        **{state.value: queue.counts.get(state, 0) for state in State},
        "paused": queue.paused,
        "oldest_waiting_seconds": oldest,
        "totals": queue.totals._asdict(),
    }
