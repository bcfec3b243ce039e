"""`manage.py djqueue stats`, `queues`, `pause`, `resume`, `hold`, `release`, `limit`, `clear`, `clean` and
`obliterate`.
"""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError

from djqueue.client import Queue, get_storage
from djqueue.conf import get_settings, parse_rate
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ConfigurationError
from djqueue.core.job import JobRecord
from djqueue.core.messages import numbered
from djqueue.core.overview import Overview, QueueOverview
from djqueue.core.policies import UNSET
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.core.suggest import nearest
from djqueue.core.units import to_datetime
from djqueue.management.arguments import age, count, duration, state
from djqueue.operations.bulk import JOBS_PER_CALL, MAX_PREVIEWED
from djqueue.runtime.exits import MISUSED

from .base import Options, Output, Subcommands, add_confirmation, note, used_queue

STATS = """Count the jobs of each queue, by state.

With --json, the document has `queues`, a list of objects with the name, a count for each state, the age in
seconds of the oldest job that could run now (`oldest_waiting_seconds`), and the totals since the queue began.

    manage.py djqueue stats
    manage.py djqueue stats --queue emails --json
"""

QUEUES = """List the queues with their limits and holds, and whether they are paused."""
PAUSE = """Stop claims from queues; running jobs finish."""
RESUME = """Resume paused queues."""
HOLD = """Stop claims of the jobs of one name from a queue; jobs of other names go on.

    manage.py djqueue hold emails shop.jobs.send --for 2h --reason "The provider is down"
"""
RELEASE = """End holds of a queue."""
LIMIT = """Limit a queue for all workers, or remove limits.

    manage.py djqueue limit emails --rate 100/s --concurrency 20
    manage.py djqueue limit emails --rate none
"""
CLEAR = """Delete every job of a queue that has not started.

    manage.py djqueue clear emails --dry-run
"""
CLEAN = """Delete jobs of a queue by state and age.

    manage.py djqueue clean emails --state completed --older-than 7d
"""
OBLITERATE = """Delete a queue with all its jobs, results, dead letters and limits.

If jobs are active, the queue is left as it is, unless --force is given; their outcomes are then discarded.
"""
NONE = "none"
"""Removes a limit."""


def add(subcommands: Subcommands) -> None:
    """Declare the subcommands."""
    for name, run, text in (("stats", stats, STATS), ("queues", queues, QUEUES)):
        parser = subcommands.add(name, run, text)
        parser.add_argument(
            "--queue", metavar="NAME", action="append", help="Only this queue; may be repeated."
        )
    for name, run, text in (("pause", pause, PAUSE), ("resume", resume, RESUME)):
        parser = subcommands.add(name, run, text)
        parser.add_argument("queues", metavar="QUEUE", nargs="+", help="Names of queues.")
    parser = subcommands.add("hold", hold, HOLD)
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")
    parser.add_argument("name", metavar="NAME", help="Name of the job type.")
    parser.add_argument(
        "--for", type=duration, metavar="TIME", help="End the hold after this time, such as 2h."
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="Shown wherever the hold is.")
    parser = subcommands.add("release", release, RELEASE)
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")
    parser.add_argument("names", metavar="NAME", nargs="+", help="Names of job types.")
    parser = subcommands.add("limit", limit, LIMIT)
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")
    parser.add_argument(
        "--rate", type=_rate, metavar="N/UNIT", help="Starts per s, m, h or d, such as 100/s; or none."
    )
    parser.add_argument("--concurrency", type=_limit, metavar="N", help="Active jobs at once; or none.")
    parser = subcommands.add("clear", clear, CLEAR)
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")
    parser.add_argument("--keep-delayed", action="store_true", help="Keep delayed and blocked jobs.")
    add_confirmation(parser, "deleted")
    parser = subcommands.add("clean", clean, CLEAN)
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")
    parser.add_argument(
        "--state",
        type=state,
        action="append",
        help="Only this state; may be repeated (default: completed, failed and cancelled).",
    )
    parser.add_argument(
        "--older-than",
        type=age,
        default=0.0,
        metavar="AGE",
        help="Only jobs that ended, or were enqueued if they are pending, this long ago, such as 7d.",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="Maximum number of jobs.")
    add_confirmation(parser, "deleted")
    parser = subcommands.add("obliterate", obliterate, OBLITERATE)
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")
    parser.add_argument("--force", action="store_true", help="Delete active jobs, too.")
    add_confirmation(parser, "deleted")


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
    rows: list[dict[str, Any]] = [
        {
            "name": queue.name,
            "paused": queue.paused,
            "rate": None if queue.rate is None else f"{queue.rate.capacity} per {queue.rate.per / 1_000:g} s",
            "concurrency": queue.concurrency,
            "active": queue.counts.get(State.ACTIVE, 0),
            "key_mode": queue.key_mode,
            "waiting_by_name": queue.names,
            "held": [hold.name for hold in queue.holds],
        }
        for queue in overview.queues
    ]
    output.document(rows)
    columns = ["name", "paused", "rate", "concurrency", "active", "key_mode"]
    output.table(
        [*(name.replace("_", " ") for name in columns), "held"],
        [[*(row[name] for name in columns), ", ".join(row["held"])] for row in rows],
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


def pause(options: Options, output: Output) -> None:
    """Pause queues."""
    _switch(options, output, paused=True)


def resume(options: Options, output: Output) -> None:
    """Resume queues."""
    _switch(options, output, paused=False)


def hold(options: Options, output: Output) -> None:
    """Hold a job type."""
    queue, name, seconds = Queue(options["queue"]), options["name"], options["for"]
    until = None if seconds is None else to_datetime(SYSTEM_CLOCK.now() + int(seconds * 1_000))
    _warn_of_unused(output, [queue.name])
    detail = queue.hold(name, until=until, reason=options["reason"]).detail()
    note("hold", queue=queue.name, detail=detail)
    output.document({"queue": queue.name, **detail})
    output.line(f"Holding {name} in {queue.name}{'' if until is None else f' until {until:%F %T} UTC'}.")


def release(options: Options, output: Output) -> None:
    """End holds."""
    queue = Queue(used_queue(get_storage(), options["queue"]))
    held = [hold.name for hold in queue.holds()]
    if unknown := [name for name in options["names"] if name not in held]:
        raise CommandError(f"{queue.name} does not hold {unknown[0]!r}{nearest(unknown[0], held) or '.'}")
    for name in options["names"]:
        queue.release(name)
        note("release", queue=queue.name, detail={"name": name})
        output.line(f"Released {name} in {queue.name}.")
    output.document([{"queue": queue.name, "name": name} for name in options["names"]])


def limit(options: Options, output: Output) -> None:
    """Limit a queue."""
    rate, concurrency = options["rate"], options["concurrency"]
    if rate is None and concurrency is None:
        raise CommandError("pass --rate, --concurrency or both; none removes a limit", returncode=MISUSED)
    queue = Queue(options["queue"])
    _warn_of_unused(output, [queue.name])
    given: dict[str, Any] = {
        "rate": UNSET if rate is None else None if rate == NONE else rate,
        "concurrency": UNSET if concurrency is None else None if concurrency == NONE else concurrency,
    }
    queue.set_limits(**given)
    note("limits", queue=queue.name, detail={"new": {"rate": rate, "concurrency": concurrency}})
    [now] = get_storage().reads.overview([queue.name]).queues
    shown = None if now.rate is None else f"{now.rate.capacity} per {now.rate.per / 1_000:g} s"
    output.document({"queue": queue.name, "rate": shown, "concurrency": now.concurrency})
    output.line(f"{queue.name}: rate {shown or NONE}, concurrency {now.concurrency or NONE}")


def clear(options: Options, output: Output) -> None:
    """Delete pending jobs."""
    states = {State.WAITING} if options["keep_delayed"] else set(PENDING)
    queue = Queue(used_queue(get_storage(), options["queue"]))
    _delete(options, output, queue, states, lambda: queue.clear(delayed=not options["keep_delayed"]))


def clean(options: Options, output: Output) -> None:
    """Delete jobs by state and age."""
    queue = Queue(used_queue(get_storage(), options["queue"]))
    states = set(options["state"] or TERMINAL)
    if State.ACTIVE in states:
        raise CommandError("--state active: cancel active jobs instead of deleting them", returncode=MISUSED)
    names = [one.value for one in states]
    _delete(
        options,
        output,
        queue,
        states,
        lambda: queue.clean(options["older_than"], names, options["limit"]),
        older_than=options["older_than"],
    )


def obliterate(options: Options, output: Output) -> None:
    """Delete a queue."""
    queue = Queue(used_queue(get_storage(), options["queue"]))
    _delete(options, output, queue, set(State), lambda: queue.obliterate(force=options["force"]), whole=True)


def _switch(options: Options, output: Output, *, paused: bool) -> None:
    storage = get_storage()
    if paused:
        _warn_of_unused(output, options["queues"])
    for name in options["queues"]:
        if paused:
            Queue(name).pause()
        else:
            Queue(used_queue(storage, name)).resume()
        note("pause" if paused else "resume", queue=name)
        output.line(f"{'Paused' if paused else 'Resumed'} {name}.")
    output.document([{"queue": name, "paused": paused} for name in options["queues"]])


def _warn_of_unused(output: Output, queues: Sequence[str]) -> None:
    """Warn of queues that nothing uses or names: they may be misspelled."""
    storage = get_storage()
    known = {*storage.queues.names(), *get_settings().queues}
    known.update(name for worker in storage.workers.all() for name in worker.queues or ())
    for name in queues:
        if name not in known:
            hint = nearest(name, known) or "."
            output.progress(f"Warning: queue {name!r} has had no jobs, and no worker names it{hint}")


def _delete(
    options: Options,
    output: Output,
    queue: Queue,
    states: set[State],
    delete: Any,
    *,
    older_than: float = 0.0,
    whole: bool = False,
) -> None:
    """Delete jobs after a confirmation that counts them."""
    matching, capped = _matching(queue, states, older_than)
    limit = options.get("limit")
    if limit is not None and limit <= matching:
        matching, capped = limit, False
    name = f"queue {queue.name!r}"
    jobs = f"{matching:,} or more jobs" if capped else numbered(matching, "job")
    text = f"{name} with {jobs}" if whole else f"{jobs} of {name}"
    if options["dry_run"]:
        output.document({"queue": queue.name, "matching": matching, "deleted": 0})
        output.line(f"Would delete {text}.")
        return
    output.confirm(f"Delete {text}?", assume_yes=options["no_input"])
    deleted = delete()
    note("clean", queue=queue.name, count=deleted, detail={"states": sorted(one.value for one in states)})
    output.document({"queue": queue.name, "matching": matching, "deleted": deleted})
    output.line(f"Deleted {numbered(deleted, 'job')} of {name}.")


def _matching(queue: Queue, states: set[State], older_than: float) -> tuple[int, bool]:
    """Count the jobs of these states and this age; True if more match than were counted."""
    reads = get_storage().reads
    if not older_than:
        return sum(number for one, number in reads.counts(queue.name).items() if one in states), False
    before = SYSTEM_CLOCK.now() - int(older_than * 1_000)
    matching = examined = 0
    for one in sorted(states):
        cursor = None
        while examined < MAX_PREVIEWED:
            page = reads.cursor_page(queue.name, one, JOBS_PER_CALL, cursor, newest_first=False)
            old = sum(_since(record) <= before for record in page.jobs)
            matching, examined, cursor = matching + old, examined + len(page.jobs), page.next
            # Jobs that ended are in the order of their ends, roughly: a page of newer ones is the last.
            if cursor is None or (one in TERMINAL and not old):
                break
    return matching, examined >= MAX_PREVIEWED


def _since(record: JobRecord) -> int:
    """Return when a job ended or, if it is pending, was enqueued."""
    return record.finished_at if record.state in TERMINAL else record.created_at


def _rate(text: str) -> str:
    if text != NONE:
        try:
            parse_rate(text)
        except ConfigurationError:
            raise ArgumentTypeError(
                f"{text!r} is not a rate: write a number, a slash and s, m, h or d, such as 100/s; or {NONE}"
            ) from None
    return text


def _limit(text: str) -> int | str:
    if text == NONE:
        return text
    try:
        return count(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, or {NONE}") from None
